"""What the target answers to an item, before it becomes wire."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

from tandem.serving.items import Closed, Opened
from tandem.types import ItemError, SessionId, Stamp, Verdict

StreamId = NewType("StreamId", int)
StreamSessionId: TypeAlias = tuple[StreamId, SessionId]  # a session belongs to the stream it was opened on
Outcome: TypeAlias = Opened | Closed | Verdict | ItemError


@dataclass(frozen=True, slots=True)
class Answer:
    """One item's only answer; `stamp` is the item's own."""

    stamp: Stamp
    outcome: Outcome
