"""The engine over transformers: its logits are that package's, its rows are accounted for, and what it claims holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from engine.backends.base import (
    EngineError,
    OutOfBlocksError,
    SequenceInput,
    SpeculativeEngine,
    UnsupportedEngineError,
    require_speculation,
)
from engine.backends.transformers_backend import TransformersEngine
from tests.engine import tiny_transformers as tiny
from tests.engine.engines import logits, logits_of, random_tokens

# One for each kind of: family with the interface, Conv1D and learned positions, q and k norms, sliding window.
INVARIANT = ["llama", "gpt2", "qwen3", "window"]
Load = Callable[..., TransformersEngine]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model's engine, loaded once; every test leaves it empty."""
    engines: dict[str, TransformersEngine] = {}

    def get(name: str) -> TransformersEngine:
        if name not in engines:
            directory = tmp_path_factory.mktemp(name)
            tiny.save(directory, name)
            engines[name] = tiny.load(directory, max_context=None if name != "state" else 256)
        return engines[name]

    return get


@pytest.mark.parametrize("name", [*INVARIANT, "softcap", "experts", "state"])
def test_logits_are_those_of_transformers_whole_and_in_steps(load: Load, name: str, tmp_path: Path) -> None:
    token_ids = random_tokens(40)
    expected = tiny.whole_text(tiny.save(tmp_path, name), token_ids)
    for steps in ((), (7, 1, 3, 20)):
        rows = logits_of(load(name), token_ids, steps)
        torch.testing.assert_close(rows, expected, atol=2e-4, rtol=1e-4)
    assert load(name).kv_usage().used_blocks == 0


