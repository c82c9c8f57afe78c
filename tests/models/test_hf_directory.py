"""Loading Hugging Face directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.config import ModelFileError
from engine.models.loading import load_model
from tests.fixtures.tiny_models import CONFIGS, hf_config, tiny_logits, tiny_model, write_hf_directory


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_as_it_was_written(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)

    loaded = load_model(write_hf_directory(tmp_path, model))

    assert loaded.config == model.config
    assert set(loaded.weights) == set(model.weights)
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in model.weights.items())


def test_weights_keep_the_precision_of_the_file(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path, tiny_model("llama"))
    halves = {name: weight.bfloat16() for name, weight in tiny_model("llama").weights.items()}
    save_file(halves, directory / "model.safetensors")

    assert {weight.dtype for weight in load_model(directory).weights.values()} == {torch.bfloat16}


def test_a_sharded_checkpoint_is_joined(tmp_path: Path) -> None:
    model = tiny_model("llama")
    directory = write_hf_directory(tmp_path, model)
    (directory / "model.safetensors").unlink()
    names = list(model.weights)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file_name, members in shards.items():
        save_file({name: model.weights[name] for name in members}, directory / file_name)
    weight_map = {name: file_name for file_name, members in shards.items() for name in members}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    assert set(load_model(directory).weights) == set(names)

    (directory / "model-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-2\.safetensors is missing"):
        load_model(directory)


def test_a_tied_head_stored_twice_is_dropped(tmp_path: Path) -> None:
    model = tiny_model("llama")
    directory = write_hf_directory(tmp_path, model)
    head = model.weights["model.embed_tokens.weight"].clone()
    save_file({**model.weights, "lm_head.weight": head}, directory / "model.safetensors")

    assert "lm_head.weight" not in load_model(directory).weights


def test_settings_in_the_newer_rope_parameters_are_read(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e5}

    loaded = load_model(write_hf_directory(tmp_path, tiny_model("llama"), rope_parameters=parameters))

    assert loaded.config.rope_theta == 5e5


def test_a_model_without_a_tie_setting_is_tied_when_it_has_no_head(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path, tiny_model("llama"))
    config = hf_config(CONFIGS["llama"])
    del config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config))

    assert load_model(directory).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ("mistral", {"sliding_window": 128}, "sliding_window 128"),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, "sliding_window 128"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"hidden_size": "many"}, "does not describe a llama model"),
        ("llama", {"vocab_size": 161}, r"model\.embed_tokens\.weight is \[160, 64\].*\[161, 64\]"),
        ("llama", {"num_hidden_layers": 3}, r"9 weights are missing, the first is model\.layers\.2\."),
        ("llama", {"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is not part of a llama model"),
    ],
)
def test_what_the_forward_lacks_is_refused_by_name(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    directory = write_hf_directory(tmp_path, tiny_model(family), **changes)

    with pytest.raises(ModelFileError, match=named) as refused:
        load_model(directory)
    assert str(directory) in str(refused.value)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_a_sliding_window_that_never_bites_is_accepted(family: str, tmp_path: Path) -> None:
    changes = {"sliding_window": 512, "use_sliding_window": True}

    assert load_model(write_hf_directory(tmp_path, tiny_model(family), **changes)).config.family == family


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path / "model", tiny_model("llama"))
    weights_path = directory / "model.safetensors"
    complete = weights_path.read_bytes()
    for content in (complete[: len(complete) // 2], complete[:5], b"", b"\xff" * 64):
        weights_path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"model\.safetensors cannot be read; it is cut short or damaged"):
            load_model(directory)
    weights_path.unlink()
    with pytest.raises(ModelFileError, match=r"model\.safetensors is missing"):
        load_model(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read"):
        load_model(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        load_model(directory)
    with pytest.raises(ModelFileError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize("family", CONFIGS)
def test_recorded_logits_fit_the_tiny_models(family: str) -> None:
    input_ids, logits = tiny_logits(family)

    assert logits.shape == (len(input_ids), CONFIGS[family].vocab_size)
    assert max(input_ids) < CONFIGS[family].vocab_size
    assert logits.std() > 0.5
