"""A draft service short of memory, context or places costs drafts and nothing else, and serves again afterwards."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from draft_service.limits import IDLE_S, DraftLimits
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.service import DraftService
from engine.backends.toy_backend import ToyEngine
from orchestrator.server import OrchestratorSettings
from tandem.client_result import Chunk, GenerationResult
from tandem.rng import F32
from tests.draft.clock import run_with_clock, settled, skip
from tests.draft.support import make_spec
from tests.items import stamp
from tests.orchestrator.services import (
    TARGET_LOGITS,
    VOCAB,
    VOCABULARY,
    Stack,
    all_services,
    token_lists,
    toy_engine,
)

PROMPTS = [f"prompt {'ab' * n} number {n}" for n in range(8)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PATIENT = OrchestratorSettings(draft_timeout_s=60.0)  # a busy machine is not a failed draft


def self_draft(**engine: int) -> DraftModelProposer:
    """The target's own logits on a small engine."""
    return DraftModelProposer(
        ToyEngine(TARGET_LOGITS, VOCAB, prefix_cache=True, **engine), "toy", VOCABULARY.id_bytes_hash
    )


async def plain(max_tokens: int) -> list[tuple[int, ...]]:
    async with all_services(None) as stack:
        return await token_lists(stack, PROMPTS, max_tokens=max_tokens, **GREEDY)


def draft_service(stack: Stack) -> DraftService:
    assert stack.draft is not None
    assert stack.draft.service is not None
    return stack.draft.service


def test_past_the_end_of_the_drafts_own_context_the_generation_goes_on_without_drafts() -> None:
    max_context, k, max_tokens = 40, 4, 50

    async def scenario() -> None:
        expected = await plain(max_tokens)
        async with all_services(lambda: self_draft(max_context=max_context), settings=PATIENT) as stack:
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                generation = stack.client.generate(prompt, max_tokens=max_tokens, num_draft_tokens=k, **GREEDY)
                prompt_len = committed_len = len(VOCABULARY.encode(prompt))
                async for chunk in generation:
                    # The last draft has no row: K drafts need committed_len + K - 1.
                    most = min(k, max_context - committed_len + 1, prompt_len + max_tokens - committed_len - 1)
                    assert chunk.num_draft_tokens == max(0, most)
                    committed_len += len(chunk.token_ids)
                assert committed_len > max_context + k
                assert generation.result.token_ids == tokens
                assert generation.result.speculation.num_fallback_rounds == 0
            await stack.until_idle()

    run_with_clock(scenario())


def test_a_tiny_pool_changes_no_text_and_is_empty_again_when_the_requests_have_ended() -> None:
    async def scenario() -> None:
        expected = await plain(24)
        for num_blocks in (2, 9, 20):
            proposer = self_draft(num_blocks=num_blocks, block_size=4)
            async with all_services(lambda: proposer, settings=PATIENT) as stack:  # noqa: B023 - called at once
                assert await token_lists(stack, PROMPTS, max_tokens=24, **GREEDY) == expected
                await stack.until_idle()
                load = draft_service(stack).load
                assert load.shrunk_draft_tokens > 0
                assert load.used_blocks == 0

    run_with_clock(scenario())


class Pausing:
    """The target's logits; the first row after `pause_len` tokens waits for `go`."""

    def __init__(self, pause_len: int) -> None:
        self._pause_len = pause_len
        self.paused, self.go = threading.Event(), threading.Event()

    def __call__(self, token_ids: Sequence[int]) -> F32:
        if len(token_ids) == self._pause_len and not self.paused.is_set():
            self.paused.set()
            assert self.go.wait(20)
        return TARGET_LOGITS(token_ids)


def test_a_session_whose_lease_ended_in_mid_answer_is_opened_again_with_every_token_so_far() -> None:
    prompt = PROMPTS[0]
    logits_of = Pausing(len(VOCABULARY.encode(prompt)) + 22)
    limits = DraftLimits(session_lease_s=10.0)

    async def scenario() -> None:
        async with all_services(self_draft, toy_engine(logits_of), PATIENT, draft_limits=limits) as stack:
            answering = asyncio.create_task(chunks_of(stack, prompt, max_tokens=60))
            await settled(logits_of.paused.is_set)
            skip(10.0)
            await settled(lambda: draft_service(stack).num_sessions == 0)
            logits_of.go.set()
            chunks, result = await answering
            assert result.token_ids == (await plain(60))[0]
            assert result.speculation.num_reopens == 1
            assert result.speculation.num_fallback_rounds >= 2  # one learns of it, one opens
            counts = [chunk.num_draft_tokens for chunk in chunks]
            assert counts[-3:-1] == [4, 4]
            assert all(chunk.num_accepted == chunk.num_draft_tokens for chunk in chunks)
            assert draft_service(stack).load.evicted_sessions == 1
            await stack.until_idle()

    run_with_clock(scenario())


def test_a_request_that_finds_no_place_asks_for_one_ever_less_often_and_drafts_once_there_is_one() -> None:
    async def scenario() -> None:
        async with all_services(self_draft, settings=PATIENT, draft_limits=DraftLimits(max_sessions=1)) as stack:
            service = draft_service(stack)
            occupant = service.open_stream()
            spec = make_spec()
            occupant.open_session(stamp(spec.token_ids), spec, asyncio.get_running_loop().time())
            refused = count_calls(service, "make_room")
            generation = stack.client.generate(PROMPTS[0], max_tokens=120, num_draft_tokens=4, **GREEDY)
            num_chunks = num_drafts = 0
            async for chunk in generation:
                num_chunks += 1
                num_drafts += chunk.num_draft_tokens
                if num_chunks == 40:
                    assert num_drafts == 0
                    assert 2 <= len(refused) <= 6
                    occupant.end()
            assert generation.result.token_ids == (await plain(120))[0]
            assert num_drafts > 0
            assert generation.result.speculation.num_reopens == len(refused) - 1
            await stack.until_idle()

    run_with_clock(scenario())


def test_a_request_takes_the_place_of_a_session_that_is_idle() -> None:
    async def scenario() -> None:
        async with all_services(self_draft, settings=PATIENT, draft_limits=DraftLimits(max_sessions=1)) as stack:
            service, spec = draft_service(stack), make_spec()
            occupant = service.open_stream()
            occupant.open_session(stamp(spec.token_ids), spec, asyncio.get_running_loop().time())
            skip(IDLE_S)
            result = await stack.client.complete(PROMPTS[0], max_tokens=20, **GREEDY)
            assert result.speculation.acceptance_rate == 1.0
            assert result.speculation.num_fallback_rounds == 0
            assert service.load.evicted_sessions == 1
            assert occupant.num_sessions == 0
            occupant.end()

    run_with_clock(scenario())


async def chunks_of(stack: Stack, prompt: str, max_tokens: int) -> tuple[list[Chunk], GenerationResult]:
    generation = stack.client.generate(prompt, max_tokens=max_tokens, num_draft_tokens=4, **GREEDY)
    chunks = [chunk async for chunk in generation]
    return chunks, generation.result


def count_calls(service: DraftService, name: str) -> list[None]:
    """A list that grows by an entry at each call of the service's method."""
    calls: list[None] = []
    method = getattr(service, name)

    def counted() -> None:
        calls.append(None)
        method()

    setattr(service, name, counted)
    return calls
