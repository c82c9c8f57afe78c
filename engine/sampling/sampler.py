"""The regular sampler: the one selection rule, and the target's own noise.

The score of a token is its processed logit in float32 plus float32 Gumbel noise of the TARGET stream at the
position being decided. Draft, target and plain decoding all score like this, so equal logits choose equal
tokens. (Processed logits are log-probabilities up to a constant, and a constant never changes an argmax.)

Letters: R rows, V vocabulary.
"""

import torch

from engine.sampling.gumbel import gumbel_argmax, noise_key
from engine.sampling.rows import Row
from tandem.rng import Stream


def select(scores: torch.Tensor) -> torch.Tensor:
    """THE selection rule: argmax of float32 scores [..., V] -> int64 [...]; the lowest id among equals."""
    return torch.argmax(scores.float(), dim=-1)


def finite_argmax(logits: torch.Tensor) -> torch.Tensor:
    """`select` for raw logits [R, V] of any precision, without a copy -> int64 [R]; -1 where none is finite.

    Rounding up to float32 keeps order and ties, and argmax takes a NaN for the largest.
    """
    token_ids = logits.argmax(dim=-1)
    largest = logits.gather(-1, token_ids[:, None])[:, 0]
    return token_ids.masked_fill(~torch.isfinite(largest), -1)


def sample_row(processed: torch.Tensor, row: Row) -> int:
    """The token that one processed row [V] gives: the argmax when greedy, else with the target's noise."""
    if row.spec.sampling.is_greedy:
        return int(select(processed))
    return gumbel_argmax(processed.cpu().numpy(), noise_key(row.spec, Stream.TARGET, row.position))
