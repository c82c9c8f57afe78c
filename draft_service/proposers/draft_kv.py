"""The draft model's key-value rows, one engine sequence a session, and the token each row stands for.

Invariant: a session's rows are a prefix of the tokens it last drafted from. Rollback is absolute: rows are cut to
what they have in common with the committed tokens, whatever happened before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.limits import IDLE_S
from draft_service.proposers.base import SessionKey
from engine.backends.base import SequenceId, SequenceInput, SpeculativeEngine

_COMPARED = 512  # tokens compared at once: list equality is far faster than a loop


@dataclass(slots=True)
class _Sequence:
    sequence_id: SequenceId
    token_ids: list[int]  # [rows] what each row stands for
    used_s: float = 0.0


class DraftKv:
    """Which rows each session has; the least recently used session comes first."""

    def __init__(self, engine: SpeculativeEngine, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, never going back."""
        self._engine = engine
        self._clock = clock
        self._sequences: dict[SessionKey, _Sequence] = {}
        usage = engine.kv_usage()
        self.max_rows = usage.total_blocks * usage.block_size  # of one session that has all the memory

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sequences

    def roll_back(self, key: SessionKey, committed_token_ids: Sequence[int]) -> list[int]:
        """Cut the session's rows to a prefix of all committed tokens but the last -> the tokens without a row.

        Never empty: the last committed token has no row yet, so that its logits can be asked for. A session without
        rows begins with those that the engine has kept for its tokens.
        """
        sequence = self._sequences.pop(key, None) or self._create(committed_token_ids[:-1])
        self._sequences[key] = sequence  # now the most recently used
        sequence.used_s = self._clock()
        num_kept = min(
            common_prefix_len(sequence.token_ids, committed_token_ids),
            len(committed_token_ids) - 1,
        )
        self.truncate(key, num_kept)
        return list(committed_token_ids[num_kept:])

    def sequence_id(self, key: SessionKey) -> SequenceId:
        """The engine's name for the session's rows."""
        return self._sequences[key].sequence_id

    def num_rows(self, key: SessionKey) -> int:
        """Rows the session has; 0 for an unknown one."""
        return len(self._sequences[key].token_ids) if key in self._sequences else 0

    def num_blocks_for(self, key: SessionKey, num_rows: int) -> int:
        """Blocks that so many more rows of the session take from the available ones."""
        return self._engine.num_blocks_for([SequenceInput(self.sequence_id(key), range(num_rows))])

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had now."""
        return self._engine.kv_usage().available_blocks

    def appended(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """A forward has appended rows for these tokens."""
        self._sequences[key].token_ids.extend(token_ids)

    def truncate(self, key: SessionKey, num_rows: int) -> None:
        """Drop the session's rows past so many; a no-op when there are fewer."""
        sequence = self._sequences[key]
        self._engine.truncate(sequence.sequence_id, num_rows)
        del sequence.token_ids[num_rows:]

    def evict_idle(self) -> bool:
        """Free the rows of the idle session that drafted longest ago; False when there is none.

        Who has been rolled back for a batch is not idle.
        """
        idle_since_s = self._clock() - IDLE_S
        for key, sequence in self._sequences.items():
            if sequence.used_s > idle_since_s:
                return False  # those behind it were used later still
            if sequence.token_ids:
                self.release(key)
                return True
        return False

    def evict_younger(self, than: SessionKey) -> bool:
        """Free the rows of the session opened last, if it was opened after `than`; False when there is none."""
        youngest = max((key for key, sequence in self._sequences.items() if sequence.token_ids), default=than)
        if youngest <= than:
            return False
        self.release(youngest)
        return True

    def release(self, key: SessionKey) -> None:
        """Free the session's rows; a no-op when it has none."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._engine.release(sequence.sequence_id)

    def _create(self, token_ids: Sequence[int]) -> _Sequence:
        sequence_id = self._engine.create(token_ids)
        return _Sequence(sequence_id, list(token_ids[: self._engine.num_cached_tokens(sequence_id)]))


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both start with."""
    limit = min(len(left), len(right))
    for start in range(0, limit, _COMPARED):
        stop = min(start + _COMPARED, limit)
        if list(left[start:stop]) != list(right[start:stop]):
            return next(index for index in range(start, stop) if left[index] != right[index])
    return limit
