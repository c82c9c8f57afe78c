"""Proposer `synthetic`: drafts are right as often as was asked, whatever the text, and the text is the target's own."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from draft_service.limits import DraftLimits
from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.kind import ProposerSettings
from draft_service.proposers.model_base import Drafting
from draft_service.proposers.registry import load_proposer
from draft_service.proposers.synthetic import SyntheticProposer, parse_rates
from engine.backends.settings import EngineSettings
from engine.backends.toy_backend import LogitsOf, ToyEngine, hashed_logits, scripted_logits
from engine.sampling.policies import VerifyRows, verify_argmax
from tandem.types import DraftProbsTransport, ErrorCode, Proposal, SessionSpec, Verdict, VerificationPolicy
from target_service.step import StepItem, StepPlan
from target_service.verifier import Verifier
from tests.draft.support import VOCAB, StubProposer, coupled_spec, make_spec
from tests.draft.wire import Peer, error_of, open_item, running
from tests.every_proposer import own_options
from tests.sampling.helpers import worst_deviation
from tests.target.harness import plain_decode

PROMPT = (1, 2, 3)
RATES = (0.9, 0.8, 0.7)
MEAN_LENGTH = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7
SCRIPT = scripted_logits([5, 3, 8, 3, 1, 20, 11], VOCAB)
LOGITS = hashed_logits(VOCAB)


def synthetic(logits_of: LogitsOf, rates: Sequence[float] = RATES) -> SyntheticProposer:
    """A draft model with the target's logits, spoilt."""
    engine = ToyEngine(logits_of, VOCAB, num_blocks=1 << 16, max_context=1 << 16)
    return SyntheticProposer(DraftModelProposer(engine, drafting=Drafting(1024)), VOCAB, rates)


class Rounds:
    """Sessions of one proposer and of the target's own verifier, all a round further at a time."""

    def __init__(self, logits_of: LogitsOf, specs: Sequence[SessionSpec], rates: Sequence[float] = RATES) -> None:
        self.proposer = synthetic(logits_of, rates)
        self.verifier = Verifier(ToyEngine(logits_of, VOCAB, num_blocks=1 << 16, max_context=1 << 16))
        self.specs = specs
        self.committed = [list(spec.token_ids) for spec in specs]
        self.num_accepted: list[int] = []  # of every round
        self._ids = [None] * len(specs)

    def run(self, num_rounds: int, num_draft_tokens: int = len(RATES)) -> "Rounds":
        for _ in range(num_rounds):
            batch = [
                ProposeInput(SessionKey(index), spec, tuple(tokens), num_draft_tokens)
                for index, (spec, tokens) in enumerate(zip(self.specs, self.committed, strict=True))
            ]
            self._verify(self.proposer.propose(batch))
        return self

    def _verify(self, proposals: Sequence[Proposal]) -> None:
        items = []
        for spec, tokens, sequence_id, proposal in zip(
            self.specs, self.committed, self._ids, proposals, strict=True
        ):
            num_rows = 0 if sequence_id is None else len(tokens) - 1
            missing, request = tokens[num_rows:], VerifyRows(spec, tokens, proposal)
            max_rows = len(missing) + request.num_rows - 1
            items.append(StepItem(sequence_id, num_rows, missing, max_rows, request))
        outcomes = self.verifier.step(StepPlan((), tuple(items))).outcomes
        self._ids = [outcome.sequence_id for outcome in outcomes]
        for tokens, outcome in zip(self.committed, outcomes, strict=True):
            assert isinstance(outcome.decided, Verdict)
            tokens += outcome.decided.token_ids
            self.num_accepted.append(outcome.decided.num_accepted)

    def accepted_at(self, position: int) -> tuple[int, int]:
        """Of the rounds that accepted all drafts before this one: how many accepted it too, and did not."""
        reached = [accepted for accepted in self.num_accepted if accepted >= position]
        num_here = sum(accepted > position for accepted in reached)
        return num_here, len(reached) - num_here


def specs(num_sessions: int, spec: SessionSpec) -> list[SessionSpec]:
    """The session with as many seeds."""
    return [replace(spec, sampling=replace(spec.sampling, seed=seed)) for seed in range(num_sessions)]


@pytest.mark.parametrize(
    "spec", [make_spec(max_tokens=9999), coupled_spec(max_tokens=9999)], ids=["greedy", "coupled"]
)
def test_every_position_is_accepted_at_its_rate_and_the_text_is_plain_decodings(spec: SessionSpec) -> None:
    played = Rounds(LOGITS, specs(100, spec)).run(10)
    for position, rate in enumerate(RATES):
        assert worst_deviation(played.accepted_at(position), [rate, 1 - rate]) < 5
    for session, tokens in list(zip(played.specs, played.committed, strict=True))[:3]:
        assert tokens[3:] == plain_decode(session, LOGITS, len(tokens) - 3)


def test_the_mean_acceptance_length_of_50000_rounds_is_within_a_percent_of_what_was_set() -> None:
    right = StubProposer(Proposal((4, 5, 6)))
    proposer = SyntheticProposer(right, VOCAB, RATES)
    argmax = torch.tensor([4, 5, 6, 7])  # of the target, at the drafts' rows and after them
    num_accepted = []
    for spec in specs(50, make_spec(max_tokens=9999)):
        committed = list(spec.token_ids)
        for _ in range(1000):
            (proposal,) = proposer.propose([ProposeInput(SessionKey(1), spec, committed, 3)])
            (decision,) = verify_argmax(
                argmax[: len(proposal.draft_token_ids) + 1], [VerifyRows(spec, committed, proposal)]
            )
            num_accepted.append(decision.num_accepted)
            committed += [1] * (decision.num_accepted + 1)
    assert len(num_accepted) == 50_000
    assert 1 + sum(num_accepted) / 50_000 == pytest.approx(MEAN_LENGTH, rel=0.01)


