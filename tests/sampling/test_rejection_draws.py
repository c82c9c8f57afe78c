"""Rejection sampling through the real noise: 200,000 rounds within five standard errors, and what breaks it."""

import numpy as np
import pytest

from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.policies import Decision, VerifyRows, verify
from engine.sampling.rejection import probabilities, sent_q
from engine.sampling.rows import Row
from tandem import rng
from tandem.rng import Stream
from tandem.types import DraftProbsTransport, Proposal, SessionSpec, VerificationPolicy
from tests.sampling.helpers import Probs, logits_of, make_spec, sparse, worst_deviation
from tests.sampling.vectorised import FIRST_POSITION, sampled_drafts, verify_first_drafts

ROUNDS = 200_000
REJECTION, SPARSE, ONE_HOT = VerificationPolicy.REJECTION, DraftProbsTransport.SPARSE, DraftProbsTransport.ONE_HOT
TOY_P, TOY_Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
P5, Q5 = np.array([0.45, 0.25, 0.2, 0.06, 0.04]), np.array([0.35, 0.01, 0.1, 0.3, 0.24])


def exact(probs: Probs) -> Probs:
    """The float64 probabilities that float32 logits of `probs` stand for."""
    return probabilities(logits_of(probs))


def real_round(spec: SessionSpec, position: int, p: Probs, proposal: Proposal) -> Decision:
    request = VerifyRows(spec, range(position), proposal)
    return verify(logits_of([p] * request.num_rows), [request])[0]


def emitted_counts(p: Probs, q: Probs, seed: int) -> np.ndarray:
    """How often each token is what an honest round's first row decides."""
    _, tokens = verify_first_drafts(p, q, sampled_drafts(q, seed, ROUNDS), seed)
    return np.bincount(tokens, minlength=p.size)


@pytest.mark.parametrize(("p", "q"), [(TOY_P, TOY_Q), (P5, Q5), (np.array([0.7, 0.3, 0.0]), TOY_Q)])
def test_the_vectorised_rounds_are_the_real_ones(p: Probs, q: Probs) -> None:
    spec = make_spec(REJECTION, SPARSE, seed=5)
    _, sent = sample_drafts(logits_of([q]), [Row(spec, range(FIRST_POSITION))])
    assert sent[0] is not None
    probs = sent_q(sent[0])[1]
    drafts = sampled_drafts(probs, 5, 300)
    accepted, tokens = verify_first_drafts(exact(p), probs, drafts, 5)
    for n in range(300):
        position = FIRST_POSITION + n
        (draft,), (draft_probs,) = sample_drafts(logits_of([q]), [Row(spec, range(position))])
        assert draft == drafts[n]
        assert draft_probs is not None
        decision = real_round(spec, position, p, Proposal((draft,), (draft_probs,)))
        assert (decision.num_accepted == 1) == accepted[n]
        assert accepted[n] or decision.next_token_id == tokens[n]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("p", "q"), [(TOY_P, TOY_Q), (P5, Q5)])
def test_what_comes_out_is_distributed_as_the_target(p: Probs, q: Probs, seed: int) -> None:
    counts = emitted_counts(p, q, seed)
    assert worst_deviation(counts, p) < 5
    assert np.abs(counts / ROUNDS - p).sum() / 2 < 0.005


def test_the_toy_pair_accepts_seven_tenths_and_recovers_token_zero_only() -> None:
    drafts = sampled_drafts(TOY_Q, 9, ROUNDS)
    accepted, tokens = verify_first_drafts(TOY_P, TOY_Q, drafts, 9)
    assert worst_deviation([accepted.sum(), (~accepted).sum()], [0.7, 0.3]) < 5
    assert set(tokens[~accepted]) == {0}


def test_recovered_tokens_are_distributed_as_the_residual() -> None:
    drafts = sampled_drafts(Q5, 4, ROUNDS)
    accepted, tokens = verify_first_drafts(P5, Q5, drafts, 4)
    rest = np.maximum(P5 - Q5, 0)
    assert worst_deviation(np.bincount(tokens[~accepted], minlength=5), rest / rest.sum()) < 5


