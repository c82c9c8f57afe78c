"""Who of a batch gets how many rows: of key-value memory, and of the step they share."""

from collections.abc import Sequence

from draft_service.proposers.base import SessionKey
from draft_service.proposers.draft_kv import DraftKv
from draft_service.proposers.draft_round import DraftRound
from engine.row_shares import even_shares


class DraftRoom:
    """The blocks that one batch's sessions have been promised; ask for the oldest session first.

    Memory belongs to the sessions that were opened first. Were it taken from whoever drafted longest ago, sessions
    that are with the target would lose their rows to those that are not, and all of them would compute their rows
    anew, round by round. An idle session (IDLE_S) has no claim.
    """

    def __init__(self, kv: DraftKv) -> None:
        self._kv = kv
        self._num_rows: dict[SessionKey, int] = {}  # promised
        self._num_blocks: dict[SessionKey, int] = {}  # that those take
        self._num_promised = 0  # blocks of all of them

    def recount(self) -> None:
        """Another sequence has been made, or released, from blocks that may be those of promised sessions.

        Who has to write into a block that another one lists takes a copy of it: a block more than before.
        """
        self._num_blocks = {key: self._kv.num_blocks_for(key, rows) for key, rows in self._num_rows.items()}
        self._num_promised = sum(self._num_blocks.values())

    def admit(self, key: SessionKey, num_rows: int) -> bool:
        """Promise rows that the session cannot draft without; idle sessions lose theirs for it, then younger ones."""
        while not self._promise(key, num_rows):
            if not (self._kv.evict_idle() or self._kv.evict_younger(key)):
                return False
        return True

    def extend(self, key: SessionKey, least: int, most: int) -> int:
        """Promise up to `most` rows in place of the `least` of before -> how many; only idle sessions lose theirs."""
        num_rows = most
        while num_rows > least and not self._promise(key, num_rows):
            if not self._kv.evict_idle():
                num_rows -= 1
        return num_rows

    def _promise(self, key: SessionKey, num_rows: int) -> bool:
        """Promise one session rows in place of what it was promised before, if there are blocks for everybody's."""
        needed = self._kv.num_blocks_for(key, num_rows)
        num_promised = self._num_promised - self._num_blocks.get(key, 0) + needed
        if num_promised > self._kv.available_blocks:
            return False
        self._num_rows[key], self._num_blocks[key], self._num_promised = num_rows, needed, num_promised
        return True


def plan_batch(kv: DraftKv, rounds: Sequence[DraftRound], max_step_tokens: int) -> list[DraftRound]:
    """Roll back, then share out memory and the first step -> the rounds that take part, the oldest session first."""
    room = DraftRoom(kv)
    admitted = _admit(kv, room, sorted(rounds, key=lambda draft: draft.key))
    shares = even_shares([len(draft.pending) for draft in admitted], max_step_tokens)
    for draft, share in zip(admitted, shares, strict=True):
        draft.num_fed = share
        if not draft.is_behind:
            num_rows = len(draft.pending)  # with the last of them comes the first draft
            draft.num_granted = 1 + room.extend(draft.key, num_rows, num_rows + draft.num_wanted - 1) - num_rows
    return admitted


def _admit(kv: DraftKv, room: DraftRoom, rounds: Sequence[DraftRound]) -> list[DraftRound]:
    """Rounds, the oldest session first -> those that can draft and have memory for all that they lack.

    The others keep no rows: whatever they had is free for those behind them.
    """
    able = []
    for draft in rounds:
        if draft.num_wanted == 0 or len(draft.tokens) > kv.max_rows:
            kv.release(draft.key)
            continue
        able.append(draft)
        if draft.key in kv:
            draft.pending = kv.roll_back(draft.key, draft.tokens)
    admitted = []
    for draft in able:
        if draft.key not in kv:  # new, evicted earlier, or by an older session of this batch
            draft.pending = kv.roll_back(draft.key, draft.tokens)
            room.recount()
        if room.admit(draft.key, len(draft.pending)):
            admitted.append(draft)
        else:
            kv.release(draft.key)
            room.recount()
    return admitted
