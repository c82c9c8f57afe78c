"""The prefix cache: rows are found by their tokens, equal a fresh prefill's, and go least recently used first."""

import pytest
import torch

from engine.backends.base import SequenceId, SequenceInput, SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from engine.backends.toy_backend import ToyEngine, hashed_logits
from engine.kv.block_pool import BlockPool
from engine.kv.block_table import BlockTable
from engine.kv.prefix_cache import NO_TOKENS, block_digest
from tests.engine.engines import random_tokens, tiny_engine

BLOCK_SIZE, VOCAB_SIZE = 4, 96


def build(kind: str, num_blocks: int, *, prefix_cache: bool = True) -> SpeculativeEngine:
    if kind == "toy":
        logits_of = hashed_logits(VOCAB_SIZE, seed=3)
        return ToyEngine(
            logits_of, VOCAB_SIZE, num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_cache=prefix_cache
        )
    model = tiny_engine()
    return TorchEngine(
        model.model, model._runner.kernels, num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_cache=prefix_cache
    )


@pytest.fixture(params=["toy", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start(engine: SpeculativeEngine, token_ids: list[int]) -> tuple[SequenceId, int]:
    """A sequence with a row for every token -> itself, and how many rows were cached."""
    sequence = engine.create(token_ids)
    num_cached = engine.num_cached_tokens(sequence)
    if num_cached < len(token_ids):
        engine.advance([SequenceInput(sequence, token_ids[num_cached:])])
    return sequence, num_cached


def next_logits(engine: SpeculativeEngine, sequence: SequenceId) -> torch.Tensor:
    return engine.forward_per_position_logits([SequenceInput(sequence, [7], 1)])


def answer(engine: SpeculativeEngine, token_ids: list[int]) -> tuple[torch.Tensor, int]:
    """The logits after a prompt, and how much of it was cached; nothing stays in use."""
    sequence, num_cached = start(engine, token_ids)
    logits = next_logits(engine, sequence)
    engine.release(sequence)
    assert engine.kv_usage().used_blocks == 0
    return logits, num_cached


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 12])
def test_the_same_prompt_again_finds_its_full_blocks_and_gives_the_same_logits(kind: str, length: int) -> None:
    engine, prompt = build(kind, 32), random_tokens(length)
    first, num_cached = answer(engine, prompt)
    assert num_cached == 0
    for _ in range(2):
        again, num_cached = answer(engine, prompt)
        assert num_cached == length // BLOCK_SIZE * BLOCK_SIZE
        assert torch.equal(again, first)


def test_prompts_share_as_much_as_they_have_in_common_from_the_start(kind: str) -> None:
    engine, common = build(kind, 32), random_tokens(8)
    answer(engine, [*common, 1, 2, 3, 4])
    fresh = build(kind, 32)
    for prompt, expected in (([*common, 1, 2, 3, 5], 8), ([*common[:6], 9, 9], 4), ([9, *common], 0)):
        logits, num_cached = answer(engine, prompt)
        assert num_cached == expected
        assert torch.equal(logits, answer(fresh, prompt)[0])


def test_rows_in_use_are_shared_too_and_neither_side_changes_the_others(kind: str) -> None:
    engine, prompt = build(kind, 32), random_tokens(8)
    first, _ = start(engine, prompt)
    second, num_cached = start(engine, prompt)
    assert (num_cached, engine.kv_usage().used_blocks) == (8, 2)
    expected = answer(build(kind, 32), prompt)[0]
    engine.truncate(second, 6)
    engine.advance([SequenceInput(second, [90, 91])])
    assert torch.equal(next_logits(engine, first), expected)
    assert torch.equal(next_logits(engine, second), answer(build(kind, 32), [*prompt[:6], 90, 91])[0])


def test_a_block_written_again_is_not_found_by_its_old_tokens(kind: str) -> None:
    engine, prompt = build(kind, 32), random_tokens(8)
    sequence, _ = start(engine, prompt)
    engine.truncate(sequence, 5)
    engine.advance([SequenceInput(sequence, [90, 91, 92])])
    logits, num_cached = answer_beside(engine, prompt)
    assert num_cached == 4
    assert torch.equal(logits, answer(build(kind, 32), prompt)[0])


