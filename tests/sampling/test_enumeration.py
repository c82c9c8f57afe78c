"""The enumeration itself: probabilities of one and of several looks at one key's noise."""

import math

import numpy as np
import pytest

from engine.sampling import draft_sampler, policies
from engine.sampling.gumbel import NoiseKey
from tests.sampling.enumeration import Race, Seen, branches
from tests.sampling.helpers import worst_deviation

KEY, OTHER = NoiseKey(7, 1, 3, 0), NoiseKey(7, 1, 4, 0)
W, V = np.array([0.5, 0.2, 0.0, 0.3]), np.array([0.1, 0.3, 0.4, 0.2])
DRAWS = 200_000


def race(weights: np.ndarray, key: NoiseKey = KEY) -> int:
    """A Gumbel-max draw as the drafter makes it."""
    with np.errstate(divide="ignore"):
        return draft_sampler.gumbel_argmax(np.log(weights), key)


def table(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """P(i wins over `one`, j wins over `other`) [V, V]."""
    pairs = [[Seen(races=(Race(one, i), Race(other, j))) for j in range(4)] for i in range(4)]
    return np.array(
        [
            [seen.probability() if one[i] and other[j] else 0.0 for j, seen in enumerate(row)]
            for i, row in enumerate(pairs)
        ]
    )


def test_two_races_on_one_vector_have_the_right_margins() -> None:
    generator = np.random.default_rng(1)
    for one, other in [(W, V), (V, W), (W, W), *generator.dirichlet(np.ones(4), (20, 2))]:
        joint = table(one, other)
        assert joint.sum(axis=1) == pytest.approx(one / one.sum(), abs=1e-12)
        assert joint.sum(axis=0) == pytest.approx(other / other.sum(), abs=1e-12)
    assert np.diag(table(W, W)) == pytest.approx(W)


def test_looks_at_one_vector_happen_as_often_as_in_draws() -> None:
    exponentials = np.random.default_rng(2).exponential(size=(DRAWS, 4))
    with np.errstate(divide="ignore"):
        first, second = np.argmin(exponentials / W, axis=1), np.argmin(exponentials / V, axis=1)
    assert worst_deviation(np.bincount(first * 4 + second, minlength=16), table(W, V)) < 5
    low, high = 0.3, 0.8
    between = (np.exp(-exponentials[:, 0]) > low) & (np.exp(-exponentials[:, 0]) < high)
    for weights, winners in ((W, first), (V, second), (np.array([0.0, 1.0, 1.0, 2.0]), None)):
        if winners is None:
            with np.errstate(divide="ignore"):
                winners = np.argmin(exponentials / weights, axis=1)
        both = np.array(
            [Seen(low, high, (Race(weights, i),)).probability() if weights[i] else 0.0 for i in range(4)]
        )
        assert both.sum() == pytest.approx(high - low)
        counts = np.bincount(winners[between], minlength=4)
        assert worst_deviation([*counts, DRAWS - counts.sum()], [*both, 1 - both.sum()]) < 5


def test_a_race_alone_and_a_comparison_alone_have_their_own_probabilities() -> None:
    assert {branch.result: branch.probability for branch in branches(lambda: race(W), {})} == pytest.approx(
        {0: 0.5, 1: 0.2, 3: 0.3}
    )
    below = branches(lambda: policies.uniform(KEY) < 0.3, {})
    assert {branch.result: branch.probability for branch in below} == pytest.approx({True: 0.3, False: 0.7})


def test_looks_at_one_key_agree_and_at_two_keys_are_independent() -> None:
    same = branches(lambda: (race(W), race(W)), {})
    assert all(first == second for first, second in (branch.result for branch in same))
    both = {branch.result: branch.probability for branch in branches(lambda: (race(W), race(V, OTHER)), {})}
    assert both == pytest.approx({(i, j): W[i] * V[j] for i in (0, 1, 3) for j in range(4)})


def test_what_an_earlier_program_saw_conditions_a_later_one() -> None:
    for before in branches(lambda: policies.uniform(KEY) < 0.3, {}):
        later = branches(lambda: policies.uniform(KEY) < 0.5, before.seen)
        assert sum(branch.probability for branch in later if branch.result) == pytest.approx(
            1.0 if before.result else 0.2 / 0.7
        )
    for before in branches(lambda: race(W), {}):
        again = {branch.result: branch.probability for branch in branches(lambda: race(V), before.seen)}
        assert again == pytest.approx(
            {j: p / W[before.result] for j, p in enumerate(table(W, V)[before.result]) if p}
        )


def test_the_scalar_of_a_key_is_made_of_its_first_tokens_noise() -> None:
    # Token 0 wins when its exponential is small, that is, when the uniform is large.
    for before in branches(lambda: race(np.array([0.5, 0.5])), {}):
        above = sum(b.probability for b in branches(lambda: policies.uniform(KEY) >= 0.5, before.seen) if b.result)
        assert above == pytest.approx(0.75 if before.result == 0 else 0.25)
    assert math.isclose(Seen(0.5, 1.0, (Race(np.array([0.5, 0.5]), 0),)).probability(), 0.375)


def test_looks_without_a_closed_form_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="more than two races"):
        branches(lambda: (race(W), race(V), race(W)), {})
