"""The session table: every item of every stream changes it here.

On the event loop only, and without an engine. A step is taken out with `plan_step` and comes back with `commit` or
`fail`; items that arrive in between change the table, never the step.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from engine.backends.base import EngineCapabilities, KvUsage, SequenceId
from engine.sampling.policies import check_proposal
from tandem.serving.items import (
    Closed,
    Opened,
    StaleItemError,
    answering,
    deadline_exceeded,
    draining,
    unknown_session,
)
from tandem.types import Load, Proposal, SessionSpec, Stamp, Verdict
from target_service.admission import Admission
from target_service.answers import Answer, StreamId, StreamSessionId
from target_service.limits import IDLE_S, Limits
from target_service.live_sessions import LiveSessions
from target_service.replays import HiddenReplay, replay_session
from target_service.sessions import PendingOpen, PendingRound, Session, open_session
from target_service.step import StepPlan, StepResult
from target_service.steps import Steps


class SessionTable:
    """Sessions of all streams; `deliver` takes each answer to its stream, `decided` hears of every round's verdict.

    `open`, `verify` and `close` raise what is wrong with their item; call them inside `answering`. Times are on the
    event loop's clock.
    """

    def __init__(
        self,
        capabilities: EngineCapabilities,
        kv_usage: KvUsage,
        limits: Limits,
        deliver: Callable[[StreamId, Answer], None],
        decided: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self.is_draining = False  # once set, no session is opened
        self._capabilities = capabilities
        self._limits = limits
        self._admission = Admission(kv_usage, limits)
        self._live = LiveSessions(self._admission, deliver)
        self._steps = Steps(self._live, limits, capabilities, decided)
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def is_empty(self) -> bool:
        """Whether no session is open and every close has its answer."""
        return self._live.is_empty

    def answering(self, stream_id: StreamId, stamp: Stamp) -> AbstractContextManager[None]:
        """Turn whatever goes wrong inside into the item's answer."""
        answer, counters = self._live.answer, self._live.counters
        return answering(stamp, lambda error: answer(stream_id, stamp, error), counters.count_stale)

    def open(
        self,
        stream_id: StreamId,
        stamp: Stamp,
        spec: SessionSpec,
        now_s: float,
        deadline_s: float | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        """Open a session, or re-open it with a higher epoch; it is answered when the session is admitted.

        Before a round's verdict, the hidden states after `hidden_layers` of the rows that it commits are sent, and
        those of the rows before it that the session has computed: not of those that it found in the prefix cache.
        """
        key = (stream_id, stamp.session_id)
        known = self._live.get(key)
        if known is not None and stamp.epoch <= known.epoch:
            if stamp.epoch < known.epoch or known.pending_open is not None or known.replay is not None:
                raise StaleItemError
            self._live.touch(known, now_s)
            self._live.answer(stream_id, stamp, Opened())
            return
        self._make_way(known)
        session = open_session(key, stamp, spec, next(self._arrivals), self._capabilities, hidden_layers)
        session.pending_open = PendingOpen(stamp, deadline_s)
        self._live.add(session, now_s)

    def replay(self, stream_id: StreamId, stamp: Stamp, wanted: HiddenReplay, now_s: float) -> None:
        """Compute rows anew, behind everybody else, and send their hidden states; answered when all are sent."""
        key = (stream_id, stamp.session_id)
        known = self._live.get(key)
        if known is not None and stamp.epoch <= known.epoch:
            raise StaleItemError
        self._make_way(known)
        self._live.add(replay_session(key, stamp, wanted, next(self._arrivals), self._capabilities), now_s)

    def _make_way(self, known: Session | None) -> None:
        """For another epoch of the session; ItemError NO_CAPACITY while the replica ends."""
        if known is not None:
            self._live.free(known)
        if self.is_draining:
            raise draining()

    def verify(
        self, stream_id: StreamId, stamp: Stamp, proposal: Proposal, now_s: float, deadline_s: float | None = None
    ) -> None:
        """Queue a round, or answer a repeat with the verdict on record."""
        session = self._live.get((stream_id, stamp.session_id))
        if session is None or session.replay is not None:
            raise unknown_session(stamp)
        self._live.touch(session, now_s)
        recorded = session.recorded_verdict(stamp)
        if recorded is not None:
            self._live.answer(stream_id, stamp, recorded)
            return
        clamped = session.clamp(proposal, stamp.committed_len, self._limits.max_draft_tokens)
        check_proposal(session.spec, clamped, self._capabilities.vocab_size)
        if session.submit(PendingRound(stamp, clamped, now_s, deadline_s)):
            self._live.counters.count_stale()
        self._live.is_changed = True

    def close(self, stream_id: StreamId, stamp: Stamp) -> None:
        """Free the session unless a later epoch has taken its place; harmless when it is not there.

        It is answered once the memory is back, so that the load which travels with the answer shows it.
        """
        session = self._live.get((stream_id, stamp.session_id))
        if session is None or stamp.epoch < session.epoch:
            self._live.answer(stream_id, stamp, Closed())
            return
        self._live.close(session, stamp)

    def end_stream(self, stream_id: StreamId) -> None:
        """Free every session of a stream that has ended."""
        for session in self._live.of_stream(stream_id):
            self._live.free(session)

    def settle_stream(self, stream_id: StreamId) -> bool:
        """Nobody asks on the stream any more: free its sessions that wait for no answer; whether that were all.

        At once, because those that do wait may wait for their memory.
        """
        for session in self._live.of_stream(stream_id):
            if not session.is_busy and session.pending_open is None:
                self._live.free(session)
        return not self._live.of_stream(stream_id) and not self._live.is_closing(stream_id)

    def expire(self, now_s: float) -> list[StreamSessionId]:
        """Answer DEADLINE_EXCEEDED to opens and rounds that were not begun in time; free who has left without a word.

        Those are returned. Whoever of them comes back is told UNKNOWN_SESSION, and opens again with its full prefix.
        Who has been idle for IDLE_S keeps its session, but no longer its memory if anybody needs it.
        """
        self._live.look(now_s)
        evicted = []
        for session in self._live.all():
            opened, entry = session.pending_open, session.pending
            if opened is not None and opened.deadline_s is not None and opened.deadline_s <= now_s:
                self._live.free(session, deadline_exceeded("waiting for room in the pool"))
            elif entry is not None and entry.deadline_s is not None and entry.deadline_s <= now_s:
                session.pending = None
                self._live.answer(session.key[0], entry.stamp, deadline_exceeded("waiting for its step"))
            elif session.idle_since_s is not None and session.idle_since_s + self._limits.session_lease_s <= now_s:
                self._live.counters.evicted_sessions += 1
                self._live.free(session)
                evicted.append(session.key)
        return evicted

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next."""
        return min(self._deadlines(), default=None)

    def plan_step(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be done until an item comes or a deadline passes."""
        return self._steps.plan(now_s)

    def commit(self, result: StepResult) -> None:
        """Take over a computed step and answer its rounds."""
        self._steps.commit(result)

    def fail(self, kv_usage: KvUsage, preempted: tuple[SequenceId, ...] = ()) -> None:
        """The step raised: its sessions are lost, their rounds are answered INTERNAL, everyone else goes on."""
        self._steps.fail(kv_usage, preempted)

    def load(self) -> Load:
        """How busy the replica is now; block figures are those after the last step."""
        usage, counters = self._admission.kv_usage, self._live.counters
        num_pending = sum(session.pending is not None for session in self._live.all())
        return Load(
            running=self._admission.num_running,
            waiting=self._admission.num_waiting + num_pending,
            kv_usage=usage.used_blocks / usage.total_blocks,
            draining=self.is_draining,
            used_blocks=usage.used_blocks,
            total_blocks=usage.total_blocks,
            stale_items=counters.stale_items,
            cached_blocks=usage.cached_blocks,
            preemptions=counters.preemptions,
            shrunk_draft_tokens=counters.shrunk_draft_tokens,
            evicted_sessions=counters.evicted_sessions,
            evicted_blocks=usage.evicted_blocks,
            hit_blocks=usage.hit_blocks,
        )

    def _deadlines(self) -> Iterator[float]:
        for session in self._live.all():
            for entry in (session.pending_open, session.pending):
                if entry is not None and entry.deadline_s is not None:
                    yield entry.deadline_s
            if session.idle_since_s is not None:
                yield session.idle_since_s + self._limits.session_lease_s
                if not session.is_dormant:
                    yield session.idle_since_s + IDLE_S
