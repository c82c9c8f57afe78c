"""From a loaded model to a running native engine: choose linears and kernels by name, prove them, say so."""

import logging
import time
from collections.abc import Iterator

import torch

from engine.backends.torch_backend import TorchEngine
from engine.kernels.base import LayerKernels
from engine.kernels.choice import choose_kernels
from engine.kernels.cpu_reference import TorchKernels
from engine.models.config import LoadedModel, ModelConfig
from engine.models.linear import ChunkedLinear, LinearType, PackedLinear, packed_linear_is_available
from engine.models.llama import LlamaModel, build_llama
from engine.self_test import SelfTestReport, check_linears, run_self_test
from engine.weights_digest import weights_digest
from tandem.defaults import MAX_STEP_TOKENS

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_torch_engine(
    model: LoadedModel,
    dtype: str = "float32",
    *,
    num_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    block_size: int = 16,
    max_context: int | None = None,
    max_step_tokens: int = MAX_STEP_TOKENS,
    kernels: LayerKernels | None = None,
    prefix_cache: bool = False,
) -> TorchEngine:
    """An engine with exactly one of `num_blocks` and `kv_memory_bytes` of key-value memory.

    `max_context` lowers the model's own limit; `max_step_tokens` is the largest step the self-test has to cover;
    `kernels` None takes the best of this machine. ValueError names a setting that cannot be.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown, the torch backend has {', '.join(DTYPES)}")
    context = model.config.max_context if max_context is None else max_context
    if not 1 <= context <= model.config.max_context:
        raise ValueError(f"max_context {context} is outside the model's 1..{model.config.max_context}")
    num_blocks = _num_blocks(model.config, DTYPES[dtype], num_blocks, kv_memory_bytes, block_size)
    start = time.perf_counter()
    built, linear, linear_failures = build_invariant(model, DTYPES[dtype], context, max_step_tokens)
    chosen = choose_kernels(model.config) if kernels is None else kernels
    report = run_self_test(built, chosen, linear_failures, max_step_tokens)
    if kernels is None and not report.passed and not linear_failures and not isinstance(chosen, TorchKernels):
        chosen = TorchKernels()
        _log.warning("falling back to kernels %r, which are slower", chosen.name)
        report = run_self_test(built, chosen, linear_failures, max_step_tokens)
    digest = weights_digest(_computed_with(model, DTYPES[dtype]))
    fingerprint = numerics_fingerprint(dtype, linear, chosen, report, digest)
    _log.info("engine %s built and tested in %.2f s", fingerprint, time.perf_counter() - start)
    if not report.passed:
        _log.error("the numerics self-test failed: logits depend on the batch, the engine is not deterministic")
    return TorchEngine(
        built,
        chosen,
        num_blocks=num_blocks,
        block_size=block_size,
        deterministic=report.passed,
        numerics_fingerprint=fingerprint,
        prefix_cache=prefix_cache,
    )


def build_invariant(
    model: LoadedModel, dtype: torch.dtype, max_context: int, max_step_tokens: int
) -> tuple[LlamaModel, LinearType, list[str]]:
    """The model, the kind of its linears, and what is not invariant about them.

    Packed linears, or chunked ones where this machine has no packed ones or they fail their check.
    """
    if packed_linear_is_available(dtype):
        packed = build_llama(model, dtype, PackedLinear, max_context)
        failures = check_linears(packed, max_step_tokens)
        if not failures:
            return packed, PackedLinear, failures
        _log.error("%s is not row-invariant on this machine: %s", PackedLinear.kind, "; ".join(failures))
    _log.warning("falling back to linears of kind %s, which are slower", ChunkedLinear.kind)
    chunked = build_llama(model, dtype, ChunkedLinear, max_context)
    return chunked, ChunkedLinear, check_linears(chunked, max_step_tokens)


def numerics_fingerprint(
    dtype: str, linear: LinearType, kernels: LayerKernels, report: SelfTestReport, digest: str
) -> str:
    """Equal for engines of one build and the same weights, on processors that gave the self-test the same bits.

    `digest`: of the weights, since the self-test reads few tokens: rows of an embedding that it never looked up could
    differ without a trace in its logits.
    """
    return f"torch:{dtype}:{linear.kind}:{kernels.name}:{report.logits_sha256[:16]}:{digest[:16]}"


def _computed_with(model: LoadedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each weight in the precision of the forward pass, at the least: norms stay in float32."""
    for name, weight in model.weights.items():
        yield name, weight.to(torch.float32 if weight.ndim == 1 else dtype)


def _num_blocks(
    config: ModelConfig, dtype: torch.dtype, num_blocks: int | None, kv_memory_bytes: int | None, block_size: int
) -> int:
    if (num_blocks is None) == (kv_memory_bytes is None):
        raise ValueError("exactly one of num_blocks and kv_memory_bytes must be given")
    if kv_memory_bytes is None:
        assert num_blocks is not None
        return num_blocks
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * block_size
    if kv_memory_bytes < block_bytes:
        raise ValueError(f"--kv-memory {kv_memory_bytes} bytes is less than one block of {block_bytes} bytes")
    return kv_memory_bytes // block_bytes
