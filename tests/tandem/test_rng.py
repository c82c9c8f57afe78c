"""The noise streams: published known answers, ranges, independence of streams."""

import numpy as np
import pytest

from tandem import rng
from tandem.rng import Stream

ONES = 0xFFFFFFFF
# Known answers for philox4x32 with 10 rounds, published with Random123 (kat_vectors).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES << 32) | ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0x299F31D0 << 32) | 0xA4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


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
