"""The table with an engine stepped by hand: rounds, re-opens, admission, chunking, deadlines, failures."""

import pytest

from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Verdict
from target_service.answers import StreamId
from target_service.limits import IDLE_S, Limits
from tests.target.harness import STREAM, Bench, plain_decode, spec, stamp, toy

PROMPT = [1, 2, 3]


def code(outcome: object) -> ErrorCode:
    assert isinstance(outcome, ItemError), outcome
    return outcome.code


def test_a_repeat_whatever_drafts_it_carries_gets_the_recorded_verdict_and_advances_nothing() -> None:
    bench = Bench()
    bench.open(spec())
    tokens = list(PROMPT)
    verdict = bench.round(tokens, 1, plain_decode(spec(), most=3))
    num_calls = len(bench.engine.calls)
    for drafts in ((), (9, 9, 9, 9), plain_decode(spec(), most=1)):
        assert bench.submit(stamp(PROMPT, 1), drafts) == verdict
    assert bench.settle() == []
    assert len(bench.engine.calls) == num_calls
    bench.round(tokens, 2)
    assert tokens[3:] == plain_decode(spec(), most=len(tokens) - 3)


def test_stale_rounds_and_epochs_are_counted_and_dropped() -> None:
    bench = Bench()
    bench.open(spec(), epoch=3)
    tokens = list(PROMPT)
    for number in (1, 2):
        bench.round(tokens, number, epoch=3)
    assert bench.submit(stamp(PROMPT, 1, epoch=3)) is None
    assert bench.submit(stamp(tokens, 3, epoch=2)) is None
    assert bench.open(spec(), epoch=2) is None
    assert bench.settle() == []
    assert bench.table.load().stale_items == 3
    bench.round(tokens, 3, epoch=3)
    assert tokens[3:] == plain_decode(spec(), most=3)


def test_other_tokens_of_the_same_length_are_a_mismatch_and_an_unopened_session_is_unknown() -> None:
    bench = Bench()
    bench.open(spec())
    assert code(bench.submit(stamp([1, 2, 4], 1))) is ErrorCode.PREFIX_MISMATCH
    assert code(bench.submit(stamp(PROMPT, 1, session=2))) is ErrorCode.UNKNOWN_SESSION
    assert code(bench.submit(stamp(PROMPT, 1, epoch=2))) is ErrorCode.UNKNOWN_SESSION
    assert code(bench.submit(stamp(PROMPT, 1), stream=StreamId(9))) is ErrorCode.UNKNOWN_SESSION
    assert isinstance(bench.round(list(PROMPT), 1), Verdict)


def test_the_same_open_again_is_answered_again_and_changes_nothing() -> None:
    bench = Bench()
    assert bench.open(spec()) == Opened()
    tokens = list(PROMPT)
    bench.round(tokens, 1)
    assert bench.open(spec()) == Opened()
    bench.round(tokens, 2)
    assert tokens[3:] == plain_decode(spec(), most=2)
    assert len(bench.engine.sequence_ids) == 1


def test_a_reopen_with_a_higher_epoch_goes_on_identically_and_frees_the_old_state() -> None:
    bench = Bench()
    bench.open(spec(max_tokens=12))
    tokens = list(PROMPT)
    bench.round(tokens, 1, plain_decode(spec(), most=3))
    again = spec(max_tokens=12, token_ids=tuple(tokens), prompt_len=3)
    assert bench.open(again, epoch=2) == Opened()
    number = 1
    while len(tokens) < 15:
        number += 1
        bench.round(tokens, number, epoch=2)
    assert tokens[3:] == plain_decode(spec(max_tokens=12))
    assert len(bench.engine.sequence_ids) == 1


def test_an_open_whose_stamp_is_of_other_tokens_is_refused() -> None:
    bench = Bench()
    with bench.table.answering(STREAM, stamp([1, 2], 0)):
        bench.table.open(STREAM, stamp([1, 2], 0), spec(), 0.0)
    assert code(bench.answers[-1][1].outcome) is ErrorCode.PREFIX_MISMATCH
    assert len(bench.table) == 0