def answer_beside(engine: SpeculativeEngine, token_ids: list[int]) -> tuple[torch.Tensor, int]:
    sequence, num_cached = start(engine, token_ids)
    logits = next_logits(engine, sequence)
    engine.release(sequence)
    return logits, num_cached


def test_a_failed_step_leaves_nothing_to_be_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = build(kind, 32), random_tokens(8)
    sequence = engine.create()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        if isinstance(engine, TorchEngine):
            patch.setattr(engine._runner, "advance", fail)
        else:
            patch.setattr(engine, "_write", fail)
        with pytest.raises(MemoryError):
            engine.advance([SequenceInput(sequence, prompt)])
    assert engine.kv_usage().free_blocks == 32
    assert answer(engine, prompt)[1] == 0


def test_evicted_rows_are_computed_again_and_the_cache_never_outgrows_the_pool(kind: str) -> None:
    engine, prompt = build(kind, 8), random_tokens(8)
    first, _ = answer(engine, prompt)
    for seed in range(1, 6):
        answer(engine, random_tokens(12, seed))
        usage = engine.kv_usage()
        assert usage.free_blocks + usage.cached_blocks == usage.total_blocks == 8
    assert engine.kv_usage().evicted_blocks > 0
    again, num_cached = answer(engine, prompt)
    assert num_cached == 0
    assert torch.equal(again, first)


def test_the_least_recently_used_goes_first_and_a_block_before_those_that_need_it_last(kind: str) -> None:
    engine = build(kind, 8)
    old, new = random_tokens(8, 1), random_tokens(8, 2)
    answer(engine, old)
    answer(engine, new)
    answer(engine, old)  # now `new` is the older one
    start(engine, random_tokens(20, 3))  # takes 5 of the 4 free and 4 cached ones
    assert engine.kv_usage().evicted_blocks == 1
    assert [engine.num_cached_tokens(engine.create(prompt)) for prompt in (old, new)] == [8, 4]


def test_without_a_prefix_cache_nothing_is_kept(kind: str) -> None:
    engine, prompt = build(kind, 8, prefix_cache=False), random_tokens(8)
    for _ in range(2):
        assert answer(engine, prompt)[1] == 0
        assert engine.kv_usage().free_blocks == 8


def test_hits_are_counted(kind: str) -> None:
    engine, prompt = build(kind, 32), random_tokens(11)
    for hits in (0, 2, 4):
        answer(engine, prompt)
        assert engine.kv_usage().hit_blocks == hits


def test_what_a_step_takes_is_known_before(kind: str) -> None:
    engine = build(kind, 32)
    sequence, _ = start(engine, random_tokens(6))
    twin, other = engine.fork(sequence), engine.create()
    inputs = [SequenceInput(sequence, [1] * 3), SequenceInput(twin, [2]), SequenceInput(other, [3] * 9)]
    before = engine.kv_usage().available_blocks
    expected = engine.num_blocks_for(inputs)
    assert expected == 1 + 1 + 3  # a block, one of two copies, three blocks
    engine.advance(inputs)
    assert before - engine.kv_usage().available_blocks == expected


def test_a_digest_is_of_every_token_before_it() -> None:
    first = block_digest(NO_TOKENS, [1, 2, 3])
    assert block_digest(NO_TOKENS, (1, 2, 3)) == first
    assert block_digest(NO_TOKENS, [1, 2, 4]) != first
    assert block_digest(first, [1, 2, 3]) != block_digest(NO_TOKENS, [1, 2, 3])


def test_of_two_blocks_with_the_same_rows_one_is_kept() -> None:
    pool = BlockPool(4, 2, prefix_cache=True)
    tables = [BlockTable(pool), BlockTable(pool)]
    for table in tables:
        table.append([5, 6])
        table.seal()
    for table in tables:
        table.release()
    usage = pool.usage()
    assert (usage.cached_blocks, usage.free_blocks) == (1, 3)
