"""Several answers to one request: generated at the same time, on one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

EventT = TypeVar("EventT")


async def interleaved(answers: Sequence[AsyncGenerator[EventT, None]]) -> AsyncGenerator[EventT, None]:
    """What the answers yield, as it comes and each answer's in its order.

    One answer that fails ends the others, and its error is raised once what came before has been taken. A slow
    reader slows the answers: at most len(answers) events lie here, and every answer waits with at most one more.
    However this ends, finished, failed or closed by whoever iterates, every answer is closed by then.
    """
    events: asyncio.Queue[EventT | None] = asyncio.Queue()  # None: no more will come
    room = asyncio.Semaphore(len(answers))  # the queue has no limit of its own, so that its end always fits

    async def feed(answer: AsyncGenerator[EventT, None]) -> None:
        async with aclosing(answer):
            async for event in answer:
                await room.acquire()
                events.put_nowait(event)

    async def feed_all() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(feed(answer)) for answer in answers]
        for task in tasks:
            task.result()  # a cancellation that nobody asked for is no failure to a task group

    feeding = asyncio.create_task(feed_all())
    feeding.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            room.release()
            yield event
        _raise_first(feeding.exception())
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def _raise_first(failure: BaseException | None) -> None:
    """The failure that ended a task group, as it was before the group wrapped it."""
    if isinstance(failure, BaseExceptionGroup):
        raise failure.exceptions[0]
    if failure is not None:
        raise failure
