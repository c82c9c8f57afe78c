"""The start-up self-test: proof, on this machine and for these weights, that a row's logits do not depend on
batch size, place in the batch, chunking, context padding or thread count.

It compares bits. Linears: every distinct shape, many row counts. Attention: up to the context limit. The whole
model: sequences alone, ragged together, row by row.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import MIN_ROWS, BatchItem, build_forward_batch, num_linear_rows
from engine.kernels.base import LayerKernels
from engine.kv.cache import KvCache
from engine.models.linear import Linear
from engine.models.llama import MAX_HEAD_ROWS, LlamaModel
from engine.runner import ModelRunner

_log = logging.getLogger(__name__)

ROW_COUNTS = (4, 5, 6, 7, 8, 9, 11, 12, 17, 33, 45, 63)
REFERENCE_ROWS = 64
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """No failure means deterministic. `logits_sha256` is of the whole-model check's float32 logits."""

    failures: tuple[str, ...]
    logits_sha256: str

    @property
    def passed(self) -> bool:
        """Whether every comparison was bitwise equal."""
        return not self.failures


def run_self_test(
    model: LlamaModel, kernels: LayerKernels, linear_failures: Sequence[str], max_step_tokens: int
) -> SelfTestReport:
    """Attention and the whole model, after `check_linears` found `linear_failures`."""
    attention_failures = check_attention(model, kernels, max_step_tokens)
    logits, model_failures = check_model(model, kernels)
    report = SelfTestReport(
        failures=(*linear_failures, *attention_failures, *model_failures),
        logits_sha256=hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
    )
    for failure in report.failures:
        _log.error("numerics self-test: %s", failure)
    return report


@torch.no_grad()
def check_linears(model: LlamaModel, max_step_tokens: int) -> list[str]:
    """Each distinct linear: those of a layer up to a whole step's rows, the head up to its own most."""
    first = model.layers[0]
    shapes = {
        (linear.in_features, linear.out_features): (linear, max_step_tokens)
        for linear in (first.qkv, first.attention_out, first.gate_up, first.down)
    }
    shapes[model.head.in_features, model.head.out_features] = (model.head, MAX_HEAD_ROWS)
    return [
        failure for linear, max_rows in shapes.values() for failure in check_linear(linear, max_rows, model.dtype)
    ]