def test_a_sliding_window_is_that_of_a_cache_which_drops_rows(load: Load, tmp_path: Path) -> None:
    model, token_ids = tiny.save(tmp_path, "window"), random_tokens(60)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([[t]]), cache=cache, use_cache=True).logits[0] for t in token_ids]
    assert cache.layers[0].keys.shape[2] == 15
    torch.testing.assert_close(logits_of(load("window"), token_ids, (9, 30)), torch.cat(rows), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", INVARIANT)
def test_an_engine_that_says_it_is_deterministic_gives_a_row_the_same_bits_however_it_is_read(
    load: Load, name: str
) -> None:
    engine, token_ids = load(name), random_tokens(90, seed=2)
    assert engine.capabilities.deterministic
    whole = logits_of(engine, token_ids)
    for steps in ([1] * 90, [2, 3, 5, 7, 11, 13], [64, 25]):
        assert torch.equal(logits_of(engine, token_ids, steps), whole)
    sequences = [engine.create() for _ in range(3)]
    together = engine.forward_per_position_logits(
        [SequenceInput(sequence, token_ids[: 30 * n], 5) for n, sequence in enumerate(sequences, 1)]
    )
    assert torch.equal(together, torch.cat([whole[30 * n - 5 : 30 * n] for n in (1, 2, 3)]))
    for sequence in sequences:
        engine.release(sequence)


def test_models_that_differ_only_past_the_self_test_s_texts_have_other_fingerprints(tmp_path: Path) -> None:
    found = []
    for number, window in enumerate((100, 200, 100)):
        directory = tmp_path / str(number)
        tiny.save(directory, "window", sliding_window=window)
        found.append(tiny.load(directory).capabilities.numerics_fingerprint)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("name", ["softcap", "experts", "state"])
def test_a_model_that_cannot_be_made_invariant_says_so_and_runs(load: Load, name: str) -> None:
    assert not load(name).capabilities.deterministic


def test_the_argmax_is_the_lowest_of_the_largest_logits(load: Load) -> None:
    engine, token_ids = load("llama"), random_tokens(30)
    sequence = engine.create()
    rows = engine.forward_per_position_argmax([SequenceInput(sequence, token_ids, 9)])
    assert rows.tolist() == logits_of(engine, token_ids)[-9:].argmax(-1).tolist()
    assert engine.forward_per_position_argmax([SequenceInput(sequence, [3], 0)]).shape == (0,)
    engine.release(sequence)


def test_rows_after_truncation_are_as_if_what_was_dropped_had_never_been_read(load: Load) -> None:
    engine, token_ids = load("llama"), random_tokens(40)
    sequence = engine.create()
    logits(engine, sequence, token_ids[:21] + [5] * 9)
    engine.truncate(sequence, 21)
    assert engine.num_cached_tokens(sequence) == 21
    assert torch.equal(logits(engine, sequence, token_ids[21:]), logits_of(engine, token_ids)[21:])
    engine.release(sequence)


def test_a_fork_shares_blocks_until_one_writes_and_neither_sees_the_other(load: Load) -> None:
    engine, token_ids = load("llama"), random_tokens(30)
    sequence = engine.create()
    engine.advance([SequenceInput(sequence, token_ids[:10])])
    twin = engine.fork(sequence)
    assert engine.kv_usage().used_blocks == 3
    logits(engine, twin, [9] * 7)
    assert torch.equal(logits(engine, sequence, token_ids[10:]), logits_of(engine, token_ids)[10:])
    other = token_ids[:10] + [9] * 7
    assert torch.equal(logits(engine, twin, [4]), logits_of(engine, [*other, 4])[17:])
    engine.release(sequence)
    engine.release(twin)
    assert engine.kv_usage().used_blocks == 0


def test_the_prefix_cache_gives_rows_that_say_the_same(load: Load, tmp_path: Path) -> None:
    tiny.save(tmp_path, "llama")
    engine, token_ids = tiny.load(tmp_path, prefix_cache=True), random_tokens(30)
    first = engine.create(token_ids)
    assert engine.num_cached_tokens(first) == 0
    engine.advance([SequenceInput(first, token_ids)])
    engine.release(first)
    second = engine.create(token_ids)
    assert engine.num_cached_tokens(second) == 28
    assert torch.equal(logits(engine, second, token_ids[28:]), logits_of(load("llama"), token_ids)[28:])


def test_memory_bounds_the_rows_and_a_step_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    tiny.save(tmp_path, "llama")
    row_bytes = 2 * 2 * 2 * tiny.HEAD_DIM * 4  # layers, keys and values, heads, head size, float32
    engine = tiny.load(tmp_path, kv_memory_bytes=8 * 4 * row_bytes + 1)
    assert engine.kv_usage().total_blocks == 8
    sequence, other = engine.create(), engine.create()
    inputs = [SequenceInput(sequence, random_tokens(27))]
    assert engine.num_blocks_for(inputs) == 7
    engine.advance(inputs)
    with pytest.raises(OutOfBlocksError, match="needs 2 key-value blocks, 1 of 8 can be had"):
        engine.advance([SequenceInput(other, [1]), SequenceInput(sequence, [1, 2])])
    assert (engine.num_cached_tokens(sequence), engine.num_cached_tokens(other)) == (27, 0)
    with pytest.raises(ValueError, match=f"--kv-memory 9 bytes is less than one block of {4 * row_bytes} bytes"):
        tiny.load(tmp_path, kv_memory_bytes=9)


@pytest.mark.parametrize("name", ["llama", "state"])
def test_a_forward_that_fails_is_as_if_it_had_not_been(
    load: Load, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, token_ids = load(name), random_tokens(24)
    sequences = [engine.create(), engine.create()]
    engine.advance([SequenceInput(sequence, token_ids[:6]) for sequence in sequences])
    network, calls = engine._model.model, []
    forward = network.forward

    def fail_later(**arguments: object) -> object:
        calls.append(None)
        if len(calls) > 1:
            raise MemoryError
        return forward(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(network, "forward", fail_later)
        with pytest.raises(MemoryError):
            engine.advance([SequenceInput(sequence, [7]) for sequence in sequences])
    assert [engine.num_cached_tokens(sequence) for sequence in sequences] == [6, 6]
    for sequence in sequences:
        rows = logits(engine, sequence, token_ids[6:])
        torch.testing.assert_close(rows, logits_of(engine, token_ids)[6:], atol=1e-5, rtol=1e-5)
        engine.release(sequence)


def test_a_model_that_folds_tokens_into_a_state_refuses_to_go_back_by_name(load: Load) -> None:
    engine: SpeculativeEngine = load("state")
    assert not engine.capabilities.can_truncate
    assert not engine.capabilities.has_prefix_cache
    with pytest.raises(UnsupportedEngineError, match="backend 'transformers' cannot speculate"):
        require_speculation(engine.capabilities)
    sequence = engine.create()
    engine.advance([SequenceInput(sequence, [1, 2, 3])])
    with pytest.raises(UnsupportedEngineError, match=f"cannot truncate: sequence {sequence} has 3 rows and 1"):
        engine.truncate(sequence, 1)
    with pytest.raises(UnsupportedEngineError, match=f"cannot fork: sequence {sequence}"):
        engine.fork(sequence)
    engine.truncate(sequence, 3)
    engine.release(sequence)


def test_blocks_of_a_model_with_a_state_are_charged_with_a_state_each(load: Load) -> None:
    # of 2 layers 96 channels each: 4 inputs of the convolution and 8 of the state, float32
    assert load("state").kv_usage().total_blocks == (1 << 20) // (2 * 96 * (4 + 8) * 4)


def test_bad_inputs_are_refused_as_by_every_engine(load: Load) -> None:
    engine = load("llama")
    sequence = engine.create()
    with pytest.raises(EngineError, match=r"token id 96 is outside the vocabulary 0\.\.95"):
        engine.advance([SequenceInput(sequence, [96])])
    with pytest.raises(EngineError, match="num_logits_rows must be 0, got 1"):
        engine.advance([SequenceInput(sequence, [1], 1)])
    with pytest.raises(EngineError, match="pass the context limit of 256"):
        engine.advance([SequenceInput(sequence, [1] * 257)])
    engine.release(sequence)
    with pytest.raises(EngineError, match=f"sequence {sequence} is unknown"):
        engine.num_cached_tokens(sequence)
    engine.advance([])
    assert engine.forward_per_position_logits([]).shape == (0, tiny.VOCAB)
    assert engine.forward_per_position_argmax([]).shape == (0,)
