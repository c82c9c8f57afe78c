"""Key-value memory: one tensor for all layers and sequences, addressed by block."""

from collections.abc import Iterable

import torch

from engine.backends.base import EngineError
from engine.kv.block_table import BlockCopy
from engine.models.config import ModelConfig


class KvCache:
    """Keys and values of every block.

    The rows of one head of a block lie next to each other, so attention reads runs of block_size * head_dim values.
    Memory starts as zeros: a padded tail is multiplied by probability 0, and 0 * NaN would be NaN.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_blocks: int, block_size: int) -> None:
        # [layers, 2 (keys, values), blocks, kv heads, block_size, head_dim]
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        try:
            self.memory = torch.zeros(shape, dtype=dtype)
        except RuntimeError as error:
            num_bytes = config.kv_bytes_per_token(dtype.itemsize) * num_blocks * block_size
            raise EngineError(f"key-value memory of {num_bytes} bytes cannot be had; ask for less") from error
        self.block_size = block_size

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, kv heads, block_size, head_dim] of one layer."""
        return self.memory[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[blocks, kv heads, block_size, head_dim] of one layer."""
        return self.memory[layer, 1]

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers, in order."""
        for source, destination in copies:
            self.memory[:, :, destination].copy_(self.memory[:, :, source])
