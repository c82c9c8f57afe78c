"""The head of proposer `eagle` as it is trained: one decoder layer over the target's hidden states and its own.

From the target's states after some layers it makes one fused state per token; with the next token's embedding a layer
turns it into the state that stands for the token after, whose logits are drafts. Further drafts go on from the layer's
own states, as they will when it serves: in training too, so that it learns to live with what it has made itself
(EAGLE-3, arXiv 2503.01840).

Letters: B documents, T anchors of each (a token whose states are known, and whose next token is), L layers asked of
the target, E hidden size, H query and KH key-value heads, D head size, I intermediate size, U ids of the reduced
vocabulary, J drafts in a row.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.models.config import LoadedModel, ModelConfig
from training.distillation import Batch
from training.heads import Heads, Norm
from training.target_parts import TargetParts


class EagleModule(nn.Module):
    """Trained weights alone; the target's parts are passed in."""

    def __init__(self, config: ModelConfig, num_states: int) -> None:
        super().__init__()
        hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        self.config = config
        self.fuse = nn.Linear(num_states * hidden, hidden, bias=False)
        self.token_norm = Norm(hidden, config.rms_norm_eps)
        self.state_norm = Norm(hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(2 * hidden, query + 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.attention_out = nn.Linear(query, hidden, bias=False)
        self.mlp_norm = Norm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.final_norm = Norm(hidden, config.rms_norm_eps)
        self.heads = Heads(config)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What engine/heads/eagle.py is built from."""
        return {name.removesuffix(".weight"): tensor.detach() for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def begin_as(self, target: LoadedModel, parts: TargetParts) -> None:
        """Start from the target's last state, and from its last layer but for what that adds to it: nothing yet."""
        weights, hidden = target.weights, self.config.hidden_size
        prefix = f"model.layers.{self.config.num_layers - 1}"

        def of(name: str) -> torch.Tensor:
            return weights[f"{prefix}.{name}.weight"].float()

        self.fuse.weight.zero_()
        self.fuse.weight[:, -hidden:] = torch.eye(hidden)
        self.qkv.weight.zero_()
        self.qkv.weight[:, hidden:] = torch.cat([of(f"self_attn.{name}_proj") for name in "qkv"])
        self.attention_out.weight.zero_()
        self.gate_up.weight.copy_(torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]))
        self.down.weight.zero_()
        self.state_norm.weight.copy_(of("input_layernorm"))
        self.mlp_norm.weight.copy_(of("post_attention_layernorm"))
        self.final_norm.weight.copy_(parts.final_norm)

    def unroll(self, parts: TargetParts, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
        """See `HeadModule`."""
        next_ids = batch.token_ids[:, 1:]
        state = self.fuse(batch.states[:, :-1].flatten(2)).float()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(num_steps):
            tokens = F.embedding(torch.roll(next_ids, -step, dims=1), parts.embedding)
            state = self._layer(tokens, state, step, keys, values)
            yield self.final_norm(state)

    def _layer(
        self,
        tokens: torch.Tensor,
        state: torch.Tensor,
        step: int,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        both = torch.cat([self.token_norm(tokens), self.state_norm(state)], dim=-1)
        query, key, value = self.heads(self.qkv(both), step)
        keys.append(key)
        values.append(value)
        attended = _attend(query, keys, values)
        state = state + self.attention_out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        result: torch.Tensor = state + self.down(F.silu(gate) * up)
        return result


def _attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """All anchors up to one's own as the target's states gave them, then one's own later steps; [B, H, T, D]."""
    num_tokens, scale = query.shape[2], query.shape[-1] ** -0.5
    scores = (query @ keys[0].transpose(-1, -2)) * scale
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    own = [(query * key).sum(dim=-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat([scores.masked_fill(future, float("-inf")), *own], dim=-1).softmax(dim=-1)
    attended = weights[..., :num_tokens] @ values[0]
    for index, value in enumerate(values[1:]):
        attended = attended + weights[..., num_tokens + index, None] * value
    return attended
