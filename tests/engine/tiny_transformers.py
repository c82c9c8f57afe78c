"""Tiny random models of transformers, saved and loaded as a user's would be."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from engine.backends.transformers_backend import TransformersEngine
from engine.backends.transformers_loading import load_transformers_engine

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Head sizes are 16 where rows must be invariant: of others, such as 8, 12 and 128, MKL on some processors gives a row
# other bits by how many rows or keys there are, which the self-test finds and the engine says.
HEAD_DIM = 16
CONFIGS: dict[str, PreTrainedConfig] = {
    # Of an inner size at which a packed linear of a single row would give other bits than one of several.
    "llama": LlamaConfig(**{**_SIZES, "intermediate_size": 1536}, head_dim=HEAD_DIM),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "qwen3": Qwen3Config(**_SIZES, head_dim=HEAD_DIM),
    "window": MistralConfig(**_SIZES, sliding_window=16, head_dim=HEAD_DIM),
    "softcap": Gemma2Config(**_SIZES, head_dim=8, sliding_window=16),
    "experts": MixtralConfig(**_SIZES, num_local_experts=4),
    "state": MambaConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, state_size=8),
    "bidirectional": BertConfig(**_SIZES),
}


def save(directory: Path, name: str, **changes: Any) -> PreTrainedModel:
    """The model of that config, with weights wide enough for logits that differ, as it lies in `directory` now."""
    config = CONFIGS[name].from_dict(CONFIGS[name].to_dict() | changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape)
    model.save_pretrained(directory)
    network: PreTrainedModel = model
    return network


def load(directory: Path, **settings: Any) -> TransformersEngine:
    """An engine of 64 blocks and more, with a quick self-test."""
    return load_transformers_engine(
        directory, **{"kv_memory_bytes": 1 << 20, "block_size": 4, "max_step_tokens": 72, **settings}
    )


@torch.no_grad()
def whole_text(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' own logits, without a cache -> [T, V]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
