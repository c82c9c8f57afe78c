"""Proposers by name. A new one is its own file, options and all, and a line in `_KINDS` (or `register_proposer`)."""

import argparse

from draft_service.proposers import ngram, suffix, synthetic
from draft_service.proposers.base import INTERFACE_VERSION, Proposer, ProposerCapabilities
from draft_service.proposers.kind import ProposerError, ProposerKind, ProposerSettings
from draft_service.proposers.model_options import add_model_options


def _load_draft_model(settings: ProposerSettings) -> Proposer:
    from draft_service.proposers.draft_model import load_draft_model  # torch, only for who needs it

    return load_draft_model(settings)


def _load_eagle(settings: ProposerSettings) -> Proposer:
    from draft_service.proposers.eagle import load_eagle  # torch

    return load_eagle(settings)


def _load_mtp(settings: ProposerSettings) -> Proposer:
    from draft_service.proposers.mtp import load_mtp  # torch

    return load_mtp(settings)


_KINDS = {
    "ngram": ngram.KIND,
    "suffix": suffix.KIND,
    "draft_model": ProposerKind(_load_draft_model),
    "synthetic": synthetic.KIND,
    "eagle": ProposerKind(_load_eagle),
    "mtp": ProposerKind(_load_mtp),
}


def register_proposer(name: str, kind: ProposerKind) -> None:
    """Offer a proposer under a new name; ValueError when the name is taken."""
    if name in _KINDS:
        raise ValueError(f"proposer {name!r} is registered already")
    _KINDS[name] = kind


def proposer_names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_KINDS)


def add_proposer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --proposer, and each proposer's own options."""
    parser.add_argument("--proposer", default="ngram", help=f"one of: {', '.join(proposer_names())}")
    add_model_options(parser.add_argument_group("proposers with a model"))
    for name in proposer_names():
        _KINDS[name].add_options(parser.add_argument_group(f"proposer {name}"))


def load_proposer(name: str, settings: ProposerSettings) -> Proposer:
    """Start a proposer.

    Raises:
        ProposerError: an unknown name, one that this service cannot feed, or contradicting settings.
        EngineError and what else `load_engine` raises: a model that cannot be used.
    """
    existing = f"there are: {', '.join(proposer_names())}"
    if name not in _KINDS:
        raise ProposerError(f"unknown proposer {name!r}; {existing}")
    kind = _KINDS[name]
    if kind.interface_version != INTERFACE_VERSION:
        raise ProposerError(
            f"proposer {name!r} was written for interface version {kind.interface_version}, "
            f"this service has version {INTERFACE_VERSION}; {existing}"
        )
    try:
        proposer = kind.load(settings)
    except (ProposerError, ValueError) as error:
        raise ProposerError(f"proposer {name!r}: {error}") from error
    if unsupported := _unsupported(proposer.capabilities):
        raise ProposerError(f"proposer {name!r} {unsupported}; {existing}")
    return proposer


def _unsupported(capabilities: ProposerCapabilities) -> str:
    """What the proposer needs or does that the services cannot; empty for nothing."""
    if capabilities.proposes_trees:
        return "proposes trees, which the target does not verify"
    return ""
