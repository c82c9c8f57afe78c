"""The head of proposer `mtp` as it is trained: a recurrent network over the target's last hidden state.

Letters: B documents, T anchors of each (a token whose state is known, and whose next token is), E hidden size, I inner
size, S steps with norms of their own.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.models.config import LoadedModel, ModelConfig
from training.distillation import Batch
from training.heads import Hints
from training.target_parts import TargetParts


class MtpModule(nn.Module):
    """Trained weights alone; the target's parts are passed in."""

    def __init__(self, config: ModelConfig, num_steps: int, inner: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.token_norms = nn.Parameter(torch.ones(num_steps, hidden))
        self.state_norms = nn.Parameter(torch.ones(num_steps, hidden))
        self.final_norms = nn.Parameter(torch.ones(num_steps, hidden))
        self.hints = Hints(config)
        self.gate_up = nn.Linear(3 * hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What engine/heads/mtp.py is built from."""
        return {name.removesuffix(".weight"): tensor.detach() for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def begin_as(self, target: LoadedModel, parts: TargetParts) -> None:  # noqa: ARG002 - as the other heads'
        """Start from the target's last state and its last norm, with nothing added."""
        self.final_norms.copy_(parts.final_norm.expand_as(self.final_norms))
        self.down.weight.zero_()

    def unroll(self, parts: TargetParts, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
        """See `HeadModule`; of the states it reads the last layer's."""
        state, size, eps = batch.states[:, :-1, -1], (self.config.hidden_size,), self.config.rms_norm_eps
        for step in range(num_steps):
            row = min(step, len(self.final_norms) - 1)
            tokens, recurring, sizes = (
                torch.roll(one[:, 1:], -step, dims=1) for one in (batch.token_ids, batch.recurring, batch.sizes)
            )
            hint, added = self.hints(parts.embedding, recurring, sizes)
            both = torch.cat(
                [
                    F.rms_norm(F.embedding(tokens, parts.embedding), size, self.token_norms[row], eps),
                    F.rms_norm(state, size, self.state_norms[row], eps),
                    hint,
                ],
                dim=-1,
            )
            gate, up = self.gate_up(both).chunk(2, dim=-1)
            state = state + self.down(F.silu(gate) * up).float() + added
            yield F.rms_norm(state, size, self.final_norms[row], eps)
