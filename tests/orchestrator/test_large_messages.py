"""Whole distributions of a large vocabulary, for several requests at once: no message passes what gRPC carries."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.toy_backend import ToyEngine
from orchestrator import pools
from orchestrator.replica_api import ReplicaApi
from orchestrator.server import OrchestratorSettings
from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES
from tandem.vocabulary import Vocabulary
from tests.orchestrator.services import all_services

VOCAB = 152_064
VOCABULARY = Vocabulary.toy(VOCAB)
K = 16
NUM_REQUESTS = 5
FULL: dict[str, Any] = {
    "max_tokens": K + 1,
    "num_draft_tokens": K,
    "ignore_eos": True,
    "verification_policy": "rejection",
    "draft_probs_transport": "full",
}
PATIENT = OrchestratorSettings(draft_timeout_s=60)
LOGITS = np.random.default_rng(1).gumbel(size=VOCAB).astype(np.float32) * 2


def logits_of(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    return np.roll(LOGITS, sum(token_ids) % 1000)


def engine() -> ToyEngine:
    return ToyEngine(logits_of, VOCAB, num_blocks=256, step_delay_s=0.01)


def self_draft() -> Proposer:
    return DraftModelProposer(engine(), "toy", VOCABULARY.id_bytes_hash)


@dataclass
class Recorder:
    """The bytes of every message of the streams that it opens, in both directions."""

    num_bytes: list[int] = field(default_factory=list)

    def of(self, api: ReplicaApi[Any, Any]) -> ReplicaApi[Any, Any]:
        return replace(
            api, open_stream=lambda channel: RecordedCall(api.open_stream(channel), self.num_bytes.append)
        )


@dataclass
class RecordedCall:
    """As much of a stream's call as a link uses."""

    call: Any
    record: Callable[[int], None]

    async def read(self) -> Any:
        message = await self.call.read()
        if hasattr(message, "ByteSize"):
            self.record(message.ByteSize())
        return message

    async def write(self, message: Any) -> None:
        self.record(message.ByteSize())
        await self.call.write(message)

    async def done_writing(self) -> None:
        await self.call.done_writing()

    def cancel(self) -> None:
        self.call.cancel()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(pools, "DRAFT_API", recorder.of(pools.DRAFT_API))
    monkeypatch.setattr(pools, "TARGET_API", recorder.of(pools.TARGET_API))
    return recorder


def test_four_proposals_of_whole_distributions_at_once_keep_their_streams(recorder: Recorder) -> None:
    async def scenario() -> None:
        async with all_services(self_draft, engine(), PATIENT, vocabulary=VOCABULARY) as stack:
            # The first is drafted for as it comes, the other four in the next batch.
            prompts = [[number, 2, 3] for number in range(NUM_REQUESTS)]
            results = await asyncio.gather(*(stack.client.complete(prompt, seed=7, **FULL) for prompt in prompts))
            assert stack.draft_link is not None
            assert (stack.draft_link.generation, stack.target_link.generation) == (1, 1)
        for result in results:
            figures = result.speculation
            assert (figures.num_rounds, figures.num_draft_tokens, figures.num_accepted) == (1, K, K)
            assert figures.num_fallback_rounds == figures.num_reopens == 0

    asyncio.run(asyncio.wait_for(scenario(), 120))
    proposal_bytes = 4 * VOCAB * K
    large = [size for size in recorder.num_bytes if size > proposal_bytes]
    assert len(large) == 2 * NUM_REQUESTS  # from the draft and to the target, each by itself
    assert max(large) < proposal_bytes + 1000
    assert (NUM_REQUESTS - 1) * proposal_bytes > MAX_INNER_MESSAGE_BYTES
