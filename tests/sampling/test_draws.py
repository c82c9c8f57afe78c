"""The policies through the real noise: millions of draws within five standard errors of plain decoding."""

import numpy as np
import pytest

from tandem.types import DraftProbsTransport, Proposal, SessionSpec, VerificationPolicy
from tests.sampling.helpers import PROMPT, make_spec, worst_deviation
from tests.sampling.rounds import emitted_tokens, one_more_draft
from tests.sampling.tables import LogitsOf, Prefix, joint, random_logits, same_logits, table_of
from tests.sampling.vectorised import Group, Ints, Trials

COUPLED, REJECTION, BLOCK = VerificationPolicy.COUPLED, VerificationPolicy.REJECTION, VerificationPolicy.BLOCK
SPARSE, FULL, ONE_HOT = DraftProbsTransport.SPARSE, DraftProbsTransport.FULL, DraftProbsTransport.ONE_HOT
RATIO_TESTS = pytest.mark.parametrize("policy", [REJECTION, BLOCK])
NUM_TOKENS, NUM_TRIALS = 4, 600_000  # 2.4 million tokens
TARGET, DRAFT = random_logits(15, 4, flatness=0.6), random_logits(1015, 4, flatness=0.6)
TOY_P, TOY_Q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]


def two_rounds(policy: VerificationPolicy, num_trials: int = NUM_TRIALS) -> Ints:
    """The first four tokens [N, 4] of generations whose first two rounds have two drafts each."""
    return Trials(make_spec(policy, SPARSE), TARGET, DRAFT).generate(num_trials, (2, 2), NUM_TOKENS)


def deviation(tokens: Ints) -> float:
    """The worst cell of the tokens' joint distribution [N, 4], in standard errors of plain decoding's."""
    codes = tokens @ 4 ** np.arange(NUM_TOKENS)[::-1]
    return worst_deviation(np.bincount(codes, minlength=4**NUM_TOKENS), joint(table_of(TARGET), (), NUM_TOKENS))


def real_generation(spec: SessionSpec, target: LogitsOf, draft: LogitsOf) -> list[int]:
    """Two rounds of two drafts by the real drafter and the real verifier, then rounds without drafts."""
    output: Prefix = ()
    for num_drafts in (2, 2, *(0,) * NUM_TOKENS):
        committed, proposal = (*PROMPT, *output), Proposal()
        for _ in range(num_drafts):
            proposal = one_more_draft(spec, draft, committed, proposal)
        output += emitted_tokens(spec, target, committed, proposal)
    return list(output[:NUM_TOKENS])


@pytest.mark.parametrize(
    ("policy", "transport"),
    [
        (COUPLED, ONE_HOT),
        (REJECTION, SPARSE),
        (REJECTION, ONE_HOT),
        (BLOCK, SPARSE),
        (BLOCK, FULL),
        (BLOCK, ONE_HOT),
    ],
)
@pytest.mark.parametrize("seed", [7, 2**64 - 1])
def test_the_vectorised_generations_are_the_real_ones(
    policy: VerificationPolicy, transport: DraftProbsTransport, seed: int
) -> None:
    target, draft = random_logits(3, 4, 0.2), random_logits(1003, 4, 0.2)
    tokens = Trials(make_spec(policy, transport, seed=seed), target, draft).generate(60, (2, 2), NUM_TOKENS)
    for trial in range(60):
        spec = make_spec(policy, transport, seed=seed, sample_index=trial)
        assert tokens[trial].tolist() == real_generation(spec, target, draft)


@RATIO_TESTS
def test_two_rounds_in_a_row_are_distributed_as_plain_decoding(policy: VerificationPolicy) -> None:
    assert deviation(two_rounds(policy)) < 5


def test_coupled_rounds_give_plain_decodings_tokens_noise_by_noise_and_so_its_distribution() -> None:
    plain = Trials(make_spec(COUPLED), TARGET, DRAFT).generate(NUM_TRIALS, (), NUM_TOKENS)
    assert np.array_equal(two_rounds(COUPLED), plain)
    assert deviation(plain) < 5


def one_round(
    policy: VerificationPolicy, transport: DraftProbsTransport, p: list[float], q: list[float], num_drafts: int = 1
) -> dict[int, Group]:
    """300,000 first rounds, by how many drafts stood."""
    trials = Trials(make_spec(policy, transport, seed=3), same_logits(p), same_logits(q))
    return {group.num_accepted: group for group in trials.round(trials.start(300_000), num_drafts)}


def counts(*groups: Group) -> Ints:
    """How often each of three tokens comes first."""
    return np.bincount(np.concatenate([group.tokens[:, 0] for group in groups]), minlength=3)


@RATIO_TESTS
def test_the_toy_pair_accepts_seven_tenths_and_recovers_token_zero_only(policy: VerificationPolicy) -> None:
    rounds = one_round(policy, SPARSE, TOY_P, TOY_Q)
    assert worst_deviation([rounds[1].trials.size, rounds[0].trials.size], [0.7, 0.3]) < 5
    assert set(rounds[0].tokens[:, 0]) == {0}
    assert worst_deviation(counts(*rounds.values()), TOY_P) < 5


def test_recovered_tokens_are_distributed_as_the_residual() -> None:
    p, q = np.array([0.45, 0.25, 0.2, 0.06, 0.04]), np.array([0.35, 0.01, 0.1, 0.3, 0.24])
    rest = np.maximum(p - q, 0.0)
    for policy in (REJECTION, BLOCK):
        recovered = one_round(policy, SPARSE, p.tolist(), q.tolist())[0].tokens[:, 0]
        assert worst_deviation(np.bincount(recovered, minlength=5), rest / rest.sum()) < 5


@RATIO_TESTS
def test_a_one_hot_draft_stands_with_its_target_probability_and_never_comes_back(
    policy: VerificationPolicy,
) -> None:
    rounds = one_round(policy, ONE_HOT, TOY_P, [0.1, 0.2, 0.7])
    assert worst_deviation([rounds[1].trials.size, rounds[0].trials.size], [0.2, 0.8]) < 5
    assert worst_deviation(counts(rounds[0]), [0.625, 0.375, 0]) < 5
    assert worst_deviation(counts(*rounds.values()), TOY_P) < 5


@RATIO_TESTS
def test_a_drafter_sure_of_an_unlikely_token_is_accepted_as_rarely_as_the_target_says(
    policy: VerificationPolicy,
) -> None:
    p = [0.6, 0.39, 0.01]
    rounds = one_round(policy, SPARSE, p, [0.0, 0.0, 1.0])
    assert worst_deviation([rounds[1].trials.size, rounds[0].trials.size], [0.01, 0.99]) < 5
    assert worst_deviation(counts(*rounds.values()), p) < 5


def test_block_lets_more_drafts_stand_than_rejection() -> None:
    mean_accepted = {}
    for policy in (REJECTION, BLOCK):
        rounds = one_round(policy, SPARSE, TOY_P, TOY_Q, num_drafts=3)
        mean_accepted[policy] = sum(count * group.trials.size for count, group in rounds.items()) / 300_000
    # rejection: .7 + .7^2 + .7^3
    assert mean_accepted[REJECTION] == pytest.approx(1.533, abs=0.01)
    assert mean_accepted[BLOCK] > mean_accepted[REJECTION] + 0.1