def test_a_round_with_a_lower_base_rolls_back_and_decides_the_same_tokens_again() -> None:
    bench = Bench()
    bench.open(spec())
    tokens = list(PROMPT)
    bench.round(tokens, 1, plain_decode(spec(), most=4))
    first, tokens = list(tokens), tokens[:5]
    bench.round(tokens, 2, plain_decode(spec(), most=4)[2:])
    assert tokens == first
    (held,) = map(bench.engine.token_ids, bench.engine.sequence_ids)
    assert held == tokens[:-1]


def test_a_close_in_flight_drops_the_result_and_gives_the_memory_back_after_it() -> None:
    bench = Bench()
    bench.open(spec())
    bench.submit(stamp(PROMPT, 1))
    plan = bench.table.plan_step(0.0)
    assert plan is not None
    assert bench.close(stamp(PROMPT, 0)) is None
    assert not bench.table.settle_stream(STREAM)
    bench.table.commit(bench.verifier.step(plan))
    assert bench.used_blocks() > 0
    assert [answer.outcome for answer in bench.settle()] == [Closed()]
    assert bench.table.settle_stream(STREAM)
    assert bench.used_blocks() == 0
    assert bench.table.load().used_blocks == 0


def test_a_reopen_in_flight_drops_the_old_verdict_and_decides_anew() -> None:
    bench = Bench()
    bench.open(spec())
    bench.submit(stamp(PROMPT, 1))
    plan = bench.table.plan_step(0.0)
    assert plan is not None
    assert bench.open(spec(), epoch=2) == Opened()
    bench.table.commit(bench.verifier.step(plan))
    tokens = list(PROMPT)
    bench.round(tokens, 1, epoch=2)
    assert tokens[3:] == plain_decode(spec(), most=1)
    assert len(bench.engine.sequence_ids) == 1


def test_a_close_is_answered_when_the_load_shows_its_memory_free_even_if_that_step_fails() -> None:
    for is_failing in (False, True):
        bench = Bench()
        bench.open(spec())
        bench.round(list(PROMPT), 1)
        assert bench.close(stamp(PROMPT, 0)) is None
        plan = bench.table.plan_step(0.0)
        assert plan is not None
        result = bench.verifier.step(plan)
        if is_failing:
            bench.table.fail(bench.engine.kv_usage())
        else:
            bench.table.commit(result)
        assert bench.table.load().used_blocks == 0
        assert bench.answers[-1][1].outcome == Closed()
        assert bench.close(stamp(PROMPT, 0)) == Closed()
        assert bench.table.is_empty


def test_a_late_close_of_an_older_epoch_does_not_free_the_newer_one() -> None:
    bench = Bench()
    bench.open(spec(), epoch=2)
    assert bench.close(stamp(PROMPT, 0, epoch=1)) == Closed()
    assert isinstance(bench.round(list(PROMPT), 1, epoch=2), Verdict)


def test_a_stream_that_ends_frees_its_own_sessions_and_no_others() -> None:
    bench = Bench()
    other = StreamId(2)
    for number in range(4):
        bench.open(spec(), number)
        bench.open(spec(), number, stream=other)
        bench.submit(stamp(PROMPT, 1, number))
    bench.step()
    bench.table.end_stream(STREAM)
    bench.settle()
    assert len(bench.table) == len(bench.engine.sequence_ids) == 4
    bench.table.end_stream(other)
    bench.settle()
    assert (len(bench.table), bench.used_blocks(), bench.table.load().running) == (0, 0, 0)


