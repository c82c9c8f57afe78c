"""Hidden states of a forward's new rows: the same whatever the chunks and the neighbours, and refused by name."""

from dataclasses import replace

import pytest
import torch

from engine.backends.base import (
    HiddenCapture,
    SequenceInput,
    SpeculativeEngine,
    UnsupportedEngineError,
    check_capture,
)
from engine.backends.toy_backend import HIDDEN_SIZE, ToyEngine, hashed_logits, hidden_states
from tests.engine.engines import random_tokens, tiny_engine

ENGINES = {"torch": tiny_engine, "toy": lambda: ToyEngine(hashed_logits(96), 96)}
TOKENS = random_tokens(23, seed=4)


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> SpeculativeEngine:
    built: SpeculativeEngine = ENGINES[request.param]()
    return built


def states_of(engine: SpeculativeEngine, chunks: tuple[int, ...], layers: tuple[int, ...]) -> torch.Tensor:
    """TOKENS in steps of these sizes, each beside another sequence -> float32 [23, L, E]."""
    sequence, rows, start = engine.create(), [], 0
    for number, count in enumerate(chunks):
        other = SequenceInput(engine.create(), random_tokens(3 + number, seed=number))
        capture = HiddenCapture(layers)
        engine.advance([other, SequenceInput(sequence, TOKENS[start : start + count])], capture)
        assert capture.states is not None
        rows.append(capture.states[3 + number :])
        start += count
    return torch.cat(rows)


def test_chunks_and_neighbours_change_no_state(engine: SpeculativeEngine) -> None:
    layers = tuple(range(1, engine.capabilities.num_layers + 1))
    whole = states_of(engine, (23,), layers)
    assert whole.shape == (23, len(layers), engine.capabilities.hidden_size)
    torch.testing.assert_close(states_of(engine, (1, 7, 15), layers), whole, rtol=1e-5, atol=1e-5)
    assert not torch.equal(whole[:, 0], whole[:, -1])


def test_only_the_layers_asked_for_are_kept(engine: SpeculativeEngine) -> None:
    last = engine.capabilities.num_layers
    whole = states_of(engine, (23,), (1, last))
    assert torch.equal(states_of(engine, (23,), (last,)), whole[:, 1:])


@pytest.mark.parametrize("is_argmax", [True, False])
def test_a_forward_with_logits_gives_the_states_of_all_its_rows(engine: SpeculativeEngine, is_argmax: bool) -> None:
    forward = engine.forward_per_position_argmax if is_argmax else engine.forward_per_position_logits
    capture = HiddenCapture((1,))
    forward([SequenceInput(engine.create(), TOKENS, 2)], capture)
    assert capture.states is not None
    assert capture.states.shape == (23, 1, engine.capabilities.hidden_size)


def test_the_last_layers_states_are_what_the_head_reads() -> None:
    engine, capture = tiny_engine(), HiddenCapture((tiny_engine().capabilities.num_layers,))
    logits = engine.forward_per_position_logits([SequenceInput(engine.create(), TOKENS, 23)], capture)
    assert capture.states is not None
    states = capture.states[:, 0]
    scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + engine.model.config.rms_norm_eps)
    normed = states * scale * engine.model.final_norm
    torch.testing.assert_close(engine.model.head(normed), logits, rtol=1e-4, atol=1e-4)


def test_toy_states_are_other_ones_for_every_other_prefix() -> None:
    whole = hidden_states(TOKENS, 0, (1, 2))
    assert whole.shape == (23, 2, HIDDEN_SIZE)
    assert torch.equal(hidden_states(TOKENS, 5, (1, 2)), whole[5:])
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 23
    assert not torch.equal(hidden_states([TOKENS[0] + 1, *TOKENS[1:]], 0, (1, 2))[-1], whole[-1])


def test_layers_that_are_not_there_are_refused_by_name(engine: SpeculativeEngine) -> None:
    last = engine.capabilities.num_layers
    sequence = engine.create()
    for layer in (0, last + 1):
        with pytest.raises(UnsupportedEngineError, match=f"no hidden states after layer {layer}.*1..{last}"):
            engine.advance([SequenceInput(sequence, [1])], HiddenCapture((layer,)))
    assert engine.num_cached_tokens(sequence) == 0


def test_a_backend_without_hidden_states_is_named() -> None:
    without = replace(tiny_engine().capabilities, hidden_size=0)
    check_capture(without, None)
    with pytest.raises(UnsupportedEngineError, match="backend 'torch' gives no hidden states"):
        check_capture(without, HiddenCapture((1,)))
