"""Notices a stream on which nothing moves any more: a peer that is stopped, or a network that swallows."""

import asyncio
from collections.abc import Callable

SILENCE_S = 5.0  # a service says something every second (tandem/serving/item_stream.py)
_NUM_LOOKS = 10


class Silence:
    """How long a stream has been silent, counted in looks: while this process itself stands still, there are none."""

    def __init__(self, limit_s: float = SILENCE_S) -> None:
        self._limit_s = limit_s
        self._has_heard = False

    def heard(self) -> None:
        """Something has come."""
        self._has_heard = True

    async def is_too_long(self, is_awaited: Callable[[], bool] = lambda: True) -> None:
        """Return once nothing has come for the limit, all of which something was awaited."""
        num_silent = 0
        while num_silent < _NUM_LOOKS:
            await asyncio.sleep(self._limit_s / _NUM_LOOKS)
            num_silent = 0 if self._has_heard or not is_awaited() else num_silent + 1
            self._has_heard = False
