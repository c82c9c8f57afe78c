"""The tests behind the report: right when all is well, and able to see what is not."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from tandem.rng import F64
from tests.losslessness.cells import ALPHA, NUM_TOKENS
from tests.losslessness.statistics import NUM_BINS, ChiSquare, bins_of_numbers, bins_of_pairs, power

Test = Callable[[F64], ChiSquare]


def shifted(total_variation: float, num_tokens: int, seed: int) -> F64:
    """Numbers of which some, that should be in the lower half, are in the upper one."""
    generator = np.random.default_rng(seed)
    numbers = generator.random(num_tokens)
    moved = (numbers < 0.5) & (generator.random(num_tokens) < 2 * total_variation)
    return np.where(moved, numbers + 0.5, numbers)


@pytest.mark.parametrize("test", [bins_of_numbers, bins_of_pairs])
def test_p_values_of_uniform_numbers_are_uniform(test: Test) -> None:
    generator = np.random.default_rng(1)
    p_values = [test(generator.random(5000)).p_value for _ in range(500)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("test", [bins_of_numbers, bins_of_pairs])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hundred_thousand_tokens_tell_a_total_variation_of_two_hundredths_or_more(test: Test, seed: int) -> None:
    assert test(shifted(0.02, NUM_TOKENS, seed)).p_value < ALPHA


def test_a_total_variation_of_one_hundredth_is_seen_as_often_as_the_power_says() -> None:
    halves = np.where(np.arange(NUM_BINS) < NUM_BINS // 2, -1, 1)
    chances = 1 / NUM_BINS + halves * 2 * 0.01 / NUM_BINS
    p_values = [bins_of_numbers(shifted(0.01, NUM_TOKENS, seed)).p_value for seed in range(200)]
    assert np.mean([p < 0.05 for p in p_values]) == pytest.approx(
        power(chances.tolist(), NUM_TOKENS, 0.05), abs=0.07
    )
    assert power(chances.tolist(), NUM_TOKENS, 0.05) > 0.9
    assert np.mean([p < ALPHA for p in p_values]) == pytest.approx(
        power(chances.tolist(), NUM_TOKENS, ALPHA), abs=0.1
    )


def test_one_hundredth_that_one_bin_gains_is_always_seen() -> None:
    chances = [1 / NUM_BINS + 0.01, *[1 / NUM_BINS - 0.01 / (NUM_BINS - 1)] * (NUM_BINS - 1)]
    assert power(chances, NUM_TOKENS, ALPHA) > 0.999


def test_pairs_tell_what_tokens_alone_do_not() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.random((2, NUM_TOKENS // 2))
    second = np.where(generator.random(second.size) < 0.05, first, second)
    numbers = np.stack([first, second], axis=1).reshape(-1)
    assert bins_of_numbers(numbers).p_value > 0.01
    assert bins_of_pairs(numbers).p_value < 1e-6


def test_bins_are_equal_and_pairs_do_not_overlap() -> None:
    numbers = np.array([0.001, 0.999, 0.021, 1.0, 0.5])
    counts = bins_of_numbers(numbers).counts
    assert (counts[0], counts[1], counts[25], counts[49], sum(counts)) == (1, 1, 1, 2, 5)
    pairs = np.array(bins_of_pairs(numbers).counts).reshape(7, 7)
    assert pairs[0, 6] == 2
    assert pairs.sum() == 2


def test_the_statistic_is_pearsons() -> None:
    test = ChiSquare((12, 8, 10, 10))
    expected = stats.chisquare([12, 8, 10, 10])
    assert (test.statistic, test.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert test.degrees_of_freedom == 3
