"""A proposer that drafts from the target's hidden states gets each row's own, or none, and no text waits for them.

`Reader` looks at every row it is given. Its drafts are the target's own: a round that has drafts accepts them all.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from draft_service.limits import DraftLimits
from draft_service.proposers.base import HiddenStatesNeed
from engine.backends.toy_backend import ToyEngine
from orchestrator.replica_link import HandshakeError
from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from target_service.limits import Limits
from tests.hidden import LAYERS, Reader
from tests.orchestrator.fakes import until
from tests.orchestrator.services import (
    TARGET_LOGITS,
    VOCAB,
    all_services,
    orchestrating,
    replicas,
    self_draft,
    token_lists,
    toy_engine,
)
from tests.orchestrator.weather import Storm, behind_weather

PATIENT = OrchestratorSettings(draft_timeout_s=60.0)
PROMPTS = [f"prompt {'ab' * n} number {n}" for n in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "num_draft_tokens": 3, "ignore_eos": True}
COUPLED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 11}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def reader() -> Reader:
    return Reader(self_draft())


def cached_engine(num_blocks: int = 512, step_delay_s: float = 0.0) -> ToyEngine:
    return ToyEngine(
        TARGET_LOGITS,
        VOCAB,
        max_context=256,
        num_blocks=num_blocks,
        block_size=4,
        prefix_cache=True,
        step_delay_s=step_delay_s,
    )


async def plain(prompts: list[str], **options: Any) -> list[tuple[int, ...]]:
    async with all_services(None) as stack:
        return await token_lists(stack, prompts, **options)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("step_tokens", [512, 24])
def test_from_the_second_round_on_every_draft_is_accepted(sampling: dict[str, Any], step_tokens: int) -> None:
    async def scenario() -> None:
        expected = await plain(PROMPTS, max_tokens=25, **sampling)
        limits = Limits(max_step_tokens=step_tokens)
        async with all_services(
            reader, toy_engine(), PATIENT, limits, draft_limits=DraftLimits(max_batch=4)
        ) as stack:
            answers = await asyncio.gather(
                *(stack.client.complete(prompt, max_tokens=25, **sampling) for prompt in PROMPTS)
            )
            await stack.until_idle()
        assert [answer.token_ids for answer in answers] == expected
        for answer in answers:
            figures = answer.speculation
            assert figures.num_rounds == 7  # one token, then six times four
            assert figures.num_accepted == figures.num_draft_tokens == 18
            assert (figures.num_fallback_rounds, figures.num_reopens) == (0, 0)

    run(scenario())


def test_rows_found_in_the_targets_prefix_cache_are_replayed_while_rounds_go_on() -> None:
    async def scenario() -> None:
        prompt = PROMPTS[5]
        (expected,) = await plain([prompt], max_tokens=60, **COUPLED)
        async with all_services(reader, cached_engine(), PATIENT) as stack:
            answers = [await stack.client.complete(prompt, max_tokens=60, **COUPLED) for _ in range(2)]
            await stack.until_idle()
            assert stack.target.scheduler is not None
        assert [answer.token_ids for answer in answers] == [expected] * 2
        first, second = answers
        assert (first.num_cached_tokens, second.num_cached_tokens > 0) == (0, True)
        assert second.speculation.num_accepted == second.speculation.num_draft_tokens > 20
        assert (second.speculation.num_fallback_rounds, second.speculation.num_reopens) == (0, 0)

    run(scenario())


@pytest.mark.parametrize("how", ["restart", "loss"])
def test_a_draft_service_that_has_lost_its_rows_gets_them_again_and_its_next_draft_is_right(how: str) -> None:
    async def scenario() -> None:
        made: list[Reader] = []

        def make() -> Reader:
            made.append(reader())
            return made[-1]

        (expected,) = await plain(PROMPTS[:1], max_tokens=120, **COUPLED)
        async with all_services(make, cached_engine(step_delay_s=0.005), PATIENT) as stack:
            answer = asyncio.create_task(stack.client.complete(PROMPTS[0], max_tokens=120, **COUPLED))
            await until(lambda: len(made[0].batches) > 3)
            if how == "restart":
                with stack.target_held():
                    await stack.restart_draft()
            else:
                made[0].lose()
            result = await answer
            await stack.until_idle()
        assert result.token_ids == expected
        figures = result.speculation
        assert figures.num_reopens >= 1
        assert figures.num_accepted == figures.num_draft_tokens
        assert len(made[-1].batches) > (2 if how == "restart" else 6)  # it drafted again
        assert figures.num_draft_tokens > 30

    run(scenario())


def test_a_target_that_restarts_sends_what_it_computes_anew() -> None:
    async def scenario() -> None:
        (expected,) = await plain(PROMPTS[:1], max_tokens=80, **GREEDY)
        readers = [reader()]
        async with all_services(lambda: readers[0], toy_engine(step_delay_s=0.002), PATIENT) as stack:
            answer = asyncio.create_task(stack.client.complete(PROMPTS[0], max_tokens=80, **GREEDY))
            await until(lambda: len(readers[0].batches) > 3)
            await stack.target.stop()
            stack.target.engine = toy_engine()
            await stack.target.start()
            result = await answer
            await stack.until_idle()
        assert result.token_ids == expected
        assert result.speculation.num_accepted == result.speculation.num_draft_tokens

    run(scenario())


def test_under_memory_pressure_every_row_is_still_its_own() -> None:
    async def scenario() -> None:
        expected = await plain(PROMPTS, max_tokens=40, **COUPLED)
        async with all_services(reader, cached_engine(36), PATIENT, Limits(max_draft_tokens=4)) as stack:
            assert await token_lists(stack, PROMPTS, max_tokens=40, **COUPLED) == expected
            assert await token_lists(stack, PROMPTS, max_tokens=40, **COUPLED) == expected
            await stack.until_idle()
            assert stack.target.scheduler is not None
            assert stack.target.scheduler.table.load().preemptions > 0

    run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_lost_late_doubled_or_out_of_order_change_no_token(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.hidden_relay._REPEAT_S", 0.1)

    async def scenario() -> None:
        expected = await plain(PROMPTS[:4], max_tokens=24, **COUPLED)
        settings = OrchestratorSettings(draft_timeout_s=0.15, target_patience=TargetPatience(answer_s=0.5))
        weather = Storm(seed, 0.05)
        async with replicas(reader, cached_engine()) as (target, draft), behind_weather(target, weather):
            assert draft is not None
            async with behind_weather(draft, weather), orchestrating(target, draft, settings) as stack:
                assert await token_lists(stack, PROMPTS[:4], max_tokens=24, **COUPLED) == expected

    run(scenario())


def test_what_an_absent_draft_service_leaves_behind_is_bounded_and_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows come while nobody takes them: past the limit they are dropped, and asked for when somebody is back."""
    monkeypatch.setattr("orchestrator.hidden_relay.MAX_HELD_BYTES", 40 * 32)  # rows of 32 bytes

    async def scenario() -> None:
        readers: list[Reader] = []

        def make() -> Reader:
            readers.append(reader())
            return readers[-1]

        (expected,) = await plain(PROMPTS[:1], max_tokens=150, **GREEDY)
        engine = cached_engine(step_delay_s=0.005)
        async with all_services(make, engine, PATIENT) as stack:
            assert stack.draft is not None
            answer = asyncio.create_task(stack.client.complete(PROMPTS[0], max_tokens=150, **GREEDY))
            await until(lambda: len(readers[0].batches) > 1)
            await stack.draft.stop()
            scheduler = stack.target.scheduler
            assert scheduler is not None
            begun = len(scheduler.table._live.all()[0].tokens)
            await until(lambda: len(scheduler.table._live.all()[0].tokens) > begun + 50)
            engine.step_delay_s = 0.2  # so that the answer does not end before the new one can have drafted
            await stack.draft.start()
            await until(lambda: len(readers) == 2 and len(readers[1].batches) > 1)
            engine.step_delay_s = 0.0
            result = await answer
            await stack.until_idle()
        assert result.token_ids == expected
        assert result.speculation.num_accepted == result.speculation.num_draft_tokens

    run(scenario())


