"""The SpeculativeEngine protocol: all a draft or target service asks of a model.

Letters: N sequences in a step, T new tokens of the step, R rows whose logits are wanted, V vocabulary.

A sequence is token state in an engine: `num_cached_tokens` rows of key-value memory, one a token, addressed by
a `SequenceId`. A step appends each input's tokens after the rows that are there; whatever a verdict rejects is
taken back with `truncate`, which counts in rows from the start and never relatively.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, Protocol

from tandem.types import ModelInfo

if TYPE_CHECKING:
    import torch  # the errors and values below are also for those who never load it

SequenceId = NewType("SequenceId", int)


class EngineError(Exception):
    """What an engine refuses; the message names the sequence and the limit."""


class OutOfBlocksError(EngineError):
    """The block pool cannot hold the step; nothing of the step was done."""


class UnsupportedEngineError(EngineError):
    """The backend lacks a capability that was asked of it; the message names the backend."""


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """One sequence's part of a step: tokens to append, and how many of the last rows want logits.

    `num_logits_rows` is 0 for prefill (`advance`), 1 for decode, K+1 for verify; at most `len(token_ids)`.
    """

    sequence_id: SequenceId
    token_ids: Sequence[int]
    num_logits_rows: int = 0
    states: "torch.Tensor | None" = None  # float32 [n, W]: what a head reads beside each token; None for a model


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What a backend is and can do; `numerics_fingerprint` equal means bitwise equal logits."""

    backend: str  # the name users configure: "torch", "toy"
    vocab_size: int
    max_context: int  # most rows a sequence may have
    dtype: str  # "float32", "bfloat16"
    device: str
    can_truncate: bool  # False: the backend cannot roll back, so it must not speculate
    deterministic: bool  # a row's logits do not depend on batch, chunking, place or thread count
    numerics_fingerprint: str
    has_prefix_cache: bool = False  # `create` may find rows of earlier sequences
    num_layers: int = 0  # after each of which there are hidden states
    hidden_size: int = 0  # numbers of a row's hidden state; 0: the backend does not give any

    def model_info(self, model_id: str, vocab_hash: str) -> ModelInfo:
        """The engine's part of a service's handshake."""
        return ModelInfo(
            model_id=model_id,
            vocab_size=self.vocab_size,
            vocab_hash=vocab_hash,
            max_context=self.max_context,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            numerics_fingerprint=self.numerics_fingerprint,
            deterministic=self.deterministic,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
        )


@dataclass(slots=True)
class HiddenCapture:
    """Asks one forward for hidden states: the residual stream after so many layers, of all its new rows.

    Letters: L layers asked for, E hidden size.
    """

    layers: tuple[int, ...]  # [L] ascending, each 1..num_layers
    states: "torch.Tensor | None" = None  # float32 [T, L, E], inputs in order: what the forward has filled in


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Block accounting: free + used + cached == total at every step."""

    total_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    block_size: int  # tokens a block
    evicted_blocks: int = 0  # cached blocks given to others, since start
    hit_blocks: int = 0  # blocks that new sequences found in the prefix cache, since start

    @property
    def available_blocks(self) -> int:
        """Blocks that a step could take: those in nobody's use."""
        return self.free_blocks + self.cached_blocks


class SpeculativeEngine(Protocol):
    """Per-position scores over batches of (sequence, token ids), with absolute rollback.

    Not thread-safe: one caller at a time. Every forward method raises `OutOfBlocksError` before it changes
    anything, and `EngineError` for an unknown sequence, an id outside the vocabulary, an empty input, or a
    sequence that would pass `max_context`. Given a `capture` they fill it in, or raise `UnsupportedEngineError` where
    the capabilities say that there are no hidden states.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def create(self, token_ids: Sequence[int] = ()) -> SequenceId:
        """A new sequence, with the rows of the longest start of `token_ids` that the prefix cache has.

        `num_cached_tokens` says how many; none where there is no prefix cache.
        """
        ...

    def num_cached_tokens(self, sequence_id: SequenceId) -> int:
        """Rows of key-value memory the sequence has."""
        ...

    def advance(self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None) -> None:
        """Append rows without computing logits; `num_logits_rows` must be 0."""
        ...

    def forward_per_position_logits(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> "torch.Tensor":
        """One forward for the whole batch -> float32 [R, V]: inputs in order, each its last rows in order.

        Inputs with `num_logits_rows == 0` advance in the same forward and own no row.
        """
        ...

    def forward_per_position_argmax(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> "torch.Tensor":
        """As above -> int64 [R], the lowest id among the largest logits, with no copy of the vocabulary.

        -1 for a row whose largest logit is not finite.
        """
        ...

    def truncate(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Drop rows past `num_tokens` (absolute); a no-op when there are fewer."""
        ...

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """A new sequence with the same rows, sharing memory until one of them writes."""
        ...

    def release(self, sequence_id: SequenceId) -> None:
        """Forget the sequence and give its blocks back; a second release is a no-op."""
        ...

    def kv_usage(self) -> KvUsage:
        """The block accounting now."""
        ...

    def num_blocks_for(self, inputs: Sequence[SequenceInput]) -> int:
        """Blocks that one forward of all these inputs takes from the available ones."""
        ...


def require_speculation(capabilities: EngineCapabilities) -> None:
    """Raise `UnsupportedEngineError`, naming the backend, unless it can roll back."""
    if not capabilities.can_truncate:
        raise UnsupportedEngineError(
            f"backend {capabilities.backend!r} cannot speculate: it cannot truncate key-value rows, so rejected "
            "drafts could not be rolled back; run it with num_draft_tokens 0 or choose another backend"
        )


def check_capture(capabilities: EngineCapabilities, capture: HiddenCapture | None) -> None:
    """Raise `UnsupportedEngineError`, naming the backend, for hidden states that it does not have."""
    if capture is None:
        return
    if capabilities.hidden_size == 0:
        raise UnsupportedEngineError(f"backend {capabilities.backend!r} gives no hidden states")
    wrong = [layer for layer in capture.layers if not 1 <= layer <= capabilities.num_layers]
    if wrong:
        raise UnsupportedEngineError(
            f"backend {capabilities.backend!r} has no hidden states after layer {wrong[0]}: its model's layers are "
            f"1..{capabilities.num_layers}"
        )
