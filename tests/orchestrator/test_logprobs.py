"""Real services around toy engines: log-probabilities are those of plain decoding, one a token, whatever is drafted."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.toy_backend import ToyEngine, hashed_logits, scripted_logits
from engine.sampling.logprobs import token_logprobs
from tandem.client import GenerationResult
from tandem.client_request import build_request
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import open_channel
from tandem.types import FinishReason
from target_service.answers import StreamId
from tests.orchestrator.services import (
    TARGET_LOGITS,
    VOCABULARY,
    Stack,
    all_services,
    ngram_draft,
    self_draft,
    similar_draft,
    toy_engine,
    wrong_draft,
)

NUM_TOP = 5
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "seed": 11}
POLICIES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "coupled": SAMPLED,
    "rejection": {**SAMPLED, "verification_policy": "rejection"},
    "block": {**SAMPLED, "verification_policy": "block"},
}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "min_p": 0.02,
    "top_p": 0.97,
    "logit_bias": {3: 2.5, 9: -100.0, 20: 1.0},
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_tokens": 12,
    "seed": 2024,
}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def ask(stack: Stack, prompt: str = "abc", **options: Any) -> GenerationResult:
    """With the chosen token's log-probability and a list, unless told otherwise; at most 24 tokens."""
    defaults = {"logprobs": True, "top_logprobs": NUM_TOP, "max_tokens": 24, "ignore_eos": True}
    return await stack.client.complete(prompt, **{**defaults, **options})  # type: ignore[typeddict-item]


def views(result: GenerationResult) -> tuple[Any, ...]:
    """What must not depend on speculation."""
    return result.token_ids, result.text, result.logprobs, result.finish_reason, result.matched_stop


@pytest.mark.parametrize("make_proposer", [similar_draft, ngram_draft, self_draft, wrong_draft])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_logprobs_with_speculation_are_the_same_bits_as_without(
    sampling: dict[str, Any], mode: str, make_proposer: Callable[[], Proposer]
) -> None:
    async def scenario() -> None:
        async with all_services(make_proposer) as stack:
            off = await ask(stack, logprobs_mode=mode, speculation=False, **sampling)
            on = await ask(stack, logprobs_mode=mode, num_draft_tokens=4, **sampling)
            assert views(on) == views(off)
            assert len(on.logprobs) == len(on.token_ids) == 24
            for token_id, entry in zip(on.token_ids, on.logprobs, strict=True):
                assert (token_id in entry.top_token_ids) == (entry.rank <= NUM_TOP)
                is_certain = len(entry.top_token_ids) == 1  # top_p may leave nothing else
                assert entry.logprob == 0.0 if is_certain else entry.logprob < 0.0
                if entry.rank <= NUM_TOP:
                    assert entry.top_token_ids[entry.rank - 1] == token_id
                    assert entry.top_logprobs[entry.rank - 1] == entry.logprob

    run(scenario())


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_each_token_has_the_entry_of_its_own_prefix(policy: str) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            generation = stack.client.generate(
                "abc", logprobs=True, top_logprobs=NUM_TOP, max_tokens=40, ignore_eos=True, **POLICIES[policy]
            )
            chunks = [chunk async for chunk in generation]
        assert len({chunk.num_accepted for chunk in chunks}) >= 3
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
        tokens = VOCABULARY.encode("abc")
        for token_id, entry in zip(generation.result.token_ids, generation.result.logprobs, strict=True):
            row = torch.from_numpy(TARGET_LOGITS(tokens))[None]
            assert (replace(entry, token_bytes=b"", top_token_bytes=()),) == token_logprobs(
                row, [token_id], NUM_TOP
            )
            assert entry.token_bytes == VOCABULARY.bytes_table[token_id]
            assert entry.top_token_bytes == tuple(VOCABULARY.bytes_table[top_id] for top_id in entry.top_token_ids)
            tokens.append(token_id)

    run(scenario())


@pytest.mark.parametrize("make_proposer", [None, similar_draft])
def test_who_does_not_ask_gets_none_and_the_same_tokens(make_proposer: Callable[[], Proposer] | None) -> None:
    async def scenario() -> None:
        async with all_services(make_proposer) as stack:
            for sampling in (GREEDY, SAMPLED):
                asked = await ask(stack, **sampling)
                plain = await ask(stack, logprobs=None, top_logprobs=None, **sampling)
                assert plain.logprobs == ()
                assert plain.token_ids == asked.token_ids

    run(scenario())


