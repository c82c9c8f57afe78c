"""The draft service without its wire: streams of sessions in front of one batcher.

Everything here runs on the event loop. Items come in as values; each is answered at most once, through its stream's
outbox, and a bad item is an error result, never an exception.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from draft_service.batcher import Answer, Batcher, WaitingRound
from draft_service.leases import Leases
from draft_service.limits import DraftLimits, Offer
from draft_service.metrics import DraftMetrics
from draft_service.proposers.base import DraftKvUsage, ProposeInput, Proposer, SessionKey
from draft_service.sessions import Session, SessionTable, Step, checked_tokens
from engine.backends.base import KvUsage
from tandem.serving.compute import ComputeThread
from tandem.serving.item_stream import Outbox
from tandem.serving.items import Closed, Opened, answering, draining
from tandem.types import (
    ErrorCode,
    HiddenStates,
    ItemError,
    ItemTiming,
    Load,
    ModelInfo,
    Proposal,
    SessionSpec,
    Stamp,
)

_log = logging.getLogger(__name__)

_NO_MEMORY = DraftKvUsage(KvUsage(0, 0, 0, 0, block_size=1), 0)


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one item."""

    stamp: Stamp
    outcome: Opened | Closed | Answer
    timing: ItemTiming = field(default_factory=ItemTiming)


class DraftService:
    """All streams, the limits they share, the handshake and the load. Create it inside the event loop."""

    def __init__(self, proposer: Proposer, limits: DraftLimits, compute: ComputeThread) -> None:
        self.offer = Offer(limits, proposer.capabilities)
        self.metrics = DraftMetrics(lambda: self.load)
        self.batcher = Batcher(proposer, self.offer.vocab_size, limits.max_batch, compute, self.metrics.steps.count)
        self.leases = Leases(limits.session_lease_s, self._tables, self.forget)
        self._num_stale = 0
        self._keys = count(1)
        self._streams: set[DraftStream] = set()
        self._has_closed = asyncio.Event()
        self._is_draining = False
        self._incarnation = secrets.randbits(64)

    @property
    def num_sessions(self) -> int:
        """Open sessions of all streams."""
        return sum(stream.num_sessions for stream in self._streams)

    @property
    def load(self) -> Load:
        """How busy the replica is."""
        usage = self.batcher.usage or _NO_MEMORY
        used, total = usage.blocks.used_blocks, usage.blocks.total_blocks
        return Load(
            running=self.num_sessions,
            waiting=self.batcher.num_waiting,
            kv_usage=used / total if total else 0.0,
            draining=self._is_draining,
            frozen=self.batcher.is_frozen,
            used_blocks=used,
            total_blocks=total,
            stale_items=self._num_stale,
            cached_blocks=usage.blocks.cached_blocks,
            shrunk_draft_tokens=usage.shrunk_draft_tokens,
            evicted_sessions=self.leases.num_ended,
            evicted_blocks=usage.blocks.evicted_blocks,
            hit_blocks=usage.blocks.hit_blocks,
        )

    @property
    def model_info(self) -> ModelInfo:
        """The handshake; vocabulary size 0 and hash "" when any will do."""
        model, limit = self.offer.capabilities.model, self.offer.limits.max_draft_tokens
        return replace(model, max_draft_tokens=limit, incarnation=self._incarnation)

    def open_stream(self) -> "DraftStream":
        """A stream of sessions; the caller closes it."""
        stream = DraftStream(self)
        self._streams.add(stream)
        return stream

    def make_room(self) -> None:
        """Let one more session be opened, in an idle one's place if need be; ItemError NO_CAPACITY when it cannot."""
        if self.num_sessions >= self.offer.limits.max_sessions and not self.leases.make_room():
            raise ItemError(
                ErrorCode.NO_CAPACITY,
                f"now: {self.num_sessions} sessions are open, the limit of this replica, and none of them is idle",
            )

    def check_draining(self) -> None:
        """Raise ItemError NO_CAPACITY once the replica drains."""
        if self._is_draining:
            raise draining()

    def new_key(self) -> SessionKey:
        """A key that no session had before."""
        return SessionKey(next(self._keys))

    def stream_ended(self, stream: "DraftStream", keys: Sequence[SessionKey]) -> None:
        """The stream is gone, and its sessions with it."""
        self._streams.discard(stream)
        self.forget(keys)

    def forget(self, keys: Sequence[SessionKey]) -> None:
        """These sessions were closed."""
        self.batcher.forget(keys)
        self._has_closed.set()

    def _tables(self) -> list[SessionTable]:
        """Of every stream."""
        return [stream.table for stream in self._streams]

    def count_stale(self) -> None:
        """An item was dropped."""
        self._num_stale += 1

    async def drain(self, grace_s: float) -> None:
        """Tell every answer's reader to open nothing more here, wait for open sessions, then end the streams."""
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                while self.num_sessions:
                    self._has_closed.clear()
                    await self._has_closed.wait()
        except TimeoutError:
            _log.info("%d sessions are still open after %g s", self.num_sessions, grace_s)
        for stream in self._streams:
            stream.outbox.close()


