"""What a proposal must be before a policy may decide about it."""

import math

import numpy as np
import pytest
import torch

from engine.sampling.policies import VerifyRows, check_proposal, verify
from tandem.types import DraftProbs, DraftProbsTransport, ErrorCode, ItemError, Proposal, VerificationPolicy
from tests.sampling.helpers import PROMPT, full, make_spec

V = 6
COUPLED, REJECTION, BLOCK = VerificationPolicy.COUPLED, VerificationPolicy.REJECTION, VerificationPolicy.BLOCK
ONE_HOT, SPARSE, FULL = DraftProbsTransport.ONE_HOT, DraftProbsTransport.SPARSE, DraftProbsTransport.FULL


def test_a_session_without_draft_probs_ignores_them() -> None:
    junk = (DraftProbs(np.array([99], dtype=np.uint32), np.array([np.nan], dtype=np.float32)),)
    for spec in (make_spec(COUPLED), make_spec(BLOCK, ONE_HOT), make_spec(REJECTION, SPARSE, temperature=0.0)):
        check_proposal(spec, Proposal((1,), junk), V)
        assert len(verify(torch.zeros((2, V)), [VerifyRows(spec, PROMPT, Proposal((1,), junk))])) == 1


def entry(token_ids: list[int], probs: list[float]) -> DraftProbs:
    return DraftProbs(np.array(token_ids, dtype=np.uint32), np.array(probs, dtype=np.float32))


GOOD = entry([0, 2], [0.25, 0.75])
MALFORMED = [
    (Proposal((V,), (GOOD,)), ErrorCode.INVALID_ARGUMENT, r"draft_token_ids\[0\]: token id 6 is outside 0..5"),
    (Proposal((1,), ()), ErrorCode.INVALID_ARGUMENT, "draft_probs: 0 entries for 1 drafts"),
    (Proposal((1,), (GOOD, GOOD)), ErrorCode.INVALID_ARGUMENT, "draft_probs: 2 entries for 1 drafts"),
    (Proposal((1,), (entry([], []),)), ErrorCode.INVALID_ARGUMENT, r"draft_probs\[0\]: 0 ids"),
    (Proposal((1,), (entry([0, 1], [1.0]),)), ErrorCode.INVALID_ARGUMENT, "2 ids and 1 probabilities"),
    (Proposal((1,), (entry(list(range(129)), [1 / 129] * 129),)), ErrorCode.INVALID_ARGUMENT, "129 ids"),
    (Proposal((1,), (entry([0, 6], [0.5, 0.5]),)), ErrorCode.INVALID_ARGUMENT, "token id 6 is outside 0..5"),
    (Proposal((1,), (entry([1, 1], [0.5, 0.5]),)), ErrorCode.INVALID_ARGUMENT, "comes twice"),
    (Proposal((1, 2), (GOOD, entry([0, 1], [math.nan, 0.5]))), ErrorCode.INVALID_ARGUMENT, r"draft_probs\[1\]"),
    (Proposal((1,), (entry([0, 1], [math.inf, 0.5]),)), ErrorCode.INVALID_ARGUMENT, "not a number"),
    (Proposal((1,), (entry([0, 1], [-0.5, 1.5]),)), ErrorCode.INVALID_ARGUMENT, "negative"),
    (Proposal((1,), (entry([0, 1], [0.5, 0.4]),)), ErrorCode.INVALID_ARGUMENT, "sum to 0.9, not to 1"),
    (Proposal((1,), (entry([0, 1], [0.0, 0.0]),)), ErrorCode.INVALID_ARGUMENT, "sum to 0, not to 1"),
    (Proposal((1, 2), (GOOD, GOOD), (-1, 0)), ErrorCode.UNIMPLEMENTED, "tree proposals are not offered"),
]


@pytest.mark.parametrize("policy", [REJECTION, BLOCK])
@pytest.mark.parametrize(("proposal", "code", "message"), MALFORMED)
def test_a_malformed_proposal_is_refused_by_name(
    proposal: Proposal, code: ErrorCode, message: str, policy: VerificationPolicy
) -> None:
    with pytest.raises(ItemError, match=message) as raised:
        check_proposal(make_spec(policy, SPARSE), proposal, V)
    assert raised.value.code is code


@pytest.mark.parametrize(
    ("draft_probs", "message"),
    [
        (GOOD, r"`full` needs 1..6 probabilities and no ids; 2 came"),
        (full([0.0] * 6 + [1.0]), r"`full` needs 1..6 probabilities and no ids; 7 came"),
        (full([]), "0 came"),
        (full([0.5, math.nan]), "not a number"),
        (full([1.5, -0.5]), "negative"),
        (full([0.5, 0.4]), "sum to 0.9"),
    ],
)
def test_a_malformed_whole_distribution_is_refused_by_name(draft_probs: DraftProbs, message: str) -> None:
    with pytest.raises(ItemError, match=message) as raised:
        check_proposal(make_spec(BLOCK, FULL), Proposal((1,), (draft_probs,)), V)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_whole_distribution_may_end_before_the_vocabulary_does() -> None:
    for draft_probs in (full([0.5, 0.5]), full([0.25, 0.25, 0.5, 0.0, 0.0, 0.0])):
        check_proposal(make_spec(BLOCK, FULL), Proposal((1,), (draft_probs,)), V)


def test_a_good_or_empty_proposal_passes() -> None:
    for proposal in (Proposal(), Proposal((5, 0), (GOOD, GOOD))):
        check_proposal(make_spec(REJECTION, SPARSE), proposal, V)
        assert proposal.parents == ()
