"""One request's session on one replica: its epoch, its stamps, and the items that carry them."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic

from orchestrator.replica_api import ItemT, ResultT
from orchestrator.replica_link import AnswerKey, ReplicaLink
from orchestrator.sequence import Sequence
from tandem import codec
from tandem.types import ErrorCode, ItemError, SessionId, Stamp

_MAX_UINT32 = 2**32 - 1


class Deadline:
    """When a request's time is up; without a limit it never is."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if timeout_s is None else clock() + timeout_s

    def remaining_s(self, limit_s: float) -> float:
        """Seconds left, at most `limit_s`, at least 0."""
        return limit_s if self._end is None else max(0.0, min(limit_s, self._end - self._clock()))

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._end is not None and self._clock() >= self._end

    def milliseconds(self) -> int:
        """For the wire, a uint32: milliseconds left, at least 1; 0 without a limit."""
        return 0 if self._end is None else max(1, min(_MAX_UINT32, int((self._end - self._clock()) * 1000)))


class SessionHandle(Generic[ItemT, ResultT]):
    """Makes and sends the items of one session; its state is what the replica should have."""

    def __init__(
        self, link: ReplicaLink[ItemT, ResultT], session_id: SessionId, deadline: Deadline, traceparent: str = ""
    ) -> None:
        self.link: ReplicaLink[ItemT, ResultT] = link
        self.deadline = deadline
        self.epoch = 0  # 0: never opened
        self.session_id = session_id
        self._traceparent = traceparent
        self._generation = 0  # of the link, when the session was opened there
        self._is_open = False
        self._asked: set[AnswerKey] = set()

    @property
    def needs_open(self) -> bool:
        """Whether the replica does not have the session: never opened, told so, or the stream was lost."""
        return not (self._is_open and self.link.is_up and self._generation == self.link.generation)

    def mark_lost(self) -> None:
        """The replica said that it does not have the session as we do."""
        self._is_open = False

    def open(
        self, sequence: Sequence, complete: Callable[[ItemT], None] = lambda _: None
    ) -> "asyncio.Future[ResultT]":
        """Send an open with every token so far, one epoch further; the future of its answer.

        `complete` adds to the item what only one kind of replica is told. LinkLostError without a stream.
        """
        item = self._item(sequence, self.epoch + 1, 0)
        complete(item)
        item.open.CopyFrom(codec.session_to_proto(sequence.session_spec()))
        future = self.request(item)
        self.epoch += 1
        if self.epoch > 1:
            sequence.stats.num_reopens += 1
        self._is_open, self._generation = True, self.link.generation
        return future

    def step_item(self, sequence: Sequence) -> ItemT:
        """An item of the sequence's current round; the caller fills in what is asked."""
        return self._item(sequence, self.epoch, sequence.round)

    def request(self, item: ItemT) -> "asyncio.Future[ResultT]":
        """Send an item; the future of its answer. LinkLostError without a stream."""
        future = self.link.request(item)
        key = (item.stamp.session_id, item.stamp.epoch, item.stamp.round)
        self._asked.add(key)
        future.add_done_callback(lambda _: self._asked.discard(key))
        return future

    def close(self, sequence: Sequence) -> None:
        """Free the session on the replica and forget answers that are still out; never fails, waits for nothing."""
        for key in self._asked:
            self.link.forget(key)
        self._asked.clear()
        if self.epoch == 0 or self._generation != self.link.generation or not self.link.is_up:
            return  # never opened, or freed with the stream it was opened on
        item = self._item(sequence, self.epoch, sequence.round + 1)
        item.close.SetInParent()
        self.link.send(item)
        self._is_open = False

    def _item(self, sequence: Sequence, epoch: int, round_number: int) -> ItemT:
        committed_len = len(sequence.tokens)
        stamp = Stamp(self.session_id, epoch, round_number, committed_len, sequence.tokens.prefix_hash())
        item = self.link.api.new_item()
        item.stamp.CopyFrom(codec.stamp_to_proto(stamp))
        item.deadline_ms = self.deadline.milliseconds()
        item.traceparent = self._traceparent
        return item


async def answer_of(future: "asyncio.Future[ResultT]", timeout_s: float, role: str, wanted: str) -> ResultT:
    """The answer, which must be of the `wanted` outcome.

    TimeoutError when it is late (it may still come), LinkLostError, or ItemError: the replica's own, or INTERNAL
    for an answer that is not one.
    """
    if not future.done():
        await asyncio.wait([future], timeout=timeout_s)
    if not future.done():
        raise TimeoutError
    result = future.result()
    outcome = result.WhichOneof("outcome")
    if outcome == "error":
        raise codec.error_from_proto(result.error)
    if outcome != wanted:
        raise ItemError(
            ErrorCode.INTERNAL, f"the {role} service answered {outcome or 'nothing'} instead of {wanted}"
        )
    return result
