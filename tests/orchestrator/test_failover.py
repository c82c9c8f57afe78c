"""Replicas that die, hang, drain, or come and go amid answers: the same tokens, and nothing left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from engine.backends.toy_backend import ToyEngine
from orchestrator.pools import PoolTimes, target_pool
from orchestrator.replica_link import LinkLostError
from orchestrator.replica_pool import MAX_REPLICAS
from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem.client import Generation, TandemError
from tandem.prompt_lookup import PromptLookup
from target_service.limits import Limits
from tests.orchestrator.fakes import until
from tests.orchestrator.pooled import Pooled, num_up, pooled
from tests.orchestrator.services import (
    QUICK,
    TARGET_LOGITS,
    VOCAB,
    VOCABULARY,
    replicas,
    self_draft,
    toy_engine,
)

GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.3, "seed": 11}
BOTH = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
LENGTH = 60

Event = Callable[[Pooled], Awaitable[None]]


async def disturbed(cluster: Pooled, event: Event, **options: Any) -> Generation:
    """An answer with the event after its third chunk; its tokens are those of an undisturbed one."""
    options = {"max_tokens": LENGTH, "ignore_eos": True, **options}
    expected = await cluster.client.complete("abc", **options)
    generation = cluster.client.generate("abc", **options)
    count = 0
    async for _ in generation:
        count += 1
        if count == 3:
            await event(cluster)
    assert count > 3
    assert generation.result.token_ids == expected.token_ids
    return generation


async def kill_the_target(cluster: Pooled) -> None:
    await cluster.target_with_sessions().stop()


async def drain_the_target(cluster: Pooled) -> None:
    scheduler = cluster.target_with_sessions().scheduler
    assert scheduler is not None
    await asyncio.wait_for(scheduler.drain(10), 10)  # which ends once no session is left


async def unname_the_target(cluster: Pooled) -> None:
    busy = cluster.target_with_sessions()
    cluster.named["target"].remove(busy.address)
    await until(lambda: busy.num_sessions == 0)


async def kill_every_draft(cluster: Pooled) -> None:
    for draft in cluster.drafts:
        await draft.stop()


async def kill_one_draft(cluster: Pooled) -> None:
    (busy,) = [draft for draft in cluster.drafts if draft.num_sessions]
    await busy.stop()


@BOTH
@pytest.mark.parametrize("event", [kill_the_target, drain_the_target, unname_the_target])
def test_an_answer_goes_on_at_another_target(event: Event, sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with pooled(make_engine=lambda: toy_engine(step_delay_s=0.002)) as cluster:
            generation = await disturbed(cluster, event, **sampling)
            assert generation.result.speculation.num_reopens >= 1
            await cluster.until_idle()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@BOTH
def test_an_answer_goes_on_with_another_draft_service(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with pooled(make_proposer=self_draft) as cluster:
            generation = await disturbed(cluster, kill_one_draft, **sampling)
            figures = generation.result.speculation
            assert figures.num_accepted == figures.num_draft_tokens > 4 * 4  # the other one's are right as well
            assert figures.num_fallback_rounds >= 1
            await cluster.until_idle()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@BOTH
def test_without_any_draft_service_drafts_are_copied_from_the_sequence(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(draft_timeout_s=5.0, fallback=PromptLookup(5, 1))
        # Logits that depend on the last token alone, so that the text repeats itself.
        engine = partial(toy_engine, lambda token_ids: TARGET_LOGITS(token_ids[-1:]))
        async with pooled(make_engine=engine, settings=settings) as cluster:
            generation = await disturbed(cluster, kill_every_draft, **sampling)
            figures = generation.result.speculation
            assert figures.num_fallback_rounds > 0
            if sampling is GREEDY:
                assert figures.num_accepted > figures.num_rounds  # most of them came after the services had gone

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_sixteen_answers_survive_every_target_being_restarted_in_turn() -> None:
    async def scenario() -> None:
        async with pooled(3, 1, make_engine=lambda: toy_engine(step_delay_s=0.001)) as cluster:
            options: list[dict[str, Any]] = [
                {"max_tokens": 120, "ignore_eos": True, **(GREEDY if number % 2 else COUPLED), "seed": number}
                for number in range(16)
            ]
            expected = [await cluster.client.complete("abc", **one) for one in options]
            running = [asyncio.create_task(cluster.client.complete("abc", **one)) for one in options]
            for target in cluster.targets:
                await asyncio.sleep(0.02)
                await target.stop()
                target.engine = toy_engine(step_delay_s=0.001)
                await target.start()
                await until(lambda: num_up(cluster.target_pool) == 3)
            results = await asyncio.gather(*running)
            assert [one.token_ids for one in results] == [one.token_ids for one in expected]
            assert sum(one.speculation.num_reopens for one in results) >= 1
            await cluster.until_idle()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_target_that_hangs_is_left_when_its_answer_is_due() -> None:
    async def scenario() -> None:
        patience = TargetPatience(answer_s=0.3)
        settings = OrchestratorSettings(draft_timeout_s=5.0, target_patience=patience)
        released = asyncio.Event()

        async def hang(cluster: Pooled) -> None:
            scheduler = cluster.target_with_sessions().scheduler
            assert scheduler is not None
            scheduler.wake = lambda: None  # type: ignore[method-assign]
            released.set()

        async with pooled(settings=settings, make_engine=lambda: toy_engine(step_delay_s=0.002)) as cluster:
            generation = await disturbed(cluster, hang, **GREEDY)
            assert released.is_set()
            assert generation.result.speculation.num_reopens >= 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_request_that_one_target_has_no_room_for_is_served_by_the_other() -> None:
    async def scenario() -> None:
        limits = Limits(max_sessions=1, max_waiting_sessions=1)
        async with pooled(2, 1, limits=limits, make_engine=lambda: toy_engine(step_delay_s=0.005)) as cluster:
            options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **GREEDY}
            full, free = cluster.target_pool.links
            full.breaker.worked()
            free.breaker.failed()  # so that all requests go to the first
            results = await asyncio.gather(*(cluster.client.complete("abc", **options) for _ in range(3)))
            assert len({one.token_ids for one in results}) == 1
            assert sum(one.speculation.num_reopens for one in results) == 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_request_that_a_draining_target_refuses_waits_for_another_one() -> None:
    async def scenario() -> None:
        async with pooled(2, 1, make_engine=lambda: toy_engine(step_delay_s=0.002)) as cluster:
            options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, **GREEDY}
            expected = await cluster.client.complete("abc", **options)
            away, draining = cluster.targets
            await away.stop()
            await until(lambda: num_up(cluster.target_pool) == 1)
            assert draining.scheduler is not None
            draining.scheduler.table.is_draining = True  # of which the orchestrator has not heard yet
            answers = [asyncio.create_task(cluster.client.complete("abc", **options)) for _ in range(4)]
            await asyncio.sleep(0.1)
            assert not any(answer.done() for answer in answers)
            await away.start()
            assert {answer.token_ids for answer in await asyncio.gather(*answers)} == {expected.token_ids}

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_target_that_computes_otherwise_is_never_used_and_both_are_named() -> None:
    async def scenario() -> None:
        async with pooled(2, 1) as cluster:
            odd = cluster.targets[1]
            await odd.stop()
            odd.engine = ToyEngine(TARGET_LOGITS, VOCAB, max_context=256, num_blocks=512, fingerprint="other")
            await odd.start()
            refused = cluster.target_pool.links[1]
            await until(lambda: "target services differ" in refused.why_not())
            assert odd.address in refused.why_not()
            assert "other" in refused.why_not()
            for _ in range(4):
                await cluster.client.complete("abc", max_tokens=5)
            assert refused.generation == 1  # the stream to the one that was there before

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_new_sessions_go_where_fewer_are() -> None:
    async def scenario() -> None:
        async with pooled(2, 3, make_engine=lambda: toy_engine(step_delay_s=0.005)) as cluster:
            options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **GREEDY}
            running = [asyncio.create_task(cluster.client.complete("abc", **options)) for _ in range(12)]
            await until(lambda: sum(target.num_sessions for target in cluster.targets) == 12)
            assert min(target.num_sessions for target in cluster.targets) >= 4
            await asyncio.gather(*running)
            await cluster.until_idle()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_replicas_that_are_named_later_are_used() -> None:
    async def scenario() -> None:
        async with pooled(2, 2) as cluster:
            later = cluster.named["target"].pop()
            await until(lambda: len(cluster.target_pool.links) == 1)
            cluster.named["target"].append(later)
            await until(lambda: num_up(cluster.target_pool) == 2)
            await cluster.client.complete("abc", max_tokens=5)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_more_addresses_than_a_pool_may_have_change_nothing() -> None:
    async def scenario() -> None:
        async with pooled(1, 1) as cluster:
            here = cluster.named["target"][0]
            cluster.named["target"] += [f"127.0.0.1:{port}" for port in range(1, MAX_REPLICAS + 1)]
            await until(lambda: "257 addresses are named, at most 256" in cluster.target_pool._problem)
            assert [link.address for link in cluster.target_pool.links] == [here]
            assert (await cluster.client.complete("abc", max_tokens=3, ignore_eos=True)).num_completion_tokens == 3
            del cluster.named["target"][1:]
            await until(lambda: cluster.target_pool._problem == "none is named")

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_at_its_start_it_waits_for_a_name_to_have_an_address() -> None:
    async def scenario() -> None:
        async with replicas(None) as (target, _):
            named: list[str] = []

            async def find() -> tuple[str, ...]:
                return tuple(named)

            pool = target_pool(find, VOCABULARY, "toy", PoolTimes(find_s=0.02, backoff=QUICK))
            await pool.start()
            with pytest.raises(LinkLostError, match="there is no target service: none is named"):
                await pool.wait_checked(0.1)
            waiting = asyncio.create_task(pool.wait_checked(30))
            named.append(target.address)
            await waiting
            assert num_up(pool) == 1
            await pool.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_a_target_the_error_names_every_one_of_them() -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(target_patience=TargetPatience(reconnect_s=0.1))
        async with pooled(2, 1, settings=settings) as cluster:
            for target in cluster.targets:
                await target.stop()
            await until(lambda: num_up(cluster.target_pool) == 0)
            with pytest.raises(TandemError) as caught:
                await cluster.client.complete("abc")
            assert caught.value.code == "UNAVAILABLE"
            assert all(target.address in caught.value.message for target in cluster.targets)

    asyncio.run(asyncio.wait_for(scenario(), 60))
