"""What `tandem bench target` measures: pairs of segments, some rounds of the service and as many of the bare engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from engine.backends.base import SpeculativeEngine
from tandem.serving.compute import ComputeThread
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_service.bench_bare import BareSequences
from target_service.bench_client import Segment, ServiceSessions

MAX_SEGMENT_ROUNDS = 16
MAX_SEGMENT_ROWS = 512  # of all rounds of a segment, so that large batches do not take all the time


@dataclass(frozen=True, slots=True)
class Case:
    """So many sessions at once, each with so many drafts a round.

    `begins_apart`: half of them begin a segment while the step of the others is being computed.
    """

    num_sessions: int
    num_drafts: int
    begins_apart: bool = False

    def __str__(self) -> str:
        return f"{self.num_sessions} sessions, {self.num_drafts} drafts{', begun apart' * self.begins_apart}"

    @property
    def num_rows(self) -> int:
        """Of a step that has every session."""
        return self.num_sessions * (1 + self.num_drafts)

    @property
    def num_rounds(self) -> int:
        """Of a segment."""
        return max(2, min(MAX_SEGMENT_ROUNDS, MAX_SEGMENT_ROWS // self.num_rows))

    def max_tokens(self, num_segments: int) -> int:
        """More than so many segments can give: no session ends, no draft is cut off."""
        return (num_segments * self.num_rounds + 1) * (1 + self.num_drafts)

    def prompts(self, context_len: int, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same at every call."""
        generator = np.random.RandomState(self.num_sessions)
        prompts: list[list[int]] = generator.randint(vocab_size, size=(self.num_sessions, context_len)).tolist()
        return prompts


@dataclass(frozen=True, slots=True)
class Pair:
    """A segment of the service, and the bare engine's seconds a round for the same rounds."""

    service: Segment
    bare_s: float
    num_tokens: float  # a round, of each side

    @property
    def ratio(self) -> float:
        """The service's throughput over the bare engine's."""
        return self.bare_s / self.service.round_s


@dataclass(frozen=True, slots=True)
class Measurement:
    """The pairs of one case, in the order they were measured."""

    case: Case
    pairs: tuple[Pair, ...]

    @property
    def ratios(self) -> list[float]:
        """Pair by pair."""
        return [pair.ratio for pair in self.pairs]


async def measure_all(
    channel: grpc.aio.Channel,
    engine: SpeculativeEngine,
    compute: ComputeThread,
    cases: Sequence[Case],
    runs: int,
    context_len: int,
) -> list[Measurement]:
    """Every case: `runs` pairs after one that is not counted.

    AssertionError when the service does not compute what the bare engine does.
    """
    info = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(target_pb2.GetInfoRequest())
    bare, service = engine.capabilities.numerics_fingerprint, info.model.numerics_fingerprint
    assert bare == service, f"the bare engine computes {bare}, the service {service}"
    measurements = []
    for case in cases:
        prompts = case.prompts(context_len, engine.capabilities.vocab_size)
        sessions = ServiceSessions(channel, prompts, case.num_drafts)
        await sessions.open(case.max_tokens(runs + 1))
        sequences = await compute.run(BareSequences, engine, prompts, case.num_drafts)
        pairs: list[Pair] = []
        for _ in range(runs + 1):
            late_s = (pairs[-1].bare_s / 2 if pairs else 0.0) if case.begins_apart else None
            pairs.append(await _measure_pair(case, sessions, sequences, compute, late_s))
        measurements.append(Measurement(case, tuple(pairs[1:])))
        await sessions.end()
        await compute.run(sequences.release)
    return measurements


async def _measure_pair(
    case: Case,
    sessions: ServiceSessions,
    sequences: BareSequences,
    compute: ComputeThread,
    late_s: float | None,
) -> Pair:
    """One segment of each side; AssertionError unless they give the same tokens."""
    num_before = sum(map(len, sequences.tokens))
    segment = await sessions.run(case.num_rounds, late_s)
    bare_s = await compute.run(sequences.run, case.num_rounds)
    assert sessions.tokens == sequences.tokens, f"{case}: service and bare engine give different tokens"
    num_tokens = (sum(map(len, sequences.tokens)) - num_before) / case.num_rounds
    return Pair(segment, bare_s, num_tokens)
