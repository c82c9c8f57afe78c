"""Proposers by name: one registration adds one, and what cannot be started is refused by name."""

import argparse
import asyncio
from dataclasses import replace

import pytest

from draft_service.limits import DraftLimits
from draft_service.proposers import registry
from draft_service.proposers.base import ProposeInput, ProposerCapabilities, SessionKey
from draft_service.proposers.kind import OptionGroup, ProposerError, ProposerKind, ProposerSettings
from draft_service.proposers.registry import (
    add_proposer_arguments,
    load_proposer,
    proposer_names,
    register_proposer,
)
from engine.backends.settings import EngineSettings
from tandem.types import Proposal
from tests.draft.support import StubProposer, make_spec
from tests.draft.wire import Peer, open_item, proposal_of, propose_item, running

TOY = EngineSettings(backend="toy", toy="hashed:vocab=32,seed=3", max_step_tokens=64)


def own_options(*arguments: str) -> ProposerSettings:
    """What a command line with these options configures."""
    parser = argparse.ArgumentParser()
    add_proposer_arguments(parser)
    return ProposerSettings(options=parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ProposerError, match=r"unknown proposer 'eagle'; there are: draft_model, ngram, synthetic"):
        load_proposer("eagle", ProposerSettings())


def test_contradicting_ngram_sizes_are_refused_naming_both() -> None:
    with pytest.raises(ProposerError, match="'ngram': min_ngram_size 4 is more than max_ngram_size 3"):
        load_proposer("ngram", own_options("--max-ngram-size", "3", "--min-ngram-size", "4"))


def test_a_draft_model_needs_a_model_and_room_for_a_whole_batch_in_one_step() -> None:
    with pytest.raises(ProposerError, match="'draft_model': needs a model"):
        load_proposer("draft_model", ProposerSettings())
    with pytest.raises(ProposerError, match="--max-batch 65 is more than --max-step-tokens 64"):
        load_proposer("draft_model", ProposerSettings(DraftLimits(max_batch=65), TOY))


def test_a_draft_model_is_loaded_with_its_vocabulary_and_drafts() -> None:
    proposer = load_proposer("draft_model", ProposerSettings(DraftLimits(max_batch=8), TOY))
    capabilities = proposer.capabilities
    assert (capabilities.name, capabilities.model.vocab_size, capabilities.model.backend) == (
        "draft_model",
        32,
        "toy",
    )
    assert len(capabilities.model.vocab_hash) == 64
    (proposal,) = proposer.propose([ProposeInput(SessionKey(1), make_spec(), (1, 2, 3), 3)])
    assert len(proposal.draft_token_ids) == 3


def test_one_registration_adds_a_proposer_that_serves_with_options_of_its_own() -> None:
    def add_options(group: OptionGroup) -> None:
        group.add_argument("--mock-token", type=int, default=3)

    def load(settings: ProposerSettings) -> StubProposer:
        return StubProposer(Proposal((settings.options.mock_token,)))

    register_proposer("mock", ProposerKind(load, add_options))
    assert "mock" in proposer_names()

    async def scenario() -> Proposal:
        async with running(load_proposer("mock", own_options("--mock-token", "9"))) as server:
            peer = Peer(server.stub.Propose())
            await peer.ask(open_item(make_spec([1, 2])))
            proposal = proposal_of(await peer.ask(propose_item((1, 2), 1, 2)))
            peer.call.cancel()
            return proposal

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == Proposal((9,))


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="'ngram' is registered already"):
        register_proposer("ngram", ProposerKind(lambda settings: StubProposer()))


def test_a_proposer_that_needs_hidden_states_is_refused_by_name() -> None:
    class Hungry(StubProposer):
        @property
        def capabilities(self) -> ProposerCapabilities:
            return replace(super().capabilities, needs_hidden_states=True)

    register_proposer("hungry", ProposerKind(lambda settings: Hungry()))
    with pytest.raises(ProposerError, match="'hungry' needs hidden states"):
        load_proposer("hungry", ProposerSettings())
