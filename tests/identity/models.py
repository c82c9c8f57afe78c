"""Models that the identity tests run on, each with a draft that agrees with it now and then."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.base import SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from engine.backends.torch_loading import build_invariant
from engine.backends.toy_backend import hashed_logits
from engine.kernels.choice import choose_kernels
from engine.models.config import LoadedModel
from engine.models.loading import load_model
from engine.models.weight_names import expected_shapes
from tandem.defaults import MAX_STEP_TOKENS
from tandem.vocabulary import Vocabulary
from tests.engine.tiny_models import tiny_config
from tests.fixtures.demo_model import demo_model_dir
from tests.fixtures.tiny_models import random_model
from tests.orchestrator.services import VOCAB, VOCABULARY, toy_engine

MAX_CONTEXT = 512


@dataclass(frozen=True)
class Model:
    """A model whose engines each have key-value memory of their own."""

    name: str
    vocabulary: Vocabulary
    engine: Callable[[], SpeculativeEngine]
    similar_engine: Callable[[], SpeculativeEngine]  # of another model that agrees now and then
    patience_s: float  # an answer that takes longer was lost

    def self_draft(self) -> DraftModelProposer:
        """The target as its own draft."""
        return DraftModelProposer(self.engine(), self.name, self.vocabulary.id_bytes_hash)

    def similar_draft(self) -> DraftModelProposer:
        """A draft model that is right now and then."""
        return DraftModelProposer(self.similar_engine(), "similar", self.vocabulary.id_bytes_hash)


def toy() -> Model:
    """Hashed logits; the draft's are blended with others."""
    return Model("toy", VOCABULARY, toy_engine, lambda: toy_engine(hashed_logits(VOCAB, seed=3, blend=0.3)), 0.4)


def tiny() -> Model:
    """A random model of four layers on the native engine; the draft lacks the last of them.

    Its inner size is one at which a packed linear of a single row would give other bits than one of several.
    """
    config = tiny_config(vocab_size=VOCAB, num_layers=4, intermediate_size=1536)
    return _native("tiny", random_model(config, seed=1), VOCABULARY, 1, 0.4)


@functools.cache
def real() -> Model:
    """The demo model; the draft lacks its last two layers."""
    directory = demo_model_dir()
    return _native("smollm2-135m", load_model(directory), Vocabulary.load(directory), 2, 6.0)


def _native(
    name: str, model: LoadedModel, vocabulary: Vocabulary, num_layers_less: int, patience_s: float
) -> Model:
    """Engines in float32 over one copy of the weights."""
    return Model(name, vocabulary, _engines(model), _engines(_shallow(model, num_layers_less)), patience_s)


def _engines(model: LoadedModel) -> Callable[[], TorchEngine]:
    built, _, failures = build_invariant(model, torch.float32, MAX_CONTEXT, MAX_STEP_TOKENS)
    assert failures == []
    kernels = choose_kernels(model.config)
    return lambda: TorchEngine(built, kernels, num_blocks=640, deterministic=True)


def _shallow(model: LoadedModel, num_layers_less: int) -> LoadedModel:
    """The model without its last layers."""
    config = replace(model.config, num_layers=model.config.num_layers - num_layers_less)
    return LoadedModel(config, {name: model.weights[name] for name in expected_shapes(config)})
