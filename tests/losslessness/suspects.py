"""What drafts are like after a history, as log q: the direction in which a wrong rule would err.

An estimate is enough: any order of tokens that the history decides gives uniform numbers (transform.py).

Letters: N tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.backends.base import SpeculativeEngine
from tandem.prompt_lookup import PromptLookup
from tandem.rng import F64
from tests.losslessness.transform import LogQ, raw_rows

_LOOKUP = PromptLookup()


def of_engine(engine: SpeculativeEngine) -> LogQ:
    """A draft model's own."""

    def log_q(token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        with torch.inference_mode():
            return raw_rows(engine, token_ids, num_rows)

    return log_q


def of_prompt_lookup(vocab_size: int) -> LogQ:
    """All on the token that prompt lookup would draft; alike where it finds nothing."""

    def q_of(token_ids: Sequence[int]) -> F64:
        found = _LOOKUP.find(token_ids, 1)
        q = np.zeros(vocab_size) if found else np.full(vocab_size, 1 / vocab_size)
        q[found] = 1.0
        return q

    return of_function(q_of)


def of_function(q_of: Callable[[Sequence[int]], F64]) -> LogQ:
    """From a function of the tokens so far -> q [V]."""

    def log_q(token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        first = len(token_ids) - num_rows
        rows = [q_of(token_ids[:end]) for end in range(first, len(token_ids))]
        return torch.from_numpy(np.stack(rows)).log()

    return log_q
