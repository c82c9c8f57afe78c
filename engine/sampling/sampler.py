"""The regular sampler: the one selection rule, and the target's own noise.

The score of a token is its processed logit in float32 plus float32 Gumbel noise of the TARGET stream at the
position being decided. Draft, target and plain decoding all score like this, so equal logits choose equal
tokens. (Processed logits are log-probabilities up to a constant, and a constant never changes an argmax.)

Letters: R rows, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch

from engine.sampling import noise_torch
from engine.sampling.gumbel import NoiseKey, gumbel_argmax, noise_key
from engine.sampling.rows import Row
from tandem.rng import Stream

RowsArgmax = Callable[[torch.Tensor, Sequence[NoiseKey]], torch.Tensor]


def select(scores: torch.Tensor) -> torch.Tensor:
    """THE selection rule: argmax of float32 scores [..., V] -> int64 [...]; the lowest id among equals.

    A lower precision is rounded up to float32, which keeps order and ties. On a CPU numpy's argmax takes less than
    a tenth of the time of torch's; both take the first of equals, and a NaN for the largest.
    """
    scores = scores.float()
    if scores.device.type == "cpu":
        return torch.from_numpy(np.asarray(scores.numpy().argmax(axis=-1)))
    return scores.argmax(dim=-1)


def finite_argmax(logits: torch.Tensor) -> torch.Tensor:
    """`select` for raw logits [R, V] -> int64 [R]; -1 where the largest is not finite."""
    token_ids = select(logits)
    largest = logits.gather(-1, token_ids[:, None])[:, 0]
    return token_ids.masked_fill(~torch.isfinite(largest), -1)


def sample_row(processed: torch.Tensor, row: Row) -> int:
    """The token that one processed row [V] gives: the argmax when greedy, else with the target's noise.

    The noise is made where the row is, so that no row travels.
    """
    if row.spec.sampling.is_greedy:
        return int(select(processed))
    key = noise_key(row.spec, Stream.TARGET, row.position)
    if processed.device.type == "cpu":
        return gumbel_argmax(processed.numpy(), key)
    return int(device_argmax(processed.device.type)(processed[None], [key]))


@functools.cache
def device_argmax(device_type: str) -> RowsArgmax:
    """`gumbel_argmax` of rows [R, V] on such a device -> int64 [R]: Triton's on a GPU that has it, else torch's."""
    if device_type == "cuda" and find_spec("triton"):
        # Only here: a start without a GPU does not load Triton.
        from engine.sampling import noise_triton

        return noise_triton.gumbel_argmax_rows
    return noise_torch.gumbel_argmax_rows
