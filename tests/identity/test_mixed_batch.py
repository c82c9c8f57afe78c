"""Sixteen requests with every kind of option in one batch, with drafts: each answer is that of its request alone."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.server import OrchestratorSettings
from tandem.client import GenerationResult
from tandem.defaults import MAX_STEP_TOKENS
from tandem.types import Verdict
from target_service.limits import Limits
from tests.identity import models
from tests.identity.mixed import MEMBERS, NUM_TOKENS
from tests.identity.models import Model
from tests.orchestrator.fakes import until
from tests.orchestrator.services import VOCAB, Stack, all_services, token_lists

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9}
PROMPTS = [f"{'ab' * (n % 3)} number {n}" for n in range(len(MEMBERS))]


async def at_once(stack: Stack, requests: Sequence[dict[str, Any]]) -> list[GenerationResult]:
    """Every prompt's answer; their first rounds are decided by one step."""
    scheduler = stack.target.scheduler
    assert scheduler is not None
    everyone_is_here = threading.Event()
    held = asyncio.create_task(scheduler._compute.run(everyone_is_here.wait))
    answers = asyncio.gather(
        *(stack.client.complete(prompt, **options) for prompt, options in zip(PROMPTS, requests, strict=True))
    )
    await until(lambda: scheduler.table.load().waiting == len(requests), limit_s=60)
    everyone_is_here.set()
    await held
    return await answers


async def alone(stack: Stack, requests: Sequence[dict[str, Any]]) -> list[GenerationResult]:
    """Every prompt's answer, one after the other, with speculation off."""
    return [
        await stack.client.complete(prompt, **{**options, "speculation": False})
        for prompt, options in zip(PROMPTS, requests, strict=True)
    ]


def comparable(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.matched_stop, result.seed, result.logprobs


async def check(model: Model, sampling: dict[str, Any]) -> None:
    base = [{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": n, **sampling} for n in range(len(MEMBERS))]
    patient = OrchestratorSettings(draft_timeout_s=60.0)  # a busy machine is not a failed draft
    limits = Limits(max_prefill_tokens=MAX_STEP_TOKENS)  # all prompts in one step
    async with all_services(model.similar_draft, model.engine(), patient, limits, model.vocabulary) as stack:
        steps = stack.record_steps()
        without = await alone(stack, base)
        requests = [
            {**options, **member.options_of(plain, model.vocabulary.vocab_size)}
            for member, options, plain in zip(MEMBERS, base, without, strict=True)
        ]
        num_steps_before = len(steps)
        together = await at_once(stack, [{**request, "num_draft_tokens": 4} for request in requests])
        batches = [[outcome.decided for outcome in step.outcomes] for step in steps[num_steps_before:]]
        batch = max(batches, key=lambda decided: sum(isinstance(verdict, Verdict) for verdict in decided))
        # What was not seeded is replayed with the seed it was given.
        solo = await alone(
            stack, [{**request, "seed": result.seed} for request, result in zip(requests, together, strict=True)]
        )
        await stack.until_idle()
    assert [isinstance(verdict, Verdict) for verdict in batch] == [True] * len(MEMBERS)
    assert {verdict.num_draft_tokens for verdict in batch if isinstance(verdict, Verdict)} >= {4}
    for member, ours, theirs, plain in zip(MEMBERS, together, solo, without, strict=True):
        assert comparable(ours) == comparable(theirs), member.name
        assert not member.changes_tokens or ours.token_ids != plain.token_ids, member.name
    assert [len(result.logprobs) for result in together if result.logprobs] == [NUM_TOKENS] * 2
    assert sum(result.speculation.num_accepted for result in together) > 0
    assert sum(result.speculation.num_fallback_rounds for result in together) == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("make_model", [models.toy, models.tiny])
def test_every_member_of_a_mixed_batch_is_answered_as_if_it_were_alone(
    make_model: Callable[[], Model], sampling: dict[str, Any]
) -> None:
    asyncio.run(asyncio.wait_for(check(make_model(), sampling), 120))


@pytest.mark.model
def test_so_it_is_on_the_real_model() -> None:
    asyncio.run(asyncio.wait_for(check(models.real(), SAMPLED), 300))


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    async def scenario() -> None:
        async with all_services(None) as stack:
            options = {"seed": 5, "max_tokens": 16, "temperature": 2.0}
            off, three, beyond = [
                await token_lists(stack, PROMPTS, top_k=top_k, **options) for top_k in (0, 3, VOCAB + 1)
            ]
            assert off == beyond != three

    asyncio.run(scenario())
