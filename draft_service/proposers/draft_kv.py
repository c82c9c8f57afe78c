"""The draft model's key-value rows, one engine sequence a session, and the token each row stands for.

Invariant: a session's rows are a prefix of the tokens it last drafted from. Rollback is absolute: rows are cut to
what they have in common with the committed tokens, whatever happened before.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from draft_service.proposers.base import SessionKey
from engine.backends.base import SequenceId, SpeculativeEngine

_COMPARED = 512  # tokens compared at once: list equality is far faster than a loop


@dataclass(slots=True)
class _Sequence:
    sequence_id: SequenceId
    token_ids: list[int] = field(default_factory=list)  # [rows] what each row stands for


class DraftKv:
    """Which rows each session has; the least recently used session comes first."""

    def __init__(self, engine: SpeculativeEngine) -> None:
        self._engine = engine
        self._sequences: dict[SessionKey, _Sequence] = {}

    def roll_back(self, key: SessionKey, committed_token_ids: Sequence[int]) -> list[int]:
        """Cut the session's rows to a prefix of all committed tokens but the last -> the tokens without a row.

        Never empty: the last committed token has no row yet, so that its logits can be asked for.
        """
        sequence = self._sequences.pop(key, None) or _Sequence(self._engine.create())
        self._sequences[key] = sequence  # now the most recently used
        num_kept = min(
            common_prefix_len(sequence.token_ids, committed_token_ids),
            len(committed_token_ids) - 1,
        )
        self._engine.truncate(sequence.sequence_id, num_kept)
        del sequence.token_ids[num_kept:]
        return list(committed_token_ids[num_kept:])

    def sequence_id(self, key: SessionKey) -> SequenceId:
        """The engine's name for the session's rows."""
        return self._sequences[key].sequence_id

    def num_rows(self, key: SessionKey) -> int:
        """Rows the session has; 0 for an unknown one."""
        return len(self._sequences[key].token_ids) if key in self._sequences else 0

    def appended(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """A forward has appended rows for these tokens."""
        self._sequences[key].token_ids.extend(token_ids)

    def evict_one(self, protected: Collection[SessionKey]) -> bool:
        """Free the rows of the least recently used session that is not protected; False when there is none."""
        for key, sequence in self._sequences.items():
            if key not in protected and sequence.token_ids:
                self.release(key)
                return True
        return False

    def release(self, key: SessionKey) -> None:
        """Free the session's rows; a no-op when it has none."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._engine.release(sequence.sequence_id)


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both start with."""
    limit = min(len(left), len(right))
    for start in range(0, limit, _COMPARED):
        stop = min(start + _COMPARED, limit)
        if list(left[start:stop]) != list(right[start:stop]):
            return next(index for index in range(start, stop) if left[index] != right[index])
    return limit
