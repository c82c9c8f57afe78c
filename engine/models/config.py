"""The shape of a Llama-family model, whatever file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


class ModelFileError(Exception):
    """A model directory or file that cannot be used; the message names the path and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the forward pass needs to know besides the weights.

    Llama, Mistral, Qwen2/2.5, Qwen3 and SmolLM differ only in `attention_bias` (q, k, v have biases) and
    `qk_norm` (RMS norm of each head's q and k before the rotation).
    """

    family: str  # "llama", "mistral", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of key-value memory one token takes: keys and values of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model's config and its weights under their Hugging Face names, un-permuted, in the file's precision.

    Quantised GGUF tensors are dequantised to float32. `lm_head.weight` is absent when embeddings are tied.
    """

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
