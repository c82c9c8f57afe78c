"""The serving side of a multiplexed stream: many sessions' items in, batches of results out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, aclosing
from typing import Generic, Protocol, TypeVar

from tandem import codec
from tandem.common.v1 import common_pb2
from tandem.types import Stamp

ItemT = TypeVar("ItemT", bound="WireItem")
ItemT_co = TypeVar("ItemT_co", bound="WireItem", covariant=True)
ResultT = TypeVar("ResultT")
ResponseT = TypeVar("ResponseT")


class Outbox(Generic[ResultT]):
    """Results on their way to one peer; whatever has gathered since the last write travels together.

    Bounded by the peer itself: every item it sent is answered once.
    """

    def __init__(self) -> None:
        self._results: list[ResultT] = []
        self._wake = asyncio.Event()
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

    async def batches(self) -> AsyncGenerator[list[ResultT], None]:
        """Batches of results until closed, each non-empty."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # let whatever is ready in this turn of the loop join the batch
            self._wake.clear()
            results, self._results = self._results, []
            if results:
                yield results
            elif self._is_closed:
                return
            if self._is_closed:
                self._wake.set()


class WireItem(Protocol):
    """What every item carries, whatever it asks for."""

    @property
    def stamp(self) -> common_pb2.Stamp: ...

    @property
    def deadline_ms(self) -> int: ...


class WireRequest(Protocol[ItemT_co]):
    """A message of items."""

    @property
    def items(self) -> Iterable[ItemT_co]: ...


class ItemStream(Protocol[ResultT]):
    """A service's end of one stream."""

    @property
    def outbox(self) -> Outbox[ResultT]: ...

    def answering(self, stamp: Stamp) -> AbstractContextManager[None]:
        """Turn whatever goes wrong inside into the item's answer."""
        ...

    def is_settled(self) -> bool:
        """Whether every item has its answer; whatever makes it true has put one into the outbox."""
        ...

    def end(self) -> None:
        """Free the stream's sessions."""
        ...


Take = Callable[
    [ItemT, Stamp, float, float | None], None
]  # an item, its stamp, arrival and deadline in loop seconds


async def serve_items(
    requests: AsyncIterator[WireRequest[ItemT]],
    stream: ItemStream[ResultT],
    take: Take[ItemT],
    to_response: Callable[[list[ResultT]], ResponseT],
) -> AsyncGenerator[ResponseT, None]:
    """Take items as they come and yield responses until the outbox is closed, then free the stream's sessions.

    A peer that sends no more still gets every answer, then the end. A fault of reading raises after those answers,
    so that the call ends with its status; a fault of one item is that item's answer.
    """

    def end_when_settled(_: object = None) -> None:
        if reader.done() and stream.is_settled():
            stream.outbox.close()

    reader = asyncio.create_task(_read(requests, stream, take))
    reader.add_done_callback(end_when_settled)
    try:
        async with aclosing(stream.outbox.batches()) as batches:
            async for results in batches:
                yield to_response(results)
                end_when_settled()
        if reader.done():
            reader.result()
    finally:
        reader.cancel()
        stream.end()
        await asyncio.gather(reader, return_exceptions=True)


async def _read(
    requests: AsyncIterator[WireRequest[ItemT]], stream: ItemStream[ResultT], take: Take[ItemT]
) -> None:
    """Every item of every message, until the peer sends no more."""
    async for request in requests:
        arrived_s = asyncio.get_running_loop().time()
        for item in request.items:
            stamp = codec.stamp_from_proto(item.stamp)
            with stream.answering(stamp):
                take(item, stamp, arrived_s, arrived_s + item.deadline_ms / 1000 if item.deadline_ms else None)
