"""One proposer on one compute thread: whatever rounds wait when it becomes free form one batch."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.proposers.base import ProposeInput, Proposer, SessionKey
from draft_service.trimming import trim_proposal
from engine.backends.base import KvUsage
from tandem.serving.compute import ComputeThread
from tandem.serving.items import deadline_exceeded, internal_error
from tandem.types import ItemError, ItemTiming, Proposal

_log = logging.getLogger(__name__)

Answer = Proposal | ItemError


@dataclass(frozen=True, slots=True)
class WaitingRound:
    """A round that waits for the compute thread; times are the event loop's, in seconds."""

    item: ProposeInput
    arrived_s: float
    deadline_s: float | None
    is_wanted: Callable[[], bool]  # asked when its batch is formed
    deliver: Callable[[Answer, ItemTiming], None]  # called on the event loop, once, unless it was not wanted


class Batcher:
    """Owns the proposer. All methods run on the event loop; the compute thread gets frozen inputs."""

    def __init__(self, proposer: Proposer, vocab_size: int, compute: ComputeThread) -> None:
        self.usage: KvUsage | None = proposer.kv_usage()  # after the last batch
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._compute = compute
        self._waiting: list[WaitingRound] = []
        self._forgotten: list[SessionKey] = []
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Rounds not yet worked on."""
        return len(self._waiting)

    def submit(self, waiting: WaitingRound) -> None:
        """Queue a round."""
        self._waiting.append(waiting)
        self._wake()

    def forget(self, keys: Sequence[SessionKey]) -> None:
        """Free what the proposer keeps for these sessions, before its next batch."""
        self._forgotten += keys
        self._wake()

    async def aclose(self) -> None:
        """Finish what waits and end the compute thread; what comes later is left undone."""
        self._is_closed = True
        if self._worker is not None:
            await self._worker
        self._compute.close()

    def _wake(self) -> None:
        if not self._is_closed and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Batch after batch until nothing waits."""
        now_s = asyncio.get_running_loop().time
        while self._waiting or self._forgotten:
            forgotten, self._forgotten = self._forgotten, []
            batch = self._take_batch(now_s())
            started_s = now_s()
            items = [waiting.item for waiting in batch]
            answers, self.usage = await self._compute.run(self._run_proposer, forgotten, items)
            compute_us = int((now_s() - started_s) * 1e6)
            for waiting, answer in zip(batch, answers, strict=True):
                queue_us = int((started_s - waiting.arrived_s) * 1e6)
                waiting.deliver(answer, ItemTiming(queue_us, compute_us))

    def _take_batch(self, now_s: float) -> list[WaitingRound]:
        """Everything that waits, is still wanted and in time."""
        taken, self._waiting = self._waiting, []
        batch = []
        for waiting in taken:
            if not waiting.is_wanted():
                continue
            if waiting.deadline_s is not None and now_s > waiting.deadline_s:
                error = deadline_exceeded("waiting to be drafted for")
                waiting.deliver(error, ItemTiming(queue_us=int((now_s - waiting.arrived_s) * 1e6)))
            else:
                batch.append(waiting)
        return batch

    def _run_proposer(
        self, forgotten: Sequence[SessionKey], batch: Sequence[ProposeInput]
    ) -> tuple[list[Answer], KvUsage | None]:
        """On the compute thread: forget, propose, trim -> an answer an input, and the block accounting after."""
        self._forget_now(forgotten)
        answers: list[Answer] = []
        try:
            proposals = self._proposer.propose(batch) if batch else []
            for proposal, item in zip(proposals, batch, strict=True):
                answers.append(trim_proposal(proposal, item, self._vocab_size))
        except Exception:  # noqa: BLE001 - a bug of a proposer costs its batch the drafts, never the service
            _log.exception("the proposer failed for a batch of %d", len(batch))
            answers = [internal_error() for _ in batch]
            self._forget_now([item.session_key for item in batch])
        return answers, self._proposer.kv_usage()

    def _forget_now(self, keys: Sequence[SessionKey]) -> None:
        """On the compute thread."""
        for key in keys:
            try:
                self._proposer.forget(key)
            except Exception:  # noqa: BLE001 - as above; the other sessions are still forgotten
                _log.exception("the proposer failed to forget a session")
