"""An engine without a model: the SpeculativeEngine protocol over any function from a prefix to logits.

It keeps the protocol's promises about errors, rollback and block accounting, but no key-value memory: a sequence
is its tokens, and a row of logits is a function of every token up to it.

Letters: R rows whose logits are wanted, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.backends.base import (
    EngineCapabilities,
    EngineError,
    KvUsage,
    SequenceId,
    SequenceInput,
    UnsupportedEngineError,
)
from engine.backends.toy_blocks import ToyBlocks
from engine.backends.toy_logits import LogitsOf, hashed_logits, scripted_logits
from engine.sampling.sampler import finite_argmax

MAX_CALLS = 10_000  # the log forgets older ones: a toy may serve for hours

__all__ = ["LogitsOf", "ToyCall", "ToyEngine", "hashed_logits", "scripted_logits"]


@dataclass(frozen=True, slots=True)
class ToyCall:
    """One forward, as the `calls` log keeps it."""

    kind: Literal["advance", "logits", "argmax"]
    num_sequences: int
    num_tokens: int
    num_rows: int  # rows whose logits were wanted


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int]
    block_ids: list[int]


class ToyEngine:
    """In-memory `SpeculativeEngine`; `calls` lists its forwards, delays (seconds) make it as slow as wanted."""

    def __init__(
        self,
        logits_of: LogitsOf,
        vocab_size: int,
        *,
        max_context: int = 4096,
        num_blocks: int = 4096,
        block_size: int = 16,
        step_delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        can_truncate: bool = True,
        fingerprint: str = "toy",
    ) -> None:
        self.calls: list[ToyCall] = []
        self.step_delay_s = step_delay_s
        self.token_delay_s = token_delay_s
        self._logits_of = logits_of
        self._blocks = ToyBlocks(num_blocks, block_size)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0
        self._capabilities = EngineCapabilities(
            backend="toy",
            vocab_size=vocab_size,
            max_context=max_context,
            dtype="float32",
            device="cpu",
            can_truncate=can_truncate,
            deterministic=True,
            numerics_fingerprint=fingerprint,
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine is."""
        return self._capabilities

    def create(self) -> SequenceId:
        """A new empty sequence."""
        return self._add(_Sequence([], []))

    def num_cached_tokens(self, sequence_id: SequenceId) -> int:
        """Rows the sequence has; EngineError when it is unknown."""
        return len(self._sequence(sequence_id).token_ids)

    def token_ids(self, sequence_id: SequenceId) -> list[int]:
        """The tokens behind those rows: what a test looks at to see that a rollback was right."""
        return list(self._sequence(sequence_id).token_ids)

    def advance(self, inputs: Sequence[SequenceInput]) -> None:
        """Append rows; EngineError when logits are asked for."""
        for item in inputs:
            if item.num_logits_rows != 0:
                raise EngineError(
                    f"sequence {item.sequence_id}: advance gives no logits, {item.num_logits_rows} rows were asked"
                )
        self._forward("advance", inputs)

    def forward_per_position_logits(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """Append rows -> float32 [R, V], fresh memory."""
        return self._forward("logits", inputs)

    def forward_per_position_argmax(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """Append rows -> int64 [R]."""
        return finite_argmax(self._forward("argmax", inputs))

    def truncate(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Drop rows past `num_tokens`; UnsupportedEngineError when rows would go and the engine cannot."""
        sequence = self._sequence(sequence_id)
        if num_tokens < 0:
            raise EngineError(f"sequence {sequence_id}: cannot truncate to {num_tokens} rows, the least is 0")
        if num_tokens >= len(sequence.token_ids):
            return
        if not self._capabilities.can_truncate:
            raise UnsupportedEngineError(
                f"backend 'toy' cannot truncate: sequence {sequence_id} has {len(sequence.token_ids)} rows and "
                f"{num_tokens} were asked to stay"
            )
        del sequence.token_ids[num_tokens:]
        self._blocks.shrink(sequence.block_ids, num_tokens)

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """A new sequence with the same rows, on shared blocks."""
        parent = self._sequence(sequence_id)
        self._blocks.share(parent.block_ids)
        return self._add(_Sequence(list(parent.token_ids), list(parent.block_ids)))

    def release(self, sequence_id: SequenceId) -> None:
        """Forget the sequence; harmless when it is not there."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._blocks.shrink(sequence.block_ids, 0)

    def kv_usage(self) -> KvUsage:
        """The block accounting now; nothing is ever cached."""
        return self._blocks.usage()

    def _add(self, sequence: _Sequence) -> SequenceId:
        self._next_id += 1
        sequence_id = SequenceId(self._next_id)
        self._sequences[sequence_id] = sequence
        return sequence_id

    def _sequence(self, sequence_id: SequenceId) -> _Sequence:
        if sequence_id not in self._sequences:
            raise EngineError(f"sequence {sequence_id} is unknown; {len(self._sequences)} sequences are live")
        return self._sequences[sequence_id]

    def _forward(
        self, kind: Literal["advance", "logits", "argmax"], inputs: Sequence[SequenceInput]
    ) -> torch.Tensor:
        """Check everything, take blocks, append, compute -> float32 [R, V]; no inputs are no forward."""
        if not inputs:
            return torch.empty((0, self._capabilities.vocab_size))
        self._check(inputs)
        sequences = [self._sequence(item.sequence_id) for item in inputs]
        new_lens = [len(s.token_ids) + len(item.token_ids) for s, item in zip(sequences, inputs, strict=True)]
        old_lens = [len(s.token_ids) for s in sequences]
        self._blocks.grow_all([s.block_ids for s in sequences], old_lens, new_lens)
        rows = []
        for sequence, item in zip(sequences, inputs, strict=True):
            sequence.token_ids.extend(item.token_ids)
            end = len(sequence.token_ids)
            for row_end in range(end - item.num_logits_rows + 1, end + 1):
                rows.append(torch.tensor(self._logits_of(sequence.token_ids[:row_end]), dtype=torch.float32))
        num_tokens = sum(len(item.token_ids) for item in inputs)
        self.calls.append(ToyCall(kind, len(inputs), num_tokens, len(rows)))
        if len(self.calls) > MAX_CALLS:
            del self.calls[: MAX_CALLS // 2]
        self._delay(num_tokens)
        # [R, V]
        return torch.stack(rows) if rows else torch.empty((0, self._capabilities.vocab_size))

    def _delay(self, num_tokens: int) -> None:
        """As long as a model of this speed would take; the caller is a worker thread, as for any engine."""
        delay_s = self.step_delay_s + num_tokens * self.token_delay_s
        if delay_s > 0:
            time.sleep(delay_s)

    def _check(self, inputs: Sequence[SequenceInput]) -> None:
        """EngineError for the first input that breaks the protocol."""
        if len({item.sequence_id for item in inputs}) < len(inputs):
            raise EngineError("a sequence comes twice in one step")
        vocab_size, max_context = self._capabilities.vocab_size, self._capabilities.max_context
        for item in inputs:
            name, num_tokens = f"sequence {item.sequence_id}", len(item.token_ids)
            new_len = self.num_cached_tokens(item.sequence_id) + num_tokens
            if num_tokens == 0:
                raise EngineError(f"{name}: an input needs at least 1 token")
            if not 0 <= item.num_logits_rows <= num_tokens:
                raise EngineError(f"{name}: {item.num_logits_rows} rows of logits asked of {num_tokens} tokens")
            for token_id in item.token_ids:
                if not 0 <= token_id < vocab_size:
                    raise EngineError(f"{name}: token id {token_id} is outside 0..{vocab_size - 1}")
            if new_len > max_context:
                raise EngineError(f"{name}: {new_len} rows would pass the context of {max_context} tokens")
