"""The target as its own draft: whatever happens around a round, every draft that is verified is accepted.

One that is not would mean that a draft service's rows, positions or noise are not those of the text.
"""

import asyncio
from typing import Any

import pytest

from engine.backends.toy_backend import ToyEngine
from orchestrator.server import OrchestratorSettings
from tandem.client import GenerationResult
from target_service.limits import Limits
from tests.orchestrator.services import TARGET_LOGITS, VOCAB, Stack, all_services, self_draft, toy_engine
from tests.orchestrator.weather import Storm, under

PROMPTS = [f"prompt {'ab' * n} number {n}" for n in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.3, "seed": 11}
PATIENT = OrchestratorSettings(draft_timeout_s=60.0)  # a busy machine is not a failed draft

pytestmark = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])


async def batched(stack: Stack, sampling: dict[str, Any], max_tokens: int) -> list[GenerationResult]:
    """All prompts at a time, each with another K -> their answers, with every draft accepted."""
    results = await asyncio.gather(
        *(
            stack.client.complete(
                prompt, max_tokens=max_tokens, num_draft_tokens=2 + number, ignore_eos=True, **sampling
            )
            for number, prompt in enumerate(PROMPTS)
        )
    )
    figures = [result.speculation for result in results]
    assert [one.num_accepted for one in figures] == [one.num_draft_tokens for one in figures]
    assert sum(one.num_draft_tokens for one in figures) > 0
    return results


@pytest.mark.parametrize("seed", range(3))
def test_lost_late_doubled_and_shuffled_messages(sampling: dict[str, Any], seed: int) -> None:
    async def scenario() -> None:
        weather = Storm(seed, 0.05)
        async with under(weather, make_proposer=self_draft) as stack:
            await batched(stack, sampling, max_tokens=32)
        assert weather.num_lost > 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_preemption_at_the_target(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        engine = ToyEngine(TARGET_LOGITS, VOCAB, max_context=128, num_blocks=32, block_size=4, prefix_cache=True)
        async with all_services(self_draft, engine, PATIENT, Limits(max_draft_tokens=8)) as stack:
            await batched(stack, sampling, max_tokens=40)
            assert stack.target.scheduler is not None
            assert stack.target.scheduler.table.load().preemptions > 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_restarts_of_the_draft_service(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with all_services(self_draft, toy_engine(step_delay_s=0.001)) as stack:
            running = asyncio.create_task(batched(stack, sampling, max_tokens=120))
            for num_steps in (5, 15):
                steps = stack.record_steps()
                while len(steps) < num_steps:
                    await asyncio.sleep(0.001)
                with stack.target_held():
                    await stack.restart_draft()
            results = await running
        assert all(result.speculation.num_reopens >= 1 for result in results)

    asyncio.run(asyncio.wait_for(scenario(), 60))