class DraftStream:
    """One orchestrator's stream: its sessions, and the results on their way to it.

    Items raise ItemError or InvalidArgumentError when they cannot be served; nothing has changed then.
    """

    def __init__(self, service: DraftService) -> None:
        self.outbox: Outbox[Result] = Outbox()
        self._service = service
        self.table = SessionTable(service.new_key)

    @property
    def num_sessions(self) -> int:
        """Open sessions of this stream."""
        return len(self.table)

    def answering(self, stamp: Stamp) -> AbstractContextManager[None]:
        """Turn whatever goes wrong inside into the item's answer."""
        return answering(stamp, lambda error: self._refuse(stamp, error), self._service.count_stale)

    def open_session(self, stamp: Stamp, spec: SessionSpec, arrived_s: float) -> None:
        """Take a session up, or answer a repeat; an earlier epoch of it is freed."""
        self._service.offer.check(spec)
        if not self.table.is_open(stamp):
            tokens = checked_tokens(stamp, spec)
            self._service.check_draining()
            if not self.table.is_known(stamp):
                self._service.make_room()
            self._service.forget(self.table.close(stamp))
            self.table.open(stamp, spec, tokens, arrived_s)
            self._service.leases.watch()
        self.outbox.put(Result(stamp, Opened()))

    def propose(
        self, stamp: Stamp, step: Step, num_draft_tokens: int, arrived_s: float, deadline_s: float | None = None
    ) -> None:
        """Take a round up: go back to the stamp's tokens and queue for drafting; a repeat gets the recorded answer."""
        session = self.table.session_of(stamp)
        session.used_s = arrived_s
        if stamp.round > session.round:
            session.begin(stamp, step, self._service.offer.vocab_size)
            self._submit(session, stamp, num_draft_tokens, arrived_s, deadline_s)
            return
        session.check_repeat(stamp)
        if session.answer is not None:
            self.outbox.put(Result(stamp, session.answer))

    def take_hidden_states(self, stamp: Stamp, states: HiddenStates, arrived_s: float) -> None:
        """Keep rows for the session's next round; ItemError when they do not fit, or nobody here needs any."""
        need = self._service.offer.capabilities.hidden_states
        session = self.table.session_of(stamp)
        session.used_s = arrived_s
        if need is None:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"hidden_states: proposer {self._service.offer.capabilities.name!r} needs none",
            )
        if states.end_row >= session.spec.max_len:
            raise ItemError(
                ErrorCode.INVALID_ARGUMENT,
                f"hidden_states: row {states.end_row - 1} is outside 0..{session.spec.max_len - 2} "
                "(one less than prompt + max_tokens)",
            )
        session.hidden_states.add(states, need.row_bytes)

    def close_session(self, stamp: Stamp) -> None:
        """Free a session; done as well when there is none."""
        self._service.forget(self.table.close(stamp))
        self.outbox.put(Result(stamp, Closed()))

    def settle(self) -> bool:
        """The peer sends no more: free its sessions that wait for no answer; whether that were all."""
        self._service.forget(self.table.remove_settled())
        return self.num_sessions == 0

    def end(self) -> None:
        """The peer is gone: free every session; what is in the outbox still goes out where it can."""
        self.outbox.close()
        sessions, self.table = self.table.sessions, SessionTable(self._service.new_key)
        self._service.stream_ended(self, [session.key for session in sessions])

    def _refuse(self, stamp: Stamp, error: ItemError) -> None:
        """Answer an item with what is wrong with it."""
        self._service.metrics.count_error(error)
        self.outbox.put(Result(stamp, error))

    def _submit(
        self, session: Session, stamp: Stamp, num_draft_tokens: int, arrived_s: float, deadline_s: float | None
    ) -> None:
        """Queue the round, unless no draft can be of use."""
        num_drafts = session.num_draft_tokens(num_draft_tokens, self._service.offer.max_draft_tokens(session.spec))
        if num_drafts == 0:
            self._deliver(session, stamp, Proposal(), ItemTiming())
            return
        if self._service.offer.capabilities.needs_hidden_states:
            lacking = session.hidden_states.lacks(stamp.committed_len - 1)
            if lacking is not None:
                self._deliver(session, stamp, lacking, ItemTiming())
                return
        self._service.batcher.submit(
            WaitingRound(
                item=ProposeInput(
                    session.key,
                    session.spec,
                    tuple(session.tokens.token_ids),
                    num_drafts,
                    session.hidden_states.chunks,
                ),
                arrived_s=arrived_s,
                deadline_s=deadline_s,
                is_wanted=partial(self._is_wanted, session, stamp),
                deliver=partial(self._drafted, session, stamp),
            )
        )

    def _is_wanted(self, session: Session, stamp: Stamp) -> bool:
        """Whether the round is still its session's last; a round that is not is stale."""
        is_current = self.table.is_current(session, stamp)
        if not is_current:
            self._service.count_stale()
        return is_current

    def _drafted(self, session: Session, stamp: Stamp, answer: Answer, timing: ItemTiming) -> None:
        """The proposer has answered: the rows that it was given it has made its own."""
        if isinstance(answer, Proposal) and self.table.is_current(session, stamp):
            session.hidden_states.take_up(stamp.committed_len - 1)
        self._deliver(session, stamp, answer, timing)

    def _deliver(self, session: Session, stamp: Stamp, answer: Answer, timing: ItemTiming) -> None:
        """Record and send a round's answer, if it is still wanted."""
        if self._is_wanted(session, stamp):
            session.answer, session.used_s = answer, asyncio.get_running_loop().time()
            if isinstance(answer, Proposal):
                self._service.metrics.count_proposal(answer, timing)
            else:
                self._service.metrics.count_error(answer)
            self.outbox.put(Result(stamp, answer, timing))
