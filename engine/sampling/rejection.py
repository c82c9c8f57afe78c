"""Rejection sampling of a draft token (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

A draft d sampled from q is accepted with probability min(1, p(d) / q(d)); otherwise the recovered token is sampled
from norm(max(p - q, 0)). What comes out is distributed as p. All in float64.

Letters: V vocabulary, M entries of q as it was sent.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.gumbel import NoiseKey, gumbel_argmax
from tandem.rng import F64
from tandem.types import DraftProbs

Q = tuple[npt.NDArray[np.int64], F64]  # ids [M], distinct, and their probabilities [M]


def probabilities(processed: torch.Tensor) -> F64:
    """softmax of one processed row [V] -> float64 [V]; exactly 0 where it is masked."""
    probs: F64 = torch.softmax(processed.double(), dim=0).cpu().numpy()  # numpy is slow where logits are -inf
    return probs


def sent_q(draft_probs: DraftProbs) -> Q:
    """q as it was sampled from: the float32 entries of the wire over their float64 sum."""
    weights = draft_probs.probs.astype(np.float64)
    token_ids = draft_probs.token_ids
    ids = np.arange(weights.size) if token_ids is None else token_ids.astype(np.int64)
    return ids, weights / weights.sum()


def one_hot_q(token_id: int) -> Q:
    """q of a draft that nothing random chose."""
    return np.array([token_id]), np.array([1.0])


def acceptance_ratio(p: F64, q: Q, draft_token_id: int) -> float:
    """p(d) / q(d); 0 for a token that p or q gives no probability."""
    token_ids, probs = q
    q_of_draft = float(probs[token_ids == draft_token_id].sum())
    return float(p[draft_token_id]) / q_of_draft if q_of_draft > 0.0 else 0.0


def acceptance_probability(p: F64, q: Q, draft_token_id: int) -> float:
    """min(1, p(d) / q(d))."""
    return min(1.0, acceptance_ratio(p, q, draft_token_id))


def residual(p: F64, q: Q, weight: float = 1.0) -> F64:
    """max(weight p - q, 0) -> float64 [V], not normalised."""
    token_ids, probs = q
    rest = weight * p
    rest[token_ids] = np.maximum(rest[token_ids] - probs, 0.0)
    return np.asarray(rest)


def sample_residual(p: F64, q: Q, key: NoiseKey, weight: float = 1.0) -> int:
    """A token of norm(max(weight p - q, 0)); of p where rounding has left nothing of that (p and q are equal)."""
    rest = residual(p, q, weight)
    return sample_weights(rest if rest.any() else p, key)


def sample_weights(weights: F64, key: NoiseKey) -> int:
    """A token with probability proportional to `weights` [V], by Gumbel-max over their logarithms."""
    with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf: never chosen
        return gumbel_argmax(np.log(weights), key)
