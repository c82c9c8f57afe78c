"""Every outcome of the noise with its exact probability: the real code, run once for each branch of what it looks at.

One key's noise is a vector of independent standard exponentials E_t, one a token: Gumbel noise is -log E_t, and the
scalar uniform, made of token 0's bits, is exp(-E_0). A Gumbel-max draw over weights w is the race that the smallest
E_t / w_t wins; a comparison u < c asks whether E_0 > -log c. Whoever looks twice at one key, in one round or in two,
sees one and the same vector, and what the first look showed conditions the second. Keys that differ are independent.
Keys are the real ones, so code that changes a key changes what is enumerated.

Letters: V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import pytest

from engine.sampling import draft_sampler, policies, rejection, sampler
from engine.sampling.gumbel import NoiseKey
from tandem.rng import F64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Race:
    """A Gumbel-max draw: the winner over these weights [V]."""

    weights: F64
    winner: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What looks at one key have shown: bounds of its uniform, and the winners of its races."""

    low: float = 0.0
    high: float = 1.0
    races: tuple[Race, ...] = ()

    def probability(self) -> float:
        """Of seeing this; NotImplementedError where looks mix in a way that has no closed form here."""
        if not self.races:
            return max(self.high - self.low, 0.0)
        if len(self.races) == 1:
            (race,) = self.races
            return max(_wins_above(race, _exponential(self.high)) - _wins_above(race, _exponential(self.low)), 0.0)
        if len(self.races) > 2 or (self.low, self.high) != (0.0, 1.0):
            raise NotImplementedError("more than two races, or two and a uniform, on one key")
        return _both(*self.races)


def _exponential(u: float) -> float:
    """E_0 of a uniform."""
    return -math.log(u) if u > 0.0 else math.inf


def _wins_above(race: Race, bound: float) -> float:
    """P(the winner wins and E_0 > bound)."""
    total, first, own = float(race.weights.sum()), float(race.weights[0]), float(race.weights[race.winner])
    if math.isinf(bound):
        return 0.0
    if race.winner == 0:
        return first / total * math.exp(-bound * total / first)
    if first == 0.0:
        return own / total * math.exp(-bound)
    # The race ends at time x; token 0 is out then if E_0 > x first, which the bound implies up to x = bound / first.
    others = total - first
    early = own / others * math.exp(-bound) * -math.expm1(-others * bound / first)
    return early + own / total * math.exp(-bound * total / first)


def _both(one: Race, other: Race) -> float:
    """P(both winners win) on one vector of exponentials."""
    size = max(one.weights.size, other.weights.size)
    w, v = (np.pad(race.weights, (0, size - race.weights.size)) for race in (one, other))
    i, j = one.winner, other.winner
    if i == j:
        return float(1.0 / np.maximum(w / w[i], v / v[i]).sum())
    # One race ends at x, the other at y, r = x / y: winners stay ahead in both for v_i / w_i <= r <= v_j / w_j, and
    # for a given r the chance is w_i v_j / a(r)^2 with a(r) piecewise linear.
    low, high = v[i] / w[i], v[j] / w[j] if w[j] > 0.0 else math.inf
    if low >= high:
        return 0.0
    turns = v[w > 0.0] / w[w > 0.0]
    points = [low, *np.sort(turns[(turns > low) & (turns < high)]), high]
    rest = np.delete(np.arange(size), [i, j])
    area = 0.0
    for start, end in pairwise(points):
        a_start = start * w[i] + v[j] + np.maximum(start * w[rest], v[rest]).sum()
        middle = start + 1.0 if math.isinf(end) else (start + end) / 2.0
        slope = w[i] + w[rest][middle * w[rest] > v[rest]].sum()
        if math.isinf(end):
            area += 1.0 / (slope * a_start)
        else:
            area += (end - start) / (a_start * (a_start + slope * (end - start)))
    return float(w[i] * v[j] * area)


Knowledge = Mapping[NoiseKey, Seen]


@dataclass(frozen=True, slots=True)
class Branch(Generic[T]):
    """One way that a program can go, and what is known of the noise afterwards."""

    probability: float
    result: T
    seen: Knowledge


class _Run:
    """One run's noise: follows a path of choices, then takes the first possible outcome of each look."""

    def __init__(self, seen: Knowledge, path: tuple[int, ...]) -> None:
        self.seen = dict(seen)
        self.probability = 1.0
        self.untaken: list[tuple[int, ...]] = []
        self._path = path
        self._taken: tuple[int, ...] = ()

    def is_below(self, key: NoiseKey, bound: float) -> bool:
        """Whether the key's uniform is below the bound."""
        seen = self.seen.get(key, Seen())
        options = [replace(seen, low=max(seen.low, bound)), replace(seen, high=min(seen.high, bound))]
        return self._choose(key, options) == 1

    def race(self, values: F64, key: NoiseKey, token_ids: np.ndarray | None = None) -> int:
        """`gumbel_argmax`."""
        ids = np.arange(values.size) if token_ids is None else token_ids.astype(np.int64)
        weights = np.zeros(int(ids.max()) + 1)
        weights[ids] = np.exp(values.astype(np.float64) - values.max())
        seen, winners = self.seen.get(key, Seen()), np.flatnonzero(weights)
        options = [replace(seen, races=(*seen.races, Race(weights, int(winner)))) for winner in winners]
        return int(winners[self._choose(key, options)])

    def _choose(self, key: NoiseKey, options: list[Seen]) -> int:
        before = self.seen.get(key, Seen()).probability()
        chances = [option.probability() / before for option in options]
        depth = len(self._taken)
        if depth < len(self._path):
            choice = self._path[depth]
        else:
            possible = [index for index, chance in enumerate(chances) if chance > 0.0]
            choice = possible[0]
            self.untaken += [(*self._taken, index) for index in possible[1:]]
        self._taken += (choice,)
        self.probability *= chances[choice]
        self.seen[key] = options[choice]
        return choice


class _Uniform:
    """A uniform that decides its value only as far as it is compared."""

    def __init__(self, run: _Run, key: NoiseKey) -> None:
        self._run, self._key = run, key

    def __lt__(self, bound: float) -> bool:
        return self._run.is_below(self._key, bound)

    def __ge__(self, bound: float) -> bool:
        return not self < bound


def branches(program: Callable[[], T], seen: Knowledge) -> list[Branch[T]]:
    """Every way that the program can go, given what was seen of the noise before; probabilities sum to 1."""
    found: list[Branch[T]] = []
    paths: list[tuple[int, ...]] = [()]
    while paths:
        run = _Run(seen, paths.pop())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policies, "uniform", lambda key, run=run: _Uniform(run, key))
            for module in (sampler, rejection, draft_sampler):
                patch.setattr(module, "gumbel_argmax", run.race)
            result = program()
        paths += run.untaken
        found.append(Branch(run.probability, result, run.seen))
    assert math.isclose(sum(branch.probability for branch in found), 1.0, abs_tol=1e-9)
    return found
