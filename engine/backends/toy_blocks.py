"""Block accounting of the toy engine: who holds which block, and copy before a shared one is written."""

from collections import Counter
from collections.abc import Sequence

from engine.backends.base import KvUsage, OutOfBlocksError


class ToyBlocks:
    """A pool of `num_blocks` blocks of `block_size` tokens; block lists belong to the sequences."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: Counter[int] = Counter()

    def usage(self) -> KvUsage:
        """Blocks in use and free; none is ever cached."""
        num_free = len(self._free)
        return KvUsage(
            total_blocks=self._num_blocks,
            used_blocks=self._num_blocks - num_free,
            cached_blocks=0,
            free_blocks=num_free,
            block_size=self._block_size,
        )

    def grow_all(self, block_lists: Sequence[list[int]], old_lens: Sequence[int], new_lens: Sequence[int]) -> None:
        """Make room for each sequence's new length in tokens; OutOfBlocksError before anything changed."""
        lens = list(zip(block_lists, old_lens, new_lens, strict=True))
        copies = self._copies([(block_ids, old_len) for block_ids, old_len, _ in lens])
        num_needed = len(copies) + sum(self._blocks_for(new_len) - len(ids) for ids, _, new_len in lens)
        if num_needed > len(self._free):
            raise OutOfBlocksError(
                f"the step needs {num_needed} blocks of {self._block_size} tokens; {len(self._free)} of "
                f"{self._num_blocks} are free"
            )
        for block_ids in copies:
            self._drop(block_ids.pop())
            block_ids.append(self._take())
        for block_ids, _, new_len in lens:
            while len(block_ids) < self._blocks_for(new_len):
                block_ids.append(self._take())

    def shrink(self, block_ids: list[int], new_len: int) -> None:
        """Give back every block past `new_len` tokens."""
        while len(block_ids) > self._blocks_for(new_len):
            self._drop(block_ids.pop())

    def share(self, block_ids: Sequence[int]) -> None:
        """One more sequence holds these blocks."""
        self._holders.update(block_ids)

    def _copies(self, lens: Sequence[tuple[list[int], int]]) -> list[list[int]]:
        """The lists whose last block would be written while another holds it; the last holder needs no copy."""
        holders = Counter(self._holders)
        copies = []
        for block_ids, old_len in lens:
            if old_len % self._block_size and holders[block_ids[-1]] > 1:
                holders[block_ids[-1]] -= 1
                copies.append(block_ids)
        return copies

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _take(self) -> int:
        block_id = self._free.pop()
        self._holders[block_id] = 1
        return block_id

    def _drop(self, block_id: int) -> None:
        self._holders[block_id] -= 1
        if self._holders[block_id] == 0:
            del self._holders[block_id]
            self._free.append(block_id)
