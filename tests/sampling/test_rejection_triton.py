"""The Triton form of `rejection` against the policies: ragged batches, masked rows, degenerate residuals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import policies, policies_reference
from engine.sampling.policies import Decision, VerifyRows, rows_of, verify
from engine.sampling.processors import process
from engine.sampling.rejection import probabilities
from tandem.rng import F64
from tandem.types import DraftProbs, DraftProbsTransport, Proposal, VerificationPolicy
from tests.sampling.helpers import make_spec, sparse
from tests.sampling.interpreted import DEVICE, rejection_triton

ONE_HOT, SPARSE, FULL = DraftProbsTransport.ONE_HOT, DraftProbsTransport.SPARSE, DraftProbsTransport.FULL


def random_request(
    generator: np.random.Generator, transport: DraftProbsTransport, num_drafts: int, vocab_size: int
) -> VerifyRows:
    """Drafts that neither p nor q need contain; masked tokens and a position of its own."""
    spec = make_spec(
        VerificationPolicy.REJECTION,
        transport,
        seed=int(generator.integers(1 << 63)) * 2 + 1,
        sample_index=int(generator.integers(3)),
        top_k=int(generator.integers(0, 5)),
    )
    drafts = tuple(generator.integers(0, vocab_size, num_drafts).tolist())
    q = generator.dirichlet(np.ones(vocab_size), num_drafts)
    q[generator.random((num_drafts, vocab_size)) < max(0.3, 1 - 50 / vocab_size)] = 0.0
    q[np.arange(num_drafts), drafts] += generator.choice([0.0, 0.3])
    q[:, 0] += 0.1
    q /= q.sum(axis=1, keepdims=True)
    probs = {
        ONE_HOT: (),
        SPARSE: tuple(sparse(row) for row in q),
        FULL: tuple(DraftProbs(None, row.astype(np.float32)) for row in q),
    }
    committed = generator.integers(0, vocab_size, int(generator.integers(3, 9))).tolist()
    return VerifyRows(spec, committed, Proposal(drafts, probs[transport]))


def decide(processed: torch.Tensor, target_probs: F64, requests: list[VerifyRows]) -> list[Decision]:
    on_device = torch.from_numpy(target_probs).to(DEVICE), processed.to(DEVICE)
    return rejection_triton.verify_rejection(*on_device, requests)


KINDS = st.tuples(st.sampled_from([ONE_HOT, SPARSE, FULL]), st.integers(0, 4))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(KINDS, min_size=1, max_size=5),
    vocab_size=st.sampled_from([2, 6, 300, 1500]),
)
def test_a_ragged_batch_decides_as_the_policies_and_the_naive_loops(
    seed: int, kinds: list[tuple[DraftProbsTransport, int]], vocab_size: int
) -> None:
    generator = np.random.default_rng(seed)
    requests = [random_request(generator, *kind, vocab_size) for kind in kinds]
    rows = rows_of(requests)
    logits = generator.standard_normal((len(rows), vocab_size)).astype(np.float32).round(1) * 2
    processed = process(torch.from_numpy(logits), rows)
    target_probs = np.stack([probabilities(row) for row in processed])
    decisions = decide(processed, target_probs, requests)
    assert decisions == verify(processed, requests)
    start = 0
    for request, decision in zip(requests, decisions, strict=True):
        own_rows = processed[start : start + request.num_rows].numpy()
        assert decision == policies_reference.verify_request(own_rows, request)
        start += request.num_rows


def sure_request(draft: int, q: list[float], position: int) -> VerifyRows:
    """One draft, and a committed prefix that ends before `position`."""
    spec = make_spec(VerificationPolicy.REJECTION, SPARSE)
    return VerifyRows(spec, [0] * position, Proposal((draft,), (sparse(q),)))


def test_where_rounding_leaves_no_residual_the_recovered_token_comes_from_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # p is nowhere above q, yet the draft can be rejected: what rounding does in small, exaggerated.
    target_probs = np.array([[0.125, 0.25, 0.0], [0.5, 0.25, 0.25]] * 40)
    requests = [sure_request(0, [0.5, 0.5, 0.0], position) for position in range(3, 43)]
    processed = torch.from_numpy(np.log(target_probs + 1e-300).astype(np.float32))
    by_row = iter(target_probs[::2])
    monkeypatch.setattr(policies, "probabilities", lambda row: next(by_row))
    expected = verify(processed, requests)
    assert {decision for decision in expected if decision.num_accepted == 0} == {Decision(0, 0), Decision(0, 1)}
    assert decide(processed, target_probs, requests) == expected


def test_a_draft_without_probability_in_p_or_in_q_never_stands() -> None:
    target_probs = np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    processed = torch.full((4, 3), -1.0)
    for position in range(3, 20):
        without_p = sure_request(0, [0.5, 0.5, 0.0], position)
        without_q = sure_request(0, [0.0, 0.5, 0.5], position)
        decisions = decide(processed, target_probs, [without_p, without_q])
        assert [decision.num_accepted for decision in decisions] == [0, 0]
        assert [decision.next_token_id for decision in decisions] == [2, 0]


def test_plain_rows_and_no_requests_at_all() -> None:
    generator = np.random.default_rng(4)
    requests = [random_request(generator, SPARSE, 0, 7) for _ in range(3)]
    processed = torch.randn(3, 7)
    target_probs = np.stack([probabilities(row) for row in processed])
    assert decide(processed, target_probs, requests) == verify(processed, requests)
    assert decide(processed[:0], target_probs[:0], []) == []


def test_other_policies_and_other_numbers_of_rows_are_refused() -> None:
    target_probs, processed = np.full((2, 3), 1 / 3), torch.zeros(2, 3)
    coupled = VerifyRows(make_spec(), [1, 2, 3], Proposal((1,), ()))
    with pytest.raises(ValueError, match="policy 'coupled' is not decided here"):
        decide(processed, target_probs, [coupled])
    with pytest.raises(ValueError, match="2 rows for requests that own 4"):
        decide(processed, target_probs, [sure_request(0, [0.5, 0.5, 0.0], 3)] * 2)
