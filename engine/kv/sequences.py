"""An engine's sequences: what they may be given, their blocks, and steps that happen whole or not at all.

Every backend with paged memory keeps its sequences here; what a row is made of is the backend's own.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.backends.base import (
    EngineCapabilities,
    EngineError,
    KvUsage,
    OutOfBlocksError,
    SequenceId,
    SequenceInput,
    UnsupportedEngineError,
)
from engine.batch import BatchItem
from engine.kv.block_pool import BlockPool
from engine.kv.block_table import BlockCopy, BlockTable, num_blocks_for_step

T = TypeVar("T")


class KvSequences:
    """Block tables by sequence id; the methods named as `SpeculativeEngine`'s do what it says."""

    def __init__(
        self,
        capabilities: EngineCapabilities,
        pool: BlockPool,
        copy_blocks: Callable[[Iterable[BlockCopy]], None],
    ) -> None:
        """`copy_blocks` copies the rows of whole blocks, in order."""
        self._capabilities = capabilities
        self._pool = pool
        self._copy_blocks = copy_blocks
        self._tables: dict[SequenceId, BlockTable] = {}
        self._next_id = itertools.count(1)

    @property
    def ids(self) -> list[SequenceId]:
        """Of every sequence there is, the oldest first."""
        return list(self._tables)

    def create(self, token_ids: Sequence[int] = ()) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._register(BlockTable.from_cache(self._pool, token_ids))

    def table(self, sequence_id: SequenceId) -> BlockTable:
        """The sequence's; EngineError when there is no such sequence."""
        if sequence_id not in self._tables:
            raise EngineError(f"sequence {sequence_id} is unknown: it was never created here, or was released")
        return self._tables[sequence_id]

    def truncate(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """See `SpeculativeEngine`; EngineError for a negative count.

        UnsupportedEngineError when rows would go and the backend cannot.
        """
        if num_tokens < 0:
            raise EngineError(f"sequence {sequence_id}: cannot truncate to {num_tokens} tokens")
        table = self.table(sequence_id)
        if num_tokens < table.num_tokens and not self._capabilities.can_truncate:
            raise UnsupportedEngineError(
                f"backend {self._capabilities.backend!r} cannot truncate: sequence {sequence_id} has "
                f"{table.num_tokens} rows and {num_tokens} were asked to stay"
            )
        table.truncate(num_tokens)

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._register(self.table(sequence_id).fork())

    def release(self, sequence_id: SequenceId) -> None:
        """See `SpeculativeEngine`."""
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            table.release()

    def usage(self) -> KvUsage:
        """See `SpeculativeEngine.kv_usage`."""
        return self._pool.usage()

    def num_blocks_for(self, inputs: Sequence[SequenceInput]) -> int:
        """See `SpeculativeEngine`."""
        return num_blocks_for_step(
            self._pool, [(self.table(item.sequence_id), len(item.token_ids)) for item in inputs]
        )

    def step(self, inputs: Sequence[SequenceInput], forward: Callable[[list[BatchItem]], T]) -> T:
        """Check everything, make room, run `forward` on the batch; whatever fails, the sequences are as before."""
        tokens = self._check(inputs)
        tables = [self._tables[item.sequence_id] for item in inputs]
        self._check_room(inputs)
        lengths_before = [table.num_tokens for table in tables]
        try:
            for item, table in zip(inputs, tables, strict=True):
                self._copy_blocks(table.append(item.token_ids))
            items = [
                BatchItem(ids, cached, table.block_ids, item.num_logits_rows, item.states)
                for item, ids, cached, table in zip(inputs, tokens, lengths_before, tables, strict=True)
            ]
            result = forward(items)
        except BaseException:
            for table, num_tokens in zip(tables, lengths_before, strict=True):
                table.truncate(num_tokens)
            raise
        for table in tables:
            table.seal()
        return result

    def _check_room(self, inputs: Sequence[SequenceInput]) -> None:
        needed, available = self.num_blocks_for(inputs), self._pool.num_available
        if needed > available:
            raise OutOfBlocksError(
                f"a step of {sum(len(item.token_ids) for item in inputs)} tokens of {len(inputs)} sequences needs "
                f"{needed} key-value blocks, {available} of {self._pool.num_blocks} can be had"
            )

    def _check(self, inputs: Sequence[SequenceInput]) -> list[npt.NDArray[np.int64]]:
        """The inputs' token ids as int64 [n] each; EngineError for anything a step must not be given."""
        limits = self._capabilities
        tokens = [np.asarray(item.token_ids, dtype=np.int64) for item in inputs]
        seen: set[SequenceId] = set()
        for item, ids in zip(inputs, tokens, strict=True):
            name, count = f"sequence {item.sequence_id}", len(ids)
            cached = self.table(item.sequence_id).num_tokens
            if item.sequence_id in seen:
                raise EngineError(f"{name} appears twice in one step")
            seen.add(item.sequence_id)
            if count == 0:
                raise EngineError(f"{name}: a step needs at least one token")
            if item.states is not None and len(item.states) != count:
                raise EngineError(f"{name}: {len(item.states)} states for {count} tokens")
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

    def _register(self, table: BlockTable) -> SequenceId:
        sequence_id = SequenceId(next(self._next_id))
        self._tables[sequence_id] = table
        return sequence_id
