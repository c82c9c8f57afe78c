"""A naive Llama: no cache, no batch, no packing; recomputes the whole sequence. The reference of the engine."""

import torch
import torch.nn.functional as F

from engine.models.config import LoadedModel


def naive_logits(model: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 logits [n, V] of every position."""
    config, w = model.config, model.weights
    head_dim, eps, n = config.head_dim, config.rms_norm_eps, len(token_ids)
    inverse = config.rope_theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(n)[:, None] * inverse[None]
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [n, 1, D/2] on the unit circle

    def rope(x: torch.Tensor) -> torch.Tensor:
        rotated = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2 :]) * turn
        return torch.cat((rotated.real, rotated.imag), dim=-1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name]

    hidden = w["model.embed_tokens.weight"][token_ids]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        x = norm(hidden, f"{layer}input_layernorm.weight")
        q, k, v = (
            F.linear(x, w[f"{layer}self_attn.{p}_proj.weight"], w.get(f"{layer}self_attn.{p}_proj.bias")).view(
                n, -1, head_dim
            )
            for p in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, f"{layer}self_attn.q_norm.weight"), norm(k, f"{layer}self_attn.k_norm.weight")
        group = config.num_heads // config.num_kv_heads
        k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (rope(k), v))
        attended = F.scaled_dot_product_attention(rope(q).transpose(0, 1), k, v, is_causal=True)
        hidden = hidden + F.linear(attended.transpose(0, 1).reshape(n, -1), w[f"{layer}self_attn.o_proj.weight"])
        x = norm(hidden, f"{layer}post_attention_layernorm.weight")
        gate, up = (F.linear(x, w[f"{layer}mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        hidden = hidden + F.linear(F.silu(gate) * up, w[f"{layer}mlp.down_proj.weight"])
    head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return F.linear(norm(hidden, "model.norm.weight"), head)
