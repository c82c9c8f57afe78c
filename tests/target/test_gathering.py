"""Sessions that come back at once are waited for, a share of a step at most; so rounds share steps, not take turns."""

import asyncio
from dataclasses import replace

import pytest

from tandem.types import FinishReason, SessionId, SessionSpec, Verdict
from target_service import gathering
from target_service.answers import StreamId
from target_service.gathering import WAIT_SHARE, Gathering
from tests.target.harness import Client, Service, close_item, open_item, spec, stamp, verify_item
from tests.target.test_stream import BlockedEngine, run

ONE, TWO = (StreamId(1), SessionId(1)), (StreamId(2), SessionId(1))
SPEC = spec((5,))  # nothing of it to prefill, so that every step is a round's
WAIT_S = 8.0 * WAIT_SHARE  # after a step of 8 seconds


def after_a_step(
    *keys: tuple[StreamId, SessionId], gathered: Gathering | None = None, at_s: float = 100
) -> Gathering:
    """A step of 8 seconds has ended, and these sessions have their verdicts."""
    gathered = gathered or Gathering()
    gathered.end_step(at_s - 8, at_s)
    for key in keys:
        gathered.answered(key, at_s)
    return gathered


def test_a_new_service_waits_for_nobody() -> None:
    assert Gathering().is_complete


def test_the_sessions_of_a_step_are_waited_for_until_all_have_come() -> None:
    gathered = after_a_step(ONE, TWO)
    assert gathered.until_s == 100 + WAIT_S
    gathered.arrived(TWO, 100.1)
    assert not gathered.is_complete
    gathered.arrived(ONE, 100.1)
    assert gathered.is_complete


def test_the_sessions_of_the_step_before_are_not_waited_for() -> None:
    gathered = after_a_step(TWO, gathered=after_a_step(ONE), at_s=108)
    gathered.arrived(TWO, 108.1)
    assert gathered.is_complete


def test_a_session_that_came_late_is_not_waited_for_until_it_has_come_in_time_again() -> None:
    gathered = after_a_step(ONE)
    gathered.arrived(ONE, 100 + WAIT_S + 0.1)
    assert after_a_step(ONE, gathered=gathered, at_s=110).is_complete
    gathered.arrived(ONE, 110 + WAIT_S)
    assert not after_a_step(ONE, gathered=gathered, at_s=120).is_complete


def test_what_has_ended_is_not_waited_for_and_leaves_nothing() -> None:
    gathered = after_a_step(ONE, TWO)
    gathered.arrived(TWO, 105)
    after_a_step(ONE, TWO, gathered=gathered, at_s=110)
    gathered.forget(ONE)
    assert gathered.is_complete
    gathered.forget_stream(TWO[0])
    assert not gathered._answered_s
    assert not gathered._slow


async def two_sessions_apart(
    engine: BlockedEngine, client: Client, first_spec: SessionSpec = SPEC
) -> list["asyncio.Future[object]"]:
    """Two sessions' first rounds: the second arrives while the step of the first is being computed, and waits."""
    await client.ask(open_item(first_spec, 1), open_item(SPEC, 2))
    engine.go.clear()
    (first,) = await client.send(verify_item(stamp(SPEC.token_ids, 1, 1)))
    await engine.until_entered()
    (second,) = await client.send(verify_item(stamp(SPEC.token_ids, 1, 2)))
    (probe,) = await client.send(close_item(stamp(SPEC.token_ids, 0, 99)))
    await probe  # the second round has arrived
    engine.go.set()
    return [first, second]


def test_a_round_that_arrived_during_a_step_and_the_next_one_of_that_step_are_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "WAIT_SHARE", 1e6)
    engine = BlockedEngine()

    async def scenario(service: Service, client: Client) -> None:
        first, second = await two_sessions_apart(engine, client)
        verdict = await first
        assert isinstance(verdict, Verdict)
        (third,) = await client.send(verify_item(stamp([*SPEC.token_ids, *verdict.token_ids], 2, 1)))
        rows = [verdict.batch_rows, (await second).batch_rows, (await third).batch_rows]  # type: ignore[attr-defined]
        assert rows == [1, 2, 2]

    run(scenario, engine)


def test_a_session_that_has_its_last_token_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "WAIT_SHARE", 1e6)
    engine = BlockedEngine()

    async def scenario(service: Service, client: Client) -> None:
        last, second = await two_sessions_apart(engine, client, replace(SPEC, max_tokens=1))
        assert (await last).finish_reason is FinishReason.LENGTH  # type: ignore[attr-defined]
        assert isinstance(await second, Verdict)

    run(scenario, engine)


def test_a_session_that_never_comes_back_does_not_hold_up_the_others() -> None:
    engine = BlockedEngine()

    async def scenario(service: Service, client: Client) -> None:
        first, second = await two_sessions_apart(engine, client)
        assert isinstance(await first, Verdict)
        assert isinstance(await second, Verdict)

    run(scenario, engine)
