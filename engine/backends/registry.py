"""Engines by name: from settings to a running engine and its vocabulary."""

from dataclasses import dataclass
from pathlib import Path

from engine.backends.base import EngineError, SpeculativeEngine
from engine.backends.settings import DEFAULT_KV_MEMORY_BYTES, EngineSettings
from engine.backends.toy_options import DEFAULT_TOY, build_toy_engine, parse_toy_options
from engine.cpus import use_threads
from engine.freed_memory import return_freed_memory
from engine.kernels.noise import compiled_noise
from engine.models.config import ModelFileError
from tandem.installing import how_to_install
from tandem.models import ModelNotFoundError, resolve_model
from tandem.vocabulary import Vocabulary, VocabularyError

# backend -> what it computes in
_DTYPES = {"torch": ("float32", "bfloat16"), "transformers": ("float32", "bfloat16"), "toy": ("float32",)}
_TOY_MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to serve, and what the handshake says about its model."""

    engine: SpeculativeEngine
    vocabulary: Vocabulary
    model_id: str


def load_engine(settings: EngineSettings) -> LoadedEngine:
    """Load the model and start its engine; takes seconds for a real model.

    Raises ValueError for a setting that cannot be (the message lists what exists), EngineError for a model that
    cannot be found or used.
    """
    if settings.backend not in _DTYPES:
        raise ValueError(f"backend {settings.backend!r} is unknown; there are: {', '.join(_DTYPES)}")
    if settings.dtype not in _DTYPES[settings.backend]:
        raise ValueError(
            f"dtype {settings.dtype!r} is unknown to backend {settings.backend!r}; "
            f"there are: {', '.join(_DTYPES[settings.backend])}"
        )
    use_threads(settings.threads)
    compiled_noise()  # the first sampled token shall not wait for a compiler
    if settings.backend == "toy":
        return _load_toy(settings)
    loaded = _load_torch(settings) if settings.backend == "torch" else _load_transformers(settings)
    return_freed_memory()
    return loaded


def _load_toy(settings: EngineSettings) -> LoadedEngine:
    options = parse_toy_options(settings.toy or DEFAULT_TOY)
    if settings.kv_memory_bytes is not None:
        raise ValueError(
            f"--kv-memory {settings.kv_memory_bytes} bytes mean nothing to a toy engine; "
            f"its pool is set in blocks: --toy {options.kind}:blocks={options.blocks}"
        )
    engine = build_toy_engine(
        options,
        settings.block_size,
        settings.max_context or _TOY_MAX_CONTEXT,
        prefix_cache=settings.prefix_cache,
    )
    return LoadedEngine(engine, Vocabulary.toy(options.vocab), options.name)


def _load_torch(settings: EngineSettings) -> LoadedEngine:
    # Not for the toy backend, which starts at once.
    from engine.backends.torch_loading import load_torch_engine
    from engine.models.loading import load_model

    try:
        path = resolve_model(settings.model)
        vocabulary = Vocabulary.load(path)
        model = load_model(path)
    except (ModelNotFoundError, ModelFileError, VocabularyError) as error:
        raise EngineError(f"model {settings.model!r}: {error}") from error
    engine = load_torch_engine(
        model,
        settings.dtype,
        kv_memory_bytes=settings.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES,
        block_size=settings.block_size,
        max_context=settings.max_context,
        max_step_tokens=settings.max_step_tokens,
        prefix_cache=settings.prefix_cache,
    )
    return LoadedEngine(engine, vocabulary, _model_id(path))


def _load_transformers(settings: EngineSettings) -> LoadedEngine:
    # An extra: only who chooses the backend needs the package.
    try:
        from engine.backends.transformers_loading import load_transformers_engine
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise EngineError(f"backend 'transformers' needs that package: {how_to_install('hf')}") from error

    try:
        path = resolve_model(settings.model)
        vocabulary = Vocabulary.load(path)
        engine = load_transformers_engine(
            path,
            settings.dtype,
            kv_memory_bytes=settings.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES,
            block_size=settings.block_size,
            max_context=settings.max_context,
            max_step_tokens=settings.max_step_tokens,
            prefix_cache=settings.prefix_cache,
        )
    except (ModelNotFoundError, ModelFileError, VocabularyError) as error:
        raise EngineError(f"model {settings.model!r}: {error}") from error
    if vocabulary.vocab_size > engine.capabilities.vocab_size:
        raise EngineError(
            f"model {settings.model!r}: its tokenizer has {vocabulary.vocab_size} ids, its logits only "
            f"{engine.capabilities.vocab_size}"
        )
    return LoadedEngine(engine, vocabulary, _model_id(path))


def _model_id(path: Path) -> str:
    """The directory's or file's own name: the same on every machine that holds the same model."""
    return path.name.removesuffix(".gguf")
