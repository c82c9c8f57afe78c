"""What an engine runs: anything that turns a batch of tokens into hidden states over a key-value cache."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from engine.batch import ForwardBatch
from engine.kernels.base import LayerKernels, RotaryTable
from engine.kv.cache import KvCache
from engine.models.config import ModelConfig


class DecoderModel(Protocol):
    """Letters: P rows of the step, R rows whose logits are wanted, E hidden size, U logits of a row."""

    @property
    def config(self) -> ModelConfig:
        """`vocab_size` bounds the ids that it reads."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def rotary(self) -> RotaryTable: ...

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,
        kernels: LayerKernels,
        on_layer: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run every layer, writing the cache -> what `logits` reads: the residual stream, float32 [P, E].

        `on_layer` is shown the stream after each number of layers, 1 to all of them; it is overwritten afterwards.
        """
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, kernels: LayerKernels) -> Iterator[torch.Tensor]:
        """Logits of these rows of `hidden`, [some rows, U] at a time, in the model's dtype."""
        ...
