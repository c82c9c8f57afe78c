"""Key-value rows of a transformers model in blocks: what its layers append goes there, what they read comes from there.

Letters: n new tokens, L rows after them, KH key-value heads, D head size of keys, E of values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from engine.backends.base import EngineError, SequenceId
from engine.batch import BatchItem
from engine.kv.block_table import BlockCopy


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token: a key of `key_dim` and a value of `value_dim` for each of `num_heads`."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes one token takes."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class PagedRows:
    """`SequenceCaches` over one memory, laid out by the block table of each sequence.

    A layer whose shape is None keeps nothing: it has no attention, or reads another layer's rows.
    """

    can_truncate = True

    def __init__(self, shapes: Sequence[LayerShape | None], num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        try:
            # [blocks, KH, block_size, D] and [blocks, KH, block_size, E] of each layer
            self._layers = [
                None if shape is None else tuple(_zeros(shape, num_blocks, block_size)) for shape in shapes
            ]
        except RuntimeError as error:
            num_bytes = sum(shape.row_bytes for shape in shapes if shape is not None) * num_blocks * block_size
            raise EngineError(f"key-value memory of {num_bytes} bytes cannot be had; ask for less") from error

    def open(self, sequence_id: SequenceId, item: BatchItem) -> Cache:
        """See `SequenceCaches`."""
        del sequence_id  # the item's blocks say where
        start, end = item.num_cached_tokens, item.num_cached_tokens + len(item.token_ids)
        block_ids = torch.tensor(item.block_ids)
        positions = torch.arange(start, end)
        slots = block_ids[positions // self._block_size], positions % self._block_size
        return Cache(
            layers=[
                _nothing() if memory is None else _PagedLayer(memory[0], memory[1], block_ids, slots, start)
                for memory in self._layers
            ]
        )

    def keep(self, sequence_id: SequenceId, cache: Cache) -> None:
        """Nothing to do: the rows were written where they stay."""

    def forget(self, sequence_id: SequenceId) -> None:
        """Nothing to do: whoever gets the blocks writes them first."""

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers, in order."""
        for source, destination in copies:
            for memory in self._layers:
                for tensor in memory or ():
                    tensor[destination].copy_(tensor[source])


def _nothing() -> DummyLayer:
    return DummyLayer()  # type: ignore[no-untyped-call]


def _zeros(shape: LayerShape, num_blocks: int, block_size: int) -> list[torch.Tensor]:
    """Zeros, for what lies past a sequence is masked and must be finite."""
    return [
        torch.zeros(num_blocks, shape.num_heads, block_size, size, dtype=shape.dtype)
        for size in (shape.key_dim, shape.value_dim)
    ]


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's rows of one sequence during one forward."""

    is_sliding = False  # a sliding window is a matter of the mask: all rows are kept, so that any can come back

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_ids: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
        num_tokens: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = (keys, values)
        self._block_ids = block_ids
        self._slots = slots
        self._num_tokens = num_tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows, [1, KH, n, D] and [1, KH, n, E] -> all rows, [1, KH, L, D] and [1, KH, L, E]."""
        self._num_tokens += key_states.shape[2]
        blocks, offsets = self._slots
        for memory, new in zip(self._memory, (key_states, value_states), strict=True):
            memory[blocks, :, offsets] = new[0].transpose(0, 1)
        keys, values = (self._gather(memory) for memory in self._memory)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows after `query_length` more tokens, and the position of the first."""
        return self._num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Rows there are."""
        return self._num_tokens

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def _gather(self, memory: torch.Tensor) -> torch.Tensor:
        # [B, KH, block_size, D] -> [KH, B * block_size, D] -> [1, KH, L, D]
        rows = memory[self._block_ids].transpose(0, 1).flatten(1, 2)
        return rows[None, :, : self._num_tokens]
