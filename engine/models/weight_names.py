"""The weights a model must have: Hugging Face names and shapes, derived from its config."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engine.models.config import ModelConfig, ModelFileError


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight of the model, in forward order. Linear weights are [outputs, inputs]."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    key_size = config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, size in (("q", query_size), ("k", key_size), ("v", key_size)):
        yield f"self_attn.{name}_proj.weight", (size, hidden)
        if config.attention_bias:
            yield f"self_attn.{name}_proj.bias", (size,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, query_size)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def check_weights(path: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise `ModelFileError` unless `weights` are exactly the expected ones in name and shape.

    A weight nobody expects is refused too: ignoring it would run another model than the file holds.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ModelFileError(f"{path}: {len(missing)} weights are missing, the first is {missing[0]}")
    unknown = [name for name in weights if name not in expected]
    if unknown:
        raise ModelFileError(
            f"{path}: weight {unknown[0]} is not part of a {config.family} model as supported here "
            f"({len(unknown)} such weights)"
        )
    for name, shape in expected.items():
        found = tuple(weights[name].shape)
        if found != shape:
            raise ModelFileError(f"{path}: weight {name} is {list(found)}, its config says {list(shape)}")
