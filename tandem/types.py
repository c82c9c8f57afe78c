"""The values all three services and every client speak in. Frozen; no wire and no tensors in here.

Letters: K draft tokens of a round, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NewType

import numpy as np
import numpy.typing as npt

SessionId = NewType("SessionId", int)

PROTOCOL_VERSION = 1
GREEDY_TEMPERATURE = 1e-5  # at or below it, sampling is argmax
MAX_SPARSE_ENTRIES = 128  # of one position's q on the wire
MAX_PROPOSAL_TOKENS = 4096  # of one proposal: what a service makes or verifies of it is far less
MAX_DRAFT_PROBS_BYTES = 16 * 1024 * 1024  # of one proposal: half of what a message between services may hold
MAX_TOP_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


class VerificationPolicy(StrEnum):
    """The exact rule by which the target decides about drafts."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def is_ratio_test(self) -> bool:
        """Whether it compares p with q, so that drafts need noise of their own and an honest q."""
        return self in (VerificationPolicy.REJECTION, VerificationPolicy.BLOCK)


class DraftProbsTransport(StrEnum):
    """How the draft's distribution q reaches the target."""

    ONE_HOT = "one_hot"
    COUPLED = "coupled"
    SPARSE = "sparse"
    FULL = "full"

    @property
    def carries_probs(self) -> bool:
        """Whether each draft travels with the probabilities it was sampled from."""
        return self in (DraftProbsTransport.SPARSE, DraftProbsTransport.FULL)


class LogprobsMode(StrEnum):
    """Which distribution logprobs are of."""

    RAW = "raw"  # the model's own, before any processing
    PROCESSED = "processed"  # what the token was chosen from


class ErrorCode(IntEnum):
    """What can be wrong with one item of a stream; values are the wire's."""

    UNKNOWN_SESSION = 1
    PREFIX_MISMATCH = 2
    NO_CAPACITY = 3
    INVALID_ARGUMENT = 4
    UNIMPLEMENTED = 5
    DEADLINE_EXCEEDED = 6
    INTERNAL = 7
    HIDDEN_STATES_MISSING = 8


class ItemError(Exception):
    """An item that failed while its stream and the other items go on."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling; the defaults are what an unset field means.

    Penalties: repetition counts prompt and output, presence and frequency count output only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None  # None only until the orchestrator has drawn one
    bad_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all

    @property
    def is_greedy(self) -> bool:
        """Whether this temperature means argmax."""
        return self.temperature <= GREEDY_TEMPERATURE

    def choose_policy(self, asked: VerificationPolicy | None) -> VerificationPolicy:
        """The policy for these parameters: greedy when greedy, else what was asked, else coupled."""
        if self.is_greedy:
            return VerificationPolicy.GREEDY
        if asked in (None, VerificationPolicy.GREEDY):
            return VerificationPolicy.COUPLED
        assert asked is not None
        return asked


@dataclass(frozen=True, slots=True)
class LogprobsOptions:
    """Asks for the log-probability of every token of the output."""

    num_top: int = 0  # likeliest tokens listed beside it
    mode: LogprobsMode = LogprobsMode.RAW


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One output token's log-probability (natural logarithm, float32), and the likeliest tokens of its row.

    Among equals the lowest id comes first, in the list and in the rank.
    """

    logprob: float
    rank: int  # 1: the likeliest
    top_token_ids: tuple[int, ...] = ()  # [num_top], fewer where fewer are possible
    top_logprobs: tuple[float, ...] = ()  # same order
    token_bytes: bytes = b""  # what the token stands for, maybe part of a character; empty between services
    top_token_bytes: tuple[bytes, ...] = ()  # as above, in the order of top_token_ids


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Everything that decides a session's tokens. A re-open sends the same one with more committed tokens."""

    token_ids: tuple[int, ...]  # prompt, then committed tokens
    prompt_len: int
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()  # empty when EOS is ignored
    verification_policy: VerificationPolicy = VerificationPolicy.GREEDY
    draft_probs_transport: DraftProbsTransport = DraftProbsTransport.ONE_HOT
    sample_index: int = 0
    logprobs: LogprobsOptions | None = None  # None: not wanted
    priority: int = 0  # a higher one is served sooner

    @property
    def max_len(self) -> int:
        """Most tokens the sequence may have, prompt included."""
        return self.prompt_len + self.max_tokens

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end the generation once min_tokens are out."""
        return self.stop_token_ids | self.eos_token_ids

    @property
    def effective_policy(self) -> VerificationPolicy:
        """Greedy exactly when the temperature says so, else what the session asked for."""
        return self.sampling.choose_policy(self.verification_policy)

    @property
    def uses_draft_probs(self) -> bool:
        """Whether the session's proposals must carry the distribution each draft was sampled from."""
        return self.effective_policy.is_ratio_test and self.draft_probs_transport.carries_probs


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a message is made for; every answer repeats it."""

    session_id: SessionId
    epoch: int
    round: int
    committed_len: int
    prefix_hash: int


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distribution one draft token was sampled from.

    Under `sparse` at most 128 ids and their probabilities; under `full` ids 0 .. M-1 without naming them.
    """

    token_ids: npt.NDArray[np.uint32] | None  # [M]; None under `full`
    probs: npt.NDArray[np.float32]  # [M], same order


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain of draft tokens; empty is plain decoding."""

    draft_token_ids: tuple[int, ...] = ()
    draft_probs: tuple[DraftProbs, ...] = ()  # one a draft under `sparse` and `full`, else empty
    parents: tuple[int, ...] = ()  # not empty: a tree

    def first(self, num_drafts: int) -> "Proposal":
        """Its first drafts only; exact under every policy while the number does not depend on what the drafts are."""
        return Proposal(self.draft_token_ids[:num_drafts], self.draft_probs[:num_drafts], self.parents)


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The target's hidden states at consecutive rows (one a token), as they travel."""

    first_row: int  # absolute
    num_rows: int
    data: bytes  # bfloat16, little-endian: [num_rows, layers asked for, hidden size]

    @property
    def end_row(self) -> int:
        """The row behind the last."""
        return self.first_row + self.num_rows

    def rows_from(self, row: int) -> "HiddenStates":
        """Those from an absolute row on, which is one of them."""
        num_skipped = row - self.first_row
        return HiddenStates(row, self.num_rows - num_skipped, self.data[num_skipped * self._row_bytes :])

    def rows_before(self, row: int) -> "HiddenStates":
        """Those before an absolute row, the first of them at least."""
        num_rows = min(self.num_rows, row - self.first_row)
        return HiddenStates(self.first_row, num_rows, self.data[: num_rows * self._row_bytes])

    @property
    def _row_bytes(self) -> int:
        return len(self.data) // self.num_rows


