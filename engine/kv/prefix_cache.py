"""The prefix cache: which blocks hold which tokens, found by content.

A block's digest covers its own tokens and every token before it, since its rows depend on all of them. Only full
blocks have one, and only while their rows are what the digest says: a block is taken out before it is written again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NewType

import numpy as np

Digest = NewType("Digest", bytes)
NO_TOKENS = Digest(b"")  # what comes before the first block


def block_digest(before: Digest, token_ids: Sequence[int]) -> Digest:
    """The digest of a block of `token_ids` behind the block with digest `before`.

    256 bits of BLAKE2b, so that no two prefixes share one, not even for somebody who looks for them.
    """
    content = np.asarray(token_ids, dtype="<u4").tobytes()
    return Digest(hashlib.blake2b(before + content, digest_size=32).digest())


class PrefixCache:
    """Digests of blocks, and the blocks among them that no table lists: the least recently listed goes first.

    At most one block has a digest, so there are never more entries than blocks.
    """

    def __init__(self) -> None:
        self._block_ids: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def num_unreferenced(self) -> int:
        """Blocks that could be given to others."""
        return len(self._unreferenced)

    def holds(self, block_id: int) -> bool:
        """Whether the block has a digest."""
        return block_id in self._digests

    def add(self, block_id: int, digest: Digest) -> None:
        """The block's rows are those of the digest; nothing happens when another block is known for it."""
        if digest not in self._block_ids:
            self._block_ids[digest] = block_id
            self._digests[block_id] = digest

    def find(self, digest: Digest) -> int | None:
        """The block with these rows."""
        return self._block_ids.get(digest)

    def discard(self, block_id: int) -> None:
        """The block's rows will change; a no-op when it has no digest."""
        digest = self._digests.pop(block_id, None)
        if digest is not None:
            del self._block_ids[digest]

    def referenced(self, block_id: int) -> None:
        """A table lists the block again."""
        del self._unreferenced[block_id]

    def unreferenced(self, block_id: int) -> None:
        """No table lists the block any more."""
        self._unreferenced[block_id] = None

    def evict(self) -> int:
        """Forget the block that nobody has listed for the longest -> its id; KeyError when there is none."""
        block_id, _ = self._unreferenced.popitem(last=False)
        self.discard(block_id)
        return block_id
