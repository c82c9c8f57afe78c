"""What a trained draft model stands on: its artefact, and the target that it takes its ends from."""

from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.proposers.kind import ProposerError, ProposerSettings
from draft_service.proposers.model_base import Drafting, drafting_of
from draft_service.proposers.trained import bundled_names, resolve_head
from engine.backends.settings import EngineSettings
from engine.backends.torch_backend import TorchEngine
from engine.cpus import use_threads
from engine.heads.artefact import Artefact, load_artefact
from engine.kernels.choice import choose_kernels
from engine.models.config import LoadedModel, ModelFileError
from engine.models.decoder import DecoderModel
from engine.models.linear import ChunkedLinear, LinearType, PackedLinear, packed_linear_is_available
from engine.models.loading import load_model
from tandem.models import ModelNotFoundError, resolve_model
from tandem.vocabulary import Vocabulary, VocabularyError

KV_MEMORY_BYTES = 64 << 20  # by default: a row of few layers takes little
_DTYPE = torch.bfloat16  # of int8 matrices: float32 takes up to twice the time for the same acceptance


@dataclass(frozen=True, slots=True)
class OverTarget:
    """All that a model is built from."""

    artefact: Artefact
    target: LoadedModel
    vocabulary: Vocabulary  # the target's
    dtype: torch.dtype
    linear: LinearType
    max_context: int
    settings: ProposerSettings
    drafting: Drafting

    @property
    def name(self) -> str:
        """Of the artefact's directory."""
        return Path(self.artefact.path).name

    def engine_of(self, model: DecoderModel) -> TorchEngine:
        """An engine for the built model; ValueError when its memory cannot serve the limits."""
        engine = self.settings.engine
        assert engine is not None
        block_bytes = model.config.kv_bytes_per_token(self.dtype.itemsize) * engine.block_size
        built = TorchEngine(
            model,
            choose_kernels(model.config),
            num_blocks=(engine.kv_memory_bytes or KV_MEMORY_BYTES) // block_bytes,
            block_size=engine.block_size,
        )
        self.settings.limits.check_memory(built.kv_usage())
        return built


def read_over_target(settings: ProposerSettings) -> OverTarget:
    """Read --head and --model.

    ProposerError without either or for a model that cannot be used, ArtefactError for a directory that is no artefact,
    ValueError for limits that cannot be served.
    """
    engine, head = settings.engine, settings.options.head
    if head is None:
        raise ProposerError(
            "needs a head: name one with --head, a directory or one that comes with tandem "
            f"({', '.join(bundled_names()) or 'none'})"
        )
    if engine is None:
        raise ProposerError(f"needs the target of --head {head}: name it with --model")
    settings.limits.check_step(engine.max_step_tokens)
    drafting = drafting_of(settings)
    use_threads(engine.threads)
    target, vocabulary = _target(engine)
    return OverTarget(
        artefact=load_artefact(resolve_head(head)),
        target=target,
        vocabulary=vocabulary,
        dtype=_DTYPE,
        linear=PackedLinear if packed_linear_is_available(_DTYPE) else ChunkedLinear,
        max_context=min(engine.max_context or target.config.max_context, target.config.max_context),
        settings=settings,
        drafting=drafting,
    )


def _target(engine: EngineSettings) -> tuple[LoadedModel, Vocabulary]:
    try:
        path = resolve_model(engine.model)
        return load_model(path), Vocabulary.load(path)
    except (ModelNotFoundError, ModelFileError, VocabularyError) as error:
        raise ProposerError(f"model {engine.model!r}: {error}") from error
