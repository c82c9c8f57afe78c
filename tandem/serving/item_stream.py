"""The serving side of a multiplexed stream: many sessions' items in, batches of results out."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


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
