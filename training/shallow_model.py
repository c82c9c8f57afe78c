"""A small draft model as it is trained: a few decoder layers, begun as some of the target's, between the target's ends.

Letters: B documents, N tokens of each, E hidden size.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.models.config import LoadedModel, ModelConfig
from training.distillation import Batch
from training.heads import Heads, Norm
from training.target_parts import TargetParts


class ShallowLayer(nn.Module):
    """One layer of the target's shape; its parameters are named as in engine/heads/shallow.py."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        self.attention_norm = Norm(hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(hidden, query + 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.attention_out = nn.Linear(query, hidden, bias=False)
        self.mlp_norm = Norm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.heads = Heads(config)

    @torch.no_grad()
    def begin_as(self, target: LoadedModel, index: int) -> None:
        """The target's layer of this index."""

        def of(name: str) -> torch.Tensor:
            return target.weights[f"model.layers.{index}.{name}.weight"].float()

        self.qkv.weight.copy_(torch.cat([of(f"self_attn.{name}_proj") for name in "qkv"]))
        self.attention_out.weight.copy_(of("self_attn.o_proj"))
        self.gate_up.weight.copy_(torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]))
        self.down.weight.copy_(of("mlp.down_proj"))
        self.attention_norm.weight.copy_(of("input_layernorm"))
        self.mlp_norm.weight.copy_(of("post_attention_layernorm"))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """[B, N, E] -> [B, N, E]."""
        query, key, value = self.heads(self.qkv(self.attention_norm(state)))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + self.attention_out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        result: torch.Tensor = state + self.down(F.silu(gate) * up)
        return result


class ShallowModule(nn.Module):
    """Trained weights alone; the target's ends are passed in."""

    def __init__(self, config: ModelConfig, begun_as: Sequence[int]) -> None:
        """`begun_as`: numbers of the target's layers, from 1."""
        super().__init__()
        self._begun_as = tuple(begun_as)
        self.layers = nn.ModuleList(ShallowLayer(config) for _ in begun_as)
        self.final_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What engine/heads/shallow.py is built from."""
        return {name.removesuffix(".weight"): tensor.detach() for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def begin_as(self, target: LoadedModel, parts: TargetParts) -> None:
        """Start from the target's layers and its final norm."""
        for layer, number in zip(self.layers, self._begun_as, strict=True):
            assert isinstance(layer, ShallowLayer)
            layer.begin_as(target, number - 1)
        self.final_norm.weight.copy_(parts.final_norm)

    def unroll(self, parts: TargetParts, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
        """See `HeadModule`. What follows a token does not depend on who chose it, so one forward gives every step."""
        state = F.embedding(batch.token_ids, parts.embedding)
        for layer in self.layers:
            state = layer(state)
        normed = self.final_norm(state)
        for step in range(num_steps):
            yield torch.roll(normed, -1 - step, dims=1)[:, :-1]
