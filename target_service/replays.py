"""Replays: sessions that emit no token and end when the hidden states they were opened for have been sent.

They bring what a proposer needs and does not have: of rows that a session found in the prefix cache, so that they were
not computed, and of whatever a draft service has lost.
"""

from dataclasses import dataclass

from engine.backends.base import EngineCapabilities
from tandem.serving.items import check_prefix
from tandem.types import SamplingParams, SessionSpec, Stamp
from tandem.validation import InvalidArgumentError, check_token_ids
from target_service.answers import StreamSessionId
from target_service.hidden_rows import check_hidden_layers
from target_service.sessions import PendingReplay, Session

PRIORITY = -1000  # below all that an application can ask for


@dataclass(frozen=True, slots=True)
class HiddenReplay:
    """What is asked for: the hidden states of all rows of committed tokens but the last."""

    token_ids: tuple[int, ...]  # committed
    hidden_layers: tuple[int, ...]
    first_row: int  # earlier ones are not wanted


def replay_session(
    key: StreamSessionId, stamp: Stamp, wanted: HiddenReplay, arrival: int, capabilities: EngineCapabilities
) -> Session:
    """A new session for a replay; raises as `open_session`."""
    token_ids, num_rows = wanted.token_ids, len(wanted.token_ids) - 1
    if not 1 <= num_rows <= capabilities.max_context:
        raise InvalidArgumentError(
            "replay.token_ids", f"{num_rows + 1} tokens are outside 2..{capabilities.max_context + 1}"
        )
    check_token_ids("replay.token_ids", token_ids, capabilities.vocab_size)
    if not wanted.hidden_layers:
        raise InvalidArgumentError("replay.hidden_layers", "are missing")
    check_hidden_layers(wanted.hidden_layers, capabilities)
    if wanted.first_row >= num_rows:
        raise InvalidArgumentError("replay.first_row", f"{wanted.first_row} is outside 0..{num_rows - 1}")
    session = Session(
        key,
        stamp.epoch,
        SessionSpec(token_ids, len(token_ids), SamplingParams(temperature=0.0), 1, priority=PRIORITY),
        arrival,
        hidden_layers=wanted.hidden_layers,
        first_hidden_row=wanted.first_row,
        replay=PendingReplay(stamp),
    )
    check_prefix(stamp, len(session.tokens), session.tokens.prefix_hash())
    return session
