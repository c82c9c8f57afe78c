"""The native engine: Llama-family models on torch, paged key-value memory, ragged batches, invariant rows."""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.base import (
    EngineCapabilities,
    EngineError,
    KvUsage,
    OutOfBlocksError,
    SequenceId,
    SequenceInput,
)
from engine.batch import BatchItem, ForwardBatch, build_forward_batch
from engine.kernels.base import LayerKernels
from engine.kv.block_pool import BlockPool
from engine.kv.block_table import BlockTable, num_blocks_for_step
from engine.kv.cache import KvCache
from engine.models.llama import LlamaModel
from engine.runner import ModelRunner

T = TypeVar("T")


class TorchEngine:
    """`SpeculativeEngine` over a built model. `load_torch_engine` in engine/backends/torch_loading.py makes one."""

    def __init__(
        self,
        model: LlamaModel,
        kernels: LayerKernels,
        *,
        num_blocks: int,
        block_size: int = 16,
        deterministic: bool = False,
        numerics_fingerprint: str = "",
    ) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._runner = ModelRunner(model, KvCache(model.config, model.dtype, num_blocks, block_size), kernels)
        self._tables: dict[SequenceId, BlockTable] = {}
        self._next_id = itertools.count()
        self._capabilities = EngineCapabilities(
            backend="torch",
            vocab_size=model.config.vocab_size,
            max_context=model.rotary.cos.shape[0],
            dtype=str(model.dtype).removeprefix("torch."),
            device="cpu",
            can_truncate=True,
            deterministic=deterministic,
            numerics_fingerprint=numerics_fingerprint,
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        """See `SpeculativeEngine`."""
        return self._capabilities

    @property
    def model(self) -> LlamaModel:
        """The built model the engine runs."""
        return self._runner.model

    def create(self) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._register(BlockTable(self._pool))

    def num_cached_tokens(self, sequence_id: SequenceId) -> int:
        """See `SpeculativeEngine`."""
        return self._table(sequence_id).num_tokens

    def advance(self, inputs: Sequence[SequenceInput]) -> None:
        """See `SpeculativeEngine`."""
        for item in inputs:
            if item.num_logits_rows:
                raise EngineError(
                    f"sequence {item.sequence_id}: advance computes no logits, num_logits_rows must be 0, "
                    f"got {item.num_logits_rows}"
                )
        if inputs:
            self._step(inputs, self._runner.advance)

    def forward_per_position_logits(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        if not inputs:
            return torch.empty(0, self._capabilities.vocab_size)
        return self._step(inputs, self._runner.logits)

    def forward_per_position_argmax(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        if not inputs:
            return torch.empty(0, dtype=torch.int64)
        return self._step(inputs, self._runner.argmax)

    def truncate(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """See `SpeculativeEngine`; EngineError for a negative count."""
        if num_tokens < 0:
            raise EngineError(f"sequence {sequence_id}: cannot truncate to {num_tokens} tokens")
        self._table(sequence_id).truncate(num_tokens)

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._register(self._table(sequence_id).fork())

    def release(self, sequence_id: SequenceId) -> None:
        """See `SpeculativeEngine`."""
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            table.release()

    def kv_usage(self) -> KvUsage:
        """See `SpeculativeEngine`."""
        return self._pool.usage()

    def _step(self, inputs: Sequence[SequenceInput], forward: Callable[[ForwardBatch], T]) -> T:
        """Check everything, append, build the batch, run it; whatever fails, the sequences are as before."""
        tokens = self._check(inputs)
        tables = [self._tables[item.sequence_id] for item in inputs]
        appends = [(table, len(ids)) for table, ids in zip(tables, tokens, strict=True)]
        needed, free = num_blocks_for_step(self._pool, appends), self._pool.num_free
        if needed > free:
            raise OutOfBlocksError(
                f"a step of {sum(map(len, tokens))} tokens of {len(inputs)} sequences needs {needed} key-value "
                f"blocks, {free} of {self._pool.num_blocks} are free"
            )
        lengths_before = [table.num_tokens for table in tables]
        try:
            for table, num_tokens in appends:
                self._runner.cache.copy_blocks(table.append(num_tokens))
            items = [
                BatchItem(ids, cached, table.block_ids, item.num_logits_rows)
                for item, ids, cached, table in zip(inputs, tokens, lengths_before, tables, strict=True)
            ]
            return forward(build_forward_batch(items, self._pool.block_size))
        except BaseException:
            for table, num_tokens in zip(tables, lengths_before, strict=True):
                table.truncate(num_tokens)
            raise

    def _check(self, inputs: Sequence[SequenceInput]) -> list[npt.NDArray[np.int64]]:
        """The inputs' token ids as int64 [n] each; EngineError for anything a step must not be given."""
        limits = self._capabilities
        tokens = [np.asarray(item.token_ids, dtype=np.int64) for item in inputs]
        seen: set[SequenceId] = set()
        for item, ids in zip(inputs, tokens, strict=True):
            name, count = f"sequence {item.sequence_id}", len(ids)
            cached = self.num_cached_tokens(item.sequence_id)
            if item.sequence_id in seen:
                raise EngineError(f"{name} appears twice in one step")
            seen.add(item.sequence_id)
            if count == 0:
                raise EngineError(f"{name}: a step needs at least one token")
            if not 0 <= item.num_logits_rows <= count:
                raise EngineError(f"{name}: num_logits_rows must be 0..{count}, got {item.num_logits_rows}")
            if ids.min() < 0 or ids.max() >= limits.vocab_size:
                wrong = ids[(ids < 0) | (ids >= limits.vocab_size)][0]
                raise EngineError(f"{name}: token id {wrong} is outside the vocabulary 0..{limits.vocab_size - 1}")
            if cached + count > limits.max_context:
                raise EngineError(
                    f"{name}: {cached} cached and {count} new tokens pass the context limit of {limits.max_context}"
                )
        return tokens

    def _table(self, sequence_id: SequenceId) -> BlockTable:
        if sequence_id not in self._tables:
            raise EngineError(f"sequence {sequence_id} is unknown: it was never created here, or was released")
        return self._tables[sequence_id]

    def _register(self, table: BlockTable) -> SequenceId:
        sequence_id = SequenceId(next(self._next_id))
        self._tables[sequence_id] = table
        return sequence_id
