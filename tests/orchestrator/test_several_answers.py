"""Several answers to one request, through real services: each is what its sample index gives alone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.client import GenerationResult
from tests.orchestrator.services import Stack, all_services, self_draft, similar_draft, toy_engine

PROMPT = "prompt abab number 2"
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 11}
COUPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
REJECTION: dict[str, Any] = {**COUPLED, "verification_policy": "rejection"}
BLOCK: dict[str, Any] = {**COUPLED, "verification_policy": "block"}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **COUPLED}
POLICIES = pytest.mark.parametrize(
    "sampling", [GREEDY, COUPLED, REJECTION, BLOCK], ids=["greedy", "coupled", "rejection", "block"]
)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def alone(stack: Stack, sample_indices: range, **options: Any) -> list[GenerationResult]:
    """Each answer as a request of its own, one after the other."""
    return [
        await stack.client.complete(PROMPT, sample_index=sample_index, **options) for sample_index in sample_indices
    ]


@POLICIES
def test_each_answer_is_the_one_its_index_gives_alone_in_text_usage_and_figures(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": True, **sampling}
            solo = await alone(stack, range(4), **options)
            for results, expected in (
                (await stack.client.complete_many(PROMPT, n=4, **options), solo),
                (await stack.client.complete_many(PROMPT, n=2, sample_index=2, **options), solo[2:]),
            ):
                assert [result.sample_index for result in results] == [one.sample_index for one in expected]
                for result, one in zip(results, expected, strict=True):
                    assert (result.text, result.token_ids) == (one.text, one.token_ids)
                    assert result.logprobs == one.logprobs != ()
                    assert (result.finish_reason, result.num_prompt_tokens) == (one.finish_reason, len(PROMPT))
                    assert result.speculation.num_draft_tokens_per_pos == one.speculation.num_draft_tokens_per_pos
                    assert result.speculation.num_accepted_per_pos == one.speculation.num_accepted_per_pos
                    assert result.speculation.num_rounds == one.speculation.num_rounds
            num_texts = len({one.text for one in solo})
            assert num_texts == (1 if sampling is GREEDY else 4)
            await stack.until_free()

    run(scenario())


@POLICIES
def test_the_target_as_its_own_draft_knows_which_answer_it_drafts_for(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            results = await stack.client.complete_many(PROMPT, n=3, max_tokens=23, ignore_eos=True, **sampling)
            assert [result.speculation.acceptance_rate for result in results] == [1.0] * 3

    run(scenario())


def test_answers_that_end_at_different_times_end_by_their_own_tokens() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            options: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": list(range(0, 64, 8)), **COUPLED}
            results = await stack.client.complete_many(PROMPT, n=4, **options)
            solo = await alone(stack, range(4), **options)
            assert [result.token_ids for result in results] == [one.token_ids for one in solo]
            assert [result.matched_stop for result in results] == [one.matched_stop for one in solo]
            assert len({len(result.token_ids) for result in results}) > 1

    run(scenario())


def test_chunks_of_all_answers_interleave_and_join_to_their_results() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            generation = stack.client.generate(PROMPT, n=3, max_tokens=24, ignore_eos=True, **COUPLED)
            chunks = [chunk async for chunk in generation]
            order = [chunk.sample_index for chunk in chunks]
            last_first = max(order.index(sample_index) for sample_index in range(3))
            first_last = min(len(order) - 1 - order[::-1].index(sample_index) for sample_index in range(3))
            assert last_first < first_last
            for result in generation.results:
                own = [chunk for chunk in chunks if chunk.sample_index == result.sample_index]
                assert "".join(chunk.text for chunk in own) == result.text
                assert sum((chunk.token_ids for chunk in own), ()) == result.token_ids
                assert len(own) == result.speculation.num_rounds
                assert sum(chunk.num_accepted for chunk in own) == result.speculation.num_accepted

    run(scenario())


def test_one_request_without_a_seed_draws_one_for_all_its_answers() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            results = await stack.client.complete_many(PROMPT, n=3, max_tokens=16, ignore_eos=True)
            (seed,) = {result.seed for result in results}
            solo = await alone(stack, range(3), max_tokens=16, ignore_eos=True, seed=seed)
            assert [result.token_ids for result in results] == [one.token_ids for one in solo]

    run(scenario())


@pytest.mark.parametrize("service", ["draft", "target"])
def test_a_service_that_restarts_midway_changes_no_token_of_any_answer(service: str) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=0.001)) as stack:
            expected = await stack.client.complete_many(PROMPT, n=3, speculation=False, **LONG)
            generation = stack.client.generate(PROMPT, n=3, **LONG)
            count = 0
            async for _ in generation:
                count += 1
                if count != 6:
                    continue
                if service == "draft":
                    with stack.target_held():
                        await stack.restart_draft()
                else:
                    await stack.target.stop()
                    stack.target.engine = toy_engine()  # a new process's has no blocks in use
                    await stack.target.start()
            assert [result.token_ids for result in generation.results] == [one.token_ids for one in expected]
            assert all(result.speculation.num_reopens for result in generation.results)
            await stack.until_free()

    run(scenario())


def test_a_draft_service_that_dies_midway_changes_no_token_of_any_answer() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            assert stack.draft is not None
            expected = await stack.client.complete_many(PROMPT, n=3, speculation=False, **LONG)
            generation = stack.client.generate(PROMPT, n=3, **LONG)
            count = 0
            async for _ in generation:
                count += 1
                if count == 6:
                    await stack.draft.stop()
            assert [result.token_ids for result in generation.results] == [one.token_ids for one in expected]
            assert all(result.speculation.num_fallback_rounds for result in generation.results)
            await stack.until_free()

    run(scenario())
