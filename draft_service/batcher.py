"""One proposer on one compute thread: the rounds that wait when it becomes free form one batch.

A round that the proposer has not finished waits on, and is part of the next batch.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draft_service.hidden_buffer import missing
from draft_service.proposers.base import DraftKvUsage, MissingHiddenStates, ProposeInput, Proposer, SessionKey
from draft_service.trimming import trim_proposal
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
    computed_s: float = 0.0  # in earlier batches

    def answer(self, answer: Answer, now_s: float) -> None:
        """Deliver the answer; what was not compute was waiting."""
        queued_s = now_s - self.arrived_s - self.computed_s
        self.deliver(answer, ItemTiming(int(queued_s * 1e6), int(self.computed_s * 1e6)))


class Batcher:
    """Owns the proposer. All methods run on the event loop; the compute thread gets frozen inputs."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        max_batch: int,
        compute: ComputeThread,
        computed: Callable[[int, float], None],
    ) -> None:
        """`computed` hears of every batch: how many rounds it had, and its seconds."""
        self.usage: DraftKvUsage | None = proposer.kv_usage()  # after the last batch
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._max_batch = max_batch
        self._compute = compute
        self._computed = computed
        self._waiting: list[WaitingRound] = []
        self._forgotten: list[SessionKey] = []
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_frozen(self) -> bool:
        """Whether a batch has taken so long that it has hung."""
        return self._compute.is_frozen

    @property
    def num_waiting(self) -> int:
        """Rounds that are not in work now."""
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
            started_s = now_s()
            batch = self._take_batch(started_s)
            items = [waiting.item for waiting in batch]
            answers, self.usage = await self._compute.run(self._run_proposer, forgotten, items)
            ended_s = now_s()
            if batch:
                self._computed(len(batch), ended_s - started_s)
            unfinished = []
            for waiting, answer in zip(batch, answers, strict=True):
                worked_on = replace(waiting, computed_s=waiting.computed_s + ended_s - started_s)
                if answer is None:
                    unfinished.append(worked_on)
                else:
                    worked_on.answer(answer, ended_s)
            self._waiting = unfinished + self._waiting

    def _take_batch(self, now_s: float) -> list[WaitingRound]:
        """The longest waiting ones that are still wanted and in time; the others go on waiting."""
        batch: list[WaitingRound] = []
        num_looked_at = 0
        for waiting in self._waiting:
            if len(batch) == self._max_batch:
                break
            num_looked_at += 1
            if not waiting.is_wanted():
                continue
            if waiting.deadline_s is not None and now_s > waiting.deadline_s:
                waiting.answer(deadline_exceeded("waiting to be drafted for"), now_s)
            else:
                batch.append(waiting)
        del self._waiting[:num_looked_at]
        return batch

    def _run_proposer(
        self, forgotten: Sequence[SessionKey], batch: Sequence[ProposeInput]
    ) -> tuple[list[Answer | None], DraftKvUsage | None]:
        """On the compute thread: forget, propose, trim -> an answer or None for each, and the memory's figures."""
        self._forget_now(forgotten)
        answers: list[Answer | None] = []
        try:
            proposals = self._proposer.propose(batch) if batch else []
            for proposal, item in zip(proposals, batch, strict=True):
                answers.append(self._answer(proposal, item))
        except Exception:  # noqa: BLE001 - a bug of a proposer costs its batch the drafts, never the service
            _log.exception("the proposer failed for a batch of %d", len(batch))
            answers = [internal_error() for _ in batch]
            self._forget_now([item.session_key for item in batch])
        return answers, self._proposer.kv_usage()

    def _answer(self, proposal: Proposal | MissingHiddenStates | None, item: ProposeInput) -> Answer | None:
        """What leaves the service for it; None for "not yet"."""
        if proposal is None:
            return None
        if isinstance(proposal, MissingHiddenStates):
            return missing(0)
        return trim_proposal(proposal, item, self._vocab_size)

    def _forget_now(self, keys: Sequence[SessionKey]) -> None:
        """On the compute thread."""
        for key in keys:
            try:
                self._proposer.forget(key)
            except Exception:  # noqa: BLE001 - as above; the other sessions are still forgotten
                _log.exception("the proposer failed to forget a session")
