"""The head of proposer `eagle` as it is trained: one decoder layer over the target's hidden states and its own.

What it computes is engine/heads/eagle.py's. Further drafts go on from the layer's own states, as they will when it
serves: in training too, so that it learns to live with what it has made itself (EAGLE-3, arXiv 2503.01840).

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
from training.heads import Heads, Hints, Norm
from training.target_parts import TargetParts


class EagleModule(nn.Module):
    """Trained weights alone; the target's parts are passed in."""

    def __init__(self, config: ModelConfig, num_states: int, inner: int) -> None:
        super().__init__()
        hidden, query = config.hidden_size, config.num_heads * config.head_dim
        self.config = config
        if num_states > 1:
            self.states_norm = nn.Parameter(torch.ones(num_states - 1, hidden))
            self.fuse = nn.Linear((num_states - 1) * hidden, hidden, bias=False)
        self.token_norm = Norm(hidden, config.rms_norm_eps)
        self.state_norm = Norm(hidden, config.rms_norm_eps)
        self.hints = Hints(config)
        self.qkv = nn.Linear(3 * hidden, query + 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.attention_out = nn.Linear(query, hidden, bias=False)
        self.mlp_norm = Norm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(3 * hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.final_norm = Norm(hidden, config.rms_norm_eps)
        self.heads = Heads(config)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What engine/heads/eagle.py is built from."""
        return {name.removesuffix(".weight"): tensor.detach() for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def begin_as(self, target: LoadedModel, parts: TargetParts) -> None:  # noqa: ARG002 - as the other heads'
        """Start from the target's last state and its last norm, with nothing added."""
        self.final_norm.weight.copy_(parts.final_norm)
        for linear in (self.attention_out, self.down, getattr(self, "fuse", None)):
            if linear is not None:
                linear.weight.zero_()

    def unroll(self, parts: TargetParts, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
        """See `HeadModule`."""
        state = self._fused(batch.states[:, :-1])
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(num_steps):
            tokens, recurring, sizes = (
                torch.roll(one[:, 1:], -step, dims=1) for one in (batch.token_ids, batch.recurring, batch.sizes)
            )
            token = self.token_norm(F.embedding(tokens, parts.embedding))
            hint, added = self.hints(parts.embedding, recurring, sizes)
            query, key, value = self.heads(self.qkv(torch.cat([token, self.state_norm(state), hint], dim=-1)), step)
            keys.append(key)
            values.append(value)
            attended = _attend(query, keys, values)
            state = state + self.attention_out(attended.transpose(1, 2).flatten(2)).float()
            gate, up = self.gate_up(torch.cat([token, self.mlp_norm(state), hint], dim=-1)).chunk(2, dim=-1)
            state = state + self.down(F.silu(gate) * up).float() + added
            yield self.final_norm(state)

    def _fused(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [B, T, L, E] -> [B, T, E]."""
        last, others = states[:, :, -1], states[:, :, :-1]
        if not others.shape[2]:
            return last
        scale = torch.rsqrt(others.pow(2).mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)
        fused: torch.Tensor = last + self.fuse((others * scale * self.states_norm).flatten(2)).float()
        return fused


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
