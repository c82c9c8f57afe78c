"""Logits without a model: pure functions from a prefix of token ids to float32 [V].

Letters: V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from tandem.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from tandem.rng import F32

LogitsOf = Callable[[Sequence[int]], F32]

_REMEMBERED_LOGITS = 1 << 22  # 16 MiB
_REMEMBERED_PREFIXES = 4096


def scripted_logits(script: Sequence[int], vocab_size: int, start: int = 0) -> LogitsOf:
    """The argmax after a prefix is the script's token for that position.

    `script[0]` is the token at position `start` (prompt included), and the script repeats for ever. The scripted
    token's probability is above 0.99 for vocabularies up to 8,000.
    """

    def logits_of(token_ids: Sequence[int]) -> F32:
        logits = np.zeros(vocab_size, dtype=np.float32)
        logits[script[(len(token_ids) - start) % len(script)]] = 14.0
        return logits

    return logits_of


def hashed_logits(
    vocab_size: int, seed: int = 0, scale: float = 2.0, blend_seed: int | None = None, blend: float = 0.0
) -> LogitsOf:
    """Random logits that depend on every token of the prefix and on nothing else, peaked as a language model's.

    They are Gumbel distributed: the gap between the best two has mean `scale`. `blend` in 0..1 mixes in the
    logits of `blend_seed` (by default the next seed), so that two functions agree as much as wanted: a draft
    `hashed_logits(V, seed=0, blend=0.2)` often agrees with the target `hashed_logits(V, seed=0)`.
    """
    other_seed = seed + 1 if blend_seed is None else blend_seed

    @lru_cache(maxsize=max(1, min(_REMEMBERED_PREFIXES, _REMEMBERED_LOGITS // vocab_size)))
    def remembered(token_ids: tuple[int, ...]) -> F32:
        prefix_hash = extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids)
        logits = _gumbel(prefix_hash, seed, vocab_size)
        if blend:
            logits = (1.0 - blend) * logits + blend * _gumbel(prefix_hash, other_seed, vocab_size)
        result = (scale * logits).astype(np.float32)
        result.setflags(write=False)
        return result

    def logits_of(token_ids: Sequence[int]) -> F32:
        return remembered(tuple(token_ids)).copy()

    return logits_of


def _gumbel(prefix_hash: int, seed: int, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Standard Gumbel values [V] for one prefix and seed."""
    key = np.array([prefix_hash, seed], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).gumbel(size=vocab_size)
