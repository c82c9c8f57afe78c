"""The start-up self-test of a transformers model: that its cache does what the engine takes for granted, and whether
a row's logits depend on what is computed beside it.

It goes through the engine, as a service does, and compares bits, but for the check of the cache.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.backends.base import EngineError, SequenceInput, SpeculativeEngine
from engine.hf.attention import additive_mask, invariant_attention
from engine.hf.paged_rows import LayerShape
from engine.self_test import REFERENCE_ROWS, SelfTestReport, thread_counts, threads

_log = logging.getLogger(__name__)

_LENGTHS = (70, 33, 5)
_NUM_WANTED = 4
_UNEQUAL_STEPS = (1, 2, 3, 5, 7, 9, 16)
# Of the largest logit: far above what rounding does, far below what a wrong mask or position does.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


def probe_tokens(vocab_size: int, max_context: int) -> list[list[int]]:
    """Three token sequences of unequal length, drawn once for all."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, min(length, max_context)).tolist() for length in _LENGTHS]


def num_probe_rows(max_context: int, max_step_tokens: int) -> int:
    """Most rows a sequence of the self-test has; three are as long at the same time."""
    return max(*_LENGTHS, min(max_context, max_step_tokens))


def is_close(logits: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two [R, V] differ by no more than rounding in `dtype` explains."""
    return bool((logits - reference).abs().max() <= _TOLERANCES[dtype] * reference.abs().max())


def check_cache(engine: SpeculativeEngine, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """EngineError unless tokens read step by step give about what the whole text gives at once, without a cache.

    `reference` [T, V] is of the first of `probe_tokens`. A model that looks at later tokens fails, and one whose
    cache means something else than the engine thinks.
    """
    tokens = probe_tokens(engine.capabilities.vocab_size, engine.capabilities.max_context)[0]
    rows = _last_rows(engine, tokens, _UNEQUAL_STEPS)
    if not is_close(rows, reference[-len(rows) :], dtype):
        raise EngineError(
            "tokens read step by step give other logits than the whole text at once: the model is not causal, or "
            "keeps what it has read in a way that backend 'transformers' does not know"
        )


def check_rows(engine: SpeculativeEngine, failures: Sequence[str], max_step_tokens: int) -> SelfTestReport:
    """Last rows of sequences alone, together, step by step, at one thread, and of as many tokens as a step may have.

    `failures` are those found before: where there are any, no more are looked for.
    """
    limits = engine.capabilities
    tokens = probe_tokens(limits.vocab_size, limits.max_context)
    alone = torch.cat([_last_rows(engine, sequence, ()) for sequence in tokens])
    found = failures or list(_row_failures(engine, tokens, alone, min(limits.max_context, max_step_tokens)))
    for failure in found:
        _log.warning("numerics self-test: %s", failure)
    return SelfTestReport(tuple(found), hashlib.sha256(alone.numpy().tobytes()).hexdigest())


def _row_failures(
    engine: SpeculativeEngine, tokens: Sequence[Sequence[int]], alone: torch.Tensor, most: int
) -> Iterator[str]:
    if not torch.equal(_together(engine, tokens), alone):
        yield "sequences together differ from sequences alone"
    first = tokens[0]
    num_wanted = min(_NUM_WANTED, len(first))
    one_by_one = [len(first) - num_wanted, *[1] * num_wanted]
    for num_threads in thread_counts():
        with threads(num_threads):
            for steps in (_UNEQUAL_STEPS, one_by_one):
                if not torch.equal(_last_rows(engine, first, steps), alone[:num_wanted]):
                    yield f"steps of {list(steps)} tokens at {num_threads} threads differ from all in one"
    step = np.random.default_rng(4).integers(0, engine.capabilities.vocab_size, most).tolist()
    pieces = [REFERENCE_ROWS - 1] * (most // (REFERENCE_ROWS - 1))
    if not torch.equal(_last_rows(engine, step, ()), _last_rows(engine, step, pieces)):
        yield f"a step of {most} tokens differs from steps of {REFERENCE_ROWS - 1}"


def _last_rows(engine: SpeculativeEngine, token_ids: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """Logits of the last rows of a sequence that is read in these steps, the rest in one."""
    sequence, start, rows = engine.create(), 0, []
    first_wanted = max(0, len(token_ids) - _NUM_WANTED)
    try:
        for count in (*steps, len(token_ids)):
            part = token_ids[start : start + count]
            start += len(part)
            if part:
                num_rows = min(len(part), max(0, start - first_wanted))
                rows.append(engine.forward_per_position_logits([SequenceInput(sequence, part, num_rows)]))
        return torch.cat(rows)
    finally:
        engine.release(sequence)


def _together(engine: SpeculativeEngine, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """The same rows of all these sequences from one step, after one that read what comes before."""
    sequences = [engine.create() for _ in tokens]
    pairs = list(zip(sequences, tokens, strict=True))
    try:
        engine.advance([SequenceInput(s, t[:-_NUM_WANTED]) for s, t in pairs if len(t) > _NUM_WANTED])
        tails = [SequenceInput(s, t[-_NUM_WANTED:], min(_NUM_WANTED, len(t))) for s, t in pairs]
        return engine.forward_per_position_logits(tails)
    finally:
        for sequence in sequences:
            engine.release(sequence)


def check_attention(num_heads: int, shape: LayerShape, max_context: int) -> Iterator[str]:
    """The invariant attention's last seven tokens of a full context, at once and one by one -> what differs."""
    generator = torch.Generator().manual_seed(2)
    num_tokens = min(7, max_context)

    def normal(heads: int, rows: int, size: int) -> torch.Tensor:
        return torch.randn(1, heads, rows, size, generator=generator).to(shape.dtype)

    query = normal(num_heads, num_tokens, shape.key_dim)
    key = normal(shape.num_heads, max_context, shape.key_dim)
    value = normal(shape.num_heads, max_context, shape.value_dim)

    def attend(start: int, end: int) -> torch.Tensor:
        num_rows = max_context - num_tokens + end
        mask = additive_mask(1, end - start, num_rows, num_rows - end + start)
        return invariant_attention(
            torch.nn.Identity(), query[:, :, start:end], key[:, :, :num_rows], value[:, :, :num_rows], mask
        )[0]

    together = attend(0, num_tokens)
    for num_threads in thread_counts():
        with threads(num_threads):
            apart = torch.cat([attend(token, token + 1) for token in range(num_tokens)], dim=1)
        if not torch.equal(apart, together):
            yield f"attention over {max_context} rows at {num_threads} threads depends on the step"