@pytest.mark.parametrize("k", [0, 4, 8])
def test_text_token_ids_logprobs_and_usage_end_together_at_a_stop_string(k: int) -> None:
    async def scenario() -> None:
        script = VOCABULARY.encode("xx ha ha ha ha ")
        engine = toy_engine(scripted_logits(script, VOCABULARY.vocab_size, start=3))
        async with all_services(ngram_draft, engine) as stack, open_channel(stack.client.address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            request = build_request(
                "abc", stop=" ha ha ha", logprobs=True, top_logprobs=2, num_draft_tokens=k, max_tokens=40, **GREEDY
            )
            events = [event async for event in stub.Generate(request)]
        chunks = [event.chunk for event in events if event.WhichOneof("event") == "chunk"]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        num_entries = sum(len(chunk.logprobs) for chunk in chunks)
        complete = events[-1].complete
        assert "".join(chunk.text for chunk in chunks) == "xx"
        assert complete.matched_stop_string == " ha ha ha"
        assert num_entries == len(token_ids) == complete.usage.num_completion_tokens == len("xx ha ha ha")
        assert VOCABULARY.decode(token_ids) == "xx ha ha ha"

    run(scenario())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_an_id_of_a_padded_output_head_has_no_text_and_its_request_ends_well(sampling: dict[str, Any]) -> None:
    num_rows, padded = VOCABULARY.vocab_size + 8, VOCABULARY.vocab_size + 2

    def engine() -> ToyEngine:
        return ToyEngine(hashed_logits(num_rows, seed=3), num_rows, max_context=256, num_blocks=512)

    def draft() -> Proposer:
        return DraftModelProposer(engine(), "toy", VOCABULARY.id_bytes_hash)

    async def scenario() -> None:
        async with all_services(draft, engine()) as stack:
            options = {"logit_bias": {padded: 100.0}, "top_logprobs": 20, "max_tokens": 12, **sampling}
            for mode in ("raw", "processed"):
                for k in (0, 4):
                    result = await ask(stack, logprobs_mode=mode, num_draft_tokens=k, **options)
                    assert result.token_ids == (padded,) * 12
                    assert (result.text, result.finish_reason) == ("", FinishReason.LENGTH)
                    assert len(result.logprobs) == 12
                    if mode == "processed":
                        assert {entry.top_token_ids[0] for entry in result.logprobs} == {padded}
                    else:
                        assert {len(entry.top_token_ids) for entry in result.logprobs} == {20}

    run(scenario())


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("make_proposer", [similar_draft, ngram_draft, self_draft])
def test_every_parameter_in_one_request_gives_with_drafts_what_it_gives_without(
    make_proposer: Callable[[], Proposer], mode: str
) -> None:
    async def scenario() -> None:
        async with all_services(make_proposer) as stack:
            options = {**EVERYTHING, "logprobs_mode": mode, "max_tokens": 60, "speculation": False}
            free = await ask(stack, **options)
            # Text that comes both before and after min_tokens: the stop must wait for the second.
            stop = next(free.text[at : at + 1] for at in range(14, 40) if free.text[at] in free.text[:12])
            off = await ask(stack, stop=[stop, "never"], **options)
            on = await ask(stack, stop=[stop, "never"], **{**options, "speculation": True, "num_draft_tokens": 4})
        assert views(on) == views(off)
        assert on.speculation.num_draft_tokens > 0
        assert (on.finish_reason, on.matched_stop) == (FinishReason.STOP, stop)
        assert 12 < len(on.token_ids) == len(on.logprobs) < 60
        assert stop in on.text
        assert 9 not in on.token_ids

    run(scenario())


def test_requests_of_every_kind_in_one_batch_are_each_as_alone() -> None:
    kinds: list[dict[str, Any]] = [
        GREEDY,
        {**GREEDY, "logprobs": None, "top_logprobs": None},
        {**GREEDY, "logprobs_mode": "processed", "repetition_penalty": 1.4},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "logprobs": None, "top_logprobs": None},
        {"temperature": 0.7, "seed": 3, "top_k": 5, "logprobs_mode": "processed", "top_logprobs": 20},
        {"temperature": 0.7, "seed": 3, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.9, "seed": 5, "logit_bias": {3: 3.0, 4: -100.0}, "bad_token_ids": [7]},
        {**SAMPLED, "allowed_token_ids": range(20), "verification_policy": "rejection"},
        {**SAMPLED, "verification_policy": "block"},
        {**EVERYTHING, "logprobs_mode": "processed"},
    ]

    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=0.001)) as stack:
            alone = [await ask(stack, f"prompt {n}", **kind) for n, kind in enumerate(kinds)]
            together = await asyncio.gather(*(ask(stack, f"prompt {n}", **kind) for n, kind in enumerate(kinds)))
            assert [views(result) for result in together] == [views(result) for result in alone]
            assert [bool(result.logprobs) for result in alone] == ["logprobs" not in kind for kind in kinds]
            await stack.until_idle()

    run(scenario())


def test_a_session_opened_again_midway_goes_on_with_the_same_logprobs() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            expected = await ask(stack, max_tokens=40, **SAMPLED)
            options: dict[str, Any] = {"logprobs": True, "top_logprobs": NUM_TOP, "ignore_eos": True, **SAMPLED}
            generation = stack.client.generate("abc", max_tokens=40, **options)
            async for _ in generation:
                if len(generation.token_ids) in range(8, 16):
                    assert stack.target.scheduler is not None
                    stack.target.scheduler.table.end_stream(StreamId(1))
            assert generation.result.speculation.num_reopens >= 1
            assert views(generation.result) == views(expected)

    run(scenario())
