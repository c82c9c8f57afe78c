"""Rejection sampling by exact enumeration: what a round emits is distributed as the target, to rounding."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.sampling.rejection import acceptance_probability, one_hot_q, probabilities, residual, sent_q
from tandem.rng import F64
from tests.sampling.helpers import logits_of, sparse

Prefix = tuple[int, ...]
Tables = Callable[[Prefix], F64]  # the next token's probabilities [V] after these


def random_table(seed: int, vocab_size: int, zeros: float) -> Tables:
    """A random distribution a prefix; each probability is 0 with chance `zeros`."""

    def table(prefix: Prefix) -> F64:
        generator = np.random.default_rng([seed, *prefix])
        weights = generator.dirichlet(np.full(vocab_size, 0.7))
        weights[generator.random(vocab_size) < zeros] = 0.0
        weights[generator.integers(vocab_size)] += 0.05
        # float32 logits are what the target has
        return probabilities(logits_of(weights / weights.sum()))

    return table


def target_joint(p: Tables, prefix: Prefix, num_tokens: int) -> F64:
    """The target's own distribution over the next tokens [V, ..., V]."""
    if num_tokens == 0:
        return np.array(1.0)
    return np.stack([prob * target_joint(p, (*prefix, x), num_tokens - 1) for x, prob in enumerate(p(prefix))])


def emitted_joint(p: Tables, q: Tables, prefix: Prefix, num_drafts: int, *, one_hot: bool) -> F64:
    """What a round emits, continued by the target's own sampling to K+1 tokens in every case."""
    if num_drafts == 0:
        return target_joint(p, prefix, 1)
    target, draft = p(prefix), q(prefix)
    joint = np.zeros((len(target),) * (num_drafts + 1))
    for d in np.flatnonzero(draft):
        entry = one_hot_q(int(d)) if one_hot else sent_q(sparse(draft))
        chance_of_d = 1.0 * draft[d] if one_hot else entry[1][entry[0] == d][0]
        accepted = acceptance_probability(target, entry, int(d))
        if accepted > 0:
            inner = emitted_joint(p, q, (*prefix, int(d)), num_drafts - 1, one_hot=one_hot)
            joint[d] += chance_of_d * accepted * inner
        rest = residual(target, entry)
        for x in np.flatnonzero(rest):
            after = target_joint(p, (*prefix, int(x)), num_drafts)
            joint[x] += chance_of_d * (1 - accepted) * rest[x] / rest.sum() * after
    return joint


CASES = [(4, 3, 0.0), (4, 3, 0.4), (5, 2, 0.2), (6, 2, 0.4), (6, 1, 0.0)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab_size", "num_drafts", "zeros"), CASES)
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_round_emits_the_targets_joint_distribution(
    vocab_size: int, num_drafts: int, zeros: float, seed: int, one_hot: bool
) -> None:
    p, q = random_table(seed, vocab_size, zeros), random_table(seed + 1000, vocab_size, zeros)
    emitted = emitted_joint(p, q, (), num_drafts, one_hot=one_hot)
    expected = target_joint(p, (), num_drafts + 1)
    assert np.abs(emitted - expected).max() < 1e-9
    assert not emitted[expected == 0].any()


def test_the_toy_numbers() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    entry = np.arange(3), q
    accepted = [acceptance_probability(p, entry, d) for d in range(3)]
    assert sum(q * accepted) == pytest.approx(0.7)
    assert residual(p, entry).tolist() == pytest.approx([0.3, 0, 0])


def test_the_toy_numbers_of_a_one_hot_draft() -> None:
    p = np.array([0.5, 0.3, 0.2])
    assert acceptance_probability(p, one_hot_q(2), 2) == pytest.approx(0.2)
    rest = residual(p, one_hot_q(2))
    assert (rest / rest.sum()).tolist() == pytest.approx([0.625, 0.375, 0])


def test_equal_distributions_accept_every_draft() -> None:
    p = random_table(5, 6, 0.3)(())
    for d in np.flatnonzero(p):
        assert acceptance_probability(p, (np.arange(6), p), int(d)) == 1.0


def test_a_token_without_probability_on_either_side_is_never_accepted() -> None:
    p, q = np.array([0.0, 0.5, 0.5]), np.array([0.5, 0.5, 0.0])
    assert acceptance_probability(p, (np.arange(3), q), 0) == 0.0
    assert acceptance_probability(p, (np.arange(3), q), 2) == 0.0
    assert acceptance_probability(p, (np.arange(2), q[:2]), 2) == 0.0
