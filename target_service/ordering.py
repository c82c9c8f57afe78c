"""Whose turn it is, and who keeps memory: the two orders of sessions, both by priority first."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from target_service.answers import StreamId
from target_service.sessions import Session

Seniority: TypeAlias = tuple[bool, int, int]


def seniority(session: Session) -> Seniority:
    """Who is not dormant, then the higher priority, then who came first: the lower value keeps its memory longer.

    Of two sessions that both work the order never changes, so that they cannot take their memory from each other in
    turn; a dormant one must have been silent for IDLE_S before each time it loses its own.
    """
    return session.is_dormant, -session.spec.priority, session.arrival


def in_turn(sessions: Iterable[Session], arrived: Callable[[Session], tuple[float, int]]) -> list[Session]:
    """Sessions in the order they are served in, for whatever each of them `arrived` with.

    The higher priority first; then the k-th of every stream before the (k+1)-th of any, so that nobody's many hold up
    somebody's few; then who came first.
    """
    num_before: Counter[tuple[int, StreamId]] = Counter()
    turns: list[tuple[int, int, tuple[float, int], Session]] = []
    for session in sorted(sessions, key=arrived):
        priority, stream_id = session.spec.priority, session.key[0]
        turns.append((-priority, num_before[priority, stream_id], arrived(session), session))
        num_before[priority, stream_id] += 1
    return [session for *_, session in sorted(turns, key=lambda turn: turn[:3])]


def by_arrival(session: Session) -> tuple[float, int]:
    """For `in_turn`: the session itself."""
    return 0.0, session.arrival


def by_round(session: Session) -> tuple[float, int]:
    """For `in_turn`: the session's round that waits for its step."""
    assert session.pending is not None
    return session.pending.arrived_s, session.arrival
