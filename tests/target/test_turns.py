"""Whose turn it is: priorities, streams and prompts share steps, counted in steps."""

import pytest

from tandem.types import SessionSpec, Verdict
from target_service.answers import StreamId
from target_service.batching import shares
from target_service.limits import Limits
from tests.target.harness import Bench, plain_decode, spec, stamp, toy
from tests.target.play import Play

ONE, TWO = StreamId(1), StreamId(2)
NEVER_ENDS = 400  # max_tokens of those who only decode


def long_prompt(length: int) -> tuple[int, ...]:
    return tuple(number % 30 for number in range(length))


def decoding(bench: Bench, count: int, first: int = 1) -> Play:
    """So many requests that have begun to decode."""
    played = Play(bench)
    for number in range(first, first + count):
        played.begin(spec((number, 2, 3), NEVER_ENDS), number)
    while not all(played.verdicts.values()):
        played.step()
    return played


def test_no_round_waits_more_than_one_step_for_a_prompt_of_4000_tokens_and_its_rows_are_bounded() -> None:
    bench = Bench(toy(num_blocks=2048, max_context=4096))
    played = decoding(bench, 8)
    played.begin(spec(long_prompt(4000), 5), 100)
    num_steps, before = 0, {number: len(played.verdicts[number]) for number in range(1, 9)}
    while not played.verdicts[100]:
        num_steps += 1
        played.step()
        assert bench.engine.calls[-1].num_tokens <= 8 + 128
        for number, count in before.items():
            assert len(played.verdicts[number]) == count + num_steps
    assert num_steps == -(-4000 // 128)
    assert played.tokens[100][4000:] == plain_decode(spec(long_prompt(4000)), most=1)


def test_without_anybody_who_decodes_a_prompt_has_the_whole_step() -> None:
    bench = Bench(toy(num_blocks=2048, max_context=4096))
    played = Play(bench)
    played.begin(spec(long_prompt(1500), 1), 1)
    played.run()
    assert [call.num_tokens for call in bench.engine.calls] == [512, 512, 476]


def test_a_short_prompt_that_arrives_behind_a_long_one_is_not_held_up_by_it() -> None:
    bench = Bench(toy(num_blocks=2048, max_context=4096))
    played = decoding(bench, 8)
    played.begin(spec(long_prompt(4000), 5), 100)
    played.step()
    played.begin(spec((20, 21, 22), 5), 101)
    played.step()
    assert (len(played.verdicts[101]), len(played.verdicts[100])) == (1, 0)


def test_a_short_prompt_behind_many_long_ones_waits_for_a_share_only() -> None:
    bench = Bench(toy(num_blocks=4096, max_context=4096))
    played = Play(bench)
    for number in range(1, 4):
        played.begin(spec(long_prompt(2000 + number), 5), number)
    played.begin(spec(long_prompt(100), 5), 4)
    played.step()
    assert [len(played.verdicts[number]) for number in range(1, 5)] == [0, 0, 0, 1]


def test_rows_are_shared_evenly_by_the_first_few_and_what_they_leave_goes_to_the_next() -> None:
    assert shares(128, [4000, 10]) == [118, 10]
    assert shares(128, [4000, 3000, 2000, 1000, 5]) == [32, 32, 32, 32]
    assert shares(128, [5, 5, 5, 5, 5, 200, 7]) == [5, 5, 5, 5, 5, 103]
    assert shares(3, [9, 9, 9, 9]) == [1, 1, 1]
    assert shares(8, []) == []


def test_a_step_takes_no_more_sessions_than_allowed_and_neither_rounds_nor_prompts_are_kept_out() -> None:
    bench = Bench(limits=Limits(max_batch=3))
    played = decoding(bench, 6)
    played.begin(spec(long_prompt(300), 5), 100)
    counts = {number: len(played.verdicts[number]) for number in range(1, 7)}
    for _ in range(6):
        assert played.step() == 3
    decided = [len(played.verdicts[number]) - counts[number] for number in range(1, 7)]
    assert max(decided) - min(decided) <= 1
    assert played.verdicts[100]  # it had 3 chunks


@pytest.mark.parametrize("max_step_tokens", [2, 5, 7, 8])
def test_rounds_that_fill_a_small_step_leave_a_row_to_prompts(max_step_tokens: int) -> None:
    limits = Limits(max_draft_tokens=max_step_tokens - 1, max_step_tokens=max_step_tokens)
    bench = Bench(toy(), limits)
    played = Play(bench, lambda tokens, most: (0,) * most, most_drafts=max_step_tokens - 1)
    for number in (1, 2):
        played.begin(spec((number, 2, 3), NEVER_ENDS), number)
    while not all(played.verdicts.values()):
        played.step()
    played.begin(spec(long_prompt(30), 1), 100)
    for _ in range(35):
        played.step()
    assert played.verdicts[100]


def test_rounds_that_do_not_all_fit_are_taken_in_turn_by_streams() -> None:
    bench = Bench(limits=Limits(max_step_tokens=17, max_batch=3))
    streams = {1: ONE, 2: ONE, 3: ONE, 4: ONE, 5: TWO}
    for number, stream in streams.items():
        bench.open(spec(), number, stream=stream)
    bench.settle()
    for number, stream in streams.items():
        bench.submit(stamp((1, 2, 3), 1, number), stream=stream)
    order = []
    while bench.step():
        order.append({int(answer.stamp.session_id) for _, answer in bench.answers[-3:]})
    assert order[0] == {1, 2, 5}


def test_a_higher_priority_is_decided_first_when_a_step_cannot_hold_all() -> None:
    bench = Bench(limits=Limits(max_step_tokens=17))
    for number, priority in ((1, 0), (2, -1), (3, 7)):
        bench.open(spec(priority=priority), number)
    bench.settle()
    order = []
    for number in (1, 2, 3):
        bench.submit(stamp((1, 2, 3), 1, number), (0,) * 16)
    while bench.step():
        order.append(int(bench.answers[-1][1].stamp.session_id))
    assert order == [3, 1, 2]


def in_order_of_first_verdicts(bench: Bench, sessions: dict[int, tuple[SessionSpec, StreamId]]) -> list[int]:
    """All opened at once; who decides its first round first."""
    played = Play(bench)
    for number, (session, stream) in sessions.items():
        played.begin(session, number, stream)
    played.run()
    firsts = [answer.stamp.session_id for _, answer in bench.answers if isinstance(answer.outcome, Verdict)]
    return [int(session_id) for session_id in dict.fromkeys(firsts)]


def test_an_orchestrator_with_two_requests_does_not_wait_for_the_ten_of_another() -> None:
    bench = Bench(limits=Limits(max_sessions=2))
    many = {number: (spec((number, 1), 3), ONE) for number in range(1, 11)}
    few = {number: (spec((number, 1), 3), TWO) for number in (11, 12)}
    order = in_order_of_first_verdicts(bench, many | few)
    assert order[:2] == [1, 2]  # there was room
    assert {order.index(11), order.index(12)} <= {2, 3, 4, 5}


def test_waiting_requests_run_by_priority_then_by_arrival() -> None:
    bench = Bench(limits=Limits(max_sessions=1))
    sessions = {
        number: (spec((number, 1), 2, priority=priority), ONE)
        for number, priority in ((1, 0), (2, 0), (3, 5), (4, -5), (5, 5))
    }
    assert in_order_of_first_verdicts(bench, sessions) == [1, 3, 5, 2, 4]


def test_a_higher_priority_keeps_its_memory_and_is_never_preempted_for_a_lower_one() -> None:
    bench = Bench(toy(num_blocks=14), Limits(max_draft_tokens=0))
    played = Play(bench)
    for number, priority in ((1, 0), (2, 0), (3, 1)):
        played.begin(spec((number, 2, 3), 37, priority=priority), number)
    rounds = 0
    while 3 not in played.outputs:
        played.step()
        rounds += 1
        assert len(played.verdicts[3]) == rounds
    assert bench.table.load().preemptions > 0
    assert set(played.run()) == {1, 2, 3}
