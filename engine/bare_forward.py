"""The yardstick of `engine/bench.py`: a bare forward of the same weights, in plain torch, with nothing around it.

Every sequence has the same context, in a contiguous cache; packed linears, rows padded to four, attention over
fixed key-value chunks; no paging, no ragged batch, no kernels of our own, no sampling, activations and residual
in the model's dtype.

Letters: B sequences, n new tokens of each, P = max(B * n, 4), H query and KH key-value heads, D head size,
S context rounded up to KEY_MULTIPLE, Q = n * H / KH rounded up to ROW_MULTIPLE.
"""

import torch
import torch.nn.functional as F

from engine.attention import KEY_MULTIPLE, attend_rows, causal_mask, round_up
from engine.batch import MIN_ROWS
from engine.models.llama import LlamaLayer, LlamaModel


class BareForward:
    """A model and a contiguous cache of `batch_size` sequences, each `context_len` tokens long plus new ones."""

    def __init__(self, model: LlamaModel, batch_size: int, max_tokens: int) -> None:
        config = model.config
        self._model = model
        self._batch_size = batch_size
        padded = round_up(max_tokens, KEY_MULTIPLE)
        shape = (config.num_layers, batch_size * config.num_kv_heads, padded, config.head_dim)
        # [layers, B * KH, S of the longest context, D]
        self._keys = torch.zeros(shape, dtype=model.dtype)
        self._values = torch.zeros(shape, dtype=model.dtype)
        self._norms = [
            (layer.attention_norm.to(model.dtype), layer.mlp_norm.to(model.dtype)) for layer in model.layers
        ]
        self._final_norm = model.final_norm.to(model.dtype)

    @torch.no_grad()
    def __call__(self, token_ids: torch.Tensor, first_position: int) -> torch.Tensor:
        """Tokens [B, n] at positions first_position.. -> logits [B * n, V] in the model's dtype."""
        model, config = self._model, self._model.config
        size, eps = (config.hidden_size,), config.rms_norm_eps
        num_rows = token_ids.numel()
        n = token_ids.shape[1]
        positions = torch.arange(first_position, first_position + n).repeat(self._batch_size)
        cos, sin = (table[positions, None].to(model.dtype) for table in (model.rotary.cos, model.rotary.sin))
        mask = causal_mask(n, first_position + n, config.num_heads // config.num_kv_heads)
        hidden = F.embedding(F.pad(token_ids.reshape(-1), (0, max(0, MIN_ROWS - num_rows))), model.embedding)
        for index, (layer, (attention_norm, mlp_norm)) in enumerate(zip(model.layers, self._norms, strict=True)):
            qkv = layer.qkv(F.rms_norm(hidden, size, attention_norm, eps))
            attended = self._attention(index, layer, qkv[:num_rows], cos, sin, mask, first_position)
            hidden = hidden + layer.attention_out(F.pad(attended, (0, 0, 0, hidden.shape[0] - num_rows)))
            gate, up = layer.gate_up(F.rms_norm(hidden, size, mlp_norm, eps)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return model.head(F.rms_norm(hidden, size, self._final_norm, eps))[:num_rows]

    def _attention(
        self,
        index: int,
        layer: LlamaLayer,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        first_position: int,
    ) -> torch.Tensor:
        """Rotate, write the cache, attend: qkv [B * n, (H + 2 KH) * D] -> [B * n, H * D]."""
        config, batch_size = self._model.config, self._batch_size
        num_kv_heads, head_dim = config.num_kv_heads, config.head_dim
        n = qkv.shape[0] // batch_size
        heads = qkv.view(batch_size * n, -1, head_dim)
        rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if layer.head_norms is not None:
            eps, norms = config.rms_norm_eps, layer.head_norms
            query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
            query = F.rms_norm(query, (head_dim,), norms.query.to(query.dtype), eps)
            rotated = torch.cat((query, F.rms_norm(key, (head_dim,), norms.key.to(key.dtype), eps)), dim=1)
        low, high = rotated.chunk(2, dim=-1)
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

        def by_head(x: torch.Tensor) -> torch.Tensor:
            # [B * n, KH * g, D] -> [B * KH, n * g, D]
            grouped = x.reshape(batch_size, n, num_kv_heads, -1, head_dim).transpose(1, 2)
            return grouped.reshape(batch_size * num_kv_heads, -1, head_dim)

        end = first_position + n
        self._keys[index, :, first_position:end] = by_head(rotated[:, config.num_heads :])
        self._values[index, :, first_position:end] = by_head(value)
        rows = by_head(rotated[:, : config.num_heads])
        context = mask.shape[1]
        output = attend_rows(rows, self._keys[index, :, :context], self._values[index, :, :context], mask)
        by_token = output.view(batch_size, num_kv_heads, n, -1, head_dim).transpose(1, 2)
        return by_token.reshape(batch_size * n, -1)
