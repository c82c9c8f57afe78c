"""One request's session on one replica: its epoch, its stamps, and the items that carry them."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, Protocol

from orchestrator.expected_answers import AnswerKey, answer_key
from orchestrator.replica_api import ItemT, ResultT
from orchestrator.replica_link import LinkLostError, ReplicaLink
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


class Places(Protocol[ItemT, ResultT]):
    """Where sessions can be opened: see `ReplicaPool`."""

    def choose(
        self, fits: Callable[[ReplicaLink[ItemT, ResultT]], bool] = ...
    ) -> ReplicaLink[ItemT, ResultT] | None: ...

    async def wait_for(
        self, timeout_s: float, fits: Callable[[ReplicaLink[ItemT, ResultT]], bool] = ...
    ) -> ReplicaLink[ItemT, ResultT]: ...

    def why_none(self) -> str:
        """Why there is no place."""
        ...


class SessionHandle(Generic[ItemT, ResultT]):
    """Makes and sends the items of one session; its state is what its replica should have.

    A session stays where it is until it is lost there or the replica is leaving; then it is opened somewhere else.
    """

    def __init__(
        self, places: Places[ItemT, ResultT], session_id: SessionId, deadline: Deadline, traceparent: str = ""
    ) -> None:
        self.link: ReplicaLink[ItemT, ResultT] | None = None  # of the replica that has the session, or had it last
        self.deadline = deadline
        self.epoch = 0  # 0: never opened
        self.session_id = session_id
        self._places: Places[ItemT, ResultT] = places
        self._traceparent = traceparent
        self._generation = 0  # of the link, when the session was opened there
        self._is_open = False
        self._is_there = False  # opened, and not closed: the replica may have it, even if not as we do
        self._asked: set[AnswerKey] = set()
        self._avoided: set[ReplicaLink[ItemT, ResultT]] = set()  # where the session could not be served
        # Whether the session may be opened on a replica.
        self.fits: Callable[[ReplicaLink[ItemT, ResultT]], bool] = lambda _: True

    def __str__(self) -> str:
        return str(self.link or self._places)

    @property
    def needs_open(self) -> bool:
        """Whether no replica has the session: never opened, told so, the stream was lost, or it is about to go."""
        return self.link is None or not (
            self._is_open and self.link.is_up and self._generation == self.link.generation
        )

    def mark_lost(self) -> None:
        """The replica said that it does not have the session as we do."""
        self._is_open = False

    def move_if_leaving(self, sequence: Sequence) -> None:
        """Give the session up where no session should stay, if there is another place for it."""
        if self._is_open and self.link is not None and self.link.is_leaving and self.next_place() is not None:
            self._end(sequence)

    def avoid(self, sequence: Sequence) -> bool:
        """The session cannot be served where it is: give it up there. False, and it stays, without another place."""
        assert self.link is not None
        self._avoided.add(self.link)
        if self.next_place() is None:
            self._avoided.clear()
            return False
        self._end(sequence)
        return True

    def next_place(self) -> ReplicaLink[ItemT, ResultT] | None:
        """Where the session would be opened now, other than where it could not be served; None: nowhere."""
        return self._places.choose(lambda link: self.fits(link) and link not in self._avoided)

    async def wait_for_place(self, timeout_s: float) -> ReplicaLink[ItemT, ResultT] | None:
        """Return once the session can be opened; LinkLostError after the timeout.

        Not None: there are only replicas that may not have the session; one of them.
        """
        if self.next_place() is not None:
            return None
        self._avoided.clear()
        other = await self._places.wait_for(self.deadline.remaining_s(timeout_s))
        return None if self.next_place() is not None else other

    def open(
        self, sequence: Sequence, complete: Callable[[ItemT], None] = lambda _: None
    ) -> "asyncio.Future[ResultT]":
        """Send an open with every token so far, one epoch further; the future of its answer.

        `complete` adds to the item what only one kind of replica is told. LinkLostError without a place.
        """
        link = self.link if self._may_stay() else self.next_place()
        if link is None:
            raise LinkLostError(self._places.why_none())
        item = self._item(link, sequence, self.epoch + 1, 0)
        complete(item)
        item.open.CopyFrom(codec.session_to_proto(sequence.session_spec()))
        self._settle_on(link)
        future = self.request(item)
        self.epoch += 1
        if self.epoch > 1:
            sequence.stats.num_reopens += 1
        self._is_open, self._is_there, self._generation = True, True, link.generation
        return future

    def step_item(self, sequence: Sequence) -> ItemT:
        """An item of the sequence's current round; the caller fills in what is asked."""
        assert self.link is not None
        return self._item(self.link, sequence, self.epoch, sequence.round)

    def request(self, item: ItemT) -> "asyncio.Future[ResultT]":
        """Send an item; the future of its answer. LinkLostError without a stream."""
        assert self.link is not None
        future = self.link.request(item)
        key = answer_key(item.stamp)
        self._asked.add(key)
        future.add_done_callback(lambda _: self._asked.discard(key))
        return future

    def close(self, sequence: Sequence) -> None:
        """Free the session on the replica and forget answers that are still out; never fails, waits for nothing."""
        self._end(sequence)
        self._settle_on(None)

    def _may_stay(self) -> bool:
        """Whether the session is best opened where it was: its tokens may be cached there."""
        link = self.link
        return (
            link is not None
            and link.is_up
            and not link.is_leaving
            and link not in self._avoided
            and self.fits(link)
        )

    def _settle_on(self, link: ReplicaLink[ItemT, ResultT] | None) -> None:
        if link is not None:
            link.joined()
        if self.link is not None:
            self.link.left()
        self.link = link

    def _end(self, sequence: Sequence) -> None:
        """Close the session where it is, if it is there, and forget what was asked."""
        link = self.link
        if link is None:
            return
        for key in self._asked:
            link.answers.forget(key)
        self._asked.clear()
        if self._is_there and self._generation == link.generation and link.is_up:  # else freed with its stream
            item = self._item(link, sequence, self.epoch, sequence.round + 1)
            item.close.SetInParent()
            link.send(item)
        self._is_open = self._is_there = False

    def _item(self, link: ReplicaLink[ItemT, ResultT], sequence: Sequence, epoch: int, round_number: int) -> ItemT:
        committed_len = len(sequence.tokens)
        stamp = Stamp(self.session_id, epoch, round_number, committed_len, sequence.tokens.prefix_hash())
        item = link.api.new_item()
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