def test_a_repeated_open_that_waits_is_answered_once() -> None:
    bench = Bench(limits=Limits(max_sessions=1))
    bench.open(spec(), 1)
    assert bench.open(spec(), 2) is None
    assert bench.open(spec(), 2) is None
    bench.close(stamp(PROMPT, 0, 1))
    bench.settle()
    opened = [a for _, a in bench.answers if a.stamp.session_id == 2]
    assert [answer.outcome for answer in opened] == [Opened()]
    assert bench.table.load().stale_items == 1


def test_a_reopen_gives_its_room_to_whoever_waits_and_queues_again() -> None:
    bench = Bench(limits=Limits(max_sessions=1))
    bench.open(spec(), 1)
    bench.open(spec(), 2)
    bench.open(spec(), 1, epoch=2)
    assert [a.stamp.session_id for _, a in bench.answers if a.outcome == Opened()] == [1, 2]
    assert isinstance(bench.round(list(PROMPT), 1, session=2), Verdict)
    bench.close(stamp(PROMPT, 0, 2))
    bench.settle()
    assert isinstance(bench.round(list(PROMPT), 1, session=1, epoch=2), Verdict)


@pytest.mark.parametrize("is_whole_stream", [False, True])
def test_a_session_can_go_while_it_waits_for_room(is_whole_stream: bool) -> None:
    bench = Bench(limits=Limits(max_sessions=1))
    other = StreamId(2)
    bench.open(spec(), 1)
    bench.open(spec(), 2, stream=other)
    bench.submit(stamp(PROMPT, 1, 2), stream=other)
    bench.open(spec(), 3)
    if is_whole_stream:
        bench.table.end_stream(other)
    else:
        assert bench.close(stamp(PROMPT, 0, 2), other) == Closed()
    assert bench.table.load().waiting == 1
    bench.close(stamp(PROMPT, 0, 1))
    bench.settle()
    assert isinstance(bench.round(list(PROMPT), 1, session=3), Verdict)
    assert (bench.table.load().running, bench.table.load().waiting) == (1, 0)


