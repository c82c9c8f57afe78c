"""Load a Llama-family model from a Hugging Face directory: `config.json` and safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.models.config import LoadedModel, ModelConfig, ModelFileError
from engine.models.weight_names import check_weights

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def load_hf_directory(directory: Path) -> LoadedModel:
    """The model in the directory; raises `ModelFileError` naming the path and what is wrong or unsupported."""
    config_path = directory / "config.json"
    raw = _read_json(config_path)
    _refuse_unsupported(config_path, raw)
    weights = _read_weights(directory)
    config = _read_config(config_path, raw, has_head="lm_head.weight" in weights)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # some files carry the tied head a second time
    check_weights(directory, config, weights)
    return LoadedModel(config, weights)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} does not hold a JSON object")
    return content


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings: `rope_parameters` in recent files, `rope_theta` and `rope_scaling` in earlier ones."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10_000.0))
    return {"theta": theta, "type": scaling.get("rope_type", scaling.get("type", "default"))}


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise `ModelFileError` for a family or a feature the forward pass does not have."""
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ModelFileError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
    rope_type = _rope(raw)["type"]
    if rope_type != "default":
        raise ModelFileError(f"{path}: rope scaling {rope_type!r} is not supported")
    window = raw.get("sliding_window")
    uses_window = raw.get("use_sliding_window", family == "mistral")
    if uses_window and window is not None and window < raw.get("max_position_embeddings", 0):
        raise ModelFileError(f"{path}: sliding_window {window} below max_position_embeddings is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFileError(f"{path}: hidden_act {activation!r} is not supported")
    if raw.get("quantization_config"):
        raise ModelFileError(f"{path}: quantization_config is not supported; use the unquantised or a GGUF file")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelFileError(f"{path}: partial_rotary_factor {raw['partial_rotary_factor']} is not supported")
    for flag in ("attention_bias", "mlp_bias"):
        if raw.get(flag):
            raise ModelFileError(f"{path}: {flag} is not supported for {family}")


def _read_config(path: Path, raw: Mapping[str, Any], has_head: bool) -> ModelConfig:
    family = str(raw["model_type"])
    try:
        hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return ModelConfig(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(_rope(raw)["theta"]),
            max_context=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", not has_head)),
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise ModelFileError(f"{path}: {error} is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"{path}: it does not describe a {family} model: {error}") from error


def _read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of `model.safetensors`, or of the files its index names."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFileError(f"{index_path} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = ["model.safetensors"]
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise ModelFileError(f"{path} is missing")
        try:
            weights |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path} cannot be read; it is cut short or damaged: {error}") from error
    return weights
