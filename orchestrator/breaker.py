"""Keeps new sessions away from a replica that has failed those it had, for longer each time."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits after failures: doubled each time up to a limit, times a random 0.5 .. 1.5."""

    first_s: float = 0.1
    limit_s: float = 3.0

    def wait_s(self, num_failures: int) -> float:
        """Seconds to wait after that many failures in a row (at least one)."""
        longest = min(self.first_s * 2.0 ** min(num_failures - 1, 16), self.limit_s)
        return longest * random.uniform(0.5, 1.5)


class Breaker:
    """Open for a while after a failure, then one session at a time tries again until one works."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff
        self._clock = clock
        self._num_failures = 0  # in a row
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether sessions should go elsewhere, if there is an elsewhere."""
        return self._clock() < self._until

    def failed(self) -> None:
        """A session had to leave, or could not be served."""
        self._num_failures += 1
        self._until = self._clock() + self._backoff.wait_s(self._num_failures)

    def worked(self) -> None:
        """A session was served."""
        self._num_failures = 0
        self._until = 0.0