@pytest.mark.parametrize(
    ("shared", "source"),
    [(Stream.RESIDUAL, Stream.DRAFT), (Stream.RESIDUAL, Stream.ACCEPT), (Stream.ACCEPT, Stream.DRAFT)],
)
def test_two_purposes_on_one_stream_fail_the_distribution_check(
    shared: Stream, source: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = rng.stream_word

    def sharing(stream: Stream, position: int, committed_len: int | None = None) -> int:
        return honest(source if stream is shared else stream, position, position)

    monkeypatch.setattr(rng, "stream_word", sharing)
    assert worst_deviation(emitted_counts(P5, Q5, 1), P5) > 10


def test_a_one_hot_draft_stands_with_its_target_probability_and_never_comes_back() -> None:
    drafts, q = np.full(ROUNDS, 2), np.array([0.0, 0.0, 1.0])
    accepted, tokens = verify_first_drafts(TOY_P, q, drafts, 3)
    assert accepted.mean() == pytest.approx(0.2, abs=0.01)
    assert worst_deviation(np.bincount(tokens[~accepted], minlength=3), [0.625, 0.375, 0]) < 5
    assert worst_deviation(np.bincount(tokens, minlength=3), TOY_P) < 5
    spec = make_spec(REJECTION, ONE_HOT, seed=3)
    for n in range(200):
        decision = real_round(spec, FIRST_POSITION + n, TOY_P, Proposal((2,)))
        assert (decision.num_accepted == 1) == accepted[n]
        assert accepted[n] or decision.next_token_id == tokens[n]


def test_a_drafter_sure_of_an_unlikely_token_is_accepted_as_rarely_as_the_target_says() -> None:
    p = np.array([0.6, 0.39, 0.01])
    q = np.array([0.0, 0.0, 1.0])
    accepted, tokens = verify_first_drafts(p, q, np.full(ROUNDS, 2), 8)
    assert worst_deviation([accepted.sum(), (~accepted).sum()], [0.01, 0.99]) < 5
    assert worst_deviation(np.bincount(tokens, minlength=3), p) < 5
    spec = make_spec(REJECTION, SPARSE, seed=8)
    real = [real_round(spec, FIRST_POSITION + n, p, Proposal((2,), (sparse(q),))) for n in range(1000)]
    assert [decision.num_accepted for decision in real] == accepted[:1000].astype(int).tolist()
    assert 0 < sum(decision.num_accepted for decision in real) < 40


def test_the_bonus_and_the_plain_token_come_from_the_regular_sampler() -> None:
    coupled = make_spec(VerificationPolicy.COUPLED, seed=8)
    rejection = make_spec(REJECTION, SPARSE, seed=8)
    certain = np.array([0.0, 1.0, 0.0])
    for position in range(FIRST_POSITION, 100):
        plain = real_round(rejection, position, TOY_P, Proposal())
        assert plain == real_round(coupled, position, TOY_P, Proposal())
        request = VerifyRows(rejection, range(position), Proposal((1,), (sparse(certain),)))
        decision = verify(logits_of([certain, TOY_P]), [request])[0]
        assert decision == Decision(1, real_round(coupled, position + 1, TOY_P, Proposal()).next_token_id)


def test_rounds_of_two_drafts_and_a_bonus_emit_the_targets_joint_distribution() -> None:
    p = [TOY_P, np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.3, 0.4])]  # of the first, second and third token
    q = [TOY_Q, np.array([0.4, 0.2, 0.4])]
    counts = np.zeros((3, 3, 3))
    for base in range(FIRST_POSITION, FIRST_POSITION + 1500):
        spec = make_spec(REJECTION, SPARSE, seed=base)
        first_row, second_row = Row(spec, range(base)), Row(spec, range(base), (0,))
        drafts, probs = sample_drafts(logits_of(q), [first_row, second_row])
        proposal = Proposal(tuple(drafts), tuple(entry for entry in probs if entry))
        decision = verify(logits_of(p), [VerifyRows(spec, range(base), proposal)])[0]
        tokens = [*drafts[: decision.num_accepted], decision.next_token_id]
        while len(tokens) < 3:  # later rounds, without drafts
            row = real_round(spec, base + len(tokens), p[len(tokens)], Proposal())
            tokens.append(row.next_token_id)
        counts[tuple(tokens)] += 1
    assert worst_deviation(counts, np.einsum("i,j,k->ijk", *p)) < 5
