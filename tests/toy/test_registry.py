"""Engines by name: what the settings give, and what they cannot be."""

from pathlib import Path

import pytest
import torch

from engine.backends.base import EngineError, SequenceInput
from engine.backends.registry import EngineSettings, LoadedEngine, load_engine
from engine.backends.toy_backend import ToyEngine, hashed_logits
from engine.backends.toy_options import parse_toy_options
from tests.fixtures.tiny_models import tiny_logits, tiny_model, write_byte_tokenizer, write_hf_directory


def load_toy(toy: str | None = None, max_context: int | None = None) -> LoadedEngine:
    return load_engine(EngineSettings(backend="toy", toy=toy, block_size=4, max_context=max_context))


def argmax_after(loaded: LoadedEngine, token_ids: list[int]) -> list[int]:
    item = SequenceInput(loaded.engine.create(), token_ids, len(token_ids))
    argmax: list[int] = loaded.engine.forward_per_position_argmax([item]).tolist()
    return argmax


def test_a_toy_engine_comes_with_a_vocabulary_of_its_size() -> None:
    loaded = load_toy("hashed:vocab=300,seed=3,blend=0.2,blocks=7,delay_ms=5,token_delay_ms=0.5", max_context=99)
    assert loaded.engine.capabilities.vocab_size == loaded.vocabulary.vocab_size == 300
    assert loaded.engine.capabilities.max_context == 99
    assert (loaded.engine.kv_usage().total_blocks, loaded.engine.kv_usage().block_size) == (7, 4)
    assert isinstance(loaded.engine, ToyEngine)
    assert (loaded.engine.step_delay_s, loaded.engine.token_delay_s) == (0.005, 0.0005)


def test_the_options_choose_the_logits() -> None:
    expected = [int(hashed_logits(64, seed=3, blend=0.2)([1, 2][:n]).argmax()) for n in (1, 2)]
    assert argmax_after(load_toy("hashed:vocab=64,seed=3,blend=0.2"), [1, 2]) == expected
    assert argmax_after(load_toy("scripted:vocab=64,script=5-6-7,start=2"), [1, 2, 3]) == [7, 5, 6]
    assert argmax_after(load_toy(), [1, 2]) == argmax_after(load_toy("hashed:vocab=512,seed=0"), [1, 2])


def test_engines_with_equal_logits_have_equal_fingerprints_and_names() -> None:
    texts = ["hashed:vocab=64", "hashed:vocab=64,delay_ms=3,blocks=9", "hashed:vocab=64,seed=1", "hashed:vocab=65"]
    loaded = [load_toy(text) for text in [*texts, "hashed:vocab=64,blend=0.1", "scripted:vocab=64", texts[0]]]
    assert len({entry.engine.capabilities.numerics_fingerprint for entry in loaded}) == 5
    assert len({entry.model_id for entry in loaded}) == 5
    assert loaded[0].model_id == loaded[1].model_id == loaded[-1].model_id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("random", "toy engine 'random' is unknown; there are: hashed, scripted"),
        ("hashed:size=3", "toy option 'size' is unknown; there are: blend, "),
        ("hashed:vocab=many", "toy option vocab='many'"),
        ("hashed:vocab=1", "toy option vocab=1 is outside 2.."),
        ("hashed:blend=1.5", r"toy option blend=1.5 is outside 0\.\.1"),
        ("hashed:delay_ms=nan", "toy option delay_ms=nan is outside"),
        ("scripted:vocab=8,script=1-8", "token id 8 is outside 0..7"),
        ("scripted:script=", "toy option script=''"),
    ],
)
def test_a_toy_option_that_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_toy_options(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EngineSettings(backend="jax"), "backend 'jax' is unknown; there are: torch, transformers, toy"),
        (EngineSettings(dtype="int4"), "dtype 'int4' is unknown to backend 'torch'; there are: float32, bfloat16"),
        (EngineSettings(backend="toy", dtype="bfloat16"), "backend 'toy'; there are: float32"),
    ],
)
def test_an_unknown_backend_or_dtype_is_refused_with_what_exists(settings: EngineSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_engine(settings)


def test_a_model_that_is_not_there_is_an_engine_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="model 'no-such-model'"):
        load_engine(EngineSettings(model="no-such-model"))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(EngineError, match=r"tokenizer\.json is missing"):
        load_engine(EngineSettings(model=str(tmp_path)))


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        load_engine(EngineSettings(backend="toy", threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def write_tiny_model(directory: Path) -> Path:
    """A random Llama of 160 ids with a byte-level tokenizer of as many, without merges."""
    write_hf_directory(directory, tiny_model("llama"))
    write_byte_tokenizer(directory, 160)
    return directory


def test_the_torch_backend_runs_a_model_directory_under_its_own_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny-llama")
    loaded = load_engine(
        EngineSettings(model=str(path), kv_memory_bytes=1 << 20, max_context=64, max_step_tokens=32)
    )
    assert loaded.model_id == "tiny-llama"
    assert loaded.engine.capabilities.backend == "torch"
    assert (loaded.engine.capabilities.max_context, loaded.engine.capabilities.vocab_size) == (64, 160)
    token_ids, logits = tiny_logits("llama")
    assert argmax_after(loaded, token_ids) == logits.argmax(axis=-1).tolist()
    assert loaded.vocabulary.encode("ab") == [
        loaded.vocabulary.bytes_table.index(letter) for letter in (b"a", b"b")
    ]
