"""Log-probabilities of the tokens that came out, and the likeliest tokens of their rows.

Row by row, sums in numpy: a row's result is the same bits whatever rows are beside it and however many threads torch
has. Order is that of the float32 logits, the lowest id first among equals, as in `select`.

Letters: N tokens, V vocabulary, M listed tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.likeliest import likeliest
from tandem.rng import F32
from tandem.types import TokenLogprobs

Ids = npt.NDArray[np.intp]

_LOWEST = np.finfo(np.float32).min  # two logits may be further apart than float32 reaches


def token_logprobs(rows: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Logits float32 [N, V], -inf where masked, and the token chosen from each row -> an entry a token.

    At most `num_top` tokens are listed beside it, none of them masked. Every row's largest logit must be finite.
    ValueError unless there is one token a row.
    """
    return tuple(
        _logprobs_of(row.cpu().numpy(), token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True)
    )


def _logprobs_of(logits: F32, token_id: int, num_top: int) -> TokenLogprobs:
    """One row [V]."""
    top_token_ids = likeliest(torch.from_numpy(logits), num_top).numpy()
    logprob, *top_logprobs = _log_softmax(logits, np.array([token_id, *top_token_ids])).tolist()
    return TokenLogprobs(logprob, _rank(logits, token_id), tuple(top_token_ids.tolist()), tuple(top_logprobs))


def _log_softmax(logits: F32, token_ids: Ids) -> F32:
    """log softmax of the row [V] at these ids [M]; float64 inside.

    With the largest left out of the sum, log1p keeps what its probability lacks to 1, however little that is.
    """
    below = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(below)
    weights[logits.argmax()] = 0.0
    logprobs = below[token_ids] - np.log1p(weights.sum())
    return np.asarray(np.maximum(logprobs, _LOWEST), dtype=np.float32)


def _rank(logits: F32, token_id: int) -> int:
    """1 for the first by (logit descending, id ascending)."""
    chosen = logits[token_id]
    return 1 + int(np.count_nonzero(logits > chosen)) + int(np.count_nonzero(logits[:token_id] == chosen))
