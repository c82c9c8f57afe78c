"""Sessions of one stream and the rules of their stamps. Values in, decisions out: no wire, no threads, no clock.

Every open and step names the tokens it was made for. What is old is stale and dropped; what does not fit is a typed
error; what was answered before is answered the same way again; the rest takes the session to exactly the tokens the
stamp stands for, however far back that is.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from draft_service.batcher import Answer
from draft_service.hidden_buffer import HiddenBuffer
from draft_service.proposers.base import SessionKey
from draft_service.proposers.draft_kv import common_prefix_len
from tandem.prefix_hash import HashedTokens, extend_prefix_hash
from tandem.serving.items import StaleItemError, check_prefix, check_step, unknown_session
from tandem.types import ErrorCode, ItemError, SessionId, SessionSpec, Stamp
from tandem.validation import InvalidArgumentError, check_token_ids


@dataclass(slots=True)
class Session:
    """One opening of one session."""

    key: SessionKey
    session_id: SessionId
    epoch: int
    spec: SessionSpec
    tokens: HashedTokens
    used_s: float  # when its last item came or was answered
    round: int = 0  # the last one taken up
    answer: Answer | None = None  # of that round; None: not there yet
    hidden_states: HiddenBuffer = field(default_factory=HiddenBuffer)  # for a proposer that needs them

    @property
    def is_busy(self) -> bool:
        """Whether a round is not answered yet."""
        return self.round > 0 and self.answer is None

    def check_repeat(self, stamp: Stamp) -> None:
        """Raise ItemError PREFIX_MISMATCH for a repeat of the round that was made for other tokens."""
        check_prefix(stamp, len(self.tokens), self.tokens.prefix_hash())

    def idle_since_s(self, now_s: float) -> float:
        """Since when nobody has asked it anything: now, while a round is not answered yet."""
        return now_s if self.is_busy else self.used_s

    def num_draft_tokens(self, wanted: int, max_draft_tokens: int) -> int:
        """How many drafts can be of use: the round's last token is always the target's own."""
        return max(0, min(wanted, self.spec.max_len - len(self.tokens) - 1, max_draft_tokens))

    def begin(self, stamp: Stamp, step: "Step", vocab_size: int) -> None:
        """Take up a new round: the session's tokens become the stamp's, in one go or not at all.

        ItemError PREFIX_MISMATCH, InvalidArgumentError: nothing has changed.
        """
        tokens, tail = self.tokens, step.committed_token_ids
        if step.tail_start + len(tail) != stamp.committed_len:
            raise InvalidArgumentError(
                "propose.tail_start",
                f"{step.tail_start} + {len(tail)} committed_token_ids is not stamp.committed_len {stamp.committed_len}",
            )
        if not self.spec.prompt_len <= stamp.committed_len <= self.spec.max_len:
            raise InvalidArgumentError(
                "stamp.committed_len",
                f"{stamp.committed_len} is outside {self.spec.prompt_len}..{self.spec.max_len} "
                "(prompt .. prompt + max_tokens)",
            )
        check_token_ids("propose.committed_token_ids", tail, vocab_size)
        if step.tail_start > len(tokens):
            raise ItemError(
                ErrorCode.PREFIX_MISMATCH,
                f"propose.tail_start: {step.tail_start} is past the {len(tokens)} tokens known here",
            )
        prefix_hash = extend_prefix_hash(tokens.prefix_hash(step.tail_start), tail)
        check_prefix(stamp, stamp.committed_len, prefix_hash)
        dropped = tokens.token_ids[step.tail_start :]
        num_same = common_prefix_len(dropped, tail)
        if num_same < len(dropped):
            self.hidden_states.truncate(step.tail_start + num_same)
        tokens.truncate(step.tail_start)
        tokens.extend(tail)
        self.round, self.answer = stamp.round, None


@dataclass(frozen=True, slots=True)
class Step:
    """A propose item's own fields."""

    tail_start: int
    committed_token_ids: Sequence[int]  # from tail_start on


def checked_tokens(stamp: Stamp, spec: SessionSpec) -> HashedTokens:
    """The tokens that a session is opened with; ItemError PREFIX_MISMATCH when the stamp is not of them."""
    tokens = HashedTokens(spec.token_ids)
    check_prefix(stamp, len(tokens), tokens.prefix_hash())
    return tokens


@dataclass(slots=True)
class SessionTable:
    """The sessions of one stream."""

    new_key: Callable[[], SessionKey]
    _sessions: dict[SessionId, Session] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def sessions(self) -> Collection[Session]:
        """Every session."""
        return self._sessions.values()

    def is_current(self, session: Session, stamp: Stamp) -> bool:
        """Whether an answer for this stamp is still wanted."""
        return self._sessions.get(stamp.session_id) is session and session.round == stamp.round

    def is_open(self, stamp: Stamp) -> bool:
        """Whether the session is open in this very epoch; StaleItemError when it is in a later one."""
        known = self._sessions.get(stamp.session_id)
        if known is not None and stamp.epoch < known.epoch:
            raise StaleItemError
        return known is not None and stamp.epoch == known.epoch

    def is_known(self, stamp: Stamp) -> bool:
        """Whether the session is open, in whatever epoch."""
        return stamp.session_id in self._sessions

    def open(self, stamp: Stamp, spec: SessionSpec, tokens: HashedTokens, now_s: float) -> None:
        """Take up a session with the spec's tokens, which are the stamp's."""
        key = self.new_key()
        self._sessions[stamp.session_id] = Session(key, stamp.session_id, stamp.epoch, spec, tokens, now_s)

    def session_of(self, stamp: Stamp) -> Session:
        """The session that a step is for.

        ItemError UNKNOWN_SESSION, or INVALID_ARGUMENT for round 0; StaleItemError when a later epoch or round is known.
        """
        session = self._sessions.get(stamp.session_id)
        if session is None:
            raise unknown_session(stamp)
        check_step(stamp, session.epoch)
        if stamp.round < session.round:
            raise StaleItemError
        return session

    def close(self, stamp: Stamp) -> list[SessionKey]:
        """Forget a session -> its key; nothing when there was none. StaleItemError when a later epoch is open."""
        session = self._sessions.get(stamp.session_id)
        if session is not None and stamp.epoch < session.epoch:
            raise StaleItemError
        return self.remove(stamp.session_id)

    def remove(self, session_id: SessionId) -> list[SessionKey]:
        """Forget a session, whatever its epoch -> its key; nothing when there was none."""
        session = self._sessions.pop(session_id, None)
        return [] if session is None else [session.key]

    def remove_settled(self) -> list[SessionKey]:
        """Forget every session whose round, if any, is answered -> their keys."""
        settled = [session for session in self._sessions.values() if not session.is_busy]
        return [key for session in settled for key in self.remove(session.session_id)]