def test_an_answer_that_ends_takes_its_replay_with_it() -> None:
    async def scenario() -> None:
        prompt = "a long prompt " * 12
        limits = Limits(max_step_tokens=16, max_draft_tokens=3, max_prefill_tokens=8)
        async with all_services(reader, cached_engine(), PATIENT, limits) as stack:
            await stack.client.complete(prompt, max_tokens=2, **GREEDY)
            assert stack.target.scheduler is not None
            table = stack.target.scheduler.table
            stack.target.engine.step_delay_s = 0.01  # type: ignore[attr-defined]
            answer = asyncio.create_task(stack.client.complete(prompt, max_tokens=60, **GREEDY))
            await until(lambda: table.load().running == 2)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            await stack.until_free()

    run(scenario())


@pytest.mark.parametrize(
    ("need", "message"),
    [
        (
            HiddenStatesNeed(LAYERS, 9),
            "of 9 numbers after layers 1, 3 of the target; .*offers 8 numbers after each of 3",
        ),
        (HiddenStatesNeed((1, 4), 8), "of 8 numbers after layers 1, 4"),
    ],
)
def test_a_draft_service_for_another_target_is_refused_with_both_sides_named(
    need: HiddenStatesNeed, message: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(HandshakeError, match=f"proposer 'reader' needs hidden states {message}"):
            async with all_services(lambda: Reader(self_draft(), need)):
                pass

    run(scenario())


def test_behind_a_target_that_came_back_without_them_answers_go_without_drafts() -> None:
    async def scenario() -> None:
        (expected,) = await plain(PROMPTS[:1], max_tokens=20, **GREEDY)
        async with all_services(reader, toy_engine(), PATIENT) as stack:
            assert stack.target_link.info is not None
            info = stack.target_link.info
            object.__setattr__(info.model, "hidden_size", 0)
            result = await stack.client.complete(PROMPTS[0], max_tokens=20, **GREEDY)
        assert result.token_ids == expected
        assert result.speculation.num_draft_tokens == 0
        assert result.speculation.num_fallback_rounds > 0

    run(scenario())
