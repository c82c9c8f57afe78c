"""The shallow copy is the model with fewer layers, and loads like any other."""

from dataclasses import replace
from pathlib import Path

import torch

from engine.models.loading import load_model
from tests.fixtures.tiny_models import CONFIGS, random_model, write_hf_directory
from tests.losslessness.shallow import write_shallow_copy


def test_the_other_layers_move_up_and_everything_else_stays(tmp_path: Path) -> None:
    model = random_model(replace(CONFIGS["llama"], num_layers=4))
    source = write_hf_directory(tmp_path / "source", model)
    (source / "tokenizer.json").write_text("{}")
    copy = load_model(write_shallow_copy(source, [1], tmp_path / "copy"))
    assert copy.config == replace(model.config, num_layers=3)
    name = "model.layers.{}.mlp.up_proj.weight"
    for new, old in enumerate([0, 2, 3]):
        assert torch.equal(copy.weights[name.format(new)], model.weights[name.format(old)].bfloat16())
    assert torch.equal(copy.weights["model.norm.weight"], model.weights["model.norm.weight"].bfloat16())
    assert (tmp_path / "copy" / "tokenizer.json").exists()
