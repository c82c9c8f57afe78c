"""Tiny random models: every test of the engine runs on them, without files."""

import torch

from engine.models.config import LoadedModel, ModelConfig


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers, grouped queries, a vocabulary of 96."""
    fields: dict[str, object] = {
        "family": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_context": 256,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]


def random_model(config: ModelConfig, seed: int = 0) -> LoadedModel:
    """Weights large enough that attention and logits are far from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    weights = {
        "model.embed_tokens.weight": rand(config.vocab_size, hidden),
        "model.norm.weight": 1 + rand(hidden, scale=0.1),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = rand(config.vocab_size, hidden)
    sizes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for name, size in sizes.items():
            weights[f"{layer}self_attn.{name}_proj.weight"] = rand(size, hidden, scale=0.2)
            if config.attention_bias:
                weights[f"{layer}self_attn.{name}_proj.bias"] = rand(size)
            if config.qk_norm and name != "v":
                weights[f"{layer}self_attn.{name}_norm.weight"] = 1 + rand(dim, scale=0.1)
        weights[f"{layer}self_attn.o_proj.weight"] = rand(hidden, sizes["q"], scale=0.1)
        weights[f"{layer}mlp.gate_proj.weight"] = rand(inner, hidden, scale=0.15)
        weights[f"{layer}mlp.up_proj.weight"] = rand(inner, hidden, scale=0.15)
        weights[f"{layer}mlp.down_proj.weight"] = rand(hidden, inner, scale=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = 1 + rand(hidden, scale=0.1)
    return LoadedModel(config, weights)


FAMILIES = {
    "llama": tiny_config(),
    "mistral-untied": tiny_config(family="mistral", tie_word_embeddings=False, num_kv_heads=6),
    "qwen2-biases": tiny_config(family="qwen2", attention_bias=True, num_kv_heads=1),
    "qwen3-qk-norm": tiny_config(family="qwen3", qk_norm=True, head_dim=32, tie_word_embeddings=False),
}
