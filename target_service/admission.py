"""Who may use the block pool: the worst cases of all admitted sessions together never exceed it.

So no verify step can run out of blocks, and nobody's drafts cost anyone else memory.
"""

from tandem.types import ErrorCode, ItemError
from target_service.sessions import Session


class Admission:
    """Reservations in blocks, and a bounded first-come-first-served queue of sessions without one."""

    def __init__(self, total_blocks: int, block_size: int, max_sessions: int, max_waiting_sessions: int) -> None:
        self._total_blocks = total_blocks
        self._block_size = block_size
        self._max_sessions = max_sessions
        self._max_waiting_sessions = max_waiting_sessions
        self._admitted: set[Session] = set()
        self._num_reserved_blocks = 0
        self._waiting: dict[Session, None] = {}  # in order of arrival

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_blocks_for(self, max_len: int) -> int:
        """Blocks of a sequence of `max_len` tokens, the most that clamped drafts ever reach; one row a token."""
        return -(-max_len // self._block_size)

    def offer(self, session: Session) -> bool:
        """Admit the session or put it last in the queue; True when it is admitted.

        Raises `ItemError` NO_CAPACITY when it could never fit, or when the queue is full.
        """
        if session.num_blocks > self._total_blocks:
            spec = session.spec
            raise ItemError(
                ErrorCode.NO_CAPACITY,
                f"never: prompt of {spec.prompt_len} tokens + max_tokens {spec.max_tokens} needs "
                f"{session.num_blocks} blocks of {self._block_size} tokens, the pool has {self._total_blocks}",
            )
        if not self._waiting and self._fits(session):
            self._admit(session)
            return True
        if len(self._waiting) >= self._max_waiting_sessions:
            raise ItemError(
                ErrorCode.NO_CAPACITY,
                f"now: {len(self._admitted)} sessions of at most {self._max_sessions} hold "
                f"{self._num_reserved_blocks} of {self._total_blocks} blocks, this one needs {session.num_blocks}, "
                f"and {len(self._waiting)} of at most {self._max_waiting_sessions} sessions are waiting",
            )
        self._waiting[session] = None
        return False

    def admit_waiting(self) -> list[Session]:
        """Admit from the head of the queue while the head fits; nobody overtakes it."""
        admitted = []
        while self._waiting:
            head = next(iter(self._waiting))
            if not self._fits(head):
                break
            del self._waiting[head]
            self._admit(head)
            admitted.append(head)
        return admitted

    def remove(self, session: Session) -> None:
        """Give up the session's reservation or its place in the queue."""
        self._waiting.pop(session, None)
        if session in self._admitted:
            self._admitted.remove(session)
            self._num_reserved_blocks -= session.num_blocks

    def _fits(self, session: Session) -> bool:
        has_blocks = self._num_reserved_blocks + session.num_blocks <= self._total_blocks
        return has_blocks and len(self._admitted) < self._max_sessions

    def _admit(self, session: Session) -> None:
        self._admitted.add(session)
        self._num_reserved_blocks += session.num_blocks
