"""Engines over tiny models, as the tests need them."""

from collections.abc import Iterable, Sequence

import torch

from engine.backends.base import SequenceId, SequenceInput, SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from engine.kernels.base import LayerKernels
from engine.kernels.cpu_reference import TorchKernels
from engine.models.config import LoadedModel
from engine.models.linear import LinearType, PackedLinear
from engine.models.llama import build_llama
from tests.engine.tiny_models import FAMILIES
from tests.fixtures.tiny_models import random_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tiny_engine(
    model: LoadedModel | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: LayerKernels | None = None,
    *,
    linear: LinearType = PackedLinear,
    num_blocks: int = 256,
    block_size: int = 4,
    max_context: int = 256,
) -> TorchEngine:
    """An engine without its self-test."""
    model = random_model(FAMILIES["llama"]) if model is None else model
    built = build_llama(model, dtype, linear, max_context)
    return TorchEngine(built, kernels or TorchKernels(), num_blocks=num_blocks, block_size=block_size)


def logits(engine: SpeculativeEngine, sequence: SequenceId, token_ids: Sequence[int]) -> torch.Tensor:
    """One step of one sequence, all rows."""
    return engine.forward_per_position_logits([SequenceInput(sequence, token_ids, len(token_ids))])


def logits_of(engine: SpeculativeEngine, token_ids: Sequence[int], chunks: Iterable[int] = ()) -> torch.Tensor:
    """All rows of a fresh sequence in steps of `chunks`, the rest in one; released afterwards."""
    sequence, rows, start = engine.create(), [], 0
    for count in (*chunks, len(token_ids)):
        if part := token_ids[start : start + count]:
            rows.append(logits(engine, sequence, part))
        start += count
    engine.release(sequence)
    return torch.cat(rows)


def random_tokens(count: int, seed: int = 0, vocab_size: int = 96) -> list[int]:
    """Token ids drawn uniformly."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
