"""More work than there is room for, and work that nobody waits for any more: it is not done, and harms nobody."""

import asyncio
from typing import Any

import pytest

from draft_service.service import DraftStream
from orchestrator.server import OrchestratorSettings
from tandem.client import DeadlineExceededError, GenerationResult, OverloadedError
from tests.orchestrator.fakes import until
from tests.orchestrator.services import Stack, all_services, similar_draft

OPTIONS: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8}
CAPACITY = 4


def figures(result: GenerationResult) -> tuple[Any, ...]:
    """What a request has cost, and what it has brought."""
    what = result.speculation
    rounds = (what.num_rounds, what.num_draft_tokens, what.num_accepted, what.num_fallback_rounds, what.num_reopens)
    return (result.token_ids, *rounds)


def count_opens(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sessions that either service has been asked to open from now on."""
    assert stack.target.scheduler is not None
    counts = {"target": 0, "draft": 0}

    def counted(role: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[role] += 1
            return function(*arguments, **named)

        return call

    table = stack.target.scheduler.table
    monkeypatch.setattr(table, "open", counted("target", table.open))
    monkeypatch.setattr(DraftStream, "open_session", counted("draft", DraftStream.open_session))
    return counts


def test_of_four_times_the_capacity_the_excess_costs_nothing_and_the_rest_notices_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(draft_timeout_s=20.0, max_requests=CAPACITY)
        async with all_services(similar_draft, settings=settings) as stack:
            seeds = range(4 * CAPACITY)
            alone = [figures(await stack.client.complete("abc", seed=seed, **OPTIONS)) for seed in seeds]
            await stack.until_free()
            opens = count_opens(stack, monkeypatch)
            with stack.target_held():
                answers = [
                    asyncio.create_task(stack.client.complete("abc", seed=seed, **OPTIONS)) for seed in seeds
                ]
                await until(lambda: sum(one.done() for one in answers) == 3 * CAPACITY)
            results = await asyncio.gather(*answers, return_exceptions=True)
            refused = [one for one in results if isinstance(one, OverloadedError)]
            assert len(refused) == stack.servicer._admission.num_refused == 3 * CAPACITY
            assert all(one.retry_after_s for one in refused)
            accepted = [(one, alone[seed]) for seed, one in enumerate(results) if isinstance(one, GenerationResult)]
            assert len(accepted) == CAPACITY
            assert [figures(result) for result, _ in accepted] == [expected for _, expected in accepted]
            assert opens == {"target": CAPACITY, "draft": CAPACITY}
            await stack.until_free()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_for_a_client_that_is_gone_no_more_than_the_step_under_way_is_computed(end: str) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            assert stack.draft is not None
            neighbour = figures(await stack.client.complete("abd", seed=1, **OPTIONS))
            third = asyncio.Event()

            async def read() -> None:
                timeout = None if end == "cancel" else 2.0
                generation = stack.client.generate("abc", **{**OPTIONS, "max_tokens": 240}, timeout=timeout)
                async for _ in generation:
                    third.set()
                    await asyncio.sleep(0.02)

            steps = stack.record_steps()
            reading = asyncio.create_task(read())
            await third.wait()
            with stack.target_held():
                num_steps = len(steps)
                if end == "cancel":
                    reading.cancel()
                await until(lambda: stack.servicer._admission.num_running == stack.draft.num_sessions == 0)  # type: ignore[union-attr]
                (outcome,) = await asyncio.gather(reading, return_exceptions=True)
                assert type(outcome) is (asyncio.CancelledError if end == "cancel" else DeadlineExceededError)
            await stack.until_free()
            assert len(steps) - num_steps <= 2  # the one under way, and one that had been chosen when it was held
            assert figures(await stack.client.complete("abd", seed=1, **OPTIONS)) == neighbour

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("timeout", [None, 50.0])
def test_every_item_says_how_much_time_its_request_has_left(timeout: float | None) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            assert stack.draft_link is not None
            links: list[Any] = [stack.target_link, stack.draft_link]
            told: dict[str, list[int]] = {"target": [], "draft": []}
            for link in links:

                def send(item: Any, link: Any = link, send: Any = link.send) -> None:
                    told[link.api.role].append(item.deadline_ms)
                    send(item)

                link.send = send
            await stack.client.complete("abc", **OPTIONS, timeout=timeout)
            await stack.until_free()
            for role in ("target", "draft"):
                assert len(told[role]) > 10
                if timeout is None:
                    assert set(told[role]) == {0}
                else:
                    assert told[role] == sorted(told[role], reverse=True)
                    # gRPC sends a timeout with few digits, rounded up.
                    assert 0 < told[role][-1] <= told[role][0] <= timeout * 1000 * 1.01

    asyncio.run(asyncio.wait_for(scenario(), 60))
