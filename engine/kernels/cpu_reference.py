"""The layer kernels in plain torch: the reference of the compiled ones, and the fallback without a compiler."""

import torch
import torch.nn.functional as F

from engine.attention import KEY_MULTIPLE, attend, causal_mask, round_up
from engine.batch import ForwardBatch
from engine.kernels.base import HeadNorms, RotaryTable
from engine.kv.cache import KvCache
from engine.models.config import ModelConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [T, heads, D] by their position's angles, cos and sin [T, 1, D/2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class TorchKernels:
    """`LayerKernels` of torch operations, attention sequence by sequence."""

    name = f"torch-inv-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `LayerKernels.add_rms_norm`."""
        if delta is not None:
            residual.add_(delta)
        out.copy_(rms_norm(residual, weight, eps))

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See `LayerKernels.silu_mul`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(F.silu(gate) * up)

    def prepare_attention(
        self, config: ModelConfig, batch: ForwardBatch, cache: KvCache, rotary: RotaryTable
    ) -> "TorchStepAttention":
        """See `LayerKernels.prepare_attention`."""
        return TorchStepAttention(config, batch, cache, rotary)


class TorchStepAttention:
    """Attention of one step: the cache is gathered per sequence and layer, masks once a step."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, cache: KvCache, rotary: RotaryTable) -> None:
        self._config = config
        self._batch = batch
        self._cache = cache
        positions = batch.positions.long()
        # [T, 1, D/2]: one angle for all heads of a token
        self._cos, self._sin = rotary.cos[positions, None], rotary.sin[positions, None]
        self._blocks = batch.slot_mapping.long() // cache.block_size
        self._offsets = batch.slot_mapping.long() % cache.block_size
        group = config.num_heads // config.num_kv_heads
        lengths = [end - start for start, end in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False)]
        self._masks = [causal_mask(n, c, group) for n, c in zip(lengths, batch.context_lens, strict=True)]

    def __call__(self, layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None, out: torch.Tensor) -> None:
        """See `StepAttention`."""
        config, batch = self._config, self._batch
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        # [T, heads, D] each
        tokens = qkv[: batch.num_tokens].view(batch.num_tokens, -1, config.head_dim)
        query, key, value = torch.split(tokens, sizes, dim=1)
        query, key = query.float(), key.float()
        if head_norms is not None:
            query = rms_norm(query, head_norms.query, config.rms_norm_eps)
            key = rms_norm(key, head_norms.key, config.rms_norm_eps)
        query = rotate(query, self._cos, self._sin).to(qkv.dtype)
        self._cache.keys(layer)[self._blocks, :, self._offsets] = rotate(key, self._cos, self._sin).to(qkv.dtype)
        self._cache.values(layer)[self._blocks, :, self._offsets] = value
        heads = out.view(out.shape[0], config.num_heads, config.head_dim)
        for row, (mask, start) in enumerate(zip(self._masks, batch.cu_seqlens_q, strict=False)):
            end = batch.cu_seqlens_q[row + 1]
            keys, values = self._context(layer, row)
            heads[start:end] = attend(query[start:end], keys, values, mask)

    def _context(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [KH, S, D] of one sequence, zero past its context.

        What lies there is another sequence's, and were it not finite, no mask would hold it off: 0 * NaN is NaN.
        """
        cache = self._cache
        context_len = self._batch.context_lens[row]
        padded_len = round_up(context_len, KEY_MULTIPLE)
        num_blocks = -(-padded_len // cache.block_size)
        table = self._batch.block_tables[row]
        ids = F.pad(table[:num_blocks], (0, max(0, num_blocks - table.shape[0])))

        def gather(memory: torch.Tensor) -> torch.Tensor:
            # [blocks, KH, block_size, D] -> [KH, blocks * block_size, D] -> [KH, S, D]
            rows = memory[ids].transpose(0, 1).reshape(memory.shape[1], -1, memory.shape[3])[:, :padded_len]
            rows[:, context_len:] = 0  # the gather made a copy
            return rows

        return gather(cache.keys(layer)), gather(cache.values(layer))
