"""The first tokens of a row by (logit descending, id ascending), without sorting the vocabulary.

Letters: V vocabulary, N tokens.
"""

import math

import numpy as np
import torch

MASKED = -math.inf
_LOWEST = torch.finfo(torch.float32).min


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` ids of float32 [V] in that order -> int64 [N]; fewer where fewer are not masked."""
    vocab_size = logits.shape[0]
    count = min(count, vocab_size)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    # Cut the row into groups: where `count` of them reach a floor with their largest, as many tokens reach it.
    width = math.isqrt(vocab_size // count)
    num_groups = vocab_size // width
    highest = logits[: width * num_groups].view(width, num_groups).amax(dim=0)
    floor = torch.topk(highest, count).values[-1].clamp(min=_LOWEST)
    return by_logit(logits, positions(logits >= floor))[:count]


def by_logit(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Ids [N] of float32 [V] in any order -> the same by (logit descending, id ascending).

    numpy sorts plain integers several times faster than anything sorts floats and keeps their places, so logit and
    id become one: the bits of a float32 have its order once those of negative ones, but for the sign, are inverted.
    """
    bits = (logits[token_ids] + 0.0).cpu().numpy().view(np.int32)  # -0.0 becomes 0.0
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (~ascending).astype(np.int64) << 32 | token_ids.cpu().numpy()
    keys.sort()
    return torch.from_numpy(keys & 0xFFFFFFFF).to(logits.device)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Where bool [V] is true -> int64 [N], ascending; on a CPU torch.nonzero takes three times as long."""
    return torch.from_numpy(np.flatnonzero(mask.cpu().numpy())).to(mask.device)
