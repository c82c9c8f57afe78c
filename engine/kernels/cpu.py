"""The compiled layer kernels: ctypes over engine/kernels/cpu.cpp (calls release the interpreter lock).

Threads are used only where there is enough work to pay for waking them; results do not depend on it.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engine.batch import ForwardBatch
from engine.kernels.base import HeadNorms, RotaryTable
from engine.kernels.build import build_library
from engine.kv.cache import KvCache
from engine.models.config import ModelConfig

HEAD_DIMS = (16, 32, 64, 80, 96, 128)
LANES = 16
# Below this much work a thread more costs more than it saves.
MIN_PARALLEL_ELEMENTS = 1 << 16  # of a norm or an activation
MIN_PARALLEL_SCORES = 1 << 13  # of attention: query heads times context rows, over all tokens

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "add_rms_norm": (_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _INT, _INT, _INT),
    "silu_mul": (_POINTER, _POINTER, _INT, _INT, _INT),
    "attention": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER),
}


class _AttentionStep(ctypes.Structure):
    """`AttentionStep` of cpu.cpp, field by field."""

    _fields_ = (
        ("positions", _POINTER),
        ("sequence_rows", _POINTER),
        ("slot_mapping", _POINTER),
        ("block_tables", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("cache", _POINTER),
        ("values_offset", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class CompiledKernels:
    """`LayerKernels` of a compiled library; KernelBuildError when there is no working compiler."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        path = build_library(Path(__file__).with_name("cpu.cpp"), cache_dir)
        self.name = path.stem
        self._library = ctypes.CDLL(str(path))
        self._functions = {
            (name, dtype): self._function(f"tandem_{name}_{suffix}", signature)
            for name, signature in _SIGNATURES.items()
            for dtype, suffix in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
        }

    def _function(self, symbol: str, signature: tuple[object, ...]) -> Callable[..., None]:
        function: Callable[..., None] = self._library[symbol]
        function.argtypes, function.restype = signature, None  # type: ignore[attr-defined]
        return function

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `LayerKernels.add_rms_norm`."""
        rows, size = residual.shape
        self._functions["add_rms_norm", out.dtype](
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            rows,
            size,
            _num_threads(rows * size, MIN_PARALLEL_ELEMENTS),
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See `LayerKernels.silu_mul`."""
        rows, size = out.shape
        num_threads = _num_threads(rows * size, MIN_PARALLEL_ELEMENTS)
        self._functions["silu_mul", out.dtype](gate_up.data_ptr(), out.data_ptr(), rows, size, num_threads)

    def prepare_attention(
        self, config: ModelConfig, batch: ForwardBatch, cache: KvCache, rotary: RotaryTable
    ) -> "CompiledStepAttention":
        """See `LayerKernels.prepare_attention`."""
        function = self._functions["attention", cache.memory.dtype]
        return CompiledStepAttention(function, config, batch, cache, rotary)


class CompiledStepAttention:
    """Attention of one step; holds the tensors whose addresses the structure carries."""

    def __init__(
        self,
        function: Callable[..., None],
        config: ModelConfig,
        batch: ForwardBatch,
        cache: KvCache,
        rotary: RotaryTable,
    ) -> None:
        self._function = function
        self._tensors = (batch, cache, rotary)
        num_scores = config.num_heads * (int(batch.positions.sum()) + batch.num_tokens)
        self._step = _AttentionStep(
            positions=batch.positions.data_ptr(),
            sequence_rows=batch.sequence_rows.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            cosines=rotary.cos.data_ptr(),
            sines=rotary.sin.data_ptr(),
            cache=cache.memory.data_ptr(),
            values_offset=cache.memory[0, 0].numel(),
            num_tokens=batch.num_tokens,
            max_blocks=batch.block_tables.shape[1],
            block_size=cache.block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_threads=_num_threads(num_scores, MIN_PARALLEL_SCORES),
            eps=config.rms_norm_eps,
        )
        self._address = ctypes.addressof(self._step)

    def __call__(self, layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None, out: torch.Tensor) -> None:
        """See `StepAttention`."""
        query_norm = None if head_norms is None else head_norms.query.data_ptr()
        key_norm = None if head_norms is None else head_norms.key.data_ptr()
        self._function(self._address, layer, qkv.data_ptr(), query_norm, key_norm, out.data_ptr())


def unsupported_reason(config: ModelConfig) -> str | None:
    """Why the compiled kernels cannot run the model, or None when they can."""
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim {config.head_dim} is none of {HEAD_DIMS}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % LANES:
            return f"{name} {getattr(config, name)} is no multiple of {LANES}"
    return None


def _num_threads(work: int, minimum: int) -> int:
    return torch.get_num_threads() if work >= minimum else 1
