"""Every registered proposer over every outcome of its and the verifier's noise: rounds emit what plain decoding would.

The exact form of what tests/losslessness measures, for a small vocabulary and two rounds.
"""

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from draft_service.proposers.base import ProposeInput, Proposer, SessionKey
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.model_base import Drafting
from engine.backends.toy_backend import ToyEngine
from tandem.rng import F32
from tandem.types import DraftProbsTransport, Proposal, SessionSpec, VerificationPolicy
from tests.every_proposer import NAMES, make_registered, serves
from tests.hidden import states_before
from tests.sampling.enumeration import Branch, Knowledge, branches
from tests.sampling.helpers import PROMPT, make_spec
from tests.sampling.rounds import Rounds
from tests.sampling.tables import LogitsOf, Prefix, random_logits

VOCAB = 4
TARGET, DRAFT = random_logits(9, VOCAB, zeros=0.2), random_logits(1009, VOCAB, zeros=0.2)
CASES = [
    (name, policy, transport)
    for name in NAMES
    for policy in (VerificationPolicy.REJECTION, VerificationPolicy.BLOCK)
    for transport in DraftProbsTransport
    if transport is not DraftProbsTransport.COUPLED and serves(name, policy, transport)
]


class ProposersRounds(Rounds):
    """Rounds that a proposer drafts for: one session, sent back to other tokens with every branch."""

    def __init__(
        self, proposer: Proposer, spec: SessionSpec, target: LogitsOf, num_drafts: tuple[int, ...]
    ) -> None:
        super().__init__(spec, target, target, num_drafts)
        self._proposer = proposer
        self.num_drafted = self.num_wanted = 0

    def _proposals(self, committed: Prefix, num_drafts: int, seen: Knowledge) -> list[Branch[Proposal]]:
        return branches(partial(self._propose, committed, num_drafts), seen)

    def _propose(self, committed: Prefix, num_drafts: int) -> Proposal:
        states = states_before(committed, self._proposer.capabilities.hidden_states)
        (proposal,) = self._proposer.propose(
            [ProposeInput(SessionKey(1), self._spec, committed, num_drafts, states)]
        )
        assert isinstance(proposal, Proposal)
        self.num_wanted += num_drafts
        self.num_drafted += len(proposal.draft_token_ids)
        return proposal


def draft_model(min_confidence: float = 0.0) -> DraftModelProposer:
    def logits_of(token_ids: Sequence[int]) -> F32:
        logits: torch.Tensor = DRAFT(tuple(token_ids[len(PROMPT) :]))
        return logits.numpy()

    return DraftModelProposer(ToyEngine(logits_of, VOCAB), drafting=Drafting(min_confidence=min_confidence))


@pytest.mark.parametrize(("name", "policy", "transport"), CASES)
def test_two_rounds_emit_plain_decodings_distribution(
    name: str, policy: VerificationPolicy, transport: DraftProbsTransport
) -> None:
    rounds = ProposersRounds(make_registered(name, draft_model), make_spec(policy, transport), TARGET, (2, 2))
    assert rounds.deviation() < 1e-9
    assert rounds.num_drafted > 0


@pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])
@pytest.mark.parametrize("transport", [DraftProbsTransport.SPARSE, DraftProbsTransport.ONE_HOT])
def test_ending_drafts_where_the_model_is_not_sure_keeps_the_distribution(
    policy: VerificationPolicy, transport: DraftProbsTransport
) -> None:
    rounds = ProposersRounds(draft_model(0.65), make_spec(policy, transport), TARGET, (3, 2))
    assert rounds.deviation() < 1e-9
    assert 0.1 * rounds.num_wanted < rounds.num_drafted < 0.9 * rounds.num_wanted


def test_every_proposer_that_serves_a_ratio_test_is_a_case() -> None:
    served = [name for name in NAMES if serves(name, VerificationPolicy.REJECTION, DraftProbsTransport.ONE_HOT)]
    assert {name for name, _, _ in CASES} == set(served) >= {"ngram", "suffix", "draft_model"}
