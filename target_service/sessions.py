"""One session at the target: its tokens, its rounds, and the rules by which an item changes them.

Nothing here knows of engines or streams; a session is touched on the event loop only.

A row is one token's key-value memory. The last committed token has no row yet, so a session that is caught up has
`num_rows == len(tokens) - 1`, and a round of K drafts appends K + 1 rows. Letters: K draft tokens of a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.backends.base import EngineCapabilities, SequenceId
from tandem.prefix_hash import HashedTokens
from tandem.serving.items import StaleItemError, check_prefix, check_step
from tandem.types import ErrorCode, ItemError, Proposal, SessionSpec, Stamp, Verdict
from tandem.validation import InvalidArgumentError, check_session
from target_service.answers import StreamSessionId
from target_service.hidden_rows import check_hidden_layers
from target_service.step import StepOutcome


@dataclass(frozen=True, slots=True)
class PendingReplay:
    """A replay that is not finished."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class PendingOpen:
    """An open that waits for room; `deadline_s` is on the event loop's clock, None for no deadline."""

    stamp: Stamp
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A verify item that waits for its step; `proposal` is already within every limit."""

    stamp: Stamp
    proposal: Proposal
    arrived_s: float
    deadline_s: float | None = None

    @property
    def num_drafts(self) -> int:
        """K."""
        return len(self.proposal.draft_token_ids)


@dataclass(slots=True, eq=False)
class Session:
    """Token state of one request, and where its engine sequence stands."""

    key: StreamSessionId
    epoch: int
    spec: SessionSpec
    arrival: int  # grows from one session to the next
    touched_s: float | None = (
        0.0  # when it last had an item or was busy, event loop's clock; None: up to the next look
    )
    is_dormant: bool = False  # idle for IDLE_S: it gives way to anybody, and waits for nothing
    pending_open: PendingOpen | None = None  # until it is admitted for the first time
    tokens: HashedTokens = field(init=False)
    sequence_id: SequenceId | None = None  # None before its first step and after a preemption
    num_rows: int = 0
    num_cached_tokens: int | None = None  # rows found in the prefix cache when its first sequence was made
    pending: PendingRound | None = None
    is_in_flight: bool = False  # part of the step that is being computed
    verifying: PendingRound | None = None  # the round that step decides; None when it only prefills
    last_round: int = 0  # answered with `last_verdict`
    last_verdict: Verdict | None = None
    last_base: tuple[int, int] = (0, 0)  # committed length and prefix hash that it was decided for
    is_freed: bool = False  # no longer in the table; only a step in flight still knows it
    hidden_layers: tuple[int, ...] = ()  # after which hidden states are sent
    first_hidden_row: int = 0  # whose hidden states have not been sent
    replay: PendingReplay | None = None  # it emits no token: all it wants are hidden states

    def __post_init__(self) -> None:
        self.tokens = HashedTokens(self.spec.token_ids)

    @property
    def num_missing_rows(self) -> int:
        """Rows to prefill before only K + 1 rows separate the session from a verdict."""
        return len(self.tokens) - 1 - self.num_rows

    @property
    def is_caught_up(self) -> bool:
        """Whether only a round's own rows separate it from a verdict."""
        return self.num_missing_rows == 0

    @property
    def prompt_key(self) -> tuple[int, int]:
        """Equal for equal prompts."""
        return self.spec.prompt_len, self.tokens.prefix_hash(self.spec.prompt_len)

    def clamp(self, proposal: Proposal, committed_len: int, max_draft_tokens: int) -> Proposal:
        """The proposal's first drafts, as many as the generation and the service leave room for."""
        most = max(0, min(self.spec.max_len - committed_len - 1, max_draft_tokens))
        return proposal.first(most)

    def recorded_verdict(self, stamp: Stamp) -> Verdict | None:
        """The verdict to repeat, None for a new round.

        Raises `StaleItemError` for an older epoch or round and for a repeat whose first copy is not answered yet,
        `ItemError` UNKNOWN_SESSION for an epoch that was never opened here, PREFIX_MISMATCH for a repeat that was made
        for other tokens than the verdict.
        """
        check_step(stamp, self.epoch)
        newest_unanswered = max((entry.stamp.round for entry in (self.pending, self.verifying) if entry), default=0)
        if stamp.round <= newest_unanswered or stamp.round < self.last_round:
            raise StaleItemError
        if stamp.round != self.last_round or self.last_verdict is None:
            return None
        check_prefix(stamp, *self.last_base)
        return self.last_verdict

    @property
    def is_busy(self) -> bool:
        """Whether a verify item, or a replay, is not answered yet."""
        return self.pending is not None or self.verifying is not None or self.replay is not None

    @property
    def is_idle(self) -> bool:
        """Whether its next item is all it waits for."""
        return not self.is_busy and not self.is_in_flight and self.pending_open is None

    @property
    def gives_way(self) -> bool:
        """Whether it loses its memory to anybody who waits for room, and waits for none itself that others have."""
        return self.is_dormant or self.replay is not None

    @property
    def idle_since_s(self) -> float | None:
        """Since when its next item is all it waits for; None when it is not idle, or nobody has looked since."""
        return self.touched_s if self.is_idle else None

    def submit(self, entry: PendingRound) -> bool:
        """Take a new round; True when it pushed out an older one that was not begun.

        Raises `ItemError` when its stamp does not fit. While another round is being decided the check
        waits for `settle`, because the verdict decides what the session's tokens are.
        """
        if self.verifying is None:
            self._roll_back(entry.stamp)
        is_replacing = self.pending is not None
        self.pending = entry
        return is_replacing

    def settle(self) -> None:
        """Roll back for the round that arrived during the step, if any; raises, and forgets it, as `submit`."""
        entry, self.pending = self.pending, None
        if entry is not None:
            self._roll_back(entry.stamp)
            self.pending = entry

    def _roll_back(self, stamp: Stamp) -> None:
        """Check the base a round was made for, then take tokens and rows back to it: absolute, harmless twice."""
        committed_len, spec = stamp.committed_len, self.spec
        known_len = min(committed_len, len(self.tokens))
        check_prefix(stamp, known_len, self.tokens.prefix_hash(known_len))
        if not spec.prompt_len <= committed_len < spec.max_len:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"stamp.committed_len: {committed_len} is outside {spec.prompt_len}..{spec.max_len - 1} "
                "(the prompt, and one token short of max_tokens)",
            )
        self.tokens.truncate(committed_len)
        self.num_rows = min(self.num_rows, committed_len - 1)
        self.first_hidden_row = min(self.first_hidden_row, self.num_rows)

    def begin(self, verifying: PendingRound | None) -> None:
        """The session becomes part of a step that may decide `verifying`, or that only prefills."""
        assert not self.is_in_flight
        assert not self.is_dormant
        assert verifying is None or verifying is self.pending
        self.is_in_flight, self.verifying = True, verifying
        if verifying is not None:
            self.pending = None

    def take_over(self, outcome: StepOutcome) -> None:
        """The step is over: where it left the sequence."""
        assert self.is_in_flight
        self.is_in_flight, self.touched_s = False, None
        self.sequence_id, self.num_rows = outcome.sequence_id, outcome.num_rows
        if self.num_cached_tokens is None:
            self.num_cached_tokens = outcome.num_found
        if outcome.hidden_states:
            self.first_hidden_row = outcome.hidden_states[-1].end_row

    def commit(self, verdict: Verdict) -> None:
        """The step decided the round."""
        assert self.verifying is not None
        stamp = self.verifying.stamp
        self.tokens.extend(verdict.token_ids)
        self.last_round, self.last_verdict = stamp.round, verdict
        self.last_base = stamp.committed_len, stamp.prefix_hash
        self.verifying = None
        assert self.num_rows == len(self.tokens) - 1

    def defer(self) -> bool:
        """The step decided no round: the one it might have decided waits on; True when a newer one pushed it out."""
        entry, self.verifying = self.verifying, None
        self.num_rows = min(self.num_rows, len(self.tokens) - 1)  # a rollback may have come during a prefill
        if entry is None:
            return False
        is_pushed_out = self.pending is not None
        self.pending = self.pending or entry
        return is_pushed_out

    def lose_rows(self) -> None:
        """The sequence was preempted: every row is to be computed again."""
        self.sequence_id, self.num_rows = None, 0

    def uncomputed_token_ids(self) -> Sequence[int]:
        """The committed tokens without a row: the missing ones, and the last of all."""
        return self.tokens.token_ids[self.num_rows :]


def open_session(
    key: StreamSessionId,
    stamp: Stamp,
    spec: SessionSpec,
    arrival: int,
    capabilities: EngineCapabilities,
    hidden_layers: tuple[int, ...] = (),
) -> Session:
    """A new session, once its open is found right.

    Raises `InvalidArgumentError` for a spec that the model cannot serve, `ItemError` PREFIX_MISMATCH for a stamp that
    was made for other tokens, UNIMPLEMENTED or INVALID_ARGUMENT for hidden states that the model does not have.
    """
    check_hidden_layers(hidden_layers, capabilities)
    check_session(spec, capabilities.vocab_size, capabilities.max_context)
    if len(spec.token_ids) >= spec.max_len:
        raise InvalidArgumentError(
            "open.token_ids", f"{len(spec.token_ids)} tokens leave nothing of prompt + max_tokens = {spec.max_len}"
        )
    session = Session(key, stamp.epoch, spec, arrival, hidden_layers=hidden_layers)
    check_prefix(stamp, len(session.tokens), session.tokens.prefix_hash())
    return session
