"""A row's logits depend on its tokens alone: not on batch, chunking, blocks, history or threads; bit by bit."""

import os
import threading
from collections.abc import Callable

import pytest
import torch

from engine.backends.base import SequenceInput
from engine.backends.torch_backend import TorchEngine
from engine.kernels.base import LayerKernels
from engine.models.linear import ChunkedLinear
from tests.engine.engines import DTYPES, logits, logits_of, random_tokens, tiny_engine
from tests.engine.naive_model import naive_logits
from tests.engine.tiny_models import FAMILIES, tiny_config
from tests.fixtures.tiny_models import random_model

MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(params=[*FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*DTYPES])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def make_engine(family: str, dtype: torch.dtype, kernels: LayerKernels) -> MakeEngine:
    model = random_model(FAMILIES[family])
    return lambda **options: tiny_engine(model, dtype, kernels, **options)


def test_logits_match_a_naive_recompute(family: str, kernels: LayerKernels) -> None:
    model = random_model(FAMILIES[family])
    tokens = random_tokens(200)
    engine = tiny_engine(model, kernels=kernels, linear=ChunkedLinear)
    torch.testing.assert_close(
        logits_of(engine, tokens, (150, 1, 1, 5)), naive_logits(model, tokens), atol=2e-4, rtol=1e-4
    )


def test_bfloat16_logits_stay_near_a_naive_float32_recompute(family: str, kernels: LayerKernels) -> None:
    model = random_model(FAMILIES[family])
    tokens = random_tokens(100)
    exact = naive_logits(model, tokens)
    error = (logits_of(tiny_engine(model, torch.bfloat16, kernels), tokens) - exact).std()
    assert error < 0.03 * exact.std()


@pytest.mark.parametrize("chunks", [[1] * 150, [2] * 75, [3] * 50, [5] * 30, [64, 64], [131, 9, 8, 1]])
def test_prefill_chunks_do_not_change_a_bit(make_engine: MakeEngine, chunks: list[int]) -> None:
    tokens = random_tokens(150)
    engine = make_engine()
    assert torch.equal(logits_of(engine, tokens, chunks), logits_of(engine, tokens))


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_block_size_does_not_change_a_bit(make_engine: MakeEngine, block_size: int) -> None:
    tokens = random_tokens(150)
    assert torch.equal(
        logits_of(make_engine(block_size=block_size), tokens, (140, 1, 5)),
        logits_of(make_engine(block_size=7), tokens),
    )


def test_scattered_blocks_do_not_change_a_bit(make_engine: MakeEngine) -> None:
    tokens = random_tokens(60)
    engine = make_engine()
    holes = [engine.create() for _ in range(40)]
    for hole in holes:
        engine.advance([SequenceInput(hole, random_tokens(3))])
    for hole in holes[::3] + holes[1::3]:
        engine.release(hole)
    assert torch.equal(logits_of(engine, tokens, (31, 1, 4)), logits_of(make_engine(), tokens))


def test_a_ragged_batch_of_prefill_decode_and_verify_equals_each_alone(make_engine: MakeEngine) -> None:
    engine, alone = make_engine(), make_engine()
    prompts = [random_tokens(length, seed=length) for length in (130, 64, 17, 1)]
    # (new tokens, rows wanted) of one sequence each, the last without a prompt
    steps = [(40, 3), (1, 1), (5, 5), (2, 0), (70, 70)]
    news = [random_tokens(count, seed=100 + count) for count, _ in steps]
    sequences = [engine.create() for _ in steps]
    engine.advance([SequenceInput(s, p) for s, p in zip(sequences, prompts, strict=False)])
    together = engine.forward_per_position_logits(
        [SequenceInput(s, new, rows) for s, new, (_, rows) in zip(sequences, news, steps, strict=True)]
    )
    expected = [
        logits_of(alone, prompt + new)[len(prompt + new) - rows :]
        for prompt, new, (_, rows) in zip([*prompts, []], news, steps, strict=True)
    ]
    assert torch.equal(together, torch.cat(expected))


def test_place_in_the_batch_does_not_change_a_bit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [random_tokens(20 + i, seed=i) for i in range(6)]
    sequences = [engine.create() for _ in prompts]
    engine.advance([SequenceInput(s, p[:-1]) for s, p in zip(sequences, prompts, strict=True)])
    forward = engine.forward_per_position_logits(
        [SequenceInput(s, p[-1:], 1) for s, p in zip(sequences, prompts, strict=True)]
    )
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.truncate(sequence, len(prompt) - 1)
    pairs = list(zip(sequences, prompts, strict=True))[::-1]
    backward = engine.forward_per_position_logits([SequenceInput(s, p[-1:], 1) for s, p in pairs])
    assert torch.equal(forward, backward.flip(0))


