"""A sequence's block table: which blocks hold its key-value rows, in order."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.kv.block_pool import BlockPool


class BlockCopy(NamedTuple):
    """Copy the rows of block `source` to block `destination` before anything is written to it."""

    source: int
    destination: int


class BlockTable:
    """Row i of the sequence is at offset i % block_size of block `block_ids[i // block_size]`.

    Invariant: `len(block_ids) == ceil(num_tokens / block_size)`, and a block that will be written is never
    shared: `append` replaces a shared last block by a copy first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_ids: list[int] = []
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Rows the sequence has."""
        return self._num_tokens

    @property
    def block_ids(self) -> Sequence[int]:
        """The blocks, first rows first."""
        return self._block_ids

    def append(self, num_tokens: int) -> list[BlockCopy]:
        """Room for that many more rows -> copies to make before writing them.

        Raises OutOfBlocksError, and changes nothing, when the pool cannot hold them.
        """
        shared_tail = self.writable_tail()
        must_copy = shared_tail is not None and self._pool.num_references(shared_tail) > 1
        num_new = self.num_new_blocks(num_tokens)
        block_ids = self._pool.allocate(num_new + must_copy)
        copies: list[BlockCopy] = []
        if must_copy:
            copies = [BlockCopy(self._block_ids[-1], block_ids.pop(0))]
            self._pool.free([copies[0].source])
            self._block_ids[-1] = copies[0].destination
        self._block_ids += block_ids
        self._num_tokens += num_tokens
        return copies

    def num_new_blocks(self, num_tokens: int) -> int:
        """Blocks that many more rows add, not counting a copy of a shared last block."""
        return self._num_blocks(self._num_tokens + num_tokens) - len(self._block_ids)

    def writable_tail(self) -> int | None:
        """The block the next row goes to if there is one with room: it must not be shared when written."""
        return self._block_ids[-1] if self._num_tokens % self._pool.block_size else None

    def fork(self) -> "BlockTable":
        """A table with the same rows in the same blocks, one more reference each."""
        twin = BlockTable(self._pool)
        self._pool.share(self._block_ids)
        twin._block_ids = list(self._block_ids)
        twin._num_tokens = self._num_tokens
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Drop rows past `num_tokens` (absolute); a no-op when there are fewer."""
        if num_tokens < 0:
            raise ValueError(f"cannot truncate to {num_tokens} rows")
        if num_tokens >= self._num_tokens:
            return
        keep = self._num_blocks(num_tokens)
        self._pool.free(self._block_ids[keep:])
        del self._block_ids[keep:]
        self._num_tokens = num_tokens

    def release(self) -> None:
        """Give every block back; the table is empty afterwards."""
        self.truncate(0)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


def num_blocks_for_step(pool: BlockPool, appends: Sequence[tuple[BlockTable, int]]) -> int:
    """Blocks that appending `(table, num_tokens)` for every pair, in any order, takes from the pool.

    Sequences that share a partly filled last block each take a copy of it, except that when nobody outside the
    step holds the block, the last writer keeps the original.
    """
    new_blocks = sum(table.num_new_blocks(num_tokens) for table, num_tokens in appends)
    tails = Counter(tail for table, _ in appends if (tail := table.writable_tail()) is not None)
    copies = sum(min(writers, pool.num_references(tail) - 1) for tail, writers in tails.items())
    return new_blocks + copies
