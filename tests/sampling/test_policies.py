"""Verification: each policy against its naive loop, plain decoding and solo runs; what a proposal must be."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.toy_backend import hashed_logits
from engine.sampling import policies, policies_reference
from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.policies import Decision, VerifyRows, check_proposal, rows_of, verify, verify_argmax
from engine.sampling.processors import process
from engine.sampling.rows import Row
from engine.sampling.sampler import select
from tandem.types import (
    DraftProbsTransport,
    Proposal,
    SessionSpec,
    VerificationPolicy,
)
from tests.sampling.helpers import PROMPT, full, logits_of, make_spec, sample, sparse

V = 6
GREEDY, COUPLED, REJECTION, BLOCK = VerificationPolicy
ONE_HOT, SPARSE, FULL = DraftProbsTransport.ONE_HOT, DraftProbsTransport.SPARSE, DraftProbsTransport.FULL
RATIO_TESTS = pytest.mark.parametrize("policy", [REJECTION, BLOCK])
KINDS: list[tuple[VerificationPolicy, DraftProbsTransport, float]] = [
    (GREEDY, ONE_HOT, 0.0),
    (COUPLED, ONE_HOT, 1.0),
    *((policy, transport, 1.0) for policy in (REJECTION, BLOCK) for transport in (SPARSE, FULL)),
    *((policy, ONE_HOT, 0.7) for policy in (REJECTION, BLOCK)),
    *((policy, SPARSE, 0.0) for policy in (REJECTION, BLOCK)),
]


def random_request(generator: np.random.Generator, kind: int, num_drafts: int) -> VerifyRows:
    """A request with drafts that its own q may or may not contain."""
    policy, transport, temperature = KINDS[kind]
    spec = make_spec(policy, transport, temperature=temperature, seed=int(generator.integers(1 << 40)), top_k=4)
    drafts = tuple(int(token) for token in generator.integers(0, V, num_drafts))
    q = generator.dirichlet(np.ones(V), num_drafts)
    q[generator.random((num_drafts, V)) < 0.3] = 0.0
    q[:, 0] += 0.1
    probs = tuple(sparse(row / row.sum()) if transport is SPARSE else full(row / row.sum()) for row in q)
    committed = [*PROMPT, *generator.integers(0, V, int(generator.integers(0, 5))).tolist()]
    return VerifyRows(spec, committed, Proposal(drafts, probs if transport.carries_probs else ()))


def random_batch(seed: int, kinds: list[tuple[int, int]]) -> tuple[torch.Tensor, list[VerifyRows]]:
    """Processed rows [T, V] and the requests that own them."""
    generator = np.random.default_rng(seed)
    requests = [random_request(generator, kind, num_drafts) for kind, num_drafts in kinds]
    rows = rows_of(requests)
    logits = torch.from_numpy(generator.standard_normal((len(rows), V)).astype(np.float32).round(1) * 2)
    return process(logits, rows), requests


BATCHES = st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 4)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kinds=BATCHES)
def test_a_mixed_batch_decides_as_the_naive_loops_and_as_each_request_alone(
    seed: int, kinds: list[tuple[int, int]]
) -> None:
    processed, requests = random_batch(seed, kinds)
    decisions = verify(processed, requests)
    start = 0
    for request, decision in zip(requests, decisions, strict=True):
        rows = processed[start : start + request.num_rows]
        assert decision == policies_reference.verify_request(rows.numpy(), request)
        assert [decision] == verify(rows.clone(), [request])
        start += request.num_rows


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kinds=BATCHES)
def test_an_accepted_or_emitted_token_is_never_masked(seed: int, kinds: list[tuple[int, int]]) -> None:
    processed, requests = random_batch(seed, kinds)
    start = 0
    for request, decision in zip(requests, verify(processed, requests), strict=True):
        emitted = [*request.proposal.draft_token_ids[: decision.num_accepted], decision.next_token_id]
        assert all(processed[start + i, token] > -math.inf for i, token in enumerate(emitted))
        start += request.num_rows


NEXT_LOGITS = hashed_logits(V, scale=1.0)


def next_logits(committed: list[int]) -> torch.Tensor:
    """Logits [V] that depend on the whole prefix."""
    return torch.from_numpy(NEXT_LOGITS(committed))


def plain(spec: SessionSpec, num_tokens: int) -> list[int]:
    """Token-by-token decoding with the regular sampler."""
    committed = list(PROMPT)
    for _ in range(num_tokens):
        row = Row(spec, tuple(committed))
        committed += sample(process(next_logits(committed)[None], [row]), [row])
    return committed


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.8, 1.0]),
    rounds=st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=8, max_size=8),
    honest=st.booleans(),
    penalty=st.sampled_from([0.0, 1.5]),
)
def test_greedy_and_coupled_emit_plain_decodings_tokens_whatever_the_drafts(
    seed: int, temperature: float, rounds: list[list[int]], honest: bool, penalty: float
) -> None:
    spec = make_spec(temperature=temperature, seed=seed, frequency_penalty=penalty, top_p=0.95)
    expected = plain(spec, 40)
    committed = list(PROMPT)
    for guesses in rounds:
        right = expected[len(committed) : len(committed) + len(guesses)]
        drafts = tuple(right[:2] + guesses[2:] if honest else guesses)
        request = VerifyRows(spec, tuple(committed), Proposal(drafts))
        logits = torch.stack([next_logits([*committed, *drafts[:i]]) for i in range(len(drafts) + 1)])
        decision = verify(process(logits, rows_of([request])), [request])[0]
        committed += [*drafts[: decision.num_accepted], decision.next_token_id]
    assert committed == expected[: len(committed)]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_the_argmax_path_decides_as_greedy_verification_does(seed: int, lengths: list[int]) -> None:
    processed, requests = random_batch(seed, [(0, length) for length in lengths])
    assert verify_argmax(select(processed), requests) == verify(processed, requests)


@pytest.mark.parametrize("policy", VerificationPolicy)
def test_ties_go_to_the_lowest_id_in_drafter_verifier_and_plain_decoding(policy: VerificationPolicy) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 2)
    spec = make_spec(policy, temperature=0.0)
    assert sample_drafts(logits[:1].clone(), [Row(spec, PROMPT)]) == ([1], [None])
    assert sample(logits[:1], [Row(spec, PROMPT)]) == [1]
    assert verify(logits, [VerifyRows(spec, PROMPT, Proposal((1,)))]) == [Decision(1, 1)]
    assert verify(logits, [VerifyRows(spec, PROMPT, Proposal((2,)))]) == [Decision(0, 1)]
    assert verify_argmax(select(logits), [VerifyRows(spec, PROMPT, Proposal((1,)))]) == [Decision(1, 1)]


@RATIO_TESTS
def test_a_ratio_test_at_temperature_zero_is_greedy_and_needs_no_draft_probs(policy: VerificationPolicy) -> None:
    spec = make_spec(policy, SPARSE, temperature=0.0)
    proposal = Proposal((1,))
    check_proposal(spec, proposal, 4)
    assert verify(logits_of([[0.1, 0.9], [0.8, 0.2]]), [VerifyRows(spec, PROMPT, proposal)]) == [Decision(1, 0)]


@RATIO_TESTS
def test_a_draft_outside_its_own_q_is_rejected_and_replaced_from_the_residual(policy: VerificationPolicy) -> None:
    p, q = [0.5, 0.3, 0.2], [0.5, 0.5, 0.0]
    for seed in range(50):
        spec = make_spec(policy, SPARSE, seed=seed)
        request = VerifyRows(spec, PROMPT, Proposal((2,), (sparse(q),)))
        assert verify(logits_of([p, p]), [request]) == [Decision(0, 2)]  # p - q is positive at 2 alone


@RATIO_TESTS
def test_a_residual_that_rounding_emptied_falls_back_to_the_target(policy: VerificationPolicy) -> None:
    p = [0.5, 0.5, 0.0]
    for seed in range(50):
        request = VerifyRows(make_spec(policy, SPARSE, seed=seed), PROMPT, Proposal((2,), (sparse(p),)))
        decision = verify(logits_of([p, p]), [request])[0]
        assert decision.num_accepted == 0
        assert decision.next_token_id in (0, 1)


@RATIO_TESTS
def test_a_certain_target_accepts_its_token_and_replaces_every_other(policy: VerificationPolicy) -> None:
    p = [0.0, 1.0, 0.0]
    for transport, probs in ((ONE_HOT, ()), (SPARSE, (sparse([0.4, 0.2, 0.4]),))):
        spec = make_spec(policy, transport)
        assert verify(logits_of([p, p]), [VerifyRows(spec, PROMPT, Proposal((1,), probs))]) == [Decision(1, 1)]
        assert verify(logits_of([p, p]), [VerifyRows(spec, PROMPT, Proposal((0,), probs))]) == [Decision(0, 1)]


@RATIO_TESTS
def test_a_nearly_certain_target_accepts_a_whole_chain_of_its_token(policy: VerificationPolicy) -> None:
    row = [60.0, 0.0, 0.0, 20.0]  # the other tokens' probabilities are lost beside 1
    for transport, probs in ((ONE_HOT, ()), (SPARSE, (sparse([1.0, 0.0, 0.0, 1e-30]),) * 3)):
        request = VerifyRows(make_spec(policy, transport), PROMPT, Proposal((0, 0, 0), probs))
        assert verify(torch.tensor([row] * 4), [request]) == [Decision(3, 0)]


@RATIO_TESTS
def test_the_bonus_and_the_plain_token_come_from_the_regular_sampler(policy: VerificationPolicy) -> None:
    row, certain = logits_of([0.5, 0.3, 0.2]), logits_of([0.0, 1.0, 0.0])
    spec = make_spec(policy, SPARSE)
    for position in range(3, 60):
        after_draft = VerifyRows(spec, range(position), Proposal((1,), (sparse([0.0, 1.0, 0.0]),)))
        (decision,) = verify(torch.stack([certain, row]), [after_draft])
        (plain,) = verify(row[None], [VerifyRows(spec, range(position + 1), Proposal())])
        assert decision == Decision(1, plain.next_token_id)
        assert [plain.next_token_id] == sample(row[None], [Row(make_spec(COUPLED), range(position + 1))])


def test_a_later_round_looks_at_fresh_acceptance_noise_of_the_same_position() -> None:
    for policy in (REJECTION, BLOCK):
        spec = make_spec(policy, ONE_HOT)
        requests = [VerifyRows(spec, range(base), Proposal((0,) * (9 - base))) for base in (5, 6, 7, 8)]
        keys = [policies._acceptance_key(request, 8 - len(request.committed_token_ids)) for request in requests]
        assert {key.position for key in keys} == {8}
        assert len({key.word for key in keys}) == 4


def test_rows_that_do_not_add_up_are_refused() -> None:
    request = VerifyRows(make_spec(), PROMPT, Proposal((1, 2)))
    with pytest.raises(ValueError, match="2 rows for requests that own 3"):
        verify(torch.zeros((2, V)), [request])
