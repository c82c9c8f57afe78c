"""What `--backend transformers` loads, what it refuses and how it says so."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.backends.base import EngineError, SequenceInput
from engine.backends.registry import load_engine
from engine.backends.settings import EngineSettings
from engine.hf.loading import angles_depend_on_step
from engine.hf.self_test import probe_tokens
from tests.engine import tiny_transformers as tiny
from tests.engine.engines import logits_of, random_tokens
from tests.fixtures.demo_model import demo_model_dir
from tests.fixtures.tiny_models import write_byte_tokenizer

# A token whose embedding the self-test does not look up.
UNREAD = min({*range(tiny.VOCAB)} - {token for tokens in probe_tokens(tiny.VOCAB, 256) for token in tokens})


def settings(directory: Path, **changes: object) -> EngineSettings:
    given = {"model": str(directory), "backend": "transformers", "max_step_tokens": 64, "kv_memory_bytes": 1 << 20}
    return EngineSettings(**{**given, **changes})  # type: ignore[arg-type]


def saved(directory: Path, name: str = "llama") -> Path:
    tiny.save(directory, name)
    write_byte_tokenizer(directory, tiny.VOCAB)
    return directory


def test_a_model_directory_runs_under_its_own_name(tmp_path: Path) -> None:
    directory = tmp_path / "tiny-gpt2"
    directory.mkdir()
    loaded = load_engine(settings(saved(directory, "gpt2"), dtype="bfloat16", max_context=100))
    capabilities = loaded.engine.capabilities
    assert loaded.model_id == "tiny-gpt2"
    assert (capabilities.backend, capabilities.dtype) == ("transformers", "bfloat16")
    assert (capabilities.vocab_size, capabilities.max_context) == (tiny.VOCAB, 100)
    sequence = loaded.engine.create()
    rows = loaded.engine.forward_per_position_logits([SequenceInput(sequence, [1, 2, 3], 2)])
    assert (rows.shape, rows.dtype) == ((2, tiny.VOCAB), torch.float32)


def test_equal_fingerprints_are_of_equal_weights(tmp_path: Path) -> None:
    tiny.save(tmp_path, "llama")
    first, again = tiny.load(tmp_path).capabilities, tiny.load(tmp_path).capabilities
    assert first.numerics_fingerprint == again.numerics_fingerprint
    weights = load_file(tmp_path / "model.safetensors")
    for name, row in (("model.norm.weight", ...), ("model.embed_tokens.weight", UNREAD)):
        changed = {other: weight.clone() for other, weight in weights.items()}
        changed[name][row] *= 1.001
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert tiny.load(tmp_path).capabilities.numerics_fingerprint != first.numerics_fingerprint


def without_a_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def of_another_kind(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_weight, r"missing_keys: model\.layers\.1\.mlp\.up_proj\.weight"),
        (of_another_kind, "cannot load .* as a causal language model: .*ViTConfig"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"no"), "cannot load"),
        (lambda directory: (directory / "model.safetensors").unlink(), r"cannot load .*model\.safetensors"),
        (lambda directory: (directory / "config.json").write_text("{}"), "cannot load"),
        (lambda directory: write_byte_tokenizer(directory, 97), "its tokenizer has 97 ids, its logits only 96"),
        (lambda directory: (directory / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_what_is_wrong(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(saved(tmp_path))
    with pytest.raises(EngineError, match=f"(?s)model '{tmp_path}': .*{message}"):
        load_engine(settings(tmp_path))


def test_a_model_that_looks_at_later_tokens_is_not_causal(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokens read step by step give other logits .* not causal"):
        load_engine(settings(saved(tmp_path, "bidirectional")))


def test_a_context_limit_must_be_known_and_within_the_models(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ValueError, match=r"max_context 257 is outside the model's 1\.\.256"):
        load_engine(settings(tmp_path, max_context=257))
    with pytest.raises(ValueError, match="type 'mamba' names no context limit; set max_context"):
        load_engine(settings(saved(tmp_path, "state")))


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.backends.transformers_loading", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EngineError, match=r"needs that package: pip install \"\.\[hf\]\" in the folder"):
        load_engine(settings(tmp_path))


@pytest.mark.parametrize(
    ("rope", "max_context", "depends"),
    [
        ({"rope_type": "default"}, 256, False),
        ({"rope_type": "dynamic", "factor": 2.0}, 256, False),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128}, 256, True),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128}, 128, False),
    ],
)
def test_angles_that_follow_the_longest_position_are_known(
    rope: dict[str, object], max_context: int, depends: bool
) -> None:
    config = LlamaConfig(max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, **rope})
    assert angles_depend_on_step(config, max_context) == depends


@pytest.mark.model
def test_the_demo_models_logits_are_those_of_the_native_engine_within_rounding() -> None:
    # Both in float32; sums are in another order: 1e-3 of logits up to 32, where 8e-5 was met.
    sizes = {"kv_memory_bytes": 64 << 20, "max_context": 512}
    engines = [
        load_engine(settings(demo_model_dir(), backend=b, **sizes)).engine for b in ("transformers", "torch")
    ]
    token_ids = random_tokens(60, vocab_size=49152)
    ours, native = (logits_of(engine, token_ids, (40, 1, 5)) for engine in engines)
    torch.testing.assert_close(ours, native, atol=1e-3, rtol=0)
    assert [engine.capabilities.deterministic for engine in engines] == [True, True]
