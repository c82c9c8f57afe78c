"""A session for which nobody asks anything gives way, whoever it is, and goes on exactly when it is asked again."""

import asyncio
from itertools import count

import pytest

from orchestrator.round_times import LONGEST_S
from tandem.serving.items import Opened
from tandem.types import SessionSpec, Verdict
from target_service import live_sessions, table
from target_service.limits import IDLE_S, Limits
from tests.target.harness import (
    Bench,
    close_item,
    generate,
    open_item,
    plain_decode,
    serving,
    spec,
    stamp,
    toy,
    verify_item,
)

PLAIN = Limits(max_draft_tokens=0)
SENIOR, JUNIOR = spec((1,) * 9, 15, priority=5), spec((2,) * 9, 15)  # 6 blocks of 4 at their ends


def silence(bench: Bench, seconds: float = IDLE_S) -> None:
    """Nobody sends anything for so long."""
    bench.table.expire(bench.now_s)
    bench.now_s += seconds
    bench.table.expire(bench.now_s)


def finish(bench: Bench, session: SessionSpec, number: int, tokens: list[int]) -> list[int]:
    """Rounds to the end of the generation -> its output."""
    for round_number in count(len(tokens)):  # past every round so far
        if bench.round(tokens, round_number, session=number).finish_reason is not None:
            return tokens[session.prompt_len :]
    raise AssertionError


def begun(bench: Bench, session: SessionSpec, number: int, num_rounds: int) -> list[int]:
    """A session after some rounds -> its tokens."""
    tokens = list(session.token_ids)
    assert bench.open(session, number) == Opened()
    for round_number in range(1, num_rounds + 1):
        bench.round(tokens, round_number, session=number)
    return tokens


def beside_each_other(prefix_cache: bool) -> tuple[Bench, list[int], list[int]]:
    """Both run, and the junior one asks for the row that the pool no longer has -> tokens of both."""
    bench = Bench(toy(num_blocks=7, prefix_cache=prefix_cache), PLAIN)
    senior, junior = begun(bench, SENIOR, 1, 1), begun(bench, JUNIOR, 2, 1)
    for round_number in count(2):
        assert bench.submit(stamp(junior, round_number, 2)) is None
        answers = bench.settle()
        if not answers:
            return bench, senior, junior
        (answer,) = answers
        assert isinstance(answer.outcome, Verdict)
        junior += answer.outcome.token_ids
    raise AssertionError


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_idle_senior_loses_its_memory_to_a_junior_that_runs_and_both_texts_are_exact(prefix_cache: bool) -> None:
    bench, senior, junior = beside_each_other(prefix_cache)
    silence(bench, IDLE_S - 1)
    assert bench.settle() == []
    silence(bench, 1.0)
    (answer,) = bench.settle()
    assert isinstance(answer.outcome, Verdict)
    junior += answer.outcome.token_ids
    assert bench.table.load().preemptions == 1
    assert finish(bench, JUNIOR, 2, junior) == plain_decode(JUNIOR)
    bench.close(stamp(junior, 99, 2))
    bench.settle()
    assert finish(bench, SENIOR, 1, senior) == plain_decode(SENIOR)
    assert bench.table.load().preemptions == 1


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_idle_senior_loses_its_memory_to_a_junior_that_waits_and_both_texts_are_exact(
    prefix_cache: bool,
) -> None:
    bench = Bench(toy(num_blocks=7, prefix_cache=prefix_cache), PLAIN)
    senior, junior = begun(bench, SENIOR, 1, 6), list(JUNIOR.token_ids)
    assert bench.open(JUNIOR, 2) is None
    assert bench.submit(stamp(junior, 1, 2)) is None
    assert bench.settle() == []
    silence(bench)
    opened, answer = bench.settle()
    assert opened.outcome == Opened()
    assert isinstance(answer.outcome, Verdict)
    junior += answer.outcome.token_ids
    assert bench.table.load().preemptions == 1
    assert finish(bench, JUNIOR, 2, junior) == plain_decode(JUNIOR)
    bench.close(stamp(junior, 99, 2))
    bench.settle()
    assert finish(bench, SENIOR, 1, senior) == plain_decode(SENIOR)


def test_an_idle_session_loses_its_place_too_and_only_as_many_do_as_are_needed() -> None:
    bench = Bench(toy(), Limits(max_sessions=3, max_draft_tokens=0))
    for number in (1, 2, 3):
        begun(bench, SENIOR, number, 1)
    assert bench.open(JUNIOR, 4) is None
    silence(bench)
    assert [answer.outcome for answer in bench.settle()] == [Opened()]
    load = bench.table.load()
    assert (load.preemptions, load.running, load.waiting) == (1, 3, 1)
    assert [session.is_dormant for session in bench.table._live.all()] == [True, True, True, False]


def test_nobody_loses_anything_to_a_silence_while_there_is_room_for_all() -> None:
    bench = Bench(toy(), PLAIN)
    senior, junior = begun(bench, SENIOR, 1, 1), begun(bench, JUNIOR, 2, 1)
    num_calls = len(bench.engine.calls)
    silence(bench)
    assert bench.settle() == []
    assert finish(bench, JUNIOR, 2, junior) == plain_decode(JUNIOR)
    silence(bench)
    assert finish(bench, SENIOR, 1, senior) == plain_decode(SENIOR)
    assert bench.table.load().preemptions == 0
    assert len(bench.engine.calls) == num_calls + 28


