"""Joint verification of a chain of drafts (Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv
2403.10444).

With drafts x_1 .. x_K, w_0 = 1 and
    w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum over x of max(w_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = S_i / (S_i + 1 - w_i) for i < K, and h_K = w_K
the last i with u_i < h_i is how many drafts stand: a failure does not end the search, so a weak draft may be carried by
those after it. The next token is sampled from p_{K+1} after all K, else from norm(max(w_i p_{i+1} - q_{i+1}, 0)). What
comes out is distributed as p, and never fewer drafts stand on average than by rejection sampling. All in float64.

Letters: K drafts, V vocabulary.
"""

from collections.abc import Iterator, Sequence

from engine.sampling.rejection import Q, acceptance_ratio, residual
from tandem.rng import F64


def acceptance_steps(
    target_probs: Sequence[F64], draft_probs: Sequence[Q], draft_token_ids: Sequence[int]
) -> Iterator[tuple[float, float]]:
    """(w_i, h_i) for i = 1 .. K, from p [V] and q of each draft's position."""
    weight = 1.0
    for index, draft_token_id in enumerate(draft_token_ids):
        ratio = acceptance_ratio(target_probs[index], draft_probs[index], draft_token_id)
        weight = min(1.0, weight * ratio)
        if index + 1 == len(draft_token_ids):
            yield weight, weight
        else:
            rest = float(residual(target_probs[index + 1], draft_probs[index + 1], weight).sum())
            # w = 1 and nothing left of p - q: what follows is accepted in any case. The brackets keep a rest that
            # is too small beside 1 from making the denominator 0.
            yield weight, rest / (rest + (1.0 - weight)) if rest > 0.0 else float(weight == 1.0)


def verify_block(
    target_probs: Sequence[F64], draft_probs: Sequence[Q], draft_token_ids: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, float]:
    """How many drafts stand, and the weight of p in the residual after them, from a uniform in (0, 1) a draft."""
    num_accepted, weight_after = 0, 1.0
    steps = acceptance_steps(target_probs, draft_probs, draft_token_ids)
    for index, ((weight, chance), u) in enumerate(zip(steps, uniforms, strict=True)):
        if u < chance:
            num_accepted, weight_after = index + 1, weight
    return num_accepted, weight_after
