"""Proposer `draft_model`: a smaller model drafts, token by token, for the whole batch in lock-step.

It samples as the target would: the same processors with every parameter honoured, the same noise. So a target that
is its own draft agrees with itself in every position.

Letters: A sessions whose next draft a forward decides, V vocabulary.
"""

import torch

from draft_service.proposers.kind import ProposerError, ProposerSettings
from draft_service.proposers.model_base import Drafting, ModelIdentity, ModelProposer, drafting_of
from draft_service.proposers.over_target import read_over_target
from engine.backends.base import SpeculativeEngine
from engine.backends.registry import load_engine
from engine.heads.shallow import build_shallow


class DraftModelProposer(ModelProposer):
    """Drafts with any engine that can truncate."""

    def __init__(
        self,
        engine: SpeculativeEngine,
        model_id: str = "",
        vocab_hash: str = "",
        drafting: Drafting = Drafting(),  # noqa: B008 - frozen
        num_token_ids: int | None = None,
    ) -> None:
        """`num_token_ids`: ids of the vocabulary, fewer than the engine's where its output head is padded.

        Padding is never drafted: the target's may be shorter, and refusing a sampled draft for its value would bias
        `rejection`.
        """
        super().__init__(engine, ModelIdentity("draft_model", model_id, vocab_hash), drafting)
        self.num_token_ids = num_token_ids or engine.capabilities.vocab_size

    def _in_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, : self.num_token_ids]

    def _token_id(self, index: int) -> int:
        return index if index < self.num_token_ids else -1


def load_draft_model(settings: ProposerSettings) -> ModelProposer:
    """The model that was named, or with --head the trained one over that model's ends.

    ProposerError without a model, ValueError when it cannot serve the limits.
    """
    return load_whole_model(settings) if settings.options.head is None else _load_shallow(settings)


def load_whole_model(settings: ProposerSettings) -> DraftModelProposer:
    """Load the model that was named; raises as `load_draft_model`."""
    if settings.engine is None:
        raise ProposerError("needs a model: name one with --model (for `tandem up`: --draft-model)")
    settings.limits.check_step(settings.engine.max_step_tokens)
    loaded = load_engine(settings.engine)
    settings.limits.check_memory(loaded.engine.kv_usage())
    return DraftModelProposer(
        loaded.engine,
        loaded.model_id,
        loaded.vocabulary.id_bytes_hash,
        drafting_of(settings),
        loaded.vocabulary.vocab_size,
    )


def _load_shallow(settings: ProposerSettings) -> ModelProposer:
    """See `read_over_target` and `build_shallow`."""
    parts = read_over_target(settings)
    built = build_shallow(parts.artefact, parts.target, parts.dtype, parts.linear, parts.max_context)
    identity = ModelIdentity("draft_model", parts.name, parts.vocabulary.id_bytes_hash)
    return ModelProposer(parts.engine_of(built.model), identity, parts.drafting, built.token_ids)