def test_memory_that_a_close_gives_back_is_used_before_anybody_gives_way() -> None:
    bench = Bench(toy(num_blocks=12), PLAIN)
    begun(bench, SENIOR, 1, 6)
    junior = begun(bench, JUNIOR, 2, 6)
    assert bench.open(spec((3,) * 15, 9), 3) is None
    bench.table.expire(bench.now_s)
    bench.now_s += IDLE_S
    bench.close(stamp(junior, 99, 2))
    bench.table.expire(bench.now_s)
    assert bench.table.load().waiting == 1  # the room is not there yet
    bench.settle()
    load = bench.table.load()
    assert (load.running, load.preemptions) == (2, 0)


def test_a_prompt_is_not_computed_any_further_for_somebody_who_is_dormant() -> None:
    bench = Bench(toy(), Limits(max_draft_tokens=0, max_step_tokens=4))
    bench.open(SENIOR, 1)
    assert bench.step() == 1
    silence(bench)
    assert bench.settle() == []
    assert [call.num_tokens for call in bench.engine.calls] == [4]
    assert finish(bench, SENIOR, 1, list(SENIOR.token_ids)) == plain_decode(SENIOR)


def test_who_gave_way_waits_for_nothing_until_it_is_asked_and_then_in_its_own_place() -> None:
    bench = Bench(toy(num_blocks=7), PLAIN)
    senior = begun(bench, SENIOR, 1, 6)
    bench.open(JUNIOR, 2)
    silence(bench)
    bench.settle()
    bench.close(stamp(JUNIOR.token_ids, 1, 2))
    num_calls = len(bench.engine.calls)
    bench.settle()
    assert (bench.used_blocks(), len(bench.engine.calls)) == (0, num_calls)  # though there is room again
    for number in (3, 4):
        assert bench.open(JUNIOR, number) == Opened()  # nor does anybody wait behind it
    assert bench.open(JUNIOR, 5) is None
    assert bench.submit(stamp(senior, 99, 1)) is None
    bench.close(stamp(JUNIOR.token_ids, 1, 3))
    assert bench.settle() == []  # room enough for the newest, but not its turn
    bench.close(stamp(JUNIOR.token_ids, 1, 4))
    outcomes = {int(answer.stamp.session_id): answer.outcome for answer in bench.settle()}
    assert set(outcomes) == {1, 4}
    verdict = outcomes[1]
    assert isinstance(verdict, Verdict)
    assert list(verdict.token_ids) == plain_decode(SENIOR)[6:7]


@pytest.mark.parametrize("change", ["asks", "closes", "stream ends"])
def test_whatever_a_session_does_while_the_step_that_displaces_it_is_computed(change: str) -> None:
    bench = Bench(toy(num_blocks=7), PLAIN)
    senior = begun(bench, SENIOR, 1, 6)
    assert bench.open(JUNIOR, 2) is None
    silence(bench)
    plan = bench.table.plan_step(bench.now_s)
    assert plan is not None
    if change == "asks":
        assert bench.submit(stamp(senior, 7, 1)) is None
    elif change == "closes":
        bench.close(stamp(senior, 7, 1))
    else:
        bench.table.end_stream(bench.answers[0][0])
    bench.compute(plan)
    bench.settle()
    assert bench.table.load().preemptions == (change == "asks")
    if change == "asks":
        bench.close(stamp(JUNIOR.token_ids, 1, 2))
        bench.settle()
        senior += plain_decode(SENIOR)[6:7]
        assert finish(bench, SENIOR, 1, senior) == plain_decode(SENIOR)
    bench.table.end_stream(bench.answers[0][0])
    bench.settle()
    assert bench.table.is_empty
    assert (bench.used_blocks(), bench.engine.sequence_ids) == (0, [])


def test_a_session_may_be_silent_for_as_long_as_an_orchestrator_waits_for_drafts_by_default() -> None:
    assert LONGEST_S < IDLE_S


def test_a_long_step_makes_nobody_dormant_who_was_part_of_it() -> None:
    bench = Bench(toy(), PLAIN)
    tokens = list(SENIOR.token_ids)
    bench.open(SENIOR, 1)
    bench.submit(stamp(tokens, 1, 1))
    bench.table.expire(bench.now_s)
    plan = bench.table.plan_step(bench.now_s)
    assert plan is not None
    bench.compute(plan)
    bench.now_s += 10 * IDLE_S  # it took so long
    bench.table.expire(bench.now_s)
    assert not bench.table._live.all()[0].is_dormant
    assert bench.table.next_deadline_s() == bench.now_s + IDLE_S


def test_the_server_lets_a_junior_go_on_without_any_other_event(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (live_sessions, table):
        monkeypatch.setattr(module, "IDLE_S", 0.05)

    async def main() -> None:
        async with serving(toy(num_blocks=7), PLAIN) as service, service.client() as idle, service.client() as busy:
            senior = list(SENIOR.token_ids)
            await idle.ask(open_item(SENIOR, 1))
            for number in range(1, 7):
                (verdict,) = await idle.ask(verify_item(stamp(senior, number, 1)))
                assert isinstance(verdict, Verdict)
                senior += verdict.token_ids
            assert (await generate(busy, JUNIOR, lambda tokens, most: ()))[0] == plain_decode(JUNIOR)
            assert busy.responses[-1].load.preemptions >= 1
            (verdict,) = await idle.ask(verify_item(stamp(senior, 7, 1)))
            assert isinstance(verdict, Verdict)
            assert [*senior[9:], *verdict.token_ids] == plain_decode(SENIOR, most=7)
            await idle.ask(close_item(stamp(senior, 8, 1)))
            await service.until_idle()

    asyncio.run(asyncio.wait_for(main(), 20))
