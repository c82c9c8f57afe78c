"""A draft model that disagrees with its target now and then: the target less some of its layers."""

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from engine.models.config import LoadedModel
from engine.models.loading import load_model
from tests.fixtures.tiny_models import write_hf_directory


def write_shallow_copy(source: Path, skipped: Collection[int], directory: Path) -> Path:
    """Write the model directory `source` without the `skipped` layers, in bfloat16, as a Hugging Face directory."""
    model = without_layers(load_model(source), skipped)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.weights.items()}
    write_hf_directory(directory, LoadedModel(model.config, weights), torch_dtype="bfloat16")
    for path in source.glob("tokenizer*.json"):
        shutil.copy(path, directory)
    return directory


def without_layers(model: LoadedModel, skipped: Collection[int]) -> LoadedModel:
    """The model with the other layers only, numbered anew."""
    kept = [layer for layer in range(model.config.num_layers) if layer not in skipped]
    weights = {name: weight for name, weight in model.weights.items() if not name.startswith("model.layers.")}
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        weights |= {
            f"model.layers.{new}.{name.removeprefix(prefix)}": weight
            for name, weight in model.weights.items()
            if name.startswith(prefix)
        }
    return LoadedModel(replace(model.config, num_layers=len(kept)), weights)
