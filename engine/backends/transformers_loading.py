"""From a model's files to a running engine over transformers: what of it can be made invariant, proved, said."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import transformers

from engine.backends.torch_loading import DTYPES
from engine.backends.transformers_backend import TransformersEngine
from engine.hf.causal_model import CausalModel
from engine.hf.invariance import make_attention_invariant, make_linears_invariant, whole_text_logits
from engine.hf.layout import find_layout, new_caches
from engine.hf.loading import angles_depend_on_step, context_limit, load_causal_lm
from engine.hf.self_test import check_cache, check_rows, num_probe_rows, probe_tokens
from engine.kv.block_pool import BlockPool
from engine.models.config import ModelFileError
from engine.weights_digest import weights_digest
from tandem.defaults import MAX_STEP_TOKENS

_log = logging.getLogger(__name__)

_ORIGIN = {"_name_or_path", "architectures", "transformers_version"}


def load_transformers_engine(
    path: Path,
    dtype: str = "float32",
    *,
    kv_memory_bytes: int,
    block_size: int = 16,
    max_context: int | None = None,
    max_step_tokens: int = MAX_STEP_TOKENS,
    prefix_cache: bool = False,
) -> TransformersEngine:
    """An engine over the causal language model at `path`, with `kv_memory_bytes` for its rows.

    `max_context` lowers the model's own limit; `max_step_tokens` is the largest step the self-test covers. Raises
    `ModelFileError` for files that cannot be used, ValueError for a setting that cannot be, EngineError for a
    model that is not causal. A model that is not found row-invariant runs, and says that it is not deterministic.
    """
    start = time.perf_counter()
    model = _load(path, dtype, max_context)
    # Now: the linears are about to be packed. Buffers too, rotary frequencies are among them.
    digest = weights_digest(
        (*model.model.named_parameters(), *model.model.named_buffers()), _config_text(model.model.config)
    )
    tokens = probe_tokens(model.vocab_size, model.max_context)[0]
    reference = whole_text_logits(model, tokens)
    layout = find_layout(model)
    failures = make_attention_invariant(model, layout, tokens, reference)
    attention = "torch" if failures else "torch-inv"
    linear, linear_failures = make_linears_invariant(model, tokens, reference, max_step_tokens)
    failures += linear_failures
    if angles_depend_on_step(model.config, model.max_context):
        failures.append("rotary angles depend on the longest position of a step")
    block_bytes = layout.block_bytes(block_size)
    if kv_memory_bytes < block_bytes:
        raise ValueError(f"--kv-memory {kv_memory_bytes} bytes is less than one block of {block_bytes} bytes")

    # A pool of its own, so that the engine's begins empty.
    num_blocks = 3 * -(-num_probe_rows(model.max_context, max_step_tokens) // block_size)
    probe = TransformersEngine(
        model, new_caches(model, layout, num_blocks, block_size), BlockPool(num_blocks, block_size)
    )
    check_cache(probe, reference, model.dtype)
    report = check_rows(probe, failures, max_step_tokens)
    fingerprint = (
        f"transformers-{transformers.__version__}:{dtype}:{linear}:{attention}"
        f":{report.logits_sha256[:16]}:{digest[:16]}"
    )
    _log.info("engine %s built and tested in %.2f s", fingerprint, time.perf_counter() - start)
    num_blocks = kv_memory_bytes // block_bytes
    caches = new_caches(model, layout, num_blocks, block_size)
    return TransformersEngine(
        model,
        caches,
        BlockPool(num_blocks, block_size, prefix_cache=prefix_cache and caches.can_truncate),
        deterministic=report.passed,
        numerics_fingerprint=fingerprint,
    )


def _config_text(config: transformers.PreTrainedConfig) -> str:
    """What is not about where the model came from. A window decides only rows past it, which no short text has."""
    said = {name: value for name, value in config.to_dict().items() if name not in _ORIGIN}
    return json.dumps(said, sort_keys=True, default=str)


def _load(path: Path, dtype: str, max_context: int | None) -> CausalModel:
    network = load_causal_lm(path, DTYPES[dtype])
    head: Any = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = network.get_input_embeddings()
    if head is None:
        raise ModelFileError(f"a model of type {network.config.model_type!r} has no logits over its vocabulary")
    vocab_size, num_embeddings = head.weight.shape[0], embedding.weight.shape[0]
    if num_embeddings < vocab_size:
        raise ModelFileError(f"the model has logits of {vocab_size} ids and embeddings of {num_embeddings}")
    limit = context_limit(network.config.get_text_config(decoder=True), max_context)
    return CausalModel(network, vocab_size, limit, DTYPES[dtype])
