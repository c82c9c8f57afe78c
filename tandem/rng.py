"""The counter-based noise streams: the reference for every other version of them.

Noise is a pure function of (seed, stream, absolute position, token, sample index). No generator has state, so
rollback, retry, batch mix and the number of drafts cannot shift it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with
key = (seed low, seed high) and counter = (token block, position, sample index, stream). Token t takes word t % 4
of block t // 4; a scalar takes block 0, word 0. The position is that of the token being decided, prompt included.

Letters: V vocabulary, N counters or tokens.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF
_LOW = np.uint64(_MASK32)
_SHIFT = np.uint64(32)
_CHUNK = 4096  # counters at a time


class Stream(IntEnum):
    """The four noise streams. A ratio test needs independent streams; accept-if-equal coupling the same one."""

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def stream_word(stream: Stream, position: int, committed_len: int | None = None) -> int:
    """The counter's fourth word. ACCEPT and DRAFT also carry the round's base.

    With the base, word = stream | (position - committed_len + 1) << 8, so that draws a round looked at but did
    not use are fresh when a later round decides the same position.
    """
    if stream in (Stream.ACCEPT, Stream.DRAFT):
        if committed_len is None:
            raise ValueError(f"stream {stream.name} needs the round's committed_len")
        return int(stream) | (position - committed_len + 1) << 8
    return int(stream)


def philox4x32(counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], seed: int) -> U32:
    """Ten rounds of Philox4x32 -> uint32 [N, 4]; the counter's four words broadcast against each other."""
    words = [np.atleast_1d(word) for word in np.broadcast_arrays(*(np.asarray(w, np.uint64) for w in counter))]
    round_keys = [(np.uint64(key_0), np.uint64(key_1)) for key_0, key_1 in _round_keys(seed)]
    num_counters = words[0].shape[0]
    # [N, 4]
    output = np.empty((num_counters, 4), dtype=np.uint32)
    for start in range(0, num_counters, _CHUNK):  # working memory that stays in the cache
        x0, x1, x2, x3 = (word[start : start + _CHUNK].copy() for word in words)
        product_0, product_1 = np.empty_like(x0), np.empty_like(x0)
        for key_0, key_1 in round_keys:
            np.multiply(x0, _MULTIPLIER_0, out=product_0)
            np.multiply(x2, _MULTIPLIER_1, out=product_1)
            np.right_shift(product_1, _SHIFT, out=x0)
            x0 ^= x1
            x0 ^= key_0
            np.bitwise_and(product_1, _LOW, out=x1)
            np.right_shift(product_0, _SHIFT, out=x2)
            x2 ^= x3
            x2 ^= key_1
            np.bitwise_and(product_0, _LOW, out=x3)
        for word_index, value in enumerate((x0, x1, x2, x3)):
            output[start : start + _CHUNK, word_index] = value
    return output


def _round_keys(seed: int) -> list[tuple[int, int]]:
    """The two key words of each of the ten rounds."""
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    return [((low + r * _WEYL_0) & _MASK32, (high + r * _WEYL_1) & _MASK32) for r in range(10)]


def _philox_first_word(counter: tuple[int, int, int, int], seed: int) -> int:
    """`philox4x32(counter, seed)[0, 0]` in plain integers, many times quicker for a single counter."""
    x0, x1, x2, x3 = counter
    for key_0, key_1 in _round_keys(seed):
        product_0, product_1 = x0 * int(_MULTIPLIER_0), x2 * int(_MULTIPLIER_1)
        x0, x2 = (product_1 >> 32) ^ x1 ^ key_0, (product_0 >> 32) ^ x3 ^ key_1
        x1, x3 = product_1 & _MASK32, product_0 & _MASK32
    return x0


def uniform_from_bits(bits: U32) -> F64:
    """((bits >> 9) + 0.5) * 2^-23: exact also in float32, never 0 and never 1."""
    return ((bits >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23


def gumbel_from_bits(bits: U32) -> F32:
    """-log(-log u) in float64, rounded to float32; in [-2.81, 16.64]."""
    values = uniform_from_bits(bits)
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    np.negative(values, out=values)
    return values.astype(np.float32)


def vocabulary_bits(seed: int, word: int, position: int, vocab_size: int, sample_index: int = 0) -> U32:
    """One position's noise bits for every token -> uint32 [V]."""
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    return philox4x32((blocks, position, sample_index, word), seed).reshape(-1)[:vocab_size]


def gumbel(seed: int, word: int, position: int, vocab_size: int, sample_index: int = 0) -> F32:
    """One position's Gumbel noise for every token -> float32 [V]."""
    return gumbel_from_bits(vocabulary_bits(seed, word, position, vocab_size, sample_index))


def gumbel_at(
    seed: int, word: int, position: int, token_ids: npt.NDArray[np.integer], sample_index: int = 0
) -> F32:
    """`gumbel(...)[token_ids]` -> float32 [N], at the cost of N tokens instead of the vocabulary's."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    words = philox4x32((ids >> np.uint64(2), position, sample_index, word), seed)
    bits = np.take_along_axis(words, (ids & np.uint64(3)).astype(np.int64)[:, None], axis=1)[:, 0]
    return gumbel_from_bits(bits)


def uniform(seed: int, word: int, position: int, sample_index: int = 0) -> float:
    """One position's scalar uniform in (0, 1)."""
    return ((_philox_first_word((0, position, sample_index, word), seed) >> 9) + 0.5) * 2.0**-23
