"""Proposers by name: what cannot be started is refused by name."""

from dataclasses import replace

import pytest

from draft_service.limits import DraftLimits
from draft_service.proposers import registry
from draft_service.proposers.base import ProposeInput, ProposerCapabilities, SessionKey
from draft_service.proposers.kind import ProposerError, ProposerKind, ProposerSettings
from draft_service.proposers.registry import load_proposer, register_proposer
from engine.backends.settings import EngineSettings
from tests.draft.support import StubProposer, make_spec
from tests.every_proposer import NAMES, own_options

TOY = EngineSettings(backend="toy", toy="hashed:vocab=32,seed=3", max_step_tokens=64)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ProposerError, match=f"unknown proposer 'medusa'; there are: {', '.join(NAMES)}"):
        load_proposer("medusa", ProposerSettings())


def test_contradicting_ngram_sizes_are_refused_naming_both() -> None:
    with pytest.raises(ProposerError, match="'ngram': min_ngram_size 4 is more than max_ngram_size 3"):
        load_proposer("ngram", own_options("--max-ngram-size", "3", "--min-ngram-size", "4"))


def test_a_draft_model_needs_a_model_and_room_for_a_whole_batch_in_one_step() -> None:
    with pytest.raises(ProposerError, match="'draft_model': needs a model"):
        load_proposer("draft_model", own_options())
    with pytest.raises(ProposerError, match="--max-batch 65 is more than --max-step-tokens 64"):
        load_proposer("draft_model", ProposerSettings(DraftLimits(max_batch=65), TOY, own_options().options))


def test_a_draft_model_is_loaded_with_its_vocabulary_and_drafts() -> None:
    proposer = load_proposer("draft_model", ProposerSettings(DraftLimits(max_batch=8), TOY, own_options().options))
    capabilities = proposer.capabilities
    assert (capabilities.name, capabilities.model.vocab_size, capabilities.model.backend) == (
        "draft_model",
        32,
        "toy",
    )
    assert len(capabilities.model.vocab_hash) == 64
    (proposal,) = proposer.propose([ProposeInput(SessionKey(1), make_spec(), (1, 2, 3), 3)])
    assert len(proposal.draft_token_ids) == 3


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="'ngram' is registered already"):
        register_proposer("ngram", ProposerKind(lambda settings: StubProposer()))


def test_a_proposer_that_the_services_cannot_serve_is_refused_by_name_with_what_there_is() -> None:
    class Demanding(StubProposer):
        @property
        def capabilities(self) -> ProposerCapabilities:
            return replace(super().capabilities, proposes_trees=True)

    register_proposer("demanding", ProposerKind(lambda settings: Demanding()))
    problem = "proposes trees, which the target does not verify"
    with pytest.raises(ProposerError, match=f"'demanding' {problem}.*; there are: demanding, draft_model, eagle"):
        load_proposer("demanding", ProposerSettings())


def test_a_proposer_of_another_interface_version_is_refused_naming_both() -> None:
    register_proposer("earlier", ProposerKind(lambda settings: StubProposer(), interface_version=1))
    with pytest.raises(
        ProposerError, match="'earlier' was written for interface version 1, this service has version 2"
    ):
        load_proposer("earlier", ProposerSettings())


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_proposer_without_a_model_refuses_one(name: str) -> None:
    with pytest.raises(ProposerError, match=f"'{name}': uses no model"):
        load_proposer(name, ProposerSettings(engine=TOY, options=own_options().options))
