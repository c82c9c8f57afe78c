"""Sessions of one stream and the rules of their stamps. Values in, decisions out: no wire, no threads, no clock.

Every open and step names the tokens it was made for. What is old is stale and dropped; what does not fit is a typed
error; what was answered before is answered the same way again; the rest takes the session to exactly the tokens the
stamp stands for, however far back that is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from draft_service.batcher import Answer
from draft_service.proposers.base import SessionKey
from tandem.prefix_hash import HashedTokens, extend_prefix_hash
from tandem.types import ErrorCode, ItemError, SessionId, SessionSpec, Stamp
from tandem.validation import check_token_ids


class Dropped(Enum):
    """Why an item gets no answer."""

    STALE = "stale"  # a later epoch or round is known
    REPEAT = "repeat"  # the same round is being worked on; its one answer comes


@dataclass(slots=True)
class Session:
    """One opening of one session."""

    key: SessionKey
    epoch: int
    spec: SessionSpec
    tokens: HashedTokens
    round: int = 0  # the last one taken up
    answer: Answer | None = None  # of that round; None: not there yet

    def num_draft_tokens(self, wanted: int, max_draft_tokens: int) -> int:
        """How many drafts can be of use: the round's last token is always the target's own."""
        return max(0, min(wanted, self.spec.max_len - len(self.tokens) - 1, max_draft_tokens))


@dataclass(frozen=True, slots=True)
class Step:
    """A propose item's own fields."""

    tail_start: int
    committed_token_ids: Sequence[int]  # from tail_start on


@dataclass(slots=True)
class SessionTable:
    """The sessions of one stream."""

    new_key: Callable[[], SessionKey]
    vocab_size: int
    _sessions: dict[SessionId, Session] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: SessionId) -> bool:
        return session_id in self._sessions

    def keys(self) -> list[SessionKey]:
        """Of every session."""
        return [session.key for session in self._sessions.values()]

    def is_current(self, session: Session, stamp: Stamp) -> bool:
        """Whether an answer for this stamp is still wanted."""
        return self._sessions.get(stamp.session_id) is session and session.round == stamp.round

    def open(self, stamp: Stamp, spec: SessionSpec) -> SessionKey | Dropped | None:
        """Take up a session.

        Returns the key of the session that it replaces; None when it replaces nothing, or is open already in this
        very epoch and stays as it is. ItemError PREFIX_MISMATCH when the stamp is not of the spec's tokens.
        """
        known = self._sessions.get(stamp.session_id)
        if known is not None and stamp.epoch < known.epoch:
            return Dropped.STALE
        if known is not None and stamp.epoch == known.epoch:
            return None
        tokens = HashedTokens(spec.token_ids)
        _check_prefix(stamp, len(tokens), tokens.prefix_hash())
        self._sessions[stamp.session_id] = Session(self.new_key(), stamp.epoch, spec, tokens)
        return known.key if known is not None else None

    def step(self, stamp: Stamp, step: Step) -> Session | Answer | Dropped:
        """Take a round up: the session, now at the stamp's tokens, or the answer that this round got before.

        ItemError UNKNOWN_SESSION, PREFIX_MISMATCH or INVALID_ARGUMENT, InvalidArgumentError: nothing has changed.
        """
        session = self._sessions.get(stamp.session_id)
        if session is None or stamp.epoch > session.epoch:
            raise ItemError(
                ErrorCode.UNKNOWN_SESSION,
                f"session {stamp.session_id} epoch {stamp.epoch} is not open on this stream",
            )
        if stamp.round == 0:
            raise ItemError(ErrorCode.INVALID_ARGUMENT, "stamp.round: 0 is the open's; rounds count from 1")
        if stamp.epoch < session.epoch or stamp.round < session.round:
            return Dropped.STALE
        if stamp.round == session.round:
            return Dropped.REPEAT if session.answer is None else session.answer
        self._move(session, stamp, step)
        session.round, session.answer = stamp.round, None
        return session

    def close(self, stamp: Stamp) -> SessionKey | Dropped | None:
        """Forget a session: its key, or None when there was none. A close of an earlier epoch is stale."""
        session = self._sessions.get(stamp.session_id)
        if session is None:
            return None
        if stamp.epoch < session.epoch:
            return Dropped.STALE
        del self._sessions[stamp.session_id]
        return session.key

    def _move(self, session: Session, stamp: Stamp, step: Step) -> None:
        """Take the session's tokens to the stamp's, in one go or not at all."""
        tokens, tail = session.tokens, step.committed_token_ids
        if step.tail_start + len(tail) != stamp.committed_len:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"propose.tail_start: {step.tail_start} + {len(tail)} committed_token_ids is not "
                f"stamp.committed_len {stamp.committed_len}",
            )
        if not session.spec.prompt_len <= stamp.committed_len <= session.spec.max_len:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"stamp.committed_len: {stamp.committed_len} is outside "
                f"{session.spec.prompt_len}..{session.spec.max_len} (prompt .. prompt + max_tokens)",
            )
        check_token_ids("propose.committed_token_ids", tail, self.vocab_size)
        if step.tail_start > len(tokens):
            raise ItemError(
                ErrorCode.PREFIX_MISMATCH,
                f"propose.tail_start: {step.tail_start} is past the {len(tokens)} tokens known here",
            )
        prefix_hash = extend_prefix_hash(tokens.prefix_hash(step.tail_start), tail)
        _check_prefix(stamp, stamp.committed_len, prefix_hash)
        tokens.truncate(step.tail_start)
        tokens.extend(tail)


def _check_prefix(stamp: Stamp, num_tokens: int, prefix_hash: int) -> None:
    """Raise PREFIX_MISMATCH unless the stamp was made for these tokens."""
    if (stamp.committed_len, stamp.prefix_hash) != (num_tokens, prefix_hash):
        raise ItemError(
            ErrorCode.PREFIX_MISMATCH,
            f"session {stamp.session_id}: the stamp is for {stamp.committed_len} tokens with hash "
            f"{stamp.prefix_hash:#018x}, here are {num_tokens} with {prefix_hash:#018x}",
        )
