"""How a proposer is started: what it can be told, and what it says when it cannot serve."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from draft_service.limits import DraftLimits
from draft_service.proposers.base import Proposer
from engine.backends.settings import EngineSettings

OptionGroup: TypeAlias = argparse._ArgumentGroup  # argparse has no public name for it


class ProposerError(Exception):
    """A proposer that cannot be started; the message names it, the limit, and what there is instead."""


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """What users configure: what proposers share, and each one's own options."""

    limits: DraftLimits = field(default_factory=DraftLimits)
    engine: EngineSettings | None = None  # None: no model was named
    options: argparse.Namespace = field(default_factory=argparse.Namespace)  # as `add_options` has declared them


def refuse_model(settings: ProposerSettings) -> None:
    """ProposerError when a model, or memory for one, was named for a proposer that uses none."""
    if settings.engine is not None:
        raise ProposerError("uses no model, so --model and --toy mean nothing to it; 'draft_model' uses one")
    if getattr(settings.options, "kv_memory", None) is not None:
        raise ProposerError("uses no model, so --kv-memory means nothing to it; 'draft_model' uses one")


def no_options(group: OptionGroup) -> None:
    """Of a proposer that has none of its own."""


@dataclass(frozen=True, slots=True)
class ProposerKind:
    """A proposer before it is started. Neither function may need torch at import: `load` imports what it needs."""

    load: Callable[[ProposerSettings], Proposer]  # raises ProposerError or ValueError for what the user can mend
    add_options: Callable[[OptionGroup], None] = no_options
    interface_version: int = 2  # of base.py that it was written for; stays 2 when that goes on
