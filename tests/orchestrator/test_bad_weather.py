"""Items and answers that are lost, late, doubled or out of order between real services change no token."""

import asyncio
from typing import Any

import pytest

from tests.orchestrator.services import token_lists
from tests.orchestrator.weather import Forgetful, Storm, under

PROMPTS = [f"prompt {n}" for n in range(4)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("seed", range(3))
def test_the_output_is_that_of_fair_weather(sampling: dict[str, Any], seed: int) -> None:
    async def scenario() -> None:
        options = {"max_tokens": 24, "ignore_eos": True, **sampling}
        async with under(Storm(0, 0.0)) as calm:
            expected = await token_lists(calm, PROMPTS, **options)
        async with under(Storm(seed, 0.05)) as stack:
            assert await token_lists(stack, PROMPTS, **options) == expected

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_round_is_asked_again_for_the_same_tokens_only_when_its_answers_are_lost() -> None:
    async def scenario() -> None:
        options = {"max_tokens": 12, "ignore_eos": True, **COUPLED}
        async with under(Storm(0, 0.0)) as calm:
            expected = await token_lists(calm, PROMPTS, **options)
        weather = Forgetful()
        async with under(weather, answer_s=0.2) as stack:
            assert await token_lists(stack, PROMPTS, **options) == expected
        rounds = [bases for (kind, *_), bases in weather.bases.items() if kind == "VerifyItem"]
        assert all(len(bases) > 1 for bases in rounds)
        assert all(len(set(bases)) == 1 for bases in weather.bases.values())

    asyncio.run(asyncio.wait_for(scenario(), 60))
