"""What a head is told beside a token and a state: which token followed when the sequence's last tokens stood before.

Text repeats itself, and a head of one layer would need much of it to learn where to look. So it is told (tandem/
ngram_index.py), and learns how far to trust what it is told by the size of the n-gram.

Letters: P rows, E hidden size, V vocabulary, S sizes of an n-gram, 0 for none among them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.ngram_index import MAX_NGRAM_SIZE, Recurrence

NUM_SIZES = MAX_NGRAM_SIZE + 1


def hint_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The trained tensors of hints."""
    return {
        "hints.norm": (hidden_size,),
        "hints.size": (NUM_SIZES, hidden_size),
        "hints.gain": (NUM_SIZES, hidden_size),
    }


@dataclass(frozen=True, slots=True)
class Hints:
    """Ready to use."""

    embedding: torch.Tensor  # [V, E], the target's
    norm: torch.Tensor  # [E]
    size: torch.Tensor  # [S, E]
    gain: torch.Tensor  # [S, E]
    eps: float

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, eps: float) -> "Hints":
        """From an artefact's tensors."""
        return cls(embedding, tensors["hints.norm"], tensors["hints.size"], tensors["hints.gain"], eps)

    def beside(self, states: torch.Tensor, recurrences: Sequence[Recurrence]) -> torch.Tensor:
        """States [P, E] -> what a head's rows read, float32 [P, 3 E]: state, hint, and what is added to the result."""
        ids = torch.tensor([one.token_id for one in recurrences])
        sizes = torch.tensor([one.size for one in recurrences])
        token = F.rms_norm(F.embedding(ids, self.embedding).float(), self.norm.shape, self.norm, self.eps)
        token = token * (sizes > 0)[:, None]
        return torch.cat([states, token + self.size[sizes], token * self.gain[sizes]], dim=-1)
