"""What both model services say about the items of a stream, in the same words.

Every item has exactly one answer, unless it is stale.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.types import ErrorCode, ItemError, Stamp
from tandem.validation import InvalidArgumentError

_log = logging.getLogger(__name__)


class StaleItemError(Exception):
    """An item made for a state that has passed: counted and dropped."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is open."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is not there (any more)."""


@contextmanager
def answering(stamp: Stamp, answer: Callable[[ItemError], None], count_stale: Callable[[], None]) -> Iterator[None]:
    """Turn whatever goes wrong with one item into that item's answer, so that nothing else notices."""
    try:
        yield
    except StaleItemError:
        count_stale()
    except ItemError as error:
        answer(error)
    except InvalidArgumentError as error:
        answer(ItemError(ErrorCode.INVALID_ARGUMENT, str(error)))
    except Exception:  # noqa: BLE001 - a bug met by one item must not end the stream of the others
        _log.exception("unhandled error in round %d", stamp.round, extra={"session_id": stamp.session_id})
        answer(internal_error())


@dataclass(frozen=True, slots=True)
class Replayed:
    """All hidden states that were asked for have been sent."""


def check_step(stamp: Stamp, epoch: int) -> None:
    """Raise unless a step's stamp can be of a session that is open in `epoch`.

    ItemError UNKNOWN_SESSION for a higher epoch, INVALID_ARGUMENT for round 0; StaleItemError for a lower epoch.
    """
    if stamp.epoch > epoch:
        raise unknown_session(stamp)
    if stamp.round < 1:
        raise ItemError(ErrorCode.INVALID_ARGUMENT, "stamp.round: 0 is the open's, rounds count from 1")
    if stamp.epoch < epoch:
        raise StaleItemError


def check_prefix(stamp: Stamp, num_tokens: int, prefix_hash: int) -> None:
    """Raise ItemError PREFIX_MISMATCH unless the stamp was made for these tokens."""
    if (stamp.committed_len, stamp.prefix_hash) != (num_tokens, prefix_hash):
        raise ItemError(
            ErrorCode.PREFIX_MISMATCH,
            f"session {stamp.session_id} round {stamp.round}: the stamp is for {stamp.committed_len} committed tokens "
            f"with hash {stamp.prefix_hash:016x}, here are {num_tokens} with {prefix_hash:016x}",
        )


def unknown_session(stamp: Stamp) -> ItemError:
    """The error that makes the orchestrator re-open."""
    return ItemError(
        ErrorCode.UNKNOWN_SESSION,
        f"session {stamp.session_id} epoch {stamp.epoch} is not open on this stream; re-open it",
    )


def draining() -> ItemError:
    """The answer to an open while the replica ends."""
    return ItemError(ErrorCode.NO_CAPACITY, "now: this replica is draining; open sessions elsewhere")


def deadline_exceeded(where: str) -> ItemError:
    """The answer to an item that was not begun in time."""
    return ItemError(ErrorCode.DEADLINE_EXCEEDED, f"deadline_ms passed while {where}")


def internal_error() -> ItemError:
    """The answer to an item that met a bug; what it was is in the log."""
    return ItemError(ErrorCode.INTERNAL, "internal error")
