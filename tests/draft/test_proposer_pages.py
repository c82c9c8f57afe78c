"""Every proposer has its page and its row of the support matrix, and both say what the code does."""

from dataclasses import fields

import pytest

from draft_service.proposers.base import (
    INTERFACE_VERSION,
    DraftKvUsage,
    HiddenStatesNeed,
    ProposeInput,
    Proposer,
    ProposerCapabilities,
)
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.kind import ProposerError, ProposerKind, ProposerSettings
from draft_service.proposers.registry import load_proposer
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import DraftProbsTransport, VerificationPolicy
from tests.draft.pages import FOLDER, names_in, page, table
from tests.draft.support import VOCAB
from tests.every_proposer import NAMES, make_registered

MATRIX = table("README.md", "| proposer | interface")
OFFERED = [name for name, row in MATRIX.items() if row[1] == "offered"]
NOT_OFFERED = [name for name in MATRIX if name not in OFFERED]


def capabilities_of(name: str) -> ProposerCapabilities:
    proposer = make_registered(name, lambda: DraftModelProposer(ToyEngine(hashed_logits(VOCAB), VOCAB)))
    return proposer.capabilities


def yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def test_what_is_offered_is_what_is_registered() -> None:
    assert OFFERED == sorted(OFFERED) == list(NAMES)
    assert set(table("README.md", "| proposer | drafts come from")) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_matrix_says_what_its_proposer_serves_and_refuses(name: str) -> None:
    version, _, *transports, policies, refused = MATRIX[name]
    capabilities = capabilities_of(name)
    assert capabilities.name == name
    assert int(version) == INTERFACE_VERSION
    assert transports == [yes_or_no(transport in capabilities.transports) for transport in DraftProbsTransport]
    assert names_in(policies) == [policy for policy in VerificationPolicy if policy in capabilities.policies]
    unserved = [
        *(transport for transport in DraftProbsTransport if transport not in capabilities.transports),
        *(policy for policy in VerificationPolicy if policy not in capabilities.policies),
    ]
    assert names_in(refused) == unserved


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_not_offered_is_refused_at_the_start_with_what_there_is(name: str) -> None:
    assert MATRIX[name][1:] == ["not offered", *[""] * 5, "at start-up"]
    with pytest.raises(ProposerError) as refused:
        load_proposer(name, ProposerSettings())
    assert str(refused.value) == f"unknown proposer {name!r}; there are: {', '.join(NAMES)}"


def test_names_that_users_know_from_elsewhere_are_told_about() -> None:
    assert {"medusa", "dflash", "tree"} <= set(NOT_OFFERED)


@pytest.mark.parametrize("name", NAMES)
def test_a_proposers_page_has_its_type_shapes_inputs_outputs_cadence_errors_and_graph_safety(name: str) -> None:
    text, facts, capabilities = page(f"{name}.md"), table(f"{name}.md", "| | |"), capabilities_of(name)
    assert text.startswith(f"# Proposer `{name}`\n")
    assert {"type", "start it", "code", "shapes", "vocabulary"} <= set(facts)
    for section in ("Inputs and outputs", "Cadence", "Errors"):
        assert f"\n## {section}" in text
    assert facts["graph_safe"][0].split(":")[0] == yes_or_no(capabilities.graph_safe)
    assert facts["needs_hidden_states"] == [yes_or_no(capabilities.needs_hidden_states)]
    assert set(names_in(facts["transports of q"][0])) == set(capabilities.transports)
    for path in names_in_code(facts["code"][0]):
        assert (FOLDER.parents[1] / path).exists(), path


def names_in_code(cell: str) -> list[str]:
    """Paths in backquotes; those without a folder are beside the first."""
    paths = [part for part in cell.split("`")[1::2] if part.endswith(".py")]
    folder = paths[0].rpartition("/")[0]
    return [path if "/" in path else f"{folder}/{path}" for path in paths]


def test_the_interface_is_what_the_page_says_of_its_version() -> None:
    assert f"\n## Interface version {INTERFACE_VERSION}\n" in page("writing.md")
    documented = {name: names_in(row[0]) for name, row in table("writing.md", "| class | has").items()}
    values = (ProposerCapabilities, HiddenStatesNeed, ProposeInput, DraftKvUsage, ProposerKind, ProposerSettings)
    expected = {value.__name__: [field.name for field in fields(value)] for value in values}
    methods = [name for name in vars(Proposer) if not name.startswith("_")]
    assert documented == {"Proposer": methods, **expected}
