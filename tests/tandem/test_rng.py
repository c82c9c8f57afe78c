"""The noise streams: published known answers, ranges, independence of streams."""

from hashlib import sha256

import numpy as np
import pytest

from tandem import rng
from tandem.rng import Stream
from tests.sampling.noise_vectors import ALL_NOISE_SHA256, GUMBEL_BITS, GUMBEL_NOISE, KNOWN_ANSWERS, ONES


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], seed: int, expected: tuple[int, int, int, int]
) -> None:
    assert tuple(rng.philox4x32(counter, seed)[0].tolist()) == expected


def test_a_token_reads_its_word_of_its_block() -> None:
    bits = rng.vocabulary_bits(seed=7, word=0, position=11, vocab_size=10)
    for token in range(10):
        assert bits[token] == rng.philox4x32((token // 4, 11, 0, 0), 7)[0, token % 4]


def test_uniforms_never_reach_zero_or_one_and_gumbel_stays_finite() -> None:
    extremes = np.array([0, ONES], dtype=np.uint32)
    uniforms = rng.uniform_from_bits(extremes)
    assert 0.0 < uniforms[0] < uniforms[1] < 1.0
    assert np.array_equal(uniforms, uniforms.astype(np.float32).astype(np.float64))
    low, high = rng.gumbel_from_bits(extremes)
    assert low == pytest.approx(-2.8107, abs=1e-3)
    assert high == pytest.approx(16.6355, abs=1e-3)


def test_gumbel_noise_is_the_committed_one_for_every_uniform() -> None:
    assert rng.gumbel_from_bits(np.array(GUMBEL_BITS, dtype=np.uint32)).tolist() == GUMBEL_NOISE
    everything = rng.gumbel_from_bits(np.arange(2**23, dtype=np.uint32) << np.uint32(9))
    assert sha256(everything.astype("<f4").tobytes()).hexdigest() == ALL_NOISE_SHA256
    assert (np.diff(everything) >= 0).all()


def test_noise_depends_on_every_word_of_the_counter_and_on_the_whole_seed() -> None:
    base = rng.uniform(1, 0, 5)
    others = [
        rng.uniform(2, 0, 5),
        rng.uniform(1 + (1 << 32), 0, 5),
        rng.uniform(1, 1, 5),
        rng.uniform(1, 0, 6),
        rng.uniform(1, 0, 5, sample_index=1),
    ]
    assert len({base, *others}) == 6


def test_accept_and_draft_streams_carry_the_round_and_never_meet_another_stream() -> None:
    words = {rng.stream_word(Stream.TARGET, 9), rng.stream_word(Stream.RESIDUAL, 9)}
    for committed_len in (5, 7, 9):
        words.add(rng.stream_word(Stream.ACCEPT, 9, committed_len))
        words.add(rng.stream_word(Stream.DRAFT, 9, committed_len))
    assert len(words) == 8


def test_a_round_stream_without_its_base_is_refused() -> None:
    with pytest.raises(ValueError, match="ACCEPT needs the round's committed_len"):
        rng.stream_word(Stream.ACCEPT, 9)
