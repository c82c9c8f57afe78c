"""A sequence's block table: its tokens, and which blocks hold their key-value rows, in order."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import NO_TOKENS, Digest, block_digest


class BlockCopy(NamedTuple):
    """Copy the rows of block `source` to block `destination` before anything is written to it."""

    source: int
    destination: int


class BlockTable:
    """Row i of the sequence is at offset i % block_size of block `block_ids[i // block_size]`.

    Invariant: `len(block_ids) == ceil(num_tokens / block_size)`, and a block that will be written is neither shared
    nor to be found in the prefix cache: `append` replaces a shared last block by a copy first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_ids: list[int] = []
        self._token_ids: list[int] = []
        self._digests: list[Digest] = []  # of the sealed blocks, the first ones

    @classmethod
    def from_cache(cls, pool: BlockPool, token_ids: Sequence[int]) -> "BlockTable":
        """A table with the rows of these tokens that are cached: whole blocks from the start, possibly none."""
        table, size = cls(pool), pool.block_size
        if not pool.is_caching:
            return table
        digest = NO_TOKENS
        for end in range(size, len(token_ids) + 1, size):
            block_tokens = token_ids[end - size : end]
            digest = block_digest(digest, block_tokens)
            block_id = pool.reuse(digest)
            if block_id is None:
                break
            table._block_ids.append(block_id)
            table._token_ids += block_tokens
            table._digests.append(digest)
        return table

    @property
    def num_tokens(self) -> int:
        """Rows the sequence has."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The token of each row."""
        return self._token_ids

    @property
    def block_ids(self) -> Sequence[int]:
        """The blocks, first rows first."""
        return self._block_ids

    def append(self, token_ids: Sequence[int]) -> list[BlockCopy]:
        """Room for the rows of these tokens -> copies to make before writing them.

        Raises OutOfBlocksError, and changes nothing, when the pool cannot hold them.
        """
        tail = self.writable_tail()
        must_copy = tail is not None and self._pool.num_references(tail) > 1
        block_ids = self._pool.allocate(self.num_new_blocks(len(token_ids)) + must_copy)
        copies: list[BlockCopy] = []
        if must_copy:
            copies = [BlockCopy(self._block_ids[-1], block_ids.pop(0))]
            self._pool.free([copies[0].source])
            self._block_ids[-1] = copies[0].destination
        elif tail is not None:
            self._pool.unseal(tail)
        self._block_ids += block_ids
        self._token_ids += token_ids
        return copies

    def seal(self) -> None:
        """Let others find the full blocks by their tokens; call it once their rows are written."""
        if not self._pool.is_caching:
            return
        size = self._pool.block_size
        for index in range(len(self._digests), self.num_tokens // size):
            before = self._digests[-1] if self._digests else NO_TOKENS
            digest = block_digest(before, self._token_ids[index * size : (index + 1) * size])
            self._digests.append(digest)
            self._pool.seal(self._block_ids[index], digest)

    def num_new_blocks(self, num_tokens: int) -> int:
        """Blocks that many more rows add, not counting a copy of a shared last block."""
        return self._num_blocks(self.num_tokens + num_tokens) - len(self._block_ids)

    def writable_tail(self) -> int | None:
        """The block the next row goes to if there is one with room: it must not be shared when written."""
        return self._block_ids[-1] if self.num_tokens % self._pool.block_size else None

    def fork(self) -> "BlockTable":
        """A table with the same rows in the same blocks, one more reference each."""
        twin = BlockTable(self._pool)
        self._pool.share(self._block_ids)
        twin._block_ids = list(self._block_ids)
        twin._token_ids = list(self._token_ids)
        twin._digests = list(self._digests)
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Drop rows past `num_tokens` (absolute); a no-op when there are fewer."""
        if num_tokens < 0:
            raise ValueError(f"cannot truncate to {num_tokens} rows")
        if num_tokens >= self.num_tokens:
            return
        keep = self._num_blocks(num_tokens)
        # The last first: a block is of no use to others without those before it, so it shall be evicted sooner.
        self._pool.free(reversed(self._block_ids[keep:]))
        del self._block_ids[keep:]
        del self._token_ids[num_tokens:]
        del self._digests[num_tokens // self._pool.block_size :]

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
