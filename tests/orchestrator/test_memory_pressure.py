"""Both services with real blocks: a target short of memory, and prompts of every length in blocks of any size."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from draft_service.proposers.base import Proposer
from engine.backends.toy_backend import ToyEngine
from orchestrator.server import OrchestratorSettings
from target_service.limits import Limits
from tests.orchestrator.services import (
    TARGET_LOGITS,
    VOCAB,
    Stack,
    all_services,
    self_draft,
    similar_draft,
    wrong_draft,
)

PATIENT = OrchestratorSettings(draft_timeout_s=60.0)  # a busy machine is not a failed draft


def engine_of(num_blocks: int, block_size: int) -> ToyEngine:
    return ToyEngine(
        TARGET_LOGITS, VOCAB, max_context=128, num_blocks=num_blocks, block_size=block_size, prefix_cache=True
    )


async def answers(stack: Stack, prompts: Sequence[Sequence[int]], **options: object) -> list[tuple[int, ...]]:
    """All prompts at a time -> their tokens."""
    results = await asyncio.gather(
        *(stack.client.complete(prompt, ignore_eos=True, **options) for prompt in prompts)  # type: ignore[arg-type]
    )
    return [result.token_ids for result in results]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "coupled"])
def test_a_target_with_room_for_two_and_a_half_of_six_requests_changes_no_text(temperature: float) -> None:
    prompts = [[number, 2, 3, 4, 5, 6] for number in range(6)]
    options = {"max_tokens": 34, "temperature": temperature, "seed": 5, "num_draft_tokens": 4}

    async def run(num_blocks: int, make_proposer: Callable[[], Proposer] | None) -> list[tuple[int, ...]]:
        limits = Limits(max_draft_tokens=4)
        engine = engine_of(num_blocks, 4)
        async with all_services(make_proposer, engine, PATIENT, limits) as stack:
            tokens = await answers(stack, prompts, **options)
            await stack.until_idle()
            assert stack.target.scheduler is not None
            load = stack.target.scheduler.table.load()
            assert (load.preemptions > 0) == (num_blocks == 25)
            assert load.cached_blocks == engine.kv_usage().cached_blocks
        return tokens

    assert asyncio.run(run(25, similar_draft)) == asyncio.run(run(512, None))


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(
    "make_proposer", [self_draft, similar_draft, wrong_draft], ids=["all", "some", "none accepted"]
)
def test_prompts_of_every_length_in_blocks_of_any_size_are_answered_the_same_and_leave_nothing(
    block_size: int, make_proposer: Callable[[], Proposer]
) -> None:
    prompts = [[number % 30 for number in range(length)] for length in range(1, 41)]

    async def run(drafts: Callable[[], Proposer] | None, engine: ToyEngine) -> list[tuple[int, ...]]:
        async with all_services(drafts, engine, PATIENT) as stack:
            tokens = await answers(stack, prompts, max_tokens=18, temperature=0.0, num_draft_tokens=4)
            await stack.until_idle()
        return tokens

    with_drafts = asyncio.run(run(make_proposer, engine_of(8192 // block_size, block_size)))
    assert with_drafts == asyncio.run(run(None, engine_of(512, 16)))
