"""An engine without a model: the SpeculativeEngine protocol over any function from a prefix to logits.

It keeps the protocol's promises about errors, rollback and block accounting. A row of its key-value memory is the
token itself, and a row of logits is a function of every token that the sequence's blocks hold up to it: reading a
block that was not written for the sequence gives other logits, as it would with a model.

Letters: R rows whose logits are wanted, V vocabulary.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.base import (
    EngineCapabilities,
    HiddenCapture,
    SequenceId,
    SequenceInput,
    check_capture,
)
from engine.backends.paged import PagedEngine, check_advance
from engine.backends.toy_logits import LogitsOf, hashed_logits, scripted_logits
from engine.batch import BatchItem
from engine.kv.block_pool import BlockPool
from engine.kv.block_table import BlockCopy
from engine.kv.sequences import KvSequences
from engine.sampling.sampler import finite_argmax
from tandem.prefix_hash import HashedTokens

NUM_LAYERS, HIDDEN_SIZE = 3, 8
MAX_CALLS = 10_000  # the log forgets older ones: a toy may serve for hours

__all__ = ["LogitsOf", "ToyCall", "ToyEngine", "hashed_logits", "hidden_states", "scripted_logits"]


_Kind: TypeAlias = Literal["advance", "logits", "argmax"]


def hidden_states(token_ids: Sequence[int], first_row: int, layers: Sequence[int]) -> torch.Tensor:
    """The toy's own, of rows first_row .. len(token_ids) - 1 -> float32 [rows, len(layers), HIDDEN_SIZE].

    The bytes of the rolling hash of all tokens up to the row, moved up by the layer, modulo 256: whole numbers that
    bfloat16 holds, and other ones for every other prefix.
    """
    hashed = HashedTokens(token_ids)
    ends = range(first_row + 1, len(token_ids) + 1)
    hashes = np.array([hashed.prefix_hash(end) for end in ends], dtype="<u8")
    # [rows, 1, HIDDEN_SIZE]
    row_bytes = hashes.view(np.uint8).reshape(-1, 1, HIDDEN_SIZE)
    moved = row_bytes + np.asarray(layers, dtype=np.uint8)[None, :, None]
    return torch.from_numpy(moved.astype(np.float32))


@dataclass(frozen=True, slots=True)
class ToyCall:
    """One forward, as the `calls` log keeps it."""

    kind: _Kind
    num_sequences: int
    num_tokens: int
    num_rows: int  # rows whose logits were wanted


class ToyEngine(PagedEngine):
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
        prefix_cache: bool = False,
    ) -> None:
        self.calls: list[ToyCall] = []
        self.step_delay_s = step_delay_s
        self.token_delay_s = token_delay_s
        self._logits_of = logits_of
        self._memory = np.zeros((num_blocks, block_size), dtype=np.int64)  # the token of each row
        capabilities = EngineCapabilities(
            backend="toy",
            vocab_size=vocab_size,
            max_context=max_context,
            dtype="float32",
            device="cpu",
            can_truncate=can_truncate,
            deterministic=True,
            numerics_fingerprint=fingerprint,
            has_prefix_cache=prefix_cache,
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
        )
        pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        super().__init__(capabilities, KvSequences(capabilities, pool, self._copy_blocks))

    @property
    def sequence_ids(self) -> list[SequenceId]:
        """The sequences there are, for tests that look for leaks."""
        return self._sequences.ids

    def token_ids(self, sequence_id: SequenceId) -> list[int]:
        """The tokens in the sequence's rows: what a test looks at to see that memory is what it should be."""
        table = self._sequences.table(sequence_id)
        return self._read(table.block_ids, table.num_tokens)

    def advance(self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None) -> None:
        """See `SpeculativeEngine`."""
        check_advance(inputs)
        self._step("advance", inputs, capture)

    def forward_per_position_logits(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        return self._step("logits", inputs, capture)

    def forward_per_position_argmax(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        return finite_argmax(self._step("argmax", inputs, capture))

    def _step(self, kind: _Kind, inputs: Sequence[SequenceInput], capture: HiddenCapture | None) -> torch.Tensor:
        """One forward -> float32 [R, V]; no inputs are no forward."""
        check_capture(self._capabilities, capture)
        if not inputs:
            return torch.empty((0, self._capabilities.vocab_size))
        return self._sequences.step(inputs, partial(self._forward, kind, capture))

    def _forward(self, kind: _Kind, capture: HiddenCapture | None, items: list[BatchItem]) -> torch.Tensor:
        """Write the new tokens into their rows, then compute from what the rows hold -> float32 [R, V]."""
        rows = []
        states = []
        for item in items:
            end = item.num_cached_tokens + len(item.token_ids)
            self._write(item)
            token_ids = self._read(item.block_ids, end)
            if capture is not None:
                states.append(hidden_states(token_ids, item.num_cached_tokens, capture.layers))
            for row_end in range(end - item.num_logits_rows + 1, end + 1):
                rows.append(torch.tensor(self._logits_of(token_ids[:row_end]), dtype=torch.float32))
        num_tokens = sum(len(item.token_ids) for item in items)
        self.calls.append(ToyCall(kind, len(items), num_tokens, len(rows)))
        if len(self.calls) > MAX_CALLS:
            del self.calls[: MAX_CALLS // 2]
        self._delay(num_tokens)
        if capture is not None:
            capture.states = torch.cat(states)
        # [R, V]
        return torch.stack(rows) if rows else torch.empty((0, self._capabilities.vocab_size))

    def _write(self, item: BatchItem) -> None:
        positions = np.arange(item.num_cached_tokens, item.num_cached_tokens + len(item.token_ids))
        block_size = self._memory.shape[1]
        block_ids: npt.NDArray[np.int64] = np.asarray(item.block_ids)[positions // block_size]
        self._memory[block_ids, positions % block_size] = item.token_ids

    def _read(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        token_ids: list[int] = self._memory[np.asarray(block_ids, dtype=np.int64)].reshape(-1)[:num_tokens].tolist()
        return token_ids

    def _copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for source, destination in copies:
            self._memory[destination] = self._memory[source]

    def _delay(self, num_tokens: int) -> None:
        """As long as a model of this speed would take; the caller is a worker thread, as for any engine."""
        delay_s = self.step_delay_s + num_tokens * self.token_delay_s
        if delay_s > 0:
            time.sleep(delay_s)
