"""Sampling as argmax: the token with the largest log-probability plus Gumbel noise (the Gumbel-max trick).

A compiled sweep (engine/kernels/noise.py) finds it, or numpy where there is none. Noise for a whole vocabulary
costs numpy about half a millisecond at 49k tokens, so it is drawn only where it matters: Gumbel noise lies in
[-2.81, 16.64], hence the winner scores at least peak - 2.82, and a token that cannot reach that with 16.64 cannot
win. Rounding keeps order, so the comparisons are exact when made in the scores' own type.

Letters: V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels.noise import compiled_noise
from tandem import rng
from tandem.rng import F32, F64, Stream
from tandem.types import SessionSpec

_LOWEST, _HIGHEST = np.float32(-2.82), np.float32(16.64)
_SCATTERED_COST = 4  # one scattered token costs a block of four
_MANY = 2048  # candidates worth a first draw among the likeliest
_NEAR = np.float32(3.0)  # how far below the peak those are


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


def gumbel_argmax(values: F32 | F64, key: NoiseKey, token_ids: npt.NDArray[np.integer] | None = None) -> int:
    """argmax(values + noise) over log-probabilities [V], up to a constant; ties go to the lowest id.

    With `token_ids` (ascending), `values` are those tokens' only and the others are out. The sum and its order
    are those of the values' type. There must be no NaN among the values.
    """
    if token_ids is not None:
        return int(token_ids[np.argmax(values + _noise_at(key, token_ids))])
    compiled = compiled_noise()
    if compiled is None:
        return numpy_argmax(values, key)
    return compiled.argmax(values, key.seed, key.word, key.position, key.sample_index)


def numpy_argmax(values: F32 | F64, key: NoiseKey) -> int:
    """`gumbel_argmax` over the whole vocabulary without compiled code: its fallback and its reference."""
    candidates = _candidates(values, key)
    if not 0 < candidates.size * _SCATTERED_COST < values.size:
        noise = rng.gumbel(key.seed, key.word, key.position, values.size, key.sample_index)
        return int(np.argmax(values + noise))
    return int(candidates[np.argmax(values[candidates] + _noise_at(key, candidates))])


def _candidates(values: F32 | F64, key: NoiseKey) -> npt.NDArray[np.intp]:
    """The tokens that can win, ascending."""
    peak = values.max()
    candidates = np.flatnonzero(values + _HIGHEST >= peak + _LOWEST)
    if candidates.size < _MANY:
        return candidates
    likeliest = np.flatnonzero(values >= peak - _NEAR)
    if not 0 < likeliest.size < _MANY:
        return candidates
    # What the likeliest score is a higher bar than what the peak must score.
    best = (values[likeliest] + _noise_at(key, likeliest)).max()
    return np.flatnonzero(values + _HIGHEST >= best)


def _noise_at(key: NoiseKey, token_ids: npt.NDArray[np.integer]) -> F32:
    return rng.gumbel_at(key.seed, key.word, key.position, token_ids, key.sample_index)
