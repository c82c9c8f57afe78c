"""Small models as tables: logits and probabilities after every prefix.

Letters: V vocabulary.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.rejection import probabilities
from tandem.rng import F64
from tests.sampling.helpers import logits_of

Prefix = tuple[int, ...]
LogitsOf = Callable[[Prefix], torch.Tensor]  # logits [V] after these tokens
Table = Callable[[Prefix], F64]  # probabilities [V] after these tokens


def random_logits(seed: int, vocab_size: int, zeros: float = 0.0, flatness: float = 0.7) -> LogitsOf:
    """Logits of a random distribution a prefix; a token is masked with chance `zeros`, but never all."""

    @cache
    def logits(prefix: Prefix) -> torch.Tensor:
        generator = np.random.default_rng([seed, *prefix])
        weights = generator.dirichlet(np.full(vocab_size, flatness))
        weights[generator.random(vocab_size) < zeros] = 0.0
        weights[generator.integers(vocab_size)] += 0.05
        return logits_of(weights / weights.sum())

    return logits


def same_logits(probs: npt.ArrayLike) -> LogitsOf:
    """The same distribution after every prefix."""
    logits = logits_of(probs)
    return lambda _: logits


def table_of(logits: LogitsOf) -> Table:
    """softmax of the logits."""
    return cache(lambda prefix: probabilities(logits(prefix)))


def joint(table: Table, prefix: Prefix, num_tokens: int) -> F64:
    """The distribution of the next tokens [V, ..., V] when they are drawn one by one."""
    if num_tokens == 0:
        return np.array(1.0)
    return np.stack([prob * joint(table, (*prefix, x), num_tokens - 1) for x, prob in enumerate(table(prefix))])


def total_variation(one: F64, other: F64) -> float:
    """Between two distributions of one shape."""
    return float(np.abs(one - other).sum()) / 2
