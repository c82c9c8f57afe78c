"""What a head takes from its target while it is trained.

Letters: V vocabulary, U ids of the reduced one, E hidden size.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.heads.artefact import target_ends
from engine.models.config import LoadedModel, ModelConfig


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head takes from its target: never trained, never stored with it."""

    config: ModelConfig
    embedding: torch.Tensor  # [V, E]
    head: torch.Tensor  # [U, E]
    final_norm: torch.Tensor  # [E]
    ids: torch.Tensor  # int64 [U], ascending

    @classmethod
    def of(cls, target: LoadedModel, ids: torch.Tensor) -> "TargetParts":
        """Float32 copies; `ids` is the reduced vocabulary."""
        embedding, head = target_ends(target, ids, torch.float32)
        return cls(target.config, embedding, head, target.weights["model.norm.weight"].float(), ids)

    def over(self, ids: torch.Tensor) -> "TargetParts":
        """With a reduced vocabulary of these of its ids alone; int64, in any order, others and repeats among them."""
        kept = torch.isin(self.ids, ids)
        return replace(self, head=self.head[kept], ids=self.ids[kept])

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed states [rows, E] -> logits of the reduced vocabulary [rows, U]."""
        return normed @ self.head.T

    def probs(self, states: torch.Tensor) -> torch.Tensor:
        """The target's last states [rows, E] -> its distribution over the reduced vocabulary [rows, U]."""
        normed = F.rms_norm(states, states.shape[-1:], self.final_norm, self.config.rms_norm_eps)
        return self.logits(normed).softmax(dim=-1)
