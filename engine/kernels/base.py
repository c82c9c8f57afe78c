"""What a layer computes besides its linears, as a seam: a compiled and a plain torch implementation.

Letters: P rows of the step (at least 4), T of them tokens, E hidden size, I intermediate size, H query heads,
KH key-value heads, D head size. All outputs are written in place; every row depends on its own row alone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import ForwardBatch
from engine.kv.cache import KvCache
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosine and sine of every position's rotation angles, float32 [max_context, D / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] of the RMS norms of each head's query and key (Qwen3), in float32."""

    query: torch.Tensor
    key: torch.Tensor


class StepAttention(Protocol):
    """Attention of one step: what does not change from layer to layer is prepared."""

    def __call__(self, layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None, out: torch.Tensor) -> None:
        """Rotate queries and keys, write keys and values to the cache, attend.

        qkv [P, (H + 2 KH) * D] in the model's dtype -> out [P, H * D]; rows from T on are left alone.
        """
        ...


class LayerKernels(Protocol):
    """The kernels of one implementation."""

    @property
    def name(self) -> str:
        """Names the implementation and everything its results depend on; part of the numerics fingerprint."""
        ...

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """residual += delta; out = residual / rms(residual) * weight.

        residual float32 [P, E], delta and out [P, E] in the model's dtype, weight float32 [E].
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate) * up; gate_up [P, 2 I] (gate first), out [P, I], both in the model's dtype."""
        ...

    def prepare_attention(
        self, config: ModelConfig, batch: ForwardBatch, cache: KvCache, rotary: RotaryTable
    ) -> StepAttention:
        """The attention of one step of this batch over this cache."""
        ...
