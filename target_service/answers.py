"""What the target answers to an item, before it becomes wire."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

from tandem.types import ItemError, SessionId, Stamp, Verdict

StreamId = NewType("StreamId", int)
SessionKey: TypeAlias = tuple[StreamId, SessionId]  # a session belongs to the stream it was opened on


@dataclass(frozen=True, slots=True)
class Opened:
    """The session has its place in the pool."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is not there (any more)."""


Outcome: TypeAlias = Opened | Closed | Verdict | ItemError


@dataclass(frozen=True, slots=True)
class Answer:
    """One item's only answer; `stamp` is the item's own."""

    stamp: Stamp
    outcome: Outcome