def test_a_long_prompt_is_chunked_and_never_holds_up_the_rounds_of_others() -> None:
    bench = Bench(limits=Limits(max_step_tokens=32))
    bench.open(spec(), 1)
    tokens = list(PROMPT)
    bench.round(tokens, 1)
    long = spec(tuple(number % 30 for number in range(200)))
    bench.open(long, 2)
    bench.submit(stamp(long.token_ids, 1, 2))
    num_steps = 0
    while True:
        num_steps += 1
        bench.submit(stamp(tokens, num_steps + 1, 1), (0, 0, 0))
        before = len(bench.answers)
        assert bench.step() == 2
        assert bench.engine.calls[-1].num_tokens <= 32
        verdicts = {answer.stamp.session_id: answer.outcome for _, answer in bench.answers[before:]}
        assert isinstance(verdicts[1], Verdict)  # type: ignore[index]
        tokens += verdicts[1].token_ids  # type: ignore[index]
        if 2 in verdicts:
            break
    assert num_steps == -(-200 // 28)  # 4 of the 32 rows are the other session's
    assert list(verdicts[2].token_ids) == plain_decode(long, most=1)  # type: ignore[index, union-attr]
    assert tokens[3:] == plain_decode(spec(), most=len(tokens) - 3)


def test_rounds_beyond_the_budget_of_a_step_go_first_in_the_next() -> None:
    bench = Bench(limits=Limits(max_step_tokens=17))
    for number in range(1, 5):
        bench.open(spec(), number)
    bench.settle()
    order = []
    for number in (3, 1, 4, 2):
        bench.submit(stamp(PROMPT, 1, number), (0,) * 7)
    while bench.step():
        order.append({answer.stamp.session_id for _, answer in bench.answers[-2:]})
    assert order == [{3, 1}, {4, 2}]


def test_rounds_and_opens_whose_deadline_passed_before_their_turn_are_answered_so() -> None:
    bench = Bench(limits=Limits(max_sessions=1))
    bench.open(spec(), 1)
    bench.open(spec(), 2, deadline_s=5.0)
    bench.submit(stamp(PROMPT, 1, 2))
    bench.submit(stamp(PROMPT, 1, 1), deadline_s=6.0)
    assert bench.table.next_deadline_s() == 5.0
    bench.table.expire(4.9)
    assert len(bench.answers) == 1
    bench.table.expire(6.0)
    late = [(answer.stamp.session_id, answer.stamp.round, code(answer.outcome)) for _, answer in bench.answers[1:]]
    deadline = ErrorCode.DEADLINE_EXCEEDED
    assert sorted(late) == [(1, 1, deadline), (2, 0, deadline), (2, 1, deadline)]
    assert bench.table.next_deadline_s() == 6.0 + IDLE_S
    assert isinstance(bench.round(list(PROMPT), 1, session=1), Verdict)  # the round was never decided
    assert bench.table.load().waiting == 0


def test_a_step_that_raises_is_answered_internal_and_the_others_go_on() -> None:
    bench = Bench()
    for number in (1, 2):
        bench.open(spec(), number)
        bench.settle()
    bench.submit(stamp(PROMPT, 1, 1))
    assert bench.table.plan_step(0.0) is not None
    bench.table.fail(bench.engine.kv_usage())
    assert str(bench.answers[-1][1].outcome) == "INTERNAL: internal error"
    assert code(bench.submit(stamp(PROMPT, 2, 1))) is ErrorCode.UNKNOWN_SESSION
    assert isinstance(bench.round(list(PROMPT), 1, session=2), Verdict)
    assert len(bench.engine.sequence_ids) == 1


def test_nothing_is_opened_while_draining_but_rounds_go_on() -> None:
    bench = Bench()
    bench.open(spec(), 1)
    bench.table.is_draining = True
    assert code(bench.open(spec(), 2)) is ErrorCode.NO_CAPACITY
    assert isinstance(bench.round(list(PROMPT), 1, session=1), Verdict)
    assert bench.table.load().draining


@pytest.mark.parametrize("prompt_len", range(56, 64))
def test_drafts_are_clamped_at_the_end_of_the_context(prompt_len: int) -> None:
    session = spec(tuple(number % 30 for number in range(prompt_len)), max_tokens=64 - prompt_len)
    bench = Bench(toy(max_context=64))
    bench.open(session)
    tokens, number, reason = list(session.token_ids), 0, None
    while reason is None:
        number += 1
        verdict = bench.round(tokens, number, (0,) * 16)
        assert verdict.num_draft_tokens <= 64 - (len(tokens) - len(verdict.token_ids)) - 1
        reason = verdict.finish_reason
    assert (len(tokens), reason.name) == (64, "LENGTH")
    assert tokens[prompt_len:] == plain_decode(session)


def test_a_rollback_that_makes_room_for_who_waits_is_taken_into_account_before_a_newer_open() -> None:
    bench = Bench(toy(num_blocks=8, block_size=4), Limits(max_draft_tokens=4, max_step_tokens=64))
    tokens = tuple(range(1, 21))
    first, newest = spec(range(1, 13), 8), spec((5, 6, 7, 8, 9), 3)
    assert bench.open(first, 1) == Opened()
    assert bench.open(spec(tokens, 28, prompt_len=1), 2) is None, "no room for 20 tokens and a round"
    assert bench.submit(stamp(tokens[:1], 1, 2)) is None, "back to one token"
    assert bench.open(newest, 3) in (None, Opened())
    for number, session in ((1, first.token_ids), (2, tokens[:1]), (3, newest.token_ids)):
        bench.close(stamp(session, 9, number))
    bench.settle()
    opened = [int(answer.stamp.session_id) for _, answer in bench.answers if answer.outcome == Opened()]
    assert sorted(opened) == sorted(set(opened))
    assert 2 in opened
    load = bench.table.load()
    assert (len(bench.table), load.running, load.waiting, load.used_blocks) == (0, 0, 0, 0)
