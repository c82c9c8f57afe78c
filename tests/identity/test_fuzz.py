"""Random requests through all the services at once: right answers, refusals by name, nothing left behind.

Each shard is a thousand requests in flight by the hundred, some of which leave early or run out of time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.toy_backend import LogitsOf, ToyEngine, hashed_logits
from orchestrator.requests import CheckedRequest, Offer, check_request
from orchestrator.server import OrchestratorSettings
from orchestrator.session_handle import Deadline
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import open_channel
from tandem.types import TokenLogprobs
from tandem.vocabulary import Vocabulary
from tests.identity.fuzz import MAX_CONTEXT, Drawn, RequestMaker
from tests.identity.plain import answer_of, plain_logprobs, plain_tokens
from tests.identity.proposers import Varying, random_drafts
from tests.identity.streams import Streamed, StreamedAnswer
from tests.orchestrator.fakes import until
from tests.orchestrator.services import Stack, all_services, ngram_draft

NUM_REQUESTS = 1000
NUM_AT_ONCE = 100
SHARDS = [0, 1, *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(2, 20))]
SETTINGS = OrchestratorSettings(draft_timeout_s=60.0, max_requests=1000)  # a busy machine is not a failed draft
# Of the tokenizer; what the target has more than that is padding.
VOCABULARIES = (Vocabulary.toy(64), Vocabulary.toy(300))
VOCAB_SIZES = {64: 64, 300: 304}
LOGITS = {size: hashed_logits(padded, seed=3) for size, padded in VOCAB_SIZES.items()}


def similar(vocabulary: Vocabulary) -> Proposer:
    size = vocabulary.vocab_size
    engine = _engine(size, hashed_logits(VOCAB_SIZES[size], seed=3, blend=0.3))
    return DraftModelProposer(engine, "similar", vocabulary.id_bytes_hash, num_token_ids=size)


PROPOSERS: tuple[Callable[[Vocabulary], Proposer], ...] = (
    similar,
    lambda vocabulary: Varying(similar(vocabulary)),
    lambda vocabulary: random_drafts(vocabulary.vocab_size),
    lambda _: ngram_draft(),
)


def _engine(size: int, logits_of: LogitsOf) -> ToyEngine:
    return ToyEngine(logits_of, VOCAB_SIZES[size], max_context=MAX_CONTEXT, num_blocks=512)


class Fuzz:
    """One shard's requests against one stack; `outcomes` counts how they ended."""

    def __init__(self, stack: Stack, generate: Any, vocabulary: Vocabulary) -> None:
        self._stack = stack
        self._generate = generate
        self._vocabulary = vocabulary
        self.outcomes: Counter[str] = Counter()

    async def run(self, drawn: Drawn) -> None:
        """Send it, read it, and compare it with what it must be."""
        call = self._generate(drawn.request, timeout=drawn.timeout_s)
        streamed = Streamed()
        try:
            has_ended = await streamed.read(call, drawn.num_chunks)
            assert not drawn.bad_fields
            self.outcomes["answered" if has_ended else "left"] += 1
        except grpc.aio.AioRpcError as error:
            self._check_refusal(drawn, error, streamed)
        finally:
            call.cancel()
        if streamed.started is not None:
            self._check_answers(drawn.request, streamed, await self._stack.servicer._offer(Deadline(None)))

    def _check_refusal(self, drawn: Drawn, error: grpc.aio.AioRpcError, streamed: Streamed) -> None:
        """By a status with the name of a bad field, before anything was promised; or the client's own deadline."""
        code, details = error.code().name, error.details() or ""
        self.outcomes[code] += 1
        if code == "DEADLINE_EXCEEDED":
            assert drawn.timeout_s is not None
            return
        assert streamed.started is None
        assert code == ("UNIMPLEMENTED" if "is not offered" in details else "INVALID_ARGUMENT"), details
        assert any(details.startswith(name) for name in drawn.bad_fields), details

    def _check_answers(self, request: pb.GenerateRequest, streamed: Streamed, offer: Offer) -> None:
        """Every answer that was begun, under the seed that was used."""
        assert streamed.started is not None
        seeded = pb.GenerateRequest()
        seeded.CopyFrom(request)
        seeded.sampling.seed = streamed.started.seed
        checked = check_request(seeded, offer)
        for sample_index, answer in streamed.answers.items():
            self._check_answer(replace(checked, spec=replace(checked.spec, sample_index=sample_index)), answer)

    def _check_answer(self, checked: CheckedRequest, answer: StreamedAnswer) -> None:
        """Against plain decoding where the policy promises the same tokens, else against its own tokens."""
        spec, logits_of = checked.spec, LOGITS[self._vocabulary.vocab_size]
        is_plain = checked.num_draft_tokens == 0 or not spec.verification_policy.is_ratio_test
        self.outcomes["plain" if is_plain else "ratio test"] += 1
        if is_plain or answer.complete is not None:
            tokens = plain_tokens(spec, logits_of) if is_plain else iter(answer.token_ids)
            expected = answer_of(tokens, spec, self._vocabulary, checked.stops, checked.include_stop)
            answer.check(expected, self._vocabulary, checked.stops)
        wanted = spec.logprobs
        entries: list[TokenLogprobs] = []
        if wanted is not None:
            entries = plain_logprobs(spec, wanted, logits_of, answer.token_ids, self._vocabulary)
        assert answer.logprobs == entries
        self.outcomes["logprobs"] += len(entries)
        if answer.complete is not None:
            self.outcomes["fallback"] += answer.complete.speculation.num_fallback_rounds


@pytest.mark.parametrize("shard", SHARDS)
def test_random_requests_are_answered_exactly_or_refused_by_name(
    shard: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        vocabulary, make_proposer = VOCABULARIES[shard % 2], PROPOSERS[shard // 2 % 4]
        size = vocabulary.vocab_size
        maker = RequestMaker(shard, vocabulary, VOCAB_SIZES[size])
        engine = _engine(size, LOGITS[size])
        async with (
            all_services(lambda: make_proposer(vocabulary), engine, SETTINGS, vocabulary=vocabulary) as stack,
            open_channel(stack.client.address) as channel,
        ):
            generate: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate
            fuzz = Fuzz(stack, generate, vocabulary)
            requests = iter([maker.draw() for _ in range(NUM_REQUESTS)])

            async def work() -> None:
                for drawn in requests:
                    try:
                        await fuzz.run(drawn)
                    except Exception as error:
                        raise AssertionError(f"{type(error).__name__}: {error} at {drawn}") from error

            await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
            await stack.until_idle()
            await until(lambda: stack.servicer._admission.num_running == 0)
            for link in (stack.target_link, stack.draft_link):
                assert link is not None
                assert len(link.answers) == 0
        assert fuzz.outcomes["fallback"] == 0
        for outcome in ("plain", "ratio test", "logprobs", "INVALID_ARGUMENT", "left", "DEADLINE_EXCEEDED"):
            assert fuzz.outcomes[outcome] >= NUM_REQUESTS / 100, fuzz.outcomes

    asyncio.run(asyncio.wait_for(scenario(), 300))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
