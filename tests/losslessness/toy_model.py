"""A target and a draft without files: logits from two tables, one by the last token and one by all of the past.

The draft knows the target's first table and not its second, as a small model knows the local half of a large one. The
first makes what was once said likely again, so that prompt lookup hits; the second makes every token of the past
matter, so that a row computed from other tokens shows.

Letters: V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from engine.backends.toy_logits import LogitsOf
from tandem.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from tandem.rng import F32

VOCAB = 64
EOS = VOCAB - 1
_NUM_PASTS = 4096


def _tables(seed: int) -> tuple[F32, F32]:
    """[V, V] by the last token and [4096, V] by the past, Gumbel distributed: peaked as a language model's."""
    generator = np.random.default_rng(seed)
    local = 1.0 * generator.gumbel(size=(VOCAB, VOCAB))
    distant = 0.5 * generator.gumbel(size=(_NUM_PASTS, VOCAB))
    return local.astype(np.float32), distant.astype(np.float32)


_LOCAL, _DISTANT = _tables(seed=11)
_OTHER_DISTANT = _tables(seed=12)[1]


def _logits(distant: F32) -> LogitsOf:
    def logits_of(token_ids: Sequence[int]) -> F32:
        past = extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids) % _NUM_PASTS
        return np.asarray(_LOCAL[token_ids[-1]] + distant[past])

    return logits_of


target_logits = _logits(_DISTANT)
draft_logits = _logits(_OTHER_DISTANT)
