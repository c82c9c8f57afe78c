"""Sampling as argmax: the token with the largest log-probability plus Gumbel noise (the Gumbel-max trick).

Noise for a whole vocabulary costs about half a millisecond at 49k tokens, so it is drawn only where it matters:
Gumbel noise lies in [-2.81, 16.64], hence the winner scores at least peak - 2.82, and a token that cannot reach
that with 16.64 cannot win. Rounding keeps order, so both comparisons are exact when made in the scores' own type.

Letters: V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem import rng
from tandem.rng import Stream
from tandem.types import SessionSpec

_LOWEST, _HIGHEST = np.float32(-2.82), np.float32(16.64)
_SCATTERED_COST = 4  # one scattered token costs a block of four


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Where one position's noise is in its stream."""

    seed: int
    word: int
    position: int
    sample_index: int


def noise_key(spec: SessionSpec, stream: Stream, position: int, committed_len: int | None = None) -> NoiseKey:
    """A request's noise for one position; ValueError while it has no seed."""
    if spec.sampling.seed is None:
        raise ValueError("sampling.seed: noise needs the seed that the orchestrator draws")
    word = rng.stream_word(stream, position, committed_len)
    return NoiseKey(spec.sampling.seed, word, position, spec.sample_index)


def uniform(key: NoiseKey) -> float:
    """The position's scalar uniform in (0, 1)."""
    return rng.uniform(key.seed, key.word, key.position, key.sample_index)


def gumbel_argmax(
    values: npt.NDArray[np.floating], key: NoiseKey, token_ids: npt.NDArray[np.integer] | None = None
) -> int:
    """argmax(values + noise) over log-probabilities [V], up to a constant; ties go to the lowest id.

    With `token_ids` (ascending), `values` are those tokens' only and the others are out. The sum and its order
    are those of the values' type.
    """
    candidates = np.flatnonzero(values + _HIGHEST >= values.max() + _LOWEST)
    scattered = token_ids is not None or 0 < candidates.size * _SCATTERED_COST < values.size
    if not scattered:
        noise = rng.gumbel(key.seed, key.word, key.position, values.size, key.sample_index)
        return int(np.argmax(values + noise))
    candidate_ids = candidates if token_ids is None else token_ids[candidates]
    noise = rng.gumbel_at(key.seed, key.word, key.position, candidate_ids, key.sample_index)
    return int(candidate_ids[np.argmax(values[candidates] + noise)])
