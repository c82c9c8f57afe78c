"""An event loop whose clock can be put forward, so that nobody has to wait for time to pass."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any


class ClockLoop(asyncio.SelectorEventLoop):
    """Timers that are due after a `skip` fire at the loop's next turn."""

    _skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


def skip(seconds: float) -> None:
    """Put the running loop's clock forward."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockLoop)
    loop.skip(seconds)


async def settled(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Let the loop turn until the condition holds; TimeoutError after so many seconds of real time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError
        await asyncio.sleep(0)


def run_with_clock(main: Coroutine[Any, Any, None], limit_s: float = 120.0) -> None:
    """Like `asyncio.run`, on such a loop; TimeoutError after so many seconds of real time."""

    async def limited() -> None:
        task = asyncio.ensure_future(main)
        watchdog = threading.Timer(limit_s, asyncio.get_running_loop().call_soon_threadsafe, (task.cancel,))
        watchdog.daemon = True
        watchdog.start()
        try:
            await task
        except asyncio.CancelledError as error:
            raise TimeoutError from error
        finally:
            watchdog.cancel()

    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        runner.run(limited())
