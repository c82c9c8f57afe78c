"""A causal language model from a directory or a GGUF file, by transformers."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from engine.backends.base import EngineError
from engine.models.config import ModelFileError
from tandem.installing import how_to_install


def load_causal_lm(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `path`, a `.gguf` file, a directory with one or a Hugging Face directory, ready to run.

    Only safetensors and GGUF are read, nothing is fetched, and no code that lies beside the weights is run. Raises
    `ModelFileError` naming what is missing or unsupported: transformers itself would fill missing weights at random.
    """
    directory, gguf_name = _locate(path)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_warning()  # type: ignore[no-untyped-call]
    loaded: Any  # a pair, for which the package has no type
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            directory,
            gguf_file=gguf_name,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except ImportError as error:
        raise EngineError(
            f"transformers lacks a package to load {path}, {how_to_install('hf')}: {error}"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        # transformers lists every model it knows after the first sentence
        raise ModelFileError(
            f"transformers cannot load {path} as a causal language model: {_start(error)}"
        ) from error
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            raise ModelFileError(f"{path}: the file does not have the model's weights, {kind}: {_some(info[kind])}")
    network: PreTrainedModel = model.eval()
    return network


def context_limit(config: PreTrainedConfig, max_context: int | None) -> int:
    """The most tokens of a sequence: the config's limit, or less; ValueError for one that cannot be."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    context = limit if max_context is None else max_context
    if context is None:
        raise ValueError(f"a model of type {config.model_type!r} names no context limit; set max_context")
    if limit is not None and not 1 <= context <= limit:
        raise ValueError(f"max_context {context} is outside the model's 1..{limit}")
    return context


def angles_depend_on_step(config: PreTrainedConfig, max_context: int) -> bool:
    """Whether rotary angles follow the longest position of a step, so that a row depends on its neighbours."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return any(
        entry.get("rope_type") in ("dynamic", "longrope")
        and max_context > entry.get("original_max_position_embeddings", config.max_position_embeddings)
        for entry in sets
    )


def _locate(path: Path) -> tuple[Path, str | None]:
    """Directory and name of the GGUF file, or None where there is none."""
    if path.is_file():
        return path.parent, path.name
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise ModelFileError(f"{path} holds {len(gguf_files)} .gguf files; name one of them")
    return path, gguf_files[0].name if gguf_files else None


def _start(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def _some(keys: Any) -> str:
    names = sorted(str(key) for key in keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
