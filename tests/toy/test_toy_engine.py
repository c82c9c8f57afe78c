"""The toy engine keeps every promise of the protocol: rows, rollback, errors before change, block accounting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import (
    EngineError,
    OutOfBlocksError,
    SequenceId,
    SequenceInput,
    SpeculativeEngine,
    UnsupportedEngineError,
    require_speculation,
)
from engine.backends.toy_backend import ToyCall, ToyEngine, hashed_logits, scripted_logits

V = 32
LOGITS = hashed_logits(V, seed=1)


def make(
    num_blocks: int = 64, block_size: int = 4, max_context: int = 64, *, can_truncate: bool = True
) -> ToyEngine:
    return ToyEngine(
        LOGITS, V, num_blocks=num_blocks, block_size=block_size, max_context=max_context, can_truncate=can_truncate
    )


def row_after(*token_ids: int) -> torch.Tensor:
    return torch.from_numpy(LOGITS(token_ids))


def used(engine: ToyEngine) -> int:
    usage = engine.kv_usage()
    assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks
    return usage.used_blocks


def test_it_is_a_speculative_engine_that_names_itself() -> None:
    engine: SpeculativeEngine = make()
    assert engine.capabilities.backend == "toy"
    assert engine.capabilities.deterministic
    require_speculation(engine.capabilities)


def test_each_row_is_the_function_of_its_whole_prefix() -> None:
    engine = make()
    a, b = engine.create(), engine.create()
    engine.advance([SequenceInput(a, [1, 2])])
    logits = engine.forward_per_position_logits(
        [SequenceInput(a, [3, 4, 5], 2), SequenceInput(b, [9, 8], 0), SequenceInput(engine.create(), [7], 1)]
    )
    assert torch.equal(logits, torch.stack([row_after(1, 2, 3, 4), row_after(1, 2, 3, 4, 5), row_after(7)]))
    assert (engine.num_cached_tokens(a), engine.num_cached_tokens(b)) == (5, 2)


def test_chunks_and_one_step_give_the_same_rows() -> None:
    engine = make()
    whole, chunked = engine.create(), engine.create()
    engine.advance([SequenceInput(chunked, [5, 6, 7])])
    one = engine.forward_per_position_logits([SequenceInput(whole, [5, 6, 7, 8], 1)])
    assert torch.equal(one, engine.forward_per_position_logits([SequenceInput(chunked, [8], 1)]))


def test_argmax_is_the_lowest_id_of_the_largest_logit() -> None:
    engine = ToyEngine(lambda _: torch.tensor([1.0, 3.0, 3.0, 0.0]).numpy(), 4)
    argmax = engine.forward_per_position_argmax([SequenceInput(engine.create(), [0, 1], 2)])
    assert argmax.dtype == torch.int64
    assert argmax.tolist() == [1, 1]


def test_returned_logits_may_be_overwritten() -> None:
    engine = make()
    sequence_id = engine.create()
    for _ in range(2):
        logits = engine.forward_per_position_logits([SequenceInput(sequence_id, [3], 1)])
        assert torch.equal(logits[0], row_after(3))
        logits.fill_(0.0)
        engine.truncate(sequence_id, 0)


def test_truncate_is_absolute_and_decoding_goes_on_from_there() -> None:
    engine = make()
    sequence_id = engine.create()
    engine.advance([SequenceInput(sequence_id, [1, 2, 3, 4, 5])])
    engine.truncate(sequence_id, 9)
    assert engine.num_cached_tokens(sequence_id) == 5
    engine.truncate(sequence_id, 2)
    engine.truncate(sequence_id, 2)
    assert engine.token_ids(sequence_id) == [1, 2]
    logits = engine.forward_per_position_logits([SequenceInput(sequence_id, [6], 1)])
    assert torch.equal(logits[0], row_after(1, 2, 6))


@pytest.mark.parametrize("prompt_len", range(11, 19))
def test_rollback_across_a_block_edge_gives_the_block_back(prompt_len: int) -> None:
    engine = make(block_size=16)
    sequence_id = engine.create()
    engine.advance([SequenceInput(sequence_id, [1] * prompt_len)])
    engine.forward_per_position_argmax([SequenceInput(sequence_id, [2] * 5, 5)])
    engine.truncate(sequence_id, prompt_len + 1)
    assert used(engine) == -(-(prompt_len + 1) // 16)
    engine.release(sequence_id)
    assert used(engine) == 0


def test_a_fork_shares_blocks_until_one_writes() -> None:
    engine = make(block_size=4)
    parent = engine.create()
    engine.advance([SequenceInput(parent, [1, 2, 3, 4, 5, 6])])
    child = engine.fork(parent)
    assert used(engine) == 2
    engine.advance([SequenceInput(child, [7])])
    assert used(engine) == 3
    engine.advance([SequenceInput(parent, [8])])  # the last holder writes in place
    assert used(engine) == 3
    assert (engine.token_ids(parent), engine.token_ids(child)) == ([1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 7])
    engine.release(parent)
    assert used(engine) == 2
    engine.release(child)
    assert used(engine) == 0


def test_release_twice_is_harmless() -> None:
    engine = make()
    sequence_id = engine.create()
    engine.advance([SequenceInput(sequence_id, [1])])
    engine.release(sequence_id)
    engine.release(sequence_id)
    assert used(engine) == 0


def test_out_of_blocks_changes_nothing_of_the_step() -> None:
    engine = make(num_blocks=3, block_size=4)
    a, b = engine.create(), engine.create()
    engine.advance([SequenceInput(a, [1, 2, 3])])
    calls = list(engine.calls)
    with pytest.raises(OutOfBlocksError, match="needs 3 key-value blocks, 2 of 3 can be had"):
        engine.forward_per_position_logits([SequenceInput(a, [4, 5], 1), SequenceInput(b, [1] * 8, 1)])
    assert (engine.num_cached_tokens(a), engine.num_cached_tokens(b), used(engine)) == (3, 0, 1)
    assert engine.calls == calls
    engine.advance([SequenceInput(b, [1] * 8)])
    assert used(engine) == 3


BAD_INPUTS = [
    ([SequenceInput(SequenceId(99), [1], 0)], "sequence 99 is unknown"),
    ([SequenceInput(SequenceId(1), [], 0)], "at least one token"),
    ([SequenceInput(SequenceId(1), [V], 0)], "token id 32 is outside the vocabulary 0..31"),
    ([SequenceInput(SequenceId(1), [-1], 0)], "token id -1 is outside the vocabulary 0..31"),
    ([SequenceInput(SequenceId(1), [1] * 65, 0)], "65 new tokens pass the context limit of 64"),
    ([SequenceInput(SequenceId(1), [1], 0), SequenceInput(SequenceId(1), [2], 0)], "twice in one step"),
]


@pytest.mark.parametrize(("inputs", "message"), BAD_INPUTS)
def test_what_breaks_the_protocol_is_refused_before_anything_changes(
    inputs: list[SequenceInput], message: str
) -> None:
    engine = make()
    sequence_id, bystander = engine.create(), engine.create()
    for method in (engine.advance, engine.forward_per_position_logits, engine.forward_per_position_argmax):
        with pytest.raises(EngineError, match=message):
            method([SequenceInput(bystander, [1], 0), *inputs])
    assert (engine.num_cached_tokens(sequence_id), engine.num_cached_tokens(bystander)) == (0, 0)
    assert (used(engine), engine.calls) == (0, [])


def test_rows_of_logits_are_bounded_by_the_inputs_tokens_and_advance_gives_none() -> None:
    engine = make()
    sequence_id = engine.create()
    with pytest.raises(EngineError, match=r"num_logits_rows must be 0\.\.2, got 3"):
        engine.forward_per_position_logits([SequenceInput(sequence_id, [1, 2], 3)])
    with pytest.raises(EngineError, match="advance computes no logits, num_logits_rows must be 0, got 1"):
        engine.advance([SequenceInput(sequence_id, [1], 1)])
    assert engine.num_cached_tokens(sequence_id) == 0


def test_unknown_sequences_are_named() -> None:
    engine = make()
    unknown = SequenceId(7)
    for refused in (engine.num_cached_tokens, engine.fork, lambda name: engine.truncate(name, 0)):
        with pytest.raises(EngineError, match="sequence 7 is unknown"):
            refused(unknown)
    with pytest.raises(EngineError, match="cannot truncate to -1 tokens"):
        engine.truncate(engine.create(), -1)


def test_a_backend_without_rollback_decodes_but_refuses_to_speculate() -> None:
    engine = make(can_truncate=False)
    sequence_id = engine.create()
    engine.advance([SequenceInput(sequence_id, [1, 2])])
    engine.truncate(sequence_id, 2)
    with pytest.raises(UnsupportedEngineError, match="'toy' cannot truncate: sequence 1 has 2 rows and 1"):
        engine.truncate(sequence_id, 1)
    with pytest.raises(UnsupportedEngineError, match="'toy' cannot speculate"):
        require_speculation(engine.capabilities)


def test_calls_count_forwards_tokens_and_rows() -> None:
    engine = make()
    a, b = engine.create(), engine.create()
    engine.advance([SequenceInput(a, [1, 2, 3])])
    engine.forward_per_position_logits([SequenceInput(a, [4, 5], 2), SequenceInput(b, [6], 0)])
    engine.forward_per_position_argmax([SequenceInput(b, [7], 1)])
    engine.advance([])
    assert engine.forward_per_position_logits([]).shape == (0, V)
    assert engine.calls == [ToyCall("advance", 1, 3, 0), ToyCall("logits", 2, 3, 2), ToyCall("argmax", 1, 1, 1)]


def test_delays_are_per_step_and_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("engine.backends.toy_backend.time.sleep", slept.append)
    engine = ToyEngine(LOGITS, V, step_delay_s=0.5, token_delay_s=0.25)
    engine.advance([SequenceInput(engine.create(), [1, 2]), SequenceInput(engine.create(), [3])])
    engine.step_delay_s = engine.token_delay_s = 0.0
    engine.advance([SequenceInput(engine.create(), [1])])
    assert slept == [1.25]


KINDS = st.sampled_from(["create", "append", "truncate", "fork", "release"])
ACTIONS = st.lists(st.tuples(KINDS, st.integers(0, 7), st.integers(1, 9)), max_size=40)


@settings(max_examples=100, deadline=None)
@given(actions=ACTIONS)
def test_accounting_closes_and_no_block_leaks_whatever_happens(actions: list[tuple[str, int, int]]) -> None:
    engine, live = make(num_blocks=12, block_size=4), [SequenceId(1)]
    expected: dict[SequenceId, list[int]] = {engine.create(): []}
    for action, pick, amount in actions:
        sequence_id = live[pick % len(live)]
        if action == "append":
            before = engine.kv_usage()
            try:
                engine.advance([SequenceInput(sequence_id, [amount] * amount)])
                expected[sequence_id] += [amount] * amount
            except OutOfBlocksError:
                assert engine.kv_usage() == before
        elif action == "truncate":
            engine.truncate(sequence_id, amount)
            del expected[sequence_id][amount:]
        elif action == "release" and len(live) > 1:
            engine.release(sequence_id)
            live.remove(sequence_id)
            del expected[sequence_id]
        elif action in ("create", "fork"):
            new_id = engine.create() if action == "create" else engine.fork(sequence_id)
            live.append(new_id)
            expected[new_id] = list(expected[sequence_id]) if action == "fork" else []
        assert {name: engine.token_ids(name) for name in live} == expected
        assert used(engine) <= sum(-(-len(tokens) // 4) for tokens in expected.values())
    for sequence_id in live:
        engine.release(sequence_id)
    assert used(engine) == 0


def test_a_script_is_followed_by_position_and_repeats() -> None:
    engine = ToyEngine(scripted_logits([5, 6, 7], V, start=2), V)
    argmax = engine.forward_per_position_argmax([SequenceInput(engine.create(), [1] * 6, 5)])
    assert argmax.tolist() == [5, 6, 7, 5, 6]


def test_hashed_logits_depend_on_every_token_the_seed_and_nothing_else() -> None:
    base = LOGITS([1, 2, 3])
    assert (base == hashed_logits(V, seed=1)((1, 2, 3))).all()
    for other in (LOGITS([1, 2, 4]), LOGITS([2, 2, 3]), LOGITS([2, 1, 3]), hashed_logits(V, seed=2)([1, 2, 3])):
        assert (base != other).any()


@pytest.mark.parametrize(("blend", "low", "high"), [(0.0, 1.0, 1.0), (0.2, 0.55, 0.95), (1.0, 0.0, 0.2)])
def test_blending_in_other_logits_sets_how_often_a_draft_agrees(blend: float, low: float, high: float) -> None:
    target, draft = hashed_logits(V, seed=0), hashed_logits(V, seed=0, blend_seed=9, blend=blend)
    agreed = [target([n]).argmax() == draft([n]).argmax() for n in range(400)]
    assert low <= sum(agreed) / 400 <= high
