"""Is a stream of numbers uniform and independent: chi-square over equal bins of each number, and of adjacent pairs.

Letters: N numbers, B bins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tandem.rng import F64

NUM_BINS = 50
NUM_BINS_OF_PAIRS = 7  # along each axis


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """Pearson's test of counts in B bins that are equally likely."""

    counts: tuple[int, ...]  # [B]

    @property
    def degrees_of_freedom(self) -> int:
        """B - 1: nothing is fitted."""
        return len(self.counts) - 1

    @property
    def statistic(self) -> float:
        """Sum over bins of (count - expected)^2 / expected."""
        counts = np.array(self.counts, dtype=np.float64)
        expected = counts.sum() / counts.size
        return float(((counts - expected) ** 2).sum() / expected)

    @property
    def p_value(self) -> float:
        """The chance of so large a statistic when the bins are equally likely."""
        return float(stats.chi2.sf(self.statistic, self.degrees_of_freedom))


def bins_of_numbers(numbers: F64) -> ChiSquare:
    """50 equal bins over (0, 1) of N numbers."""
    return ChiSquare(_counts(_bin(numbers, NUM_BINS), NUM_BINS))


def bins_of_pairs(numbers: F64) -> ChiSquare:
    """7 x 7 equal bins of the pairs (1st, 2nd), (3rd, 4th) ... of N numbers; an odd last one is left out.

    The pairs do not overlap. Of independent numbers they are independent too, so the counts are multinomial and the
    statistic is chi-square distributed; pairs that share numbers would be correlated.
    """
    halves = _bin(numbers[: numbers.size // 2 * 2], NUM_BINS_OF_PAIRS).reshape(-1, 2)
    return ChiSquare(_counts(halves[:, 0] * NUM_BINS_OF_PAIRS + halves[:, 1], NUM_BINS_OF_PAIRS**2))


def power(chances: Sequence[float], num_numbers: int, alpha: float) -> float:
    """The chance that p falls below `alpha` when the bins' true chances are these.

    The statistic is then non-central chi-square distributed, with N sum (chance - 1/B)^2 B.
    """
    excess = np.array(chances) - 1 / len(chances)
    threshold = stats.chi2.isf(alpha, len(chances) - 1)
    return float(stats.ncx2.sf(threshold, len(chances) - 1, num_numbers * len(chances) * float((excess**2).sum())))


def _bin(numbers: F64, num_bins: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each number's bin; rounding may have taken a number up to 1."""
    return np.minimum((numbers * num_bins).astype(np.int64), num_bins - 1)


def _counts(bins: np.ndarray[tuple[int], np.dtype[np.int64]], num_bins: int) -> tuple[int, ...]:
    return tuple(np.bincount(bins, minlength=num_bins).tolist())
