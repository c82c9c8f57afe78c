"""Proposers by name. A new one is its own file plus one line in `_FACTORIES` (or one `register_proposer` call)."""

from collections.abc import Callable
from dataclasses import dataclass

from draft_service.proposers.base import Proposer
from draft_service.proposers.ngram import NgramProposer
from engine.backends.settings import EngineSettings
from tandem.defaults import MAX_SESSIONS
from tandem.prompt_lookup import PromptLookup


class ProposerError(Exception):
    """A proposer that cannot be started; the message names it, the limit, and what there is instead."""


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """What users configure; each factory reads its own part."""

    max_ngram_size: int = 5
    min_ngram_size: int = 1
    max_sessions: int = MAX_SESSIONS
    engine: EngineSettings | None = None  # None: no model was named


ProposerFactory = Callable[[ProposerSettings], Proposer]


def _ngram(settings: ProposerSettings) -> Proposer:
    if settings.engine is not None:
        raise ProposerError("proposer 'ngram' uses no model: --model and --toy are for 'draft_model'")
    try:
        return NgramProposer(PromptLookup(settings.max_ngram_size, settings.min_ngram_size))
    except ValueError as error:
        raise ProposerError(f"proposer 'ngram': {error}") from error


def _draft_model(settings: ProposerSettings) -> Proposer:
    from draft_service.proposers.draft_model import DraftModelProposer  # torch, only for who needs it
    from engine.backends.registry import load_engine

    if settings.engine is None:
        raise ProposerError("proposer 'draft_model' needs a model: name one with --model")
    if settings.max_sessions > settings.engine.max_step_tokens:
        raise ProposerError(
            f"proposer 'draft_model': max_sessions {settings.max_sessions} is more than max_step_tokens "
            f"{settings.engine.max_step_tokens}, and a step drafts a token for every session"
        )
    loaded = load_engine(settings.engine)
    return DraftModelProposer(
        loaded.engine,
        loaded.model_id,
        loaded.vocabulary.id_bytes_hash,
        settings.engine.max_step_tokens,
        loaded.vocabulary.vocab_size,
    )


_FACTORIES: dict[str, ProposerFactory] = {"ngram": _ngram, "draft_model": _draft_model}


def register_proposer(name: str, factory: ProposerFactory) -> None:
    """Offer a proposer under a new name; ValueError when the name is taken."""
    if name in _FACTORIES:
        raise ValueError(f"proposer {name!r} is registered already")
    _FACTORIES[name] = factory


def proposer_names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_FACTORIES)


def load_proposer(name: str, settings: ProposerSettings) -> Proposer:
    """Start a proposer.

    Raises:
        ProposerError: an unknown name, one that this service cannot feed, or contradicting settings.
        EngineError and what else `load_engine` raises: a model that cannot be used.
    """
    if name not in _FACTORIES:
        raise ProposerError(f"unknown proposer {name!r}; there are: {', '.join(proposer_names())}")
    proposer = _FACTORIES[name](settings)
    if proposer.capabilities.needs_hidden_states:
        raise ProposerError(
            f"proposer {name!r} needs hidden states of the target, which do not travel between the services; "
            f"there are: {', '.join(proposer_names())}"
        )
    return proposer
