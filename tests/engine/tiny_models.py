"""The shapes that the engine's tests run random models of: smaller, and with other groups of heads."""

from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from tests.fixtures.tiny_models import CONFIGS


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped queries, a vocabulary of 96."""
    fields = {"vocab_size": 96, "intermediate_size": 96, "num_heads": 6, "max_context": 256, **changes}
    return replace(CONFIGS["llama"], **fields)


FAMILIES = {
    "llama": tiny_config(),
    "mistral-untied": tiny_config(family="mistral", tie_word_embeddings=False, num_kv_heads=6),
    "qwen2-biases": tiny_config(family="qwen2", attention_bias=True, num_kv_heads=1),
    "qwen3-qk-norm": tiny_config(family="qwen3", qk_norm=True, head_dim=64, tie_word_embeddings=False),
}