@dataclass(frozen=True, slots=True)
class ItemTiming:
    """Where an item's time went, in microseconds."""

    queue_us: int = 0
    compute_us: int = 0

    def __add__(self, other: "ItemTiming") -> "ItemTiming":
        return ItemTiming(self.queue_us + other.queue_us, self.compute_us + other.compute_us)

    def __sub__(self, other: "ItemTiming") -> "ItemTiming":
        return ItemTiming(self.queue_us - other.queue_us, self.compute_us - other.compute_us)

    def within(self, time_s: float) -> "ItemTiming":
        """Neither part longer than the time that whoever asked has waited."""
        limit_us = int(1e6 * time_s)
        return ItemTiming(min(self.queue_us, limit_us), min(self.compute_us, limit_us))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decided about one round: the accepted drafts, then a recovered or bonus token.

    The extra token is missing only when an accepted draft ended the generation.
    """

    num_draft_tokens: int
    num_accepted: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    timing: ItemTiming = ItemTiming()
    batch_rows: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token of token_ids when the session asked, else empty
    num_cached_tokens: int = 0  # rows found in the prefix cache when the session began


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    draining: bool = False
    used_blocks: int = 0
    total_blocks: int = 0
    stale_items: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    shrunk_draft_tokens: int = 0
    evicted_sessions: int = 0
    evicted_blocks: int = 0
    hit_blocks: int = 0
    frozen: bool = False  # computing has not ended for too long
    step_overhead_rows: float = 0.0  # a target's step takes time in proportion to these and its rows; 0: not known
    step_sessions: float = 0.0  # whose rounds a step decides, of late

    @classmethod
    def together(cls, loads: Iterable["Load"]) -> "Load":
        """Of several replicas: sums, and the share of all their blocks; draining or frozen when all of them are."""
        many = list(loads)
        counts = {
            one.name: sum(getattr(load, one.name) for load in many)
            for one in fields(cls)
            if one.type in (int, "int")
        }
        used, total = counts["used_blocks"], counts["total_blocks"]
        return cls(
            **counts,
            kv_usage=used / total if total else 0.0,
            draining=bool(many) and all(load.draining for load in many),
            frozen=bool(many) and all(load.frozen for load in many),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The handshake: what a replica serves."""

    protocol_version: int = PROTOCOL_VERSION
    model_id: str = ""
    vocab_size: int = 0  # 0: any vocabulary
    vocab_hash: str = ""  # of the id -> bytes table; empty: any vocabulary
    max_context: int = 0  # 0: no limit of its own
    backend: str = ""
    dtype: str = ""
    device: str = ""
    numerics_fingerprint: str = ""
    deterministic: bool = True  # the same input gives the same output, whatever else is in the batch
    max_draft_tokens: int = 0
    incarnation: int = 0
    num_layers: int = 0  # after each of which there are hidden states
    hidden_size: int = 0  # numbers of a row's hidden state after one layer; 0: they cannot be had

    @property
    def numerics(self) -> str:
        """What decides every token: replicas that agree in it give the same bits for the same tokens."""
        return f"{self.model_id} ({self.numerics_fingerprint or 'no fingerprint'})"
