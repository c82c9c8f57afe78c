"""Load a Llama-family model from one GGUF file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.models.config import LoadedModel, ModelConfig, ModelFileError
from engine.models.dequantize import tensor_num_bytes, to_torch
from engine.models.weight_names import check_weights
from tandem.models import GgufFileError, GgufTensor, read_gguf_header

_FAMILIES = ("llama", "qwen2", "qwen3")  # a Mistral model's file says "llama"
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(path: Path) -> LoadedModel:
    """The model in the file; raises `ModelFileError` naming the path and what is wrong or unsupported."""
    try:
        header = read_gguf_header(path)
    except GgufFileError as error:
        raise ModelFileError(str(error)) from error
    config = _read_config(path, header.metadata, header.tensors)
    data = np.memmap(path, dtype=np.uint8, mode="c")  # copy on write: torch wants writable memory
    weights = dict(_read_weights(path, config, header.tensors.values(), data))
    check_weights(path, config, weights)
    return LoadedModel(config, weights)


def _read_config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> ModelConfig:
    family = metadata.get("general.architecture")
    if family not in _FAMILIES:
        raise ModelFileError(f"{path}: architecture {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
    _refuse_unsupported(path, family, metadata, tensors)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{path}: tensor token_embd.weight is missing")
    try:
        hidden_size = int(metadata[f"{family}.embedding_length"])
        num_heads = int(metadata[f"{family}.attention.head_count"])
        return ModelConfig(
            family=str(family),
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=int(metadata[f"{family}.feed_forward_length"]),
            num_layers=int(metadata[f"{family}.block_count"]),
            num_heads=num_heads,
            num_kv_heads=int(metadata.get(f"{family}.attention.head_count_kv", num_heads)),
            head_dim=int(metadata.get(f"{family}.attention.key_length", hidden_size // num_heads)),
            # Stored as float32, meant as the short decimal: 1e-5, not 9.99999974e-06.
            rms_norm_eps=float(str(np.float32(metadata[f"{family}.attention.layer_norm_rms_epsilon"]))),
            rope_theta=float(metadata.get(f"{family}.rope.freq_base", 10_000.0)),
            max_context=int(metadata[f"{family}.context_length"]),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise ModelFileError(f"{path}: metadata {error} is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"{path}: its metadata does not describe a {family} model: {error}") from error


def _refuse_unsupported(
    path: Path, family: str, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> None:
    """Raise `ModelFileError` for features the forward pass does not have."""
    scaling = metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ModelFileError(f"{path}: scaled rotary positions ({scaling}, rope_freqs) are not supported")
    window = metadata.get(f"{family}.attention.sliding_window")
    if window and window < metadata.get(f"{family}.context_length", 0):
        raise ModelFileError(f"{path}: sliding-window attention ({window} tokens) is not supported")
    if metadata.get(f"{family}.expert_count", 0):
        raise ModelFileError(f"{path}: mixture-of-experts models are not supported")
    head_dim = metadata.get(f"{family}.attention.key_length")
    rotated = metadata.get(f"{family}.rope.dimension_count")
    if head_dim and rotated and head_dim != rotated:
        raise ModelFileError(f"{path}: rotary positions on {rotated} of {head_dim} dimensions are not supported")


def _read_weights(
    path: Path, config: ModelConfig, tensors: Iterable[GgufTensor], data: npt.NDArray[np.uint8]
) -> Iterable[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        try:
            end = tensor.offset + tensor_num_bytes(tensor.type_code, tensor.shape)
            if end > len(data):
                raise ModelFileError(
                    f"{path} is cut short: tensor {tensor.name} ends at byte {end}, the file at {len(data)}"
                )
            weight = to_torch(data[tensor.offset : end], tensor.type_code, tensor.shape)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelFileError(f"{path}: tensor {tensor.name} cannot be read: {error}") from error
        yield _weight_name(path, tensor.name), _unpermute(config, tensor.name, weight)


def _weight_name(path: Path, gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise ModelFileError(f"{path}: tensor {gguf_name} is not part of a Llama-family model as supported here")


def _unpermute(config: ModelConfig, gguf_name: str, weight: torch.Tensor) -> torch.Tensor:
    """Undo the order of q and k rows in `llama` files: rotary pairs lie side by side there, half a head apart here.

    Rows of one head: [head_dim / 2 pairs, 2 members, hidden] -> [2, head_dim / 2, hidden].
    """
    part = gguf_name.split(".")[-2]
    if config.family != "llama" or part not in ("attn_q", "attn_k"):
        return weight
    num_heads = config.num_heads if part == "attn_q" else config.num_kv_heads
    if weight.shape[0] != num_heads * config.head_dim:
        return weight  # the check of all shapes names it
    pairs = weight.view(num_heads, config.head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)
