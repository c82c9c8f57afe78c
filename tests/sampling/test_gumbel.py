"""Gumbel-max: no version passes over the winner, noise at some tokens is the vocabulary's own."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.noise import compiled_noise
from engine.sampling import gumbel
from engine.sampling.gumbel import NoiseKey, gumbel_argmax, noise_key, numpy_argmax
from tandem import rng
from tandem.rng import F32, F64, Stream
from tests.sampling.helpers import make_spec

FloatArray = F32 | F64
Version = Callable[[FloatArray, NoiseKey], int]
SEEDS = st.integers(0, 2**64 - 1)
VERSIONS = pytest.mark.parametrize("version", [gumbel_argmax, numpy_argmax])


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """`gumbel_argmax` below is the compiled one."""
    assert compiled_noise() is not None


def in_full(values: FloatArray, key: NoiseKey) -> int:
    """Noise for every token, nothing pruned."""
    noise = rng.gumbel(key.seed, key.word, key.position, values.size, key.sample_index)
    return int(np.argmax(values + noise))


@VERSIONS
@settings(max_examples=300, deadline=None)
@given(
    seed=SEEDS,
    size=st.integers(1, 400),
    shape_seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0, 1e6]),
    num_masked=st.integers(0, 400),
    digits=st.sampled_from([-1, 0, 3]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_pruning_chooses_what_noise_for_every_token_chooses(
    version: Version,
    seed: int,
    size: int,
    shape_seed: int,
    spread: float,
    num_masked: int,
    digits: int,
    dtype: npt.DTypeLike,
) -> None:
    generator = np.random.default_rng(shape_seed)
    rounded = np.round(generator.standard_normal(size) * spread, digits)  # ties, more or fewer
    values: FloatArray = rounded.astype(dtype)
    values[generator.permutation(size)[:num_masked]] = -np.inf
    key = NoiseKey(seed, shape_seed % 1000, size, 0)
    assert version(values, key) == in_full(values, key)


@VERSIONS
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("digits", [0, 6])
def test_pruning_a_large_vocabulary_in_two_draws_chooses_the_same(
    version: Version, spread: float, digits: int
) -> None:
    generator = np.random.default_rng(5)
    for position in range(30):
        values: FloatArray = np.round(generator.standard_normal(20_000) * spread, digits).astype(np.float32)
        key = NoiseKey(17, 0, position, 0)
        assert version(values, key) == in_full(values, key)


@VERSIONS
def test_equal_scores_go_to_the_lowest_id(version: Version) -> None:
    # At this size float32 has no room for the noise: every score ties.
    values: F32 = np.full(9000, -np.inf, dtype=np.float32)
    values[[7000, 400, 8999]] = 2.0**31
    assert version(values, NoiseKey(1, 0, 5, 0)) == 400
    values[:] = 2.0**31
    assert version(values, NoiseKey(1, 0, 5, 0)) == 0
    values[:] = 2.0**22  # room for halves: some tie at the top
    for position in range(20):
        key = NoiseKey(1, 0, position, 0)
        assert version(values, key) == in_full(values, key)


@VERSIONS
def test_a_row_of_nothing_but_masked_tokens_gives_token_zero_like_full_evaluation(version: Version) -> None:
    values = np.full(50, -np.inf, dtype=np.float32)
    key = NoiseKey(3, 0, 8, 0)
    assert version(values, key) == in_full(values, key) == 0


def test_where_nothing_is_compiled_numpy_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).standard_normal(5000).astype(np.float32)
    monkeypatch.setattr(gumbel, "compiled_noise", lambda: None)
    monkeypatch.setattr(gumbel, "numpy_argmax", lambda *arguments: numpy_argmax(*arguments) + 10_000)
    key = NoiseKey(3, 0, 8, 0)
    assert gumbel_argmax(values, key) == in_full(values, key) + 10_000


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, position=st.integers(0, 2**31), token_ids=st.lists(st.integers(0, 4999), max_size=40))
def test_noise_at_some_tokens_is_the_vocabularys_own(seed: int, position: int, token_ids: list[int]) -> None:
    ids = np.array(token_ids, dtype=np.int64)
    everything = rng.gumbel(seed, 2, position, 5000, sample_index=1)
    assert np.array_equal(rng.gumbel_at(seed, 2, position, ids, sample_index=1), everything[ids])


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, position=st.integers(0, 2**31), word=st.integers(0, 2**20))
def test_a_single_uniform_is_the_first_word_of_the_array_form(seed: int, position: int, word: int) -> None:
    bits = rng.philox4x32((0, position, 4, word), seed)[:, 0]
    assert rng.uniform(seed, word, position, sample_index=4) == rng.uniform_from_bits(bits)[0]


def test_counters_over_several_chunks_equal_counters_one_by_one() -> None:
    bits = rng.philox4x32((np.arange(9000), 3, 1, 2), 99)
    for index in (0, 4095, 4096, 8191, 8192, 8999):
        assert np.array_equal(bits[index], rng.philox4x32((index, 3, 1, 2), 99)[0])


def test_some_ids_only_are_weighed_by_their_own_noise() -> None:
    token_ids = np.array([3, 700, 701])
    values = np.array([0.1, 0.2, 0.0])
    for position in range(50):
        key = NoiseKey(11, 0, position, 0)
        dense = np.full(800, -np.inf)
        dense[token_ids] = values
        assert gumbel_argmax(values, key, token_ids) == in_full(dense, key)


def test_noise_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed that the orchestrator draws"):
        noise_key(make_spec(seed=None), Stream.TARGET, 5)