def test_luck_in_one_round_says_nothing_about_the_next() -> None:
    played = Rounds(SCRIPT, specs(100, make_spec(max_tokens=9999)), [0.5]).run(30, 1)
    # [rounds, sessions]
    lucky = np.array(played.num_accepted).reshape(30, 100)
    pairs = np.bincount((lucky[:-1] * 2 + lucky[1:]).ravel(), minlength=4)
    assert worst_deviation(pairs, [0.25] * 4) < 5


def test_drafts_past_the_last_rate_have_the_last_rate_and_only_the_first_wrong_one_is_made_wrong() -> None:
    right = StubProposer(Proposal((4, 5, 6, 7, 8)))
    num_right = []
    for spec in specs(2000, make_spec()):
        (proposal,) = SyntheticProposer(right, VOCAB, [1.0, 0.6]).propose(
            [ProposeInput(SessionKey(1), spec, PROMPT, 5)]
        )
        differs = [ours != theirs for ours, theirs in zip(proposal.draft_token_ids, (4, 5, 6, 7, 8), strict=True)]
        assert sum(differs) <= 1
        num_right.append(differs.index(True) if any(differs) else 5)
    expected = [0, 0.4, 0.6 * 0.4, 0.6**2 * 0.4, 0.6**3 * 0.4, 0.6**4]
    assert worst_deviation(np.bincount(num_right, minlength=6), expected) < 5


@pytest.mark.parametrize(("rates", "accepted"), [([1.0], {3}), ([0.0], {0}), ([1.0, 0.0], {1})])
def test_a_rate_of_one_is_always_right_and_of_zero_always_wrong(rates: list[float], accepted: set[int]) -> None:
    for spec in (make_spec(max_tokens=9999), coupled_spec(max_tokens=9999)):
        assert set(Rounds(LOGITS, specs(10, spec), rates).run(10).num_accepted) == accepted


def test_a_wrong_draft_is_another_token_of_the_vocabulary_and_ends_nothing_while_one_does_not() -> None:
    def wrong(right: int, eos: Sequence[int]) -> int:
        proposer = SyntheticProposer(StubProposer(Proposal((right,))), 4, [0.0])
        (proposal,) = proposer.propose([ProposeInput(SessionKey(1), make_spec(eos=eos), PROMPT, 1)])
        return proposal.draft_token_ids[0]

    assert [wrong(right, ()) for right in range(4)] == [1, 2, 3, 0]
    assert wrong(3, (0, 1)) == 2
    assert wrong(3, (0, 1, 2)) == 0


def test_the_same_round_asked_again_has_the_same_drafts() -> None:
    item = ProposeInput(SessionKey(1), make_spec(), PROMPT, 3)
    other = ProposeInput(SessionKey(2), make_spec(), PROMPT, 3)
    proposer = synthetic(LOGITS, [0.5])
    assert proposer.propose([item]) == proposer.propose([other]) == synthetic(LOGITS, [0.5]).propose([item])


@pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])
def test_a_session_under_a_ratio_test_is_refused_by_name_at_open(policy: VerificationPolicy) -> None:
    async def scenario() -> None:
        async with running(synthetic(LOGITS)) as server:
            peer = Peer(server.stub.Propose())
            code, message = error_of(await peer.ask(open_item(make_spec(policy=policy, temperature=1.0))))
            assert code is ErrorCode.UNIMPLEMENTED
            assert message == (
                f"verification_policy '{policy}' is not served by proposer 'synthetic'; it serves: coupled, greedy"
            )
            for session, spec in enumerate([make_spec(policy=policy), coupled_spec()], 2):
                opened = await peer.ask(open_item(spec, session=session))
                assert opened.WhichOneof("outcome") == "opened"
            peer.call.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_it_frees_what_its_draft_model_keeps() -> None:
    proposer = synthetic(LOGITS)
    proposer.propose([ProposeInput(SessionKey(1), make_spec(), PROMPT, 3)])
    usage = proposer.kv_usage()
    assert usage is not None
    assert usage.blocks.used_blocks == 1
    proposer.forget(SessionKey(1))
    usage = proposer.kv_usage()
    assert usage is not None
    assert usage.blocks.used_blocks == 0


def test_it_is_loaded_by_name_with_the_target_model_and_its_rates() -> None:
    engine = EngineSettings(backend="toy", toy="hashed:vocab=32,seed=3")
    settings = ProposerSettings(
        DraftLimits(max_batch=8), engine, own_options("--acceptance-rates", "0.9,0.8").options
    )
    capabilities = load_proposer("synthetic", settings).capabilities
    assert (capabilities.name, capabilities.model.vocab_size) == ("synthetic", 32)
    assert capabilities.transports == {DraftProbsTransport.ONE_HOT, DraftProbsTransport.COUPLED}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "could not convert string to float: ''"),
        ("0.9,x", "could not convert string to float: 'x'"),
        ("0.9,1.5", r"acceptance_rates\[1\]: 1.5 is outside \[0, 1\]"),
        ("-0.1", r"acceptance_rates\[0\]: -0.1 is outside \[0, 1\]"),
        ("nan", r"acceptance_rates\[0\]: nan is outside \[0, 1\]"),
    ],
)
def test_rates_that_cannot_be_are_refused_by_place_and_limits(text: str, problem: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=problem):
        parse_rates(text)


def test_rates_are_a_list_of_at_least_one() -> None:
    assert parse_rates("0.9,0.8,1") == (0.9, 0.8, 1.0)
    with pytest.raises(ValueError, match="acceptance_rates: at least 1 rate is needed"):
        SyntheticProposer(StubProposer(), VOCAB, [])
