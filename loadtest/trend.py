"""Whether a figure grows over time, whatever single samples do."""

from collections.abc import Sequence

import numpy as np


def theil_sen(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Growth a second: the median slope over all pairs of samples (Theil 1950, Sen 1968).

    Up to 29 % of the samples may be anything. ValueError for fewer than two samples, or for equal times.
    """
    if len(times_s) != len(values) or len(values) < 2:
        raise ValueError(f"{len(times_s)} times and {len(values)} values make no slope: two of each or more do")
    first, second = np.triu_indices(len(values), k=1)
    x, y = np.asarray(times_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    spans = x[second] - x[first]
    if not np.all(spans > 0):
        raise ValueError("times must grow from sample to sample")
    return float(np.median((y[second] - y[first]) / spans))