@pytest.mark.usefixtures("restore_threads")
def test_thread_count_does_not_change_a_bit(make_engine: MakeEngine) -> None:
    tokens = random_tokens(150)
    engine, results = make_engine(), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(logits_of(engine, tokens, (100, 1, 1, 6)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_worker_thread_computes_the_same_bits(make_engine: MakeEngine) -> None:
    tokens = random_tokens(150)
    engine, results = make_engine(), []
    worker = threading.Thread(target=lambda: results.append(logits_of(engine, tokens, (100, 1, 6))))
    worker.start()
    worker.join()
    assert torch.equal(results[0], logits_of(engine, tokens))


@pytest.mark.usefixtures("restore_threads")
def test_a_worker_thread_starts_no_more_threads_than_torch_was_told() -> None:
    torch.set_num_threads(1)
    # Wide enough that oneDNN would use every core.
    engine, started = tiny_engine(random_model(tiny_config(hidden_size=256, intermediate_size=1024))), []

    def work() -> None:
        before = len(os.listdir("/proc/self/task"))
        logits_of(engine, random_tokens(20))
        started.append(len(os.listdir("/proc/self/task")) - before)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert started == [0]


def test_truncate_then_refill_is_exact(make_engine: MakeEngine) -> None:
    tokens, wrong = random_tokens(80), random_tokens(30, seed=9)
    engine = make_engine()
    sequence = engine.create()
    engine.advance([SequenceInput(sequence, tokens[:50] + wrong)])
    engine.truncate(sequence, 47)
    assert engine.num_cached_tokens(sequence) == 47
    assert torch.equal(logits(engine, sequence, tokens[47:]), logits_of(engine, tokens)[47:])


def test_forks_diverge_without_touching_each_other(make_engine: MakeEngine) -> None:
    prompt, left, right = random_tokens(45), random_tokens(9, seed=1), random_tokens(9, seed=2)
    engine = make_engine()
    parent = engine.create()
    engine.advance([SequenceInput(parent, prompt)])
    child = engine.fork(parent)
    together = engine.forward_per_position_logits([SequenceInput(parent, left, 9), SequenceInput(child, right, 9)])
    assert torch.equal(together[:9], logits_of(engine, prompt + left)[45:])
    assert torch.equal(together[9:], logits_of(engine, prompt + right)[45:])
    engine.release(parent)
    assert torch.equal(logits(engine, child, [3]), logits_of(engine, [*prompt, *right, 3])[-1:])


def test_more_rows_than_one_call_of_the_head_takes_are_exact(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [random_tokens(30, seed=i) for i in range(5)]
    sequences = [engine.create() for _ in prompts]
    together = engine.forward_per_position_logits(
        [SequenceInput(s, p, 30) for s, p in zip(sequences, prompts, strict=True)]
    )
    assert torch.equal(together, torch.cat([logits_of(engine, prompt) for prompt in prompts]))


def test_argmax_is_the_logits_argmax(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for count in (1, 100):
        first, second = engine.create(), engine.create()
        tokens = random_tokens(count)
        argmax = engine.forward_per_position_argmax([SequenceInput(first, tokens, count)])
        assert argmax.dtype == torch.int64
        assert torch.equal(argmax, logits(engine, second, tokens).argmax(dim=-1))


def test_chunked_linears_are_exact_too(dtype: torch.dtype, kernels: LayerKernels) -> None:
    tokens = random_tokens(90)
    engine = tiny_engine(None, dtype, kernels, linear=ChunkedLinear)
    assert torch.equal(logits_of(engine, tokens, [1] * 20 + [5, 17]), logits_of(engine, tokens))


def test_another_sequences_broken_rows_never_reach_a_sequence(kernels: LayerKernels) -> None:
    engine = tiny_engine(kernels=kernels)
    tokens = random_tokens(21)
    expected = logits_of(tiny_engine(kernels=kernels), tokens)
    broken = engine.create()
    engine.advance([SequenceInput(broken, random_tokens(40, seed=1))])
    engine._runner.cache.memory.fill_(float("nan"))  # of the broken sequence, and of blocks that it left behind
    assert torch.equal(logits_of(engine, tokens), expected)
