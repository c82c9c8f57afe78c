"""The scheduler: one compute call and one engine forward per step, for all sessions of all streams."""

import asyncio
import itertools
import logging
from contextlib import suppress
from dataclasses import replace

from engine.backends.base import SpeculativeEngine, require_speculation
from tandem.serving.compute import ComputeThread
from tandem.serving.item_stream import Outbox
from tandem.types import HiddenStates, ItemError, Load, SessionId, Verdict
from target_service.answers import Answer, StreamId
from target_service.gathering import Gathering
from target_service.limits import Limits
from target_service.metrics import TargetMetrics
from target_service.step import StepFailedError, StepPlan
from target_service.step_costs import StepCosts
from target_service.table import SessionTable
from target_service.verifier import Verifier

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs steps while there is work; streams bring items to `table`, and call `wake` when they have.

    Raises `UnsupportedEngineError` for an engine that cannot roll back, unless no drafts are to be verified, and
    ValueError for one whose pool is too small for the limits.
    """

    def __init__(self, engine: SpeculativeEngine, limits: Limits, compute: ComputeThread) -> None:
        if limits.max_draft_tokens > 0:
            require_speculation(engine.capabilities)
        warning = limits.check_pool(engine.capabilities, engine.kv_usage())
        if warning is not None:
            _log.warning(warning)
        self.metrics = TargetMetrics(self.load)
        self.table = SessionTable(
            engine.capabilities, engine.kv_usage(), limits, self._deliver, self.metrics.count_verdict
        )
        self._engine = engine
        self._verifier = Verifier(engine)
        self._compute = compute
        self._outboxes: dict[StreamId, Outbox[Answer]] = {}
        self._stream_ids = itertools.count(1)
        self._gathering = Gathering()
        self._costs = StepCosts()
        self._wake = asyncio.Event()
        self._is_empty = asyncio.Event()

    def open_stream(self) -> tuple[StreamId, Outbox[Answer]]:
        """A new stream and the outbox its answers come to."""
        stream_id = StreamId(next(self._stream_ids))
        self._outboxes[stream_id] = Outbox()
        return stream_id, self._outboxes[stream_id]

    def settle_stream(self, stream_id: StreamId) -> bool:
        """The peer sends no more: free its sessions that wait for no answer; whether that were all."""
        is_settled = self.table.settle_stream(stream_id)
        self.wake()
        return is_settled

    def end_stream(self, stream_id: StreamId) -> None:
        """The peer is gone: free its sessions and drop what is still on its way to it."""
        self._outboxes.pop(stream_id).close()
        self._gathering.forget_stream(stream_id)
        self.table.end_stream(stream_id)
        self.wake()

    def arrived(self, stream_id: StreamId, session_id: SessionId, now_s: float) -> None:
        """An item of the session is about to be applied."""
        self._gathering.arrived((stream_id, session_id), now_s)

    @property
    def is_frozen(self) -> bool:
        """Whether a step has taken so long that it has hung."""
        return self._compute.is_frozen

    def load(self) -> Load:
        """How busy the replica is, and whether it computes at all."""
        return replace(
            self.table.load(),
            frozen=self.is_frozen,
            step_overhead_rows=self._costs.overhead_rows,
            step_sessions=self._costs.sessions,
        )

    def wake(self) -> None:
        """There may be work."""
        self._wake.set()

    async def run(self) -> None:
        """Steps for ever; cancel it to stop, then `close`."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_work()
            for key in self.table.expire(loop.time()):
                self._gathering.forget(key)
            plan = self.table.plan_step(loop.time())
            if plan is not None:
                self._wake.set()  # whatever this step leaves over is the next one's work
                await self._step(plan)
            if self.table.is_empty:
                self._is_empty.set()

    async def drain(self, grace_s: float) -> None:
        """Open nothing new, give running sessions `grace_s` seconds to be closed, then end every stream."""
        self.table.is_draining = True
        self._is_empty.clear()
        self.wake()
        try:
            await asyncio.wait_for(self._is_empty.wait(), grace_s)
        except TimeoutError:
            _log.warning("%d sessions were still open after %g s of draining", len(self.table), grace_s)
        for outbox in self._outboxes.values():
            outbox.close()

    def close(self) -> None:
        """Wait for the compute thread and end it."""
        self._compute.close()

    async def _wait_for_work(self) -> None:
        """Until woken, or until an item's deadline passes."""
        try:
            async with asyncio.timeout_at(self.table.next_deadline_s()):
                await self._wake.wait()
        except TimeoutError:
            return
        await self._gather()
        await asyncio.sleep(0)  # items that are ready in this turn of the loop join the step
        self._wake.clear()

    async def _gather(self) -> None:
        """Give those who come back at once the time to join the step."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._gathering.until_s):
                while not self._gathering.is_complete:
                    self._wake.clear()
                    await self._wake.wait()

    async def _step(self, plan: StepPlan) -> None:
        """Compute one step; whatever it raises concerns its own sessions only."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            result = await self._compute.run(self._verifier.step, plan)
        except StepFailedError as error:
            _log.exception("a step of %d sessions failed", len(plan.items))
            self.table.fail(await self._compute.run(self._engine.kv_usage), error.preempted)
        else:
            self._gathering.end_step(started_s, loop.time())
            self.metrics.count_step(plan, result)
            if result.batch_rows:
                num_decided = sum(isinstance(outcome.decided, Verdict) for outcome in result.outcomes)
                self._costs.count(num_decided, result.batch_rows, result.compute_us / 1e6)
            self.table.commit(result)

    def _deliver(self, stream_id: StreamId, answer: Answer) -> None:
        """To the stream's outbox; nowhere once the stream has ended."""
        if isinstance(answer.outcome, ItemError):
            self.metrics.count_error(answer.outcome)
        outbox = self._outboxes.get(stream_id)
        if outbox is None:
            return
        outbox.put(answer)
        key, outcome = (stream_id, answer.stamp.session_id), answer.outcome
        if isinstance(outcome, HiddenStates):
            return
        if isinstance(outcome, Verdict) and outcome.finish_reason is None:
            self._gathering.answered(key, asyncio.get_running_loop().time())
        else:
            self._gathering.forget(key)
