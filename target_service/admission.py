"""Who may use the block pool: sessions are admitted when what they need now fits, and wait in turn until then.

What a running session will need later is not reserved, only a little: when the pool gets short, drafts shrink, then
the newest session is preempted (reservation.py) and comes back here.
"""

from engine.backends.base import KvUsage
from tandem.types import ErrorCode, ItemError
from target_service.limits import Limits
from target_service.ordering import by_arrival, in_turn
from target_service.sessions import Session

HEADROOM_BLOCKS = 1  # kept free for each running session beyond its next round


class Admission:
    """Running sessions, and a bounded queue of those that wait; `kv_usage` is the pool's after the last step.

    Dormant sessions that gave way count in the queue, though nobody waits behind them: each keeps its tokens and its
    verdict until its lease ends, and only this bounds how many do.
    """

    def __init__(self, kv_usage: KvUsage, limits: Limits) -> None:
        self.kv_usage = kv_usage
        self._limits = limits
        self._running: dict[Session, None] = {}
        self._waiting: dict[Session, None] = {}

    @property
    def running(self) -> list[Session]:
        """The sessions that steps may work on."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for room to whom others give way."""
        return any(not session.gives_way for session in self._waiting)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of a sequence of so many tokens; one row a token."""
        return -(-num_tokens // self.kv_usage.block_size)

    def offer(self, session: Session) -> bool:
        """Admit the session or put it in the queue; True when it is admitted. Call `admit` before, so that it is fair.

        Raises `ItemError` NO_CAPACITY when it could never fit, or when it would have to wait and the queue is full.
        """
        worst, total = self.num_blocks_for(session.spec.max_len), self.kv_usage.total_blocks
        if worst > total:
            raise ItemError(
                ErrorCode.NO_CAPACITY,
                f"never: prompt of {session.spec.prompt_len} tokens + max_tokens {session.spec.max_tokens} needs "
                f"{worst} blocks of {self.kv_usage.block_size} tokens, the pool has {total}",
            )
        self._waiting[session] = None
        admitted = self.admit()
        assert admitted in ([], [session])
        if not admitted and len(self._waiting) > self._limits.max_waiting_sessions:
            del self._waiting[session]
            raise self._queue_full(session)
        return bool(admitted)

    def admit(self) -> list[Session]:
        """Admit waiting sessions in turn while the next one fits; nobody overtakes it. Dormant ones stay."""
        waiting = [session for session in self._waiting if not session.is_dormant]
        if not waiting:
            return []
        admitted = []
        room = self._room()
        for session in in_turn([*self._running, *waiting], by_arrival):
            if session in self._running:
                continue
            needed = self._num_blocks_now(session)
            if len(self._running) >= self._limits.max_sessions or needed > room:
                break
            del self._waiting[session]
            self._running[session] = None
            room -= needed + HEADROOM_BLOCKS
            admitted.append(session)
        return admitted

    def requeue(self, session: Session) -> None:
        """The session was preempted: it waits again, in the place its arrival gives it."""
        del self._running[session]
        self._waiting[session] = None

    def remove(self, session: Session) -> None:
        """Forget the session."""
        self._waiting.pop(session, None)
        self._running.pop(session, None)

    def _room(self) -> int:
        """Blocks in nobody's use, without those that running sessions need now and a little more."""
        expected = sum(
            max(0, self._num_blocks_now(session) - self.num_blocks_for(session.num_rows)) + HEADROOM_BLOCKS
            for session in self._running
        )
        return self.kv_usage.available_blocks - expected

    def _num_blocks_now(self, session: Session) -> int:
        """Blocks of the session's tokens so far and one round; never more than its worst case."""
        one_round = 1 + self._limits.max_draft_tokens
        return self.num_blocks_for(min(len(session.tokens) + one_round, session.spec.max_len))

    def _queue_full(self, session: Session) -> ItemError:
        usage, limits = self.kv_usage, self._limits
        return ItemError(
            ErrorCode.NO_CAPACITY,
            f"now: {len(self._running)} sessions of at most {limits.max_sessions} hold {usage.used_blocks} of "
            f"{usage.total_blocks} blocks, this one needs {self._num_blocks_now(session)}, "
            f"and {len(self._waiting)} of at most {limits.max_waiting_sessions} sessions are waiting",
        )
