"""One thread for a model: compute never runs on the event loop, and never twice at a time."""

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

FREEZE_S = 60.0  # far longer than any step takes

_SWITCH_INTERVAL_S = 0.0005  # hand the interpreter to the event loop soon when compute is in Python


class ComputeThread:
    """Runs functions one after the other in a single worker thread.

    Load the model here too (`run_blocking`). OpenMP keeps a pool of threads for every thread that ever computed;
    with two pools it counts more threads than cores and no longer spins between operations, and a step of 14.5 ms
    took 18.7 ms.
    """

    def __init__(self, name: str, freeze_s: float = FREEZE_S, clock: Callable[[], float] = time.monotonic) -> None:
        """`freeze_s`: a function that runs for longer has hung."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._freeze_s = freeze_s
        self._clock = clock
        self._started_s: float | None = None  # when the running function began

    @property
    def is_frozen(self) -> bool:
        """Whether a function has been running for too long: the loop may go on, but nothing is computed."""
        started_s = self._started_s
        return started_s is not None and self._clock() - started_s > self._freeze_s

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result; cancellation of the waiter does not stop the function."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: self._timed(lambda: function(*args, **kwargs)))

    def run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, for the time before there is an event loop."""
        return self._executor.submit(function, *args, **kwargs).result()

    def _timed(self, function: Callable[[], T]) -> T:
        self._started_s = self._clock()
        try:
            return function()
        finally:
            self._started_s = None

    def close(self) -> None:
        """Wait for the running function, refuse new ones."""
        self._executor.shutdown(wait=True)
