"""Norms, hints and attention heads of a layer while it is trained.

Letters: B documents, T tokens of each, H query and KH key-value heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from engine.heads.hints import NUM_SIZES
from engine.models.config import ModelConfig
from engine.models.llama import build_rotary


class Norm(nn.RMSNorm):
    """In float32, whatever products are computed in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Hints(nn.Module):
    """What a head is told of recurrences: see engine/heads/hints.py."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.size = nn.Parameter(0.5 * torch.randn(NUM_SIZES, config.hidden_size))
        self.gain = nn.Parameter(torch.zeros(NUM_SIZES, config.hidden_size))

    def forward(
        self, embedding: torch.Tensor, token_ids: torch.Tensor, sizes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Recurring tokens and sizes [...] -> hint, and what is added to the result, [..., E]."""
        token = self.norm(F.embedding(token_ids, embedding)) * (sizes > 0)[..., None]
        return token + self.size[sizes], token * self.gain[sizes]


class Heads(nn.Module):
    """From a layer's joint projection to rotated queries and keys, and values, all of them H."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_dim = config.head_dim
        rotary = build_rotary(config, config.max_context)
        self.register_buffer("cos", rotary.cos, persistent=False)
        self.register_buffer("sin", rotary.sin, persistent=False)

    def forward(
        self, qkv: torch.Tensor, first_position: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, T, (H + 2 KH) D] of tokens from `first_position` on -> three times [B, H, T, D]."""
        heads = qkv.view(*qkv.shape[:-1], -1, self._head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, self._sizes, dim=1)
        positions = torch.arange(qkv.shape[1]) + first_position
        return self._rotated(query, positions), self._grouped(self._rotated(key, positions)), self._grouped(value)

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions], self.sin[positions]
        low, high = heads.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _grouped(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.repeat_interleave(self._sizes[0] // self._sizes[1], dim=1)
