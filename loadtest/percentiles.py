"""Exact percentiles: of all samples, nothing binned and nothing interpolated."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that is not below `percent` of all (nearest rank); ValueError without values."""
    if not values:
        raise ValueError("no values have no percentiles")
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]


def milliseconds(values_s: Sequence[float]) -> list[str]:
    """Cells of a table: how many, p50, p90, p99 and the most, in ms; dashes when there are none."""
    if not values_s:
        return ["0", "–", "–", "–", "–"]
    return [str(len(values_s)), *(f"{1e3 * percentile(values_s, percent):.1f}" for percent in (50, 90, 99, 100))]


MILLISECONDS_HEADER = ("samples", "p50, ms", "p90, ms", "p99, ms", "most, ms")
