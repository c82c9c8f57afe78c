"""What the target answers to an item, before it becomes wire."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

from tandem.serving.items import Closed, Opened, Replayed
from tandem.types import HiddenStates, ItemError, SessionId, Stamp, Verdict

StreamId = NewType("StreamId", int)
StreamSessionId: TypeAlias = tuple[StreamId, SessionId]  # a session belongs to the stream it was opened on
Outcome: TypeAlias = Opened | Closed | Verdict | HiddenStates | Replayed | ItemError


@dataclass(frozen=True, slots=True)
class Answer:
    """One item's only answer, with the item's own stamp; or hidden states, which answer nothing, with round 0."""

    stamp: Stamp
    outcome: Outcome
