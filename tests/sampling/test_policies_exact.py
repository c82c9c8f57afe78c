"""`rejection` and `block` by their formulas: what rounds emit is distributed as the target, to rounding."""

from dataclasses import replace

import numpy as np
import pytest

from engine.sampling.block import acceptance_steps, verify_block
from engine.sampling.rejection import acceptance_probability, one_hot_q, residual
from tandem.types import VerificationPolicy
from tests.sampling.formulas import Pair
from tests.sampling.tables import random_logits, table_of

REJECTION, BLOCK = VerificationPolicy.REJECTION, VerificationPolicy.BLOCK
CASES = [  # vocabulary, drafts of each round, share of masked tokens, pairs
    (4, (1,), 0.0, 30),
    (4, (2,), 0.4, 30),
    (4, (3,), 0.2, 9),
    (4, (4,), 0.3, 3),
    (5, (2,), 0.0, 9),
    (5, (3,), 0.4, 6),
    (6, (2,), 0.3, 9),
    (6, (4,), 0.5, 1),
    (4, (1, 1), 0.2, 12),
    (4, (2, 1), 0.4, 6),
    (4, (1, 3), 0.3, 2),
    (5, (2, 1), 0.3, 1),
    (6, (1, 1), 0.3, 2),
]


def random_pair(policy: VerificationPolicy, seed: int, vocab_size: int, zeros: float = 0.0) -> Pair:
    """Every third drafter sends no q; every third ends its proposals with token 2, as with an end of text."""
    target, draft = random_logits(seed, vocab_size, zeros), random_logits(seed + 1000, vocab_size, zeros)
    pair = Pair(policy, table_of(target), table_of(draft))
    return replace(pair, one_hot=seed % 3 == 1, last_draft=2 if seed % 3 == 2 else None)


@pytest.mark.parametrize("policy", [REJECTION, BLOCK])
@pytest.mark.parametrize(("vocab_size", "num_drafts", "zeros", "num_pairs"), CASES)
def test_rounds_emit_the_targets_joint_distribution(
    policy: VerificationPolicy, vocab_size: int, num_drafts: tuple[int, ...], zeros: float, num_pairs: int
) -> None:
    for seed in range(num_pairs):
        assert random_pair(policy, seed, vocab_size, zeros).deviation(num_drafts) < 1e-9


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_block_lets_no_fewer_drafts_stand_than_rejection_and_more_on_average(num_drafts: int) -> None:
    gains = []
    for seed in range(20):
        pair = random_pair(BLOCK, seed, 4)
        gains.append(
            pair.expected_accepted(num_drafts) - replace(pair, policy=REJECTION).expected_accepted(num_drafts)
        )
    assert min(gains) > -1e-12
    assert (sum(gains) > 0.1) == (num_drafts > 1)  # with one draft the two are one rule


def test_a_one_hot_draft_gains_nothing_from_block_verification() -> None:
    for seed in range(5):
        pair = replace(random_pair(BLOCK, seed, 4), one_hot=True)
        assert pair.expected_accepted(3) == pytest.approx(replace(pair, policy=REJECTION).expected_accepted(3))


TOY_P, TOY_Q = np.array([0.5, 0.3, 0.2]), (np.arange(3), np.array([0.2, 0.3, 0.5]))


def test_the_toy_numbers() -> None:
    accepted = [acceptance_probability(TOY_P, TOY_Q, d) for d in range(3)]
    assert sum(TOY_Q[1] * accepted) == pytest.approx(0.7)
    assert residual(TOY_P, TOY_Q).tolist() == pytest.approx([0.3, 0, 0])


def test_the_toy_numbers_of_a_one_hot_draft() -> None:
    assert acceptance_probability(TOY_P, one_hot_q(2), 2) == pytest.approx(0.2)
    rest = residual(TOY_P, one_hot_q(2))
    assert (rest / rest.sum()).tolist() == pytest.approx([0.625, 0.375, 0])


def test_the_toy_numbers_of_a_block_of_two() -> None:
    toy, one_hot = [TOY_Q, TOY_Q], [one_hot_q(2), one_hot_q(1)]
    cases = [
        # w_1 = .2 / .5, S_1 = 0: draft 1 stands only with draft 2; w_2 = min(1, .4 * .5 / .2)
        (toy, (2, 0), [(0.4, 0.0), (1.0, 1.0)]),
        # w_1 = 1, S_1 = .3, h_1 = .3 / (.3 + 0); w_2 = .2 / .5
        (toy, (0, 2), [(1.0, 1.0), (0.4, 0.4)]),
        # w_1 = .2, S_1 = .2 * (1 - .3), h_1 = .14 / (.14 + .8); w_2 = .2 * .3
        (one_hot, (2, 1), [(0.2, 0.14 / 0.94), (0.06, 0.06)]),
    ]
    for q, drafts, expected in cases:
        assert np.array(list(acceptance_steps([TOY_P, TOY_P], q, drafts))) == pytest.approx(np.array(expected))


def test_a_weak_draft_is_carried_by_the_draft_after_it() -> None:
    assert verify_block([TOY_P, TOY_P], [TOY_Q, TOY_Q], (2, 0), (0.999, 0.999)) == (2, 1.0)


def test_equal_distributions_accept_every_draft() -> None:
    p = table_of(random_logits(5, 6, 0.3))(())
    q = np.arange(6), p
    for d in np.flatnonzero(p).tolist():
        assert acceptance_probability(p, q, d) == 1.0
        assert list(acceptance_steps([p, p, p], [q, q, q], (d, d, d))) == [(1.0, 1.0)] * 3


def test_a_token_without_probability_on_either_side_is_never_accepted() -> None:
    p, q = np.array([0.0, 0.5, 0.5]), np.array([0.5, 0.5, 0.0])
    for said, draft in (((np.arange(3), q), 0), ((np.arange(3), q), 2), ((np.arange(2), q[:2]), 2)):
        assert acceptance_probability(p, said, draft) == 0.0
        # Nor is what follows it.
        assert list(acceptance_steps([p, p], [said, (np.arange(3), q)], (draft, 1))) == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("tail", [1e-17, 1e-20, 1e-300])
def test_a_residual_too_small_beside_one_still_accepts_a_certain_draft(tail: float) -> None:
    p = np.array([1.0, tail, tail])
    for q in (one_hot_q(0), (np.arange(2), np.array([1.0, tail / 2]))):
        assert list(acceptance_steps([p, p, p], [q, q, q], (0, 0, 0))) == [(1.0, 1.0)] * 3


def test_distributions_equal_up_to_rounding_accept_the_whole_block() -> None:
    generator = np.random.default_rng(1)
    for _ in range(300):
        p = generator.dirichlet(np.ones(6), 4)
        q = p * (1.0 + 1e-16 * generator.integers(-3, 4, (4, 6)))
        drafts = tuple(generator.integers(0, 6, 4).tolist())
        sent = [(np.arange(6), row) for row in q]
        assert verify_block(list(p), sent, drafts, (1.0 - 2.0**-24,) * 4)[0] == 4
