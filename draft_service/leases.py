"""Sessions that end though nobody closed them: their lease is over, or another needs their place."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from draft_service.limits import IDLE_S
from draft_service.proposers.base import SessionKey
from draft_service.sessions import SessionTable
from tandem.types import SessionId


class Leases:
    """Watches the sessions of all streams; times are the event loop's, in seconds.

    A session whose round is in work is not idle. Whoever comes back to a session that was ended is told that it is
    unknown, and opens it again.
    """

    def __init__(
        self,
        lease_s: float,
        tables: Callable[[], Iterable[SessionTable]],
        forget: Callable[[Sequence[SessionKey]], None],
    ) -> None:
        """`tables`: those there are now; `forget` is told what was ended."""
        self.num_ended = 0
        self._lease_s = lease_s
        self._tables = tables
        self._forget = forget
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """A session was opened."""
        if self._timer is None:
            self._look_again()

    def make_room(self) -> bool:
        """End the session that has been idle for longest; False when none is idle."""
        now_s = asyncio.get_running_loop().time()
        sessions = [(table, session) for table in self._tables() for session in table.sessions]
        table, longest = min(sessions, key=lambda entry: entry[1].idle_since_s(now_s))
        if longest.idle_since_s(now_s) + IDLE_S > now_s:
            return False
        self._end(table, longest.session_id)
        return True

    def _look(self) -> None:
        """End what is over, and look again when the next may be."""
        now_s = asyncio.get_running_loop().time()
        for table in self._tables():
            for session in list(table.sessions):
                if session.idle_since_s(now_s) + self._lease_s <= now_s:
                    self._end(table, session.session_id)
        self._look_again()

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        since_s = [session.idle_since_s(now_s) for table in self._tables() for session in table.sessions]
        self._timer = loop.call_at(min(since_s) + self._lease_s, self._look) if since_s else None

    def _end(self, table: SessionTable, session_id: SessionId) -> None:
        self.num_ended += 1
        self._forget(table.remove(session_id))
