"""The block pool: which blocks of key-value memory are free, and how many sequences hold each of the others."""

from collections.abc import Iterable

from engine.backends.base import KvUsage, OutOfBlocksError


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 of `block_size` tokens each.

    A block is free (no references) or used (one reference per block table that lists it). No block is kept
    without a reference, so `cached_blocks` is 0.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a block pool needs num_blocks >= 1 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self._block_size = block_size
        self._references = [0] * num_blocks
        # A stack, so that a fresh pool hands out rising ids and a block just freed is used next.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks there are."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free)

    def num_references(self, block_id: int) -> int:
        """How many block tables list the block."""
        return self._references[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """That many free blocks, each with one reference; OutOfBlocksError, and no change, when there are fewer."""
        if num_blocks > len(self._free):
            raise OutOfBlocksError(
                f"{num_blocks} key-value blocks are needed, {len(self._free)} of {len(self._references)} are free"
            )
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these used blocks."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One reference fewer to each of these used blocks; the last one frees the block."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is already free")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def usage(self) -> KvUsage:
        """The accounting now: free + used + cached == total, counted from the references."""
        used = sum(1 for references in self._references if references)
        total = len(self._references)
        assert len(self._free) + used == total, "block accounting does not close"
        return KvUsage(
            total_blocks=total,
            used_blocks=used,
            cached_blocks=0,
            free_blocks=len(self._free),
            block_size=self._block_size,
        )
