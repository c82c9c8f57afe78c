"""The sessions there are: how one is found, admitted and ended, and when its memory is given back.

Items (table.py) and steps (steps.py) both change it; every answer leaves from here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.backends.base import SequenceId
from tandem.serving.items import Closed, Opened
from tandem.types import ItemError, Stamp
from target_service.admission import Admission
from target_service.answers import Answer, Outcome, StreamId, StreamSessionId
from target_service.limits import IDLE_S
from target_service.sessions import Session


@dataclass(slots=True)
class Counters:
    """Since start."""

    stale_items: int = 0
    preemptions: int = 0
    shrunk_draft_tokens: int = 0
    evicted_sessions: int = 0

    def count_stale(self) -> None:
        """An item was dropped without an answer."""
        self.stale_items += 1


class LiveSessions:
    """Sessions of all streams; `deliver` takes each answer to its stream."""

    def __init__(self, admission: Admission, deliver: Callable[[StreamId, Answer], None]) -> None:
        self.admission = admission
        self.counters = Counters()
        self.is_changed = True  # since it was last set to False, in a way that may let a step do more
        self._deliver = deliver
        self._sessions: dict[StreamSessionId, Session] = {}
        self._released: list[Session] = []  # their sequences are forgotten by the next step
        self._releasing: list[Session] = []  # ... and by the one in flight
        self._closing: dict[Session, Stamp] = {}  # closes that are answered when the memory is back

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_empty(self) -> bool:
        """Whether no session is open and every close has its answer."""
        return not self._sessions and not self._closing

    def get(self, key: StreamSessionId) -> Session | None:
        """The session, None when there is none (any more)."""
        return self._sessions.get(key)

    def all(self) -> list[Session]:
        """Every session, in order of arrival."""
        return list(self._sessions.values())

    def of_stream(self, stream_id: StreamId) -> list[Session]:
        """The stream's sessions."""
        return [session for session in self._sessions.values() if session.key[0] == stream_id]

    def is_closing(self, stream_id: StreamId) -> bool:
        """Whether a close of the stream waits for its answer."""
        return any(session.key[0] == stream_id for session in self._closing)

    def add(self, session: Session, now_s: float) -> None:
        """Take a new session in and admit it or let it wait; raises, and leaves it out, as `Admission.offer`."""
        self.admit_waiting(now_s)  # there may be room by now for somebody before it
        is_admitted = self.admission.offer(session)
        self._sessions[session.key] = session
        if is_admitted:
            self._begin(session, now_s)

    def touch(self, session: Session, now_s: float) -> None:
        """The session has an item."""
        session.touched_s, session.is_dormant = now_s, False

    def look(self, now_s: float) -> None:
        """Note who is busy, and who has been idle for so long that it is dormant from now on."""
        for session in self._sessions.values():
            if session.touched_s is None or not session.is_idle:
                session.touched_s = now_s
            elif not session.is_dormant and session.touched_s + IDLE_S <= now_s:
                session.is_dormant = self.is_changed = True

    def admit_waiting(self, now_s: float) -> None:
        """Give room that has become free to the sessions that wait for it."""
        for session in self.admission.admit():
            self._begin(session, now_s)

    def close(self, session: Session, stamp: Stamp) -> None:
        """Free the session; the close is answered once its memory is back."""
        self._closing[session] = stamp
        self.free(session)

    def free(self, session: Session, error: ItemError | None = None) -> None:
        """Take the session out; with `error`, as the answer to whatever of it is not answered yet."""
        session.is_freed = self.is_changed = True
        del self._sessions[session.key]
        self.admission.remove(session)
        for entry in (session.pending_open, session.replay, session.verifying, session.pending):
            if error is not None and entry is not None:
                self.answer(session.key[0], entry.stamp, error)
        if not session.is_in_flight:
            self.release(session)

    def release(self, session: Session) -> None:
        """Have the next step forget the freed session's sequence, if it has one."""
        if session.sequence_id is not None:
            self._released.append(session)
        else:
            self._answer_close(session)

    def begin_releases(self) -> tuple[SequenceId, ...]:
        """The sequences that the step now planned has to forget."""
        self._releasing, self._released = self._released, []
        return tuple(session.sequence_id for session in self._releasing if session.sequence_id is not None)

    def finish_releases(self) -> None:
        """What the step has forgotten is back in the pool."""
        releasing, self._releasing = self._releasing, []
        for session in releasing:
            self._answer_close(session)

    @property
    def has_releases(self) -> bool:
        """Whether a step has something to forget."""
        return bool(self._released)

    def answer(self, stream_id: StreamId, stamp: Stamp, outcome: Outcome) -> None:
        """Send an item its answer."""
        self._deliver(stream_id, Answer(stamp, outcome))

    def _begin(self, session: Session, now_s: float) -> None:
        """The session is admitted; its open is answered unless it was before a preemption."""
        self.is_changed = True
        session.touched_s = now_s
        if session.pending_open is not None:
            self.answer(session.key[0], session.pending_open.stamp, Opened())
            session.pending_open = None

    def _answer_close(self, session: Session) -> None:
        """Answer the session's close, if it was one that freed it."""
        stamp = self._closing.pop(session, None)
        if stamp is not None:
            self.answer(session.key[0], stamp, Closed())
