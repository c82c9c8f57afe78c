"""Where the rows of a transformers model's sequences are: a seam, and the caches of models without rows to drop."""

import copy
from collections.abc import Callable, Iterable
from typing import Protocol

from transformers import Cache

from engine.backends.base import SequenceId
from engine.batch import BatchItem
from engine.kv.block_table import BlockCopy


class SequenceCaches(Protocol):
    """Each sequence's rows, as a `Cache` for one forward."""

    @property
    def can_truncate(self) -> bool:
        """Whether rows can be dropped and shared: there is one for each token, and nothing else."""
        ...

    def open(self, sequence_id: SequenceId, item: BatchItem) -> Cache:
        """The cache with the sequence's `num_cached_tokens` rows, to append the item's tokens to."""
        ...

    def keep(self, sequence_id: SequenceId, cache: Cache) -> None:
        """The whole step succeeded: the opened cache is the sequence's from now on."""
        ...

    def forget(self, sequence_id: SequenceId) -> None:
        """The sequence is released; a no-op for one never kept."""
        ...

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the rows of whole blocks, in order."""
        ...


class StateCaches:
    """A cache object a sequence, for models that fold tokens into a state: what a token did cannot be taken back.

    A step works on a copy, so that a step that fails changes nothing.
    """

    can_truncate = False

    def __init__(self, new_cache: Callable[[], Cache]) -> None:
        self._new_cache = new_cache
        self._caches: dict[SequenceId, Cache] = {}

    def open(self, sequence_id: SequenceId, item: BatchItem) -> Cache:
        """See `SequenceCaches`."""
        return copy.deepcopy(self._caches[sequence_id]) if item.num_cached_tokens else self._new_cache()

    def keep(self, sequence_id: SequenceId, cache: Cache) -> None:
        """See `SequenceCaches`."""
        self._caches[sequence_id] = cache

    def forget(self, sequence_id: SequenceId) -> None:
        """See `SequenceCaches`."""
        self._caches.pop(sequence_id, None)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Never asked for: these sequences share no block."""
        assert not list(copies)
