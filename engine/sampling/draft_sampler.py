"""What a draft model samples, so that the target accepts as much of it as its policy allows.

Letters: N rows, V vocabulary, M entries of q as it is sent.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.gumbel import NoiseKey, gumbel_argmax, noise_key
from engine.sampling.likeliest import likeliest
from engine.sampling.processors import process
from engine.sampling.rejection import probabilities
from engine.sampling.rows import Row
from engine.sampling.sampler import sample_row, select
from tandem.rng import Stream
from tandem.types import MAX_SPARSE_ENTRIES, DraftProbs, DraftProbsTransport


def sample_drafts(
    logits: torch.Tensor, rows: Sequence[Row], min_confidence: float = 0.0
) -> tuple[list[int], list[DraftProbs | None]]:
    """Raw logits float32 [N, V] -> a draft token a row, and what it was drawn from; overwrites `logits`.

    Greedy and coupled sessions get the token that the target would choose from these logits, with its own noise.
    Ratio-test sessions get a draw of the round's DRAFT stream from the probabilities that are returned, which must be
    sent as they are: all of them (`full`), at most 128 (`sparse`), or the likeliest token alone (`one_hot`).
    A row whose likeliest token has less than `min_confidence` gets -1, no draft. That is decided before anything is
    drawn: withdrawing a draft for its own value would bias a ratio test.
    """
    processed = process(logits, rows)
    is_sure = [True] * len(rows)
    if min_confidence > 0.0:
        is_sure = (torch.softmax(processed, dim=-1).amax(dim=-1) >= min_confidence).tolist()
    drafts = [
        _sample_draft(processed[index], row) if is_sure[index] else (-1, None) for index, row in enumerate(rows)
    ]
    return [token_id for token_id, _ in drafts], [draft_probs for _, draft_probs in drafts]


def draft_key(row: Row) -> NoiseKey:
    """Noise that a ratio-test draft at the row is drawn with, bound to the round."""
    return noise_key(row.spec, Stream.DRAFT, row.position, row.committed_len)


def _sample_draft(processed: torch.Tensor, row: Row) -> tuple[int, DraftProbs | None]:
    """One processed row [V]."""
    if not row.spec.effective_policy.is_ratio_test:
        return sample_row(processed, row), None
    if not row.spec.uses_draft_probs:
        return int(select(processed)), None
    is_full = row.spec.draft_probs_transport is DraftProbsTransport.FULL
    draft_probs = _all(processed) if is_full else _likeliest(processed)
    # Drawn from the float32 numbers that travel: rounding them afterwards would lose exactness.
    with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf: never drawn
        weights = np.log(draft_probs.probs.astype(np.float64))
    return gumbel_argmax(weights, draft_key(row), draft_probs.token_ids), draft_probs


def _all(processed: torch.Tensor) -> DraftProbs:
    """Every token of one processed row [V]."""
    return DraftProbs(None, probabilities(processed).astype(np.float32))


def _likeliest(processed: torch.Tensor) -> DraftProbs:
    """The 128 likeliest tokens of one processed row [V], renormalised; ids ascending, no zero among them."""
    # [M]
    token_ids = likeliest(processed, MAX_SPARSE_ENTRIES).sort().values
    probs = probabilities(processed[token_ids]).astype(np.float32)
    kept = probs > 0.0
    return DraftProbs(token_ids.cpu().numpy().astype(np.uint32)[kept], probs[kept])
