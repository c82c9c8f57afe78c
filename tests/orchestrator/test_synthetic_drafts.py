"""Synthetic acceptance through real services: the rates are as set, the text is plain decoding's."""

import asyncio
from typing import Any

import numpy as np
import pytest

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.synthetic import SyntheticProposer
from tests.orchestrator.services import VOCAB, VOCABULARY, Stack, all_services, toy_engine
from tests.sampling.helpers import worst_deviation

RATES = (0.9, 0.5)


def synthetic_draft() -> Proposer:
    right = DraftModelProposer(toy_engine(), "toy", VOCABULARY.id_bytes_hash)
    return SyntheticProposer(right, VOCAB, RATES)


async def answer(stack: Stack, seed: int, **options: Any) -> tuple[tuple[int, ...], list[int]]:
    """An answer's tokens, and how many drafts stood in each round of three."""
    generation = stack.client.generate(
        "abc", seed=seed, max_tokens=60, ignore_eos=True, num_draft_tokens=3, **options
    )
    accepted = [chunk.num_accepted async for chunk in generation if chunk.num_draft_tokens == 3]
    assert generation.result.speculation.num_fallback_rounds == 0
    return generation.result.token_ids, accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_drafts_stand_as_often_as_was_set_and_the_text_is_plain_decodings(temperature: float) -> None:
    async def answers(stack: Stack, **options: Any) -> list[tuple[tuple[int, ...], list[int]]]:
        return await asyncio.gather(
            *(answer(stack, seed, temperature=temperature, **options) for seed in range(16))
        )

    async def scenario() -> None:
        async with all_services(synthetic_draft) as stack:
            drafted, plain = await answers(stack), await answers(stack, speculation=False)
            await stack.until_idle()
        assert [token_ids for token_ids, _ in drafted] == [token_ids for token_ids, _ in plain]
        counts = np.bincount([num for _, accepted in drafted for num in accepted], minlength=4)
        assert counts.sum() > 300
        first, later = RATES
        assert (
            worst_deviation(counts, [1 - first, first * (1 - later), first * later * (1 - later), first * later**2])
            < 5
        )

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_ratio_test_is_served_without_drafts() -> None:
    async def scenario() -> None:
        async with all_services(synthetic_draft) as stack:
            result = await stack.client.complete(
                "abc", max_tokens=9, ignore_eos=True, verification_policy="rejection", seed=1
            )
            assert result.speculation.acceptance_rate is None
            assert result.speculation.num_fallback_rounds == 8
            assert len(result.token_ids) == 9

    asyncio.run(asyncio.wait_for(scenario(), 60))
