"""The block pool: which blocks of key-value memory are free, and how many sequences hold each of the others."""

from collections.abc import Iterable

from engine.backends.base import KvUsage, OutOfBlocksError
from engine.kv.prefix_cache import Digest, PrefixCache


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 of `block_size` tokens each.

    A block is used (one reference per block table that lists it), cached (no reference, but its rows can be found
    by their tokens) or free. Cached blocks are handed out when no block is free, the least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = False) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a block pool needs num_blocks >= 1 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self._block_size = block_size
        self._references = [0] * num_blocks
        self._num_used = 0
        # A stack, so that a fresh pool hands out rising ids and a block just freed is used next.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()
        self._is_caching = prefix_cache
        self._num_evicted = 0
        self._num_hits = 0

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks there are."""
        return len(self._references)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + self._cache.num_unreferenced

    @property
    def is_caching(self) -> bool:
        """Whether blocks keep their rows for others that begin with the same tokens."""
        return self._is_caching

    def num_references(self, block_id: int) -> int:
        """How many block tables list the block."""
        return self._references[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """That many blocks, each with one reference; OutOfBlocksError, and no change, when there are fewer."""
        if num_blocks > self.num_available:
            raise OutOfBlocksError(
                f"{num_blocks} key-value blocks are needed, {self.num_available} of {self.num_blocks} can be had"
            )
        block_ids = [self._take() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._references[block_id] = 1
        self._num_used += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these used blocks."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is not in use and cannot be shared")
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One reference fewer to each of these used blocks; after the last one the block is cached or free."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is already free")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._num_used -= 1
                if self._cache.holds(block_id):
                    self._cache.unreferenced(block_id)
                else:
                    self._free.append(block_id)

    def seal(self, block_id: int, digest: Digest) -> None:
        """The full block's rows are written: from now on `reuse` finds them."""
        assert self._references[block_id] > 0
        if self._is_caching:
            self._cache.add(block_id, digest)

    def unseal(self, block_id: int) -> None:
        """The block is about to be written by its only holder: nobody may find its old rows."""
        assert self._references[block_id] == 1
        self._cache.discard(block_id)

    def reuse(self, digest: Digest) -> int | None:
        """The block whose rows are the digest's, with one more reference; None when there is none."""
        block_id = self._cache.find(digest)
        if block_id is None:
            return None
        if self._references[block_id] == 0:
            self._cache.referenced(block_id)
            self._num_used += 1
        self._references[block_id] += 1
        self._num_hits += 1
        return block_id

    def usage(self) -> KvUsage:
        """The accounting now: free + used + cached == total."""
        num_cached = self._cache.num_unreferenced
        assert len(self._free) + self._num_used + num_cached == self.num_blocks, "block accounting does not close"
        return KvUsage(
            total_blocks=self.num_blocks,
            used_blocks=self._num_used,
            cached_blocks=num_cached,
            free_blocks=len(self._free),
            block_size=self._block_size,
            evicted_blocks=self._num_evicted,
            hit_blocks=self._num_hits,
        )

    def _take(self) -> int:
        """A free block, or the least recently used cached one."""
        if self._free:
            return self._free.pop()
        self._num_evicted += 1
        return self._cache.evict()
