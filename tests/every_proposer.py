"""Every registered proposer, ready to draft: tests that must hold for all of them are parametrised over NAMES.

A proposer that needs no model is there as soon as it is registered. One that stands on a model fails every such test
until it has its line in `_ON_A_MODEL`.
"""

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType

from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.kind import ProposerSettings
from draft_service.proposers.registry import add_proposer_arguments, load_proposer, proposer_names
from draft_service.proposers.synthetic import SyntheticProposer
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import DraftProbsTransport, VerificationPolicy
from tests import heads

NAMES = tuple(proposer_names())
ACCEPTANCE_RATES = (0.9, 0.6)  # of what is synthetic

_ON_A_MODEL: Mapping[str, Callable[[DraftModelProposer], Proposer]] = MappingProxyType(
    {
        "draft_model": lambda drafts: drafts,
        "synthetic": lambda drafts: SyntheticProposer(drafts, drafts.num_token_ids, ACCEPTANCE_RATES),
        "eagle": lambda drafts: heads.untrained_eagle(drafts.capabilities.model),
        "mtp": lambda drafts: heads.untrained_mtp(drafts.capabilities.model),
    }
)


def own_options(*arguments: str) -> ProposerSettings:
    """What a command line with these options of proposers configures, without a model."""
    parser = argparse.ArgumentParser()
    add_proposer_arguments(parser)
    return ProposerSettings(options=parser.parse_args(arguments))


def make_registered(name: str, make_draft_model: Callable[[], DraftModelProposer]) -> Proposer:
    """A fresh one, by default settings; ProposerError for one that needs a model and is not known here."""
    if name in _ON_A_MODEL:
        return _ON_A_MODEL[name](make_draft_model())
    return load_proposer(name, own_options())


def stands_on_a_model(name: str) -> bool:
    """Whether a model makes its drafts."""
    return name in _ON_A_MODEL


def serves(name: str, policy: VerificationPolicy, transport: DraftProbsTransport) -> bool:
    """Whether sessions under the policy can have its drafts with the transport."""
    capabilities = make_registered(name, lambda: DraftModelProposer(ToyEngine(hashed_logits(8), 8))).capabilities
    return policy in capabilities.policies and transport in capabilities.transports
