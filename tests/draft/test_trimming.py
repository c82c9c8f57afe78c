"""What leaves the service is what the round can use, whoever proposed it."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.trimming import trim_proposal
from tandem.types import DraftProbs, DraftProbsTransport, Proposal, SessionSpec, VerificationPolicy
from tests.draft.support import make_spec

VOCAB = 100
PROBS = DraftProbs(np.array([1], dtype=np.uint32), np.array([1.0], dtype=np.float32))
SPARSE = make_spec(policy=VerificationPolicy.REJECTION, transport=DraftProbsTransport.SPARSE, temperature=1.0)


def trim(proposal: Proposal, spec: SessionSpec, num_output: int = 0, num_draft_tokens: int = 4) -> Proposal:
    committed = [*spec.token_ids, *[50] * num_output]
    return trim_proposal(proposal, ProposeInput(SessionKey(1), spec, committed, num_draft_tokens), VOCAB)


def test_an_honest_proposal_passes_unchanged_and_unlogged(caplog: pytest.LogCaptureFixture) -> None:
    proposal = Proposal((1, 2, 3, 4), (PROBS,) * 4)
    assert trim(proposal, SPARSE) == proposal
    assert trim(Proposal(), SPARSE) == Proposal()
    assert caplog.records == []


def test_drafts_after_an_ending_id_are_cut_silently_with_their_probs(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(eos=[9])
    assert trim(Proposal((1, 9, 3, 9)), spec) == Proposal((1, 9))
    assert trim(Proposal((1, 9, 3), (PROBS,) * 3), spec) == Proposal((1, 9), (PROBS,) * 2)
    assert caplog.records == []


@pytest.mark.parametrize(("num_output", "expected"), [(0, (1,)), (1, (1,)), (2, (1, 9)), (3, (1, 9))])
def test_an_ending_id_is_cut_too_while_min_tokens_forbids_it(num_output: int, expected: tuple[int, ...]) -> None:
    # the ending id would be output number num_output + 1, counted from 0
    assert trim(Proposal((1, 9, 3)), make_spec(eos=[9], min_tokens=3), num_output) == Proposal(expected)


def test_a_sampled_ending_id_stays_since_refusing_it_would_bias_what_comes_instead() -> None:
    spec = replace(SPARSE, eos_token_ids=frozenset({9}), min_tokens=3)
    assert trim(Proposal((1, 9, 3), (PROBS,) * 3), spec) == Proposal((1, 9), (PROBS,) * 2)
    one_hot = replace(spec, draft_probs_transport=DraftProbsTransport.ONE_HOT)
    assert trim(Proposal((1, 9, 3)), one_hot) == Proposal((1,))


@pytest.mark.parametrize(
    ("proposal", "expected"),
    [
        (Proposal((1, 2, 3, 4, 5, 6)), Proposal((1, 2, 3, 4))),
        (Proposal((1, VOCAB, 3)), Proposal((1,))),
        (Proposal((-1, 2)), Proposal()),
        (Proposal((1, 2), parents=(-1, -1)), Proposal()),
        (Proposal((1, 2), (PROBS,)), Proposal()),
    ],
)
def test_a_misbehaving_proposal_is_cut_and_logged(
    proposal: Proposal, expected: Proposal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert trim(proposal, make_spec()) == expected
    assert len(caplog.records) == 1


def test_a_session_that_needs_probs_gets_no_drafts_without_them() -> None:
    assert trim(Proposal((1, 2)), SPARSE) == Proposal()
    assert trim(Proposal((1, 2)), make_spec()) == Proposal((1, 2))
