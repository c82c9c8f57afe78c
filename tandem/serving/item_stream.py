"""The serving side of a multiplexed stream: many sessions' items in, batches of results out."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from tandem import codec
from tandem.serving.batches import MAX_BATCH_ITEMS, batches_of
from tandem.types import ItemError, Stamp
from tandem.validation import InvalidArgumentError

_log = logging.getLogger(__name__)

MAX_MESSAGE_ITEMS = 4096  # an orchestrator sends MAX_BATCH_ITEMS at most
MAX_UNSENT = 4096  # results of one peer
HEARTBEAT_S = 1.0  # a peer hears of a service at least so often, if only its load

ResultT = TypeVar("ResultT")
ResponseT = TypeVar("ResponseT")
MessageT = TypeVar("MessageT", bound=Message)

# Applies one item: the item, its stamp, when it arrived, and its deadline if it has one, on the event loop's clock.
Take = Callable[[Any, Stamp, float, float | None], None]


class Outbox(Generic[ResultT]):
    """Results on their way to one peer; whatever has gathered since the last write travels together.

    A peer that does not read its results has no more items taken while MAX_UNSENT of them wait.
    """

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        """`heartbeat_s`: seconds after which a batch may be empty."""
        self._heartbeat_s = heartbeat_s
        self._is_due = False  # a batch, whatever is in it
        self._results: list[ResultT] = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._is_closed = False

    def put(self, result: ResultT) -> None:
        """Queue a result; dropped when the stream has ended. Call on the event loop."""
        if not self._is_closed:
            self._results.append(result)
            self._wake.set()

    def close(self) -> None:
        """End `batches` once what is queued has been taken."""
        self._is_closed = True
        self._wake.set()
        self._taken.set()

    async def room(self) -> None:
        """Return once fewer than MAX_UNSENT results wait."""
        while len(self._results) >= MAX_UNSENT and not self._is_closed:
            self._taken.clear()
            await self._taken.wait()

    async def batches(self) -> AsyncGenerator[list[ResultT], None]:
        """Batches of results until closed; one is empty when it is time for a heartbeat."""
        heart = asyncio.create_task(self._beat())
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(0)  # let whatever is ready in this turn of the loop join the batch
                self._wake.clear()
                results, self._results = self._results, []
                self._taken.set()
                is_due, self._is_due = self._is_due, False
                if results or (is_due and not self._is_closed):
                    yield results
                elif self._is_closed:
                    return
                if self._is_closed:
                    self._wake.set()
        finally:
            heart.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._is_due = True
            self._wake.set()


async def serve_items(
    requests: AsyncIterator[Any],
    take: Take,
    outbox: Outbox[ResultT],
    to_message: Callable[[ResultT], MessageT],
    to_response: Callable[[list[MessageT]], ResponseT],
    *,
    settle: Callable[[], bool],
    end: Callable[[], None],
) -> AsyncGenerator[ResponseT, None]:
    """Take the items of `requests` and yield responses until the outbox is closed; then `end` frees the sessions.

    Results that gather travel together as far as one message holds them.
    A peer that sends no more still gets every answer, then the end. A fault of reading is raised after those
    answers, so that the call ends with its status; a fault of one item is its answer, and `take` raises none.

    Args:
        to_message: the result as it travels; it has a field `error`, which takes the place of what is too large.
        settle: once the peer sends no more, and again after each answer: frees the sessions that wait for none; whether
            that were all. The answer that makes it true is in the outbox.
    """

    def close_when_settled(_: object = None) -> None:
        if reader.done() and settle():
            outbox.close()

    reader = asyncio.create_task(_read(requests, take, outbox))
    reader.add_done_callback(close_when_settled)
    try:
        async with aclosing(outbox.batches()) as batches:
            async for results in batches:
                for messages in batches_of(map(to_message, results), _with_error):
                    yield to_response(messages)
                if not results:
                    yield to_response([])
                close_when_settled()
        if reader.done():
            reader.result()
    finally:
        reader.cancel()
        end()
        await asyncio.gather(reader, return_exceptions=True)


def _with_error(message: Any, error: ItemError) -> Any:
    """The result's message with the error as its outcome."""
    stamp = message.stamp
    _log.error(
        "round %d: the answer cannot be sent: %s", stamp.round, error, extra={"session_id": stamp.session_id}
    )
    message.error.CopyFrom(codec.error_to_proto(error))
    return message


async def _read(requests: AsyncIterator[Any], take: Take, outbox: Outbox[Any]) -> None:
    """Every item of every message, until the peer sends no more; others have their turn in between.

    InvalidArgumentError, which ends the stream, for a message of too many items.
    """
    async for request in requests:
        if len(request.items) > MAX_MESSAGE_ITEMS:
            raise InvalidArgumentError(
                "items", f"{len(request.items)} items of one message are more than the limit of {MAX_MESSAGE_ITEMS}"
            )
        await outbox.room()
        now_s = asyncio.get_running_loop().time()
        for index, item in enumerate(request.items):
            if index > 0 and index % MAX_BATCH_ITEMS == 0:  # not before the first: a round would come a turn later
                await asyncio.sleep(0)
                await outbox.room()
            deadline_s = now_s + item.deadline_ms / 1000 if item.deadline_ms else None
            take(item, codec.stamp_from_proto(item.stamp), now_s, deadline_s)
