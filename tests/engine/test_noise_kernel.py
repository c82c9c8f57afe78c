"""The compiled noise against numpy, for every uniform there is; and what happens where it cannot be compiled."""

import logging
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels.build import KernelBuildError
from engine.kernels.noise import CRITICAL_BITS, CompiledNoise, build_noise
from tandem import rng
from tests.sampling.noise_vectors import ALL_NOISE_SHA256, GUMBEL_BITS, GUMBEL_NOISE, KNOWN_ANSWERS

ALL_BITS = np.arange(2**23, dtype=np.uint32) << np.uint32(9)


@pytest.fixture(scope="module")
def compiled() -> CompiledNoise:
    return CompiledNoise()


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN_ANSWERS)
def test_the_sweep_draws_the_published_bits(
    compiled: CompiledNoise, counter: tuple[int, int, int, int], seed: int, expected: tuple[int, int, int, int]
) -> None:
    block, position, sample_index, word = counter
    assert tuple(compiled.bits(block, seed, word, position, sample_index)[:4].tolist()) == expected


def test_the_bits_of_following_blocks_are_the_vocabularys_own(compiled: CompiledNoise) -> None:
    everything = rng.vocabulary_bits(2**63 + 5, 2, 77, 400, sample_index=3)
    for block in (0, 1, 3, 16, 95):
        assert np.array_equal(
            compiled.bits(block, 2**63 + 5, 2, 77, 3), everything[4 * block : 4 * block + 16][:16]
        ), block


def test_noise_is_numpys_for_every_uniform_and_never_above_its_bound(compiled: CompiledNoise) -> None:
    noise, bounds = compiled.noise_and_bounds(ALL_BITS | np.uint32(0x155))
    assert sha256(noise.astype("<f4").tobytes()).hexdigest() == ALL_NOISE_SHA256
    assert np.array_equal(noise, rng.gumbel_from_bits(ALL_BITS))
    assert (noise <= bounds).all()
    # Close where it matters: a loose bound would be right as well, and slow.
    likely_to_win = noise > 3.0
    assert (bounds - noise)[likely_to_win].max() < 0.1


def test_committed_vectors(compiled: CompiledNoise) -> None:
    bits = np.array(GUMBEL_BITS, dtype=np.uint32)
    assert compiled.noise_and_bounds(bits)[0].tolist() == GUMBEL_NOISE


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs logarithms of more than 53 bits")
def test_all_uniforms_but_one_leave_room_for_any_careful_logarithm() -> None:
    uniforms = rng.uniform_from_bits(ALL_BITS)
    unit = 2.0**-52  # one in the last place of the inner logarithm moves the outer one by as much
    close = np.flatnonzero(_to_boundary(-np.log(-np.log(uniforms))) < 100 * unit)
    exact = -np.log(-np.log(uniforms[close].astype(np.longdouble)))
    error = unit * (1 + np.abs(exact))
    assert ALL_BITS[close[_to_boundary(exact) < 5 * error]].tolist() == [CRITICAL_BITS]


def _to_boundary(noise: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """How far each is from the middle between two float32, where rounding changes."""
    rounded = noise.astype(np.float32)  # none is 0
    neighbours = [(rounded.view(np.int32) + step).view(np.float32) for step in (-1, 1)]
    middles = [(rounded.astype(noise.dtype) + neighbour) / 2 for neighbour in neighbours]
    return np.minimum(np.abs(middles[0] - noise), np.abs(middles[1] - noise))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 63, 64, 65, 127, 128, 1000])
def test_every_size_and_any_memory_layout_gives_numpys_token(
    compiled: CompiledNoise, dtype: npt.DTypeLike, size: int
) -> None:
    generator = np.random.default_rng(size)
    for position in range(40):
        table = generator.standard_normal((size, 3)).astype(dtype)
        column = table[:, 1]
        expected = int(np.argmax(column + rng.gumbel(9, 1, position, size, 5)))
        assert compiled.argmax(column, 9, 1, position, 5) == expected


def test_without_a_compiler_there_is_none_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert build_noise() is None
    assert "falling back to numpy for noise, which is slower: there is no g++ on the PATH" in caplog.text


def test_noise_that_is_not_numpys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "gumbel_from_bits", lambda bits: np.zeros(bits.shape, dtype=np.float32))
    with pytest.raises(KernelBuildError, match=r"differs from numpy in the noise of \d+ bit patterns"):
        CompiledNoise()
