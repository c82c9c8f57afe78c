"""The session table: every item of every stream changes it here, and every answer leaves from here.

On the event loop only, and without an engine. A step is taken out with `plan_step` and comes back with `commit`
or `fail`; items that arrive in between change the table, never the step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from engine.backends.base import EngineCapabilities, KvUsage
from engine.sampling.policies import check_proposal
from tandem.serving.items import (
    Closed,
    Opened,
    StaleItemError,
    answering,
    deadline_exceeded,
    draining,
    internal_error,
    unknown_session,
)
from tandem.types import ItemError, ItemTiming, Load, Proposal, SessionSpec, Stamp
from target_service.admission import Admission
from target_service.answers import Answer, Outcome, StreamId, StreamSessionId
from target_service.batching import Part, choose_parts
from target_service.limits import Limits
from target_service.sessions import PendingOpen, PendingRound, Session, open_session
from target_service.step import StepOutcome, StepPlan, StepResult


class SessionTable:
    """Sessions of all streams; `deliver` takes each answer to its stream.

    `open`, `verify` and `close` raise what is wrong with their item; call them inside `answering`.
    """

    def __init__(
        self,
        capabilities: EngineCapabilities,
        kv_usage: KvUsage,
        limits: Limits,
        deliver: Callable[[StreamId, Answer], None],
    ) -> None:
        self.is_draining = False  # once set, no session is opened
        self._capabilities = capabilities
        self._kv_usage = kv_usage
        self._limits = limits
        self._deliver = deliver
        self._admission = Admission(
            kv_usage.total_blocks, kv_usage.block_size, limits.max_sessions, limits.max_waiting_sessions
        )
        self._sessions: dict[StreamSessionId, Session] = {}
        self._released: list[Session] = []  # their sequences are forgotten by the next step
        self._releasing: list[Session] = []  # ... and by the one in flight
        self._closing: dict[Session, Stamp] = {}  # closes that are answered when the memory is back
        self._in_flight: list[Part] = []
        self._step_started_s = 0.0
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_empty(self) -> bool:
        """Whether no session is open and every close has its answer."""
        return not self._sessions and not self._closing

    def answering(self, stream_id: StreamId, stamp: Stamp) -> AbstractContextManager[None]:
        """Turn whatever goes wrong inside into the item's answer."""
        return answering(stamp, lambda error: self._answer(stream_id, stamp, error), self._count_stale)

    def open(self, stream_id: StreamId, stamp: Stamp, spec: SessionSpec, deadline_s: float | None = None) -> None:
        """Open a session, or re-open it with a higher epoch; it is answered when the session is admitted."""
        key = (stream_id, stamp.session_id)
        known = self._sessions.get(key)
        if known is not None and stamp.epoch <= known.epoch:
            if stamp.epoch < known.epoch or known.pending_open is not None:
                raise StaleItemError
            self._answer(stream_id, stamp, Opened())
            return
        if known is not None:
            self._free(known)
            self._admit_waiting()
        if self.is_draining:
            raise draining()
        num_blocks = self._admission.num_blocks_for(spec.max_len)
        session = open_session(key, stamp, spec, num_blocks, self._capabilities)
        is_admitted = self._admission.offer(session)
        self._sessions[key] = session
        if is_admitted:
            self._answer(stream_id, stamp, Opened())
        else:
            session.pending_open = PendingOpen(stamp, deadline_s)

    def verify(
        self, stream_id: StreamId, stamp: Stamp, proposal: Proposal, now_s: float, deadline_s: float | None = None
    ) -> None:
        """Queue a round, or answer a repeat with the verdict on record."""
        session = self._sessions.get((stream_id, stamp.session_id))
        if session is None:
            raise unknown_session(stamp)
        recorded = session.recorded_verdict(stamp)
        if recorded is not None:
            self._answer(stream_id, stamp, recorded)
            return
        clamped = session.clamp(proposal, stamp.committed_len, self._limits.max_draft_tokens)
        check_proposal(session.spec, clamped, self._capabilities.vocab_size)
        if session.submit(PendingRound(stamp, clamped, now_s, deadline_s)):
            self._count_stale()

    def close(self, stream_id: StreamId, stamp: Stamp) -> None:
        """Free the session unless a later epoch has taken its place; harmless when it is not there.

        It is answered once the memory is back, so that the load which travels with the answer shows it.
        """
        session = self._sessions.get((stream_id, stamp.session_id))
        if session is None or stamp.epoch < session.epoch:
            self._answer(stream_id, stamp, Closed())
            return
        self._closing[session] = stamp
        self._free(session)
        self._admit_waiting()

    def end_stream(self, stream_id: StreamId) -> None:
        """Free every session of a stream that has ended."""
        for session in self._sessions_of(stream_id):
            self._free(session)
        self._admit_waiting()

    def is_settled(self, stream_id: StreamId) -> bool:
        """Whether every item of the stream has its answer."""
        is_busy = any(session.is_busy or session.pending_open for session in self._sessions_of(stream_id))
        return not is_busy and all(session.key[0] != stream_id for session in self._closing)

    def expire(self, now_s: float) -> None:
        """Answer DEADLINE_EXCEEDED to opens and rounds that were not begun in time."""
        for session in list(self._sessions.values()):
            opened, entry = session.pending_open, session.pending
            if opened is not None and opened.deadline_s is not None and opened.deadline_s <= now_s:
                self._free(session, deadline_exceeded("waiting for room in the pool"))
            elif entry is not None and entry.deadline_s is not None and entry.deadline_s <= now_s:
                session.pending = None
                self._answer(session.key[0], entry.stamp, deadline_exceeded("waiting for its step"))
        self._admit_waiting()

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next."""
        deadlines = [
            entry.deadline_s
            for session in self._sessions.values()
            for entry in (session.pending_open, session.pending)
            if entry is not None and entry.deadline_s is not None
        ]
        return min(deadlines, default=None)

    def plan_step(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do. One at a time: `commit` or `fail` it first."""
        assert not self._in_flight
        admitted = [session for session in self._sessions.values() if session.pending_open is None]
        parts = choose_parts(admitted, self._limits.max_step_tokens)
        if not parts and not self._released:
            return None
        released = tuple(session.sequence_id for session in self._released if session.sequence_id is not None)
        plan = StepPlan(released, tuple(part.to_item() for part in parts))
        for part in parts:
            part.session.begin(part.verifying)
        self._releasing, self._released = self._released, []
        self._in_flight, self._step_started_s = parts, now_s
        return plan

    def commit(self, result: StepResult) -> None:
        """Take over a computed step and answer its rounds."""
        parts, self._in_flight = self._in_flight, []
        self._kv_usage = result.kv_usage
        for part, outcome in zip(parts, result.outcomes, strict=True):
            self._commit_part(part, outcome, result.compute_us)
        self._finish_step()

    def fail(self, kv_usage: KvUsage) -> None:
        """The step raised: its sessions are lost, their rounds are answered INTERNAL, everyone else goes on.

        `kv_usage` is the pool's now: what the step released is free all the same.
        """
        parts, self._in_flight = self._in_flight, []
        self._kv_usage = kv_usage
        for part in parts:
            part.session.is_in_flight = False
            if part.session.is_freed:
                self._release(part.session)
            else:
                self._free(part.session, internal_error())
        self._finish_step()

    def load(self) -> Load:
        """How busy the replica is now; block figures are those after the last step."""
        usage = self._kv_usage
        num_pending = sum(session.pending is not None for session in self._sessions.values())
        return Load(
            running=self._admission.num_admitted,
            waiting=self._admission.num_waiting + num_pending,
            kv_usage=usage.used_blocks / usage.total_blocks,
            draining=self.is_draining,
            used_blocks=usage.used_blocks,
            total_blocks=usage.total_blocks,
            stale_items=self._num_stale,
        )

    def _commit_part(self, part: Part, outcome: StepOutcome, compute_us: int) -> None:
        session, entry, decided = part.session, part.verifying, outcome.decided
        if session.is_freed or isinstance(decided, ItemError):
            session.is_in_flight, session.sequence_id = False, outcome.sequence_id
            if session.is_freed:
                self._release(session)
            else:
                assert isinstance(decided, ItemError)
                self._free(session, decided)
            return
        if decided is not None:
            assert entry is not None
            queue_us = max(0, round((self._step_started_s - entry.arrived_s) * 1e6))
            decided = replace(decided, timing=ItemTiming(queue_us, compute_us))
            self._answer(session.key[0], entry.stamp, decided)
        session.commit(outcome.sequence_id, outcome.num_rows, decided)
        self._settle(session)

    def _settle(self, session: Session) -> None:
        """Check the round that arrived during the step, if any."""
        if session.pending is not None:
            with self.answering(session.key[0], session.pending.stamp):
                session.settle()

    def _free(self, session: Session, error: ItemError | None = None) -> None:
        """Take the session out; with `error`, as the answer to whatever of it is not answered yet."""
        session.is_freed = True
        del self._sessions[session.key]
        self._admission.remove(session)
        for entry in (session.pending_open, session.verifying, session.pending):
            if error is not None and entry is not None:
                self._answer(session.key[0], entry.stamp, error)
        if not session.is_in_flight:
            self._release(session)

    def _release(self, session: Session) -> None:
        """Have the next step forget the session's sequence, if it ever had one."""
        if session.sequence_id is not None:
            self._released.append(session)
        else:
            self._answer_close(session)

    def _finish_step(self) -> None:
        """What a step has released is back in the pool."""
        for session in self._releasing:
            self._answer_close(session)
        self._releasing = []
        self._admit_waiting()

    def _answer_close(self, session: Session) -> None:
        """Answer the session's close, if it was one that freed it."""
        stamp = self._closing.pop(session, None)
        if stamp is not None:
            self._answer(session.key[0], stamp, Closed())

    def _admit_waiting(self) -> None:
        """Give room that has become free to the sessions that wait for it."""
        for session in self._admission.admit_waiting():
            assert session.pending_open is not None
            self._answer(session.key[0], session.pending_open.stamp, Opened())
            session.pending_open = None

    def _sessions_of(self, stream_id: StreamId) -> list[Session]:
        return [session for session in self._sessions.values() if session.key[0] == stream_id]

    def _count_stale(self) -> None:
        self._num_stale += 1

    def _answer(self, stream_id: StreamId, stamp: Stamp, outcome: Outcome) -> None:
        self._deliver(stream_id, Answer(stamp, outcome))
