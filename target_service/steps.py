"""Steps: taken out of the sessions' state as values, computed elsewhere, and brought back.

One at a time: whoever takes one out brings it back with `commit` or `fail`. Items that arrive in between change the
sessions, never the step.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.backends.base import EngineCapabilities, KvUsage, SequenceId
from tandem.serving.items import Replayed, answering, internal_error
from tandem.types import ItemError, ItemTiming, Stamp, Verdict
from target_service.batching import Part, choose_parts
from target_service.limits import Limits
from target_service.live_sessions import LiveSessions
from target_service.ordering import seniority
from target_service.sessions import PendingReplay, Session
from target_service.step import IdleSequence, StepItem, StepOutcome, StepPlan, StepResult


class Steps:
    """The steps of all sessions."""

    def __init__(
        self,
        live: LiveSessions,
        limits: Limits,
        capabilities: EngineCapabilities,
        decided: Callable[[Verdict], None],
    ) -> None:
        """`decided` hears of every verdict, once; of a repeat it does not."""
        self._live = live
        self._decided = decided
        self._limits = limits
        block_size = live.admission.kv_usage.block_size
        self._cached_block_size = block_size if capabilities.has_prefix_cache else None
        self._has_tried_senior = False  # alone, since something changed
        self._plan = StepPlan((), ())
        self._parts: list[Part] = []  # of the step in flight, in the order of its items
        self._displaced: list[Session] = []  # by who waits for room: that step forgets their sequences
        self._holders: dict[SequenceId, Session] = {}  # of the sequences that step may preempt
        self._started_s = 0.0

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do, or no room to do any of it until something changes."""
        assert not self._parts
        live = self._live
        live.admit_waiting(now_s)
        running = sorted(live.admission.running, key=seniority)
        parts = self._choose_parts([session for session in running if not session.is_dormant])
        self._displaced = self._choose_displaced(running)
        if not parts and not live.has_releases and not self._displaced:
            return None
        running = [session for session in running if session not in self._displaced]
        by_session = {part.session: part for part in parts}
        self._holders = {session.sequence_id: session for session in running if session.sequence_id is not None}
        self._parts = [by_session[session] for session in running if session in by_session]
        self._plan = StepPlan(
            live.begin_releases()
            + tuple(session.sequence_id for session in self._displaced if session.sequence_id is not None),
            tuple(
                by_session[session].to_item(rank) for rank, session in enumerate(running) if session in by_session
            ),
            tuple(
                IdleSequence(session.sequence_id, rank)
                for rank, session in enumerate(running)
                if session not in by_session and session.sequence_id is not None
            ),
        )
        for part in self._parts:
            part.session.begin(part.verifying)
        self._started_s = now_s
        return self._plan

    def _choose_parts(self, running: list[Session]) -> list[Part]:
        """None when there was no memory for any part last time, and nothing has changed since.

        But the most senior session with work is tried alone before: it may preempt all others, so when it gets
        nothing, nobody can.
        """
        if self._live.is_changed:
            self._live.is_changed, self._has_tried_senior = False, False
        elif not self._has_tried_senior:
            self._has_tried_senior = True
            running = [session for session in running if session.pending or not session.is_caught_up][:1]
        else:
            return []
        return choose_parts(running, self._limits, self._cached_block_size)

    def _choose_displaced(self, running: list[Session]) -> list[Session]:
        """Who gives way to those who wait for room, if anybody does: one a step, so that none does in vain.

        The step's releases come first, for they may be room enough.
        """
        if self._live.has_releases or not self._live.admission.is_wanted:
            return []
        return [session for session in running[-1:] if session.gives_way]

    def commit(self, result: StepResult) -> None:
        """Take over a computed step and answer its rounds."""
        parts, self._parts = self._parts, []
        self._take_back(result.preempted)
        for part, item, outcome in zip(parts, self._plan.items, result.outcomes, strict=True):
            self._live.is_changed |= _has_done(item, outcome)
            self._commit_part(part, outcome, result.compute_us)
        self._finish(result.kv_usage)

    def fail(self, kv_usage: KvUsage, preempted: tuple[SequenceId, ...]) -> None:
        """The step raised: its sessions are lost, their rounds are answered INTERNAL, everyone else goes on.

        `kv_usage` is the pool's now: what the step released is free all the same.
        """
        parts, self._parts = self._parts, []
        self._take_back(preempted)
        for part in parts:
            part.session.is_in_flight = False
            if part.session.is_freed:
                self._live.release(part.session)
            else:
                self._live.free(part.session, internal_error())
        self._finish(kv_usage)

    def _take_back(self, preempted: tuple[SequenceId, ...]) -> None:
        """Sessions whose sequences are gone wait for room again, with whatever round they have."""
        displaced, self._displaced = self._displaced, []
        for session in [*displaced, *(self._holders[sequence_id] for sequence_id in preempted)]:
            session.lose_rows()
            if not session.is_freed:
                self._live.counters.preemptions += 1
                self._live.admission.requeue(session)

    def _commit_part(self, part: Part, outcome: StepOutcome, compute_us: int) -> None:
        session, decided = part.session, outcome.decided
        session.take_over(outcome)
        if session.is_freed:
            self._live.release(session)
        elif isinstance(decided, ItemError):
            self._live.free(session, decided)
        else:
            self._send_hidden_states(session, outcome)  # before the verdict: whoever has that has them
            if session.replay is not None and session.is_caught_up:
                self._end_replay(session, session.replay)
            elif decided is not None:
                self._commit_verdict(part, decided, compute_us)
            elif session.defer():
                self._live.counters.count_stale()
            self._settle(session)

    def _send_hidden_states(self, session: Session, outcome: StepOutcome) -> None:
        stream_id, session_id = session.key
        for states in outcome.hidden_states:
            self._live.answer(stream_id, Stamp(session_id, session.epoch, 0, states.end_row, 0), states)

    def _end_replay(self, session: Session, replay: PendingReplay) -> None:
        session.replay = None
        self._live.answer(session.key[0], replay.stamp, Replayed())
        self._live.free(session)

    def _commit_verdict(self, part: Part, verdict: Verdict, compute_us: int) -> None:
        session, entry = part.session, part.verifying
        assert entry is not None
        self._live.counters.shrunk_draft_tokens += part.num_drafts - verdict.num_draft_tokens
        queue_us = max(0, round((self._started_s - entry.arrived_s) * 1e6))
        verdict = replace(
            verdict,
            timing=ItemTiming(queue_us, compute_us),
            num_cached_tokens=session.num_cached_tokens or 0,
        )
        self._decided(verdict)
        self._live.answer(session.key[0], entry.stamp, verdict)
        session.commit(verdict)

    def _settle(self, session: Session) -> None:
        """Check the round that arrived during the step, if any."""
        if session.pending is not None:
            stream_id, stamp = session.key[0], session.pending.stamp
            answer = self._live.answer
            with answering(stamp, lambda error: answer(stream_id, stamp, error), self._live.counters.count_stale):
                session.settle()

    def _finish(self, kv_usage: KvUsage) -> None:
        self._live.admission.kv_usage = kv_usage
        self._live.finish_releases()


def _has_done(item: StepItem, outcome: StepOutcome) -> bool:
    """Whether the step has brought the item's session any further."""
    return outcome.decided is not None or outcome.num_rows > item.num_rows
