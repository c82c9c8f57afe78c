"""Adversaries draft badly and honestly: what they send is what they draw from."""

import numpy as np
import pytest

from draft_service.proposers.base import ProposeInput, SessionKey
from tandem.types import DraftProbsTransport, Proposal, VerificationPolicy
from tests.losslessness import toy_model
from tests.losslessness.adversaries import ADVERSARIES, Adversary, reversed_ranking
from tests.sampling.helpers import make_spec

NUM_DRAFTS = 3


def propose(name: str, transport: DraftProbsTransport, seed: int = 1) -> Proposal:
    spec = make_spec(VerificationPolicy.REJECTION, transport, seed=seed)
    return Adversary(ADVERSARIES[name]).propose([ProposeInput(SessionKey(1), spec, spec.token_ids, NUM_DRAFTS)])[0]


def test_the_reversed_ranking_gives_the_least_likely_token_the_largest_probability() -> None:
    logits, q = toy_model.target_logits([1, 2]), reversed_ranking([1, 2])
    assert np.array_equal(np.argsort(logits), np.argsort(-q))
    probs = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    assert np.allclose(np.sort(q), np.sort(probs))


@pytest.mark.parametrize("name", ADVERSARIES)
def test_each_transport_carries_the_same_q_for_the_same_drafts(name: str) -> None:
    sparse, full = (
        propose(name, transport) for transport in (DraftProbsTransport.SPARSE, DraftProbsTransport.FULL)
    )
    assert (
        sparse.draft_token_ids == full.draft_token_ids == propose(name, DraftProbsTransport.ONE_HOT).draft_token_ids
    )
    assert propose(name, DraftProbsTransport.ONE_HOT).draft_probs == ()
    for few, every, token_id in zip(sparse.draft_probs, full.draft_probs, sparse.draft_token_ids, strict=True):
        assert few.token_ids is not None
        assert every.probs.size == toy_model.VOCAB
        assert np.array_equal(every.probs[few.token_ids], few.probs)
        assert every.probs.sum() == pytest.approx(few.probs.sum()) == pytest.approx(1.0, abs=1e-5)
        assert every.probs[token_id] > 0


def test_drafts_are_drawn_from_q() -> None:
    drafts = [propose("often EOS", DraftProbsTransport.SPARSE, seed).draft_token_ids[0] for seed in range(400)]
    assert np.mean([draft == toy_model.EOS for draft in drafts]) == pytest.approx(0.5, abs=0.1)
    assert len(set(drafts)) > 40
