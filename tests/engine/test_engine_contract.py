"""What the engine refuses, and that a refused or failed step leaves everything as it was."""

import pytest
import torch

from engine.backends.base import EngineError, OutOfBlocksError, SequenceId, SequenceInput, SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from tests.engine.engines import logits, logits_of, random_tokens, tiny_engine
from tests.engine.tiny_models import FAMILIES
from tests.fixtures.tiny_models import random_model


@pytest.fixture
def engine() -> TorchEngine:
    return tiny_engine(num_blocks=8, block_size=4, max_context=24)


def state(engine: TorchEngine, *sequences: SequenceId) -> tuple[object, ...]:
    return engine.kv_usage(), *(engine.num_cached_tokens(sequence) for sequence in sequences)


def test_it_is_a_speculative_engine(engine: TorchEngine) -> None:
    protocol: SpeculativeEngine = engine
    assert protocol.capabilities.backend == "torch"
    assert protocol.capabilities.can_truncate
    assert protocol.capabilities.max_context == 24


@pytest.mark.parametrize(
    ("token_ids", "rows", "message"),
    [
        ([], 0, "needs at least one token"),
        ([96], 1, r"token id 96 is outside the vocabulary 0\.\.95"),
        ([5, -1], 1, "token id -1 is outside the vocabulary"),
        ([5], 2, r"num_logits_rows must be 0\.\.1, got 2"),
        ([5], -1, r"num_logits_rows must be 0\.\.1, got -1"),
        ([5] * 20, 1, "5 cached and 20 new tokens pass the context limit of 24"),
    ],
)
def test_a_bad_input_is_refused_and_its_neighbour_does_not_advance(
    engine: TorchEngine, token_ids: list[int], rows: int, message: str
) -> None:
    good, bad = engine.create(), engine.create()
    engine.advance([SequenceInput(bad, random_tokens(5))])
    before = state(engine, good, bad)
    with pytest.raises(EngineError, match=f"sequence {bad}: .*{message}"):
        engine.forward_per_position_logits([SequenceInput(good, [1], 1), SequenceInput(bad, token_ids, rows)])
    assert state(engine, good, bad) == before


def test_a_sequence_twice_in_one_step_is_refused(engine: TorchEngine) -> None:
    sequence = engine.create()
    with pytest.raises(EngineError, match="appears twice"):
        engine.advance([SequenceInput(sequence, [1]), SequenceInput(sequence, [2])])
    assert engine.num_cached_tokens(sequence) == 0


def test_advance_refuses_to_be_asked_for_logits(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="num_logits_rows must be 0, got 1"):
        engine.advance([SequenceInput(engine.create(), [1], 1)])


def test_an_unknown_sequence_is_refused_by_name(engine: TorchEngine) -> None:
    sequence = engine.create()
    engine.release(sequence)
    for use in (
        engine.num_cached_tokens,
        engine.fork,
        lambda s: engine.truncate(s, 0),
        lambda s: logits(engine, s, [1]),
    ):
        with pytest.raises(EngineError, match=f"sequence {sequence} is unknown"):
            use(sequence)


def test_releasing_twice_frees_once(engine: TorchEngine) -> None:
    sequence = engine.create()
    engine.advance([SequenceInput(sequence, random_tokens(9))])
    assert engine.kv_usage().used_blocks == 3
    engine.release(sequence)
    engine.release(sequence)
    assert engine.kv_usage().used_blocks == 0
    assert engine.kv_usage().free_blocks == 8


def test_truncating_to_a_negative_length_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="cannot truncate to -1"):
        engine.truncate(engine.create(), -1)


def test_a_step_that_does_not_fit_changes_nothing_not_even_for_those_that_would(engine: TorchEngine) -> None:
    sequences = [engine.create() for _ in range(2)]
    engine.advance([SequenceInput(sequence, random_tokens(14)) for sequence in sequences])
    before = state(engine, *sequences)
    with pytest.raises(OutOfBlocksError, match="needs 1 key-value blocks, 0 of 8 can be had"):
        engine.advance([SequenceInput(sequences[0], [1, 2]), SequenceInput(sequences[1], [1, 2, 3])])
    assert state(engine, *sequences) == before
    engine.advance([SequenceInput(sequence, [1, 2]) for sequence in sequences])
    assert engine.kv_usage().free_blocks == 0


def test_a_forward_that_fails_is_rolled_back(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(12)
    sequence = engine.create()
    engine.advance([SequenceInput(sequence, tokens[:6])])
    twin = engine.fork(sequence)
    before = state(engine, sequence, twin)

    def fail(*_: object) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "logits", fail)
        with pytest.raises(MemoryError):
            logits(engine, sequence, tokens[6:])
    assert (engine.num_cached_tokens(sequence), engine.num_cached_tokens(twin)) == before[1:]
    assert torch.equal(logits(engine, sequence, tokens[6:]), logits_of(tiny_engine(), tokens)[6:])


def test_an_empty_step_is_no_work(engine: TorchEngine) -> None:
    engine.advance([])
    assert engine.forward_per_position_logits([]).shape == (0, 96)
    assert engine.forward_per_position_argmax([]).shape == (0,)


def test_a_step_without_wanted_rows_advances_and_returns_none(engine: TorchEngine) -> None:
    sequence = engine.create()
    assert engine.forward_per_position_logits([SequenceInput(sequence, [1, 2], 0)]).shape == (0, 96)
    assert engine.forward_per_position_argmax([SequenceInput(sequence, [3], 0)]).shape == (0,)
    assert engine.num_cached_tokens(sequence) == 3


def test_logits_are_float32_whatever_the_dtype() -> None:
    assert logits_of(tiny_engine(dtype=torch.bfloat16), [1, 2]).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_callers_to_change(dtype: torch.dtype) -> None:
    engine = tiny_engine(dtype=dtype)
    logits_of(engine, [1, 2, 3]).div_(2).fill_(7.0)
    assert torch.equal(logits_of(engine, [1, 2, 3]), logits_of(tiny_engine(dtype=dtype), [1, 2, 3]))


def test_the_lowest_id_wins_among_equal_logits() -> None:
    model = random_model(FAMILIES["mistral-untied"])
    head = model.weights["lm_head.weight"]
    head[:] = head[7]  # every token's logit is the same
    for dtype in (torch.float32, torch.bfloat16):
        engine = tiny_engine(model, dtype)
        rows = engine.forward_per_position_argmax([SequenceInput(engine.create(), random_tokens(9), 9)])
        assert rows.tolist() == [0] * 9