def check_linear(linear: Linear, max_rows: int, dtype: torch.dtype) -> Iterator[str]:
    """Every row count, from both ends, at one thread and at all, against 64 rows -> what differs."""
    max_rows = max(num_linear_rows(max_rows), REFERENCE_ROWS)
    x = torch.randn(max_rows, linear.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    references = torch.cat([linear(_padded(rows))[: len(rows)] for rows in torch.split(x, REFERENCE_ROWS)])
    name = f"linear {linear.in_features}->{linear.out_features} {dtype}"
    for count in sorted({max_rows, max_rows - 1, max_rows - REFERENCE_ROWS // 2}):
        if not torch.equal(linear(x[:count]), references[:count]):
            yield f"{name}: rows of {count} differ from rows of {REFERENCE_ROWS}"
    for num_threads in thread_counts():
        with threads(num_threads):
            for count in ROW_COUNTS:
                head = torch.equal(linear(x[:count]), references[:count])
                tail = torch.equal(linear(x[-count:]), references[-count:])
                if not (head and tail):
                    yield f"{name}: rows of {count} at {num_threads} threads differ from rows of {REFERENCE_ROWS}"


def _padded(x: torch.Tensor) -> torch.Tensor:
    """At least as many rows as a step's linears are given."""
    return F.pad(x, (0, 0, 0, max(0, MIN_ROWS - x.shape[0])))


@torch.no_grad()
def check_attention(model: LlamaModel, kernels: LayerKernels, max_step_tokens: int) -> list[str]:
    """The last tokens of a context, few a step and all in one step, at contexts up to the limit."""
    limit = model.rotary.cos.shape[0]
    failures = []
    for context_len, most in ((min(limit, 300), 7), (limit, 7), (min(limit, max_step_tokens), max_step_tokens)):
        num_tokens = min(most, context_len)
        together = _attend(model, kernels, context_len, [num_tokens])
        chunk = 1 if num_tokens <= 7 else REFERENCE_ROWS - 1
        chunks = [min(chunk, num_tokens - start) for start in range(0, num_tokens, chunk)]
        for num_threads in thread_counts():
            with threads(num_threads):
                apart = _attend(model, kernels, context_len, chunks)
            if not torch.equal(apart, together):
                failures.append(
                    f"attention {model.dtype}: context {context_len} at {num_threads} threads depends on chunking"
                )
    return failures


def _attend(model: LlamaModel, kernels: LayerKernels, context_len: int, chunks: Sequence[int]) -> torch.Tensor:
    """One layer over a random cache, the last sum(chunks) = n tokens in steps of `chunks` -> [n, H * D]."""
    config = replace(model.config, num_layers=1)
    num_blocks = -(-context_len // BLOCK_SIZE)
    cache = KvCache(config, model.dtype, num_blocks, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(2)
    cache.memory.copy_(torch.randn(cache.memory.shape, generator=generator))
    num_tokens = sum(chunks)
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(num_tokens, qkv_size, generator=generator).to(model.dtype)
    out = torch.zeros(num_tokens, config.num_heads * config.head_dim, dtype=model.dtype)
    start = 0
    for count in chunks:
        item = BatchItem(np.zeros(count, np.int64), context_len - num_tokens + start, range(num_blocks), 0)
        batch = build_forward_batch([item], BLOCK_SIZE)
        rows = slice(start, start + count)
        kernels.prepare_attention(config, batch, cache, model.rotary)(
            0, qkv[rows], model.layers[0].head_norms, out[rows]
        )
        start += count
    return out


def check_model(model: LlamaModel, kernels: LayerKernels) -> tuple[torch.Tensor, list[str]]:
    """Logits of the last rows of three sequences: alone, ragged together, row by row -> those alone, failures."""
    limit = model.rotary.cos.shape[0]
    lengths = [min(length, limit) for length in (70, 33, 5)]
    wanted = min(4, *lengths)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, model.config.vocab_size, length) for length in lengths]
    first_blocks = np.cumsum([0, *(-(-length // BLOCK_SIZE) for length in lengths)])
    runner = ModelRunner(model, KvCache(model.config, model.dtype, int(first_blocks[-1]), BLOCK_SIZE), kernels)

    def step(ranges: Sequence[tuple[int, int, int]], num_logits_rows: int) -> torch.Tensor:
        """Tokens start..end of each (sequence, start, end) -> logits of their last rows."""
        items = [
            BatchItem(sequences[s][a:b], a, range(first_blocks[s], first_blocks[s + 1]), num_logits_rows)
            for s, a, b in ranges
        ]
        return runner.logits(build_forward_batch(items, BLOCK_SIZE))

    alone = torch.cat([step([(s, 0, length)], wanted) for s, length in enumerate(lengths)])
    failures = []
    runner.cache.memory.zero_()
    starts = [(s, 0, length - wanted) for s, length in enumerate(lengths) if length > wanted]
    if starts:
        step(starts, 0)
    together = step([(s, length - wanted, length) for s, length in enumerate(lengths)], wanted)
    if not torch.equal(together, alone):
        failures.append(f"model {model.dtype}: ragged batches differ from sequences alone")
    with threads(1):
        rows = [step([(0, end - 1, end)], 1) for end in range(lengths[0] - wanted + 1, lengths[0] + 1)]
    if not torch.equal(torch.cat(rows), alone[:wanted]):
        failures.append(f"model {model.dtype}: rows one by one at 1 thread differ from a whole prefill")
    return alone, failures


def thread_counts() -> list[int]:
    """One, and all."""
    return sorted({1, torch.get_num_threads()})


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Compute with that many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
