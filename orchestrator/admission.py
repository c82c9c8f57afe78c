"""How many answers run at a time, and when one that finds no place should come back."""

import contextlib
import time
from collections.abc import Callable, Iterator

import grpc

from tandem.serving.errors import ServiceError

_LEAST_RETRY_S, _LONGEST_RETRY_S = 0.1, 30.0
_NEW_SHARE = 1 / 8  # of a new time in what is known


class Admission:
    """Places for running answers. Whoever finds none is refused before anything is looked at, scheduled or queued."""

    def __init__(self, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running = max_running
        self.num_running = 0
        self.num_refused = 0
        self._clock = clock
        self._mean_s = 1.0  # that a place is held

    @contextlib.contextmanager
    def places(self, num_answers: int) -> Iterator[None]:
        """A place for each answer; ServiceError RESOURCE_EXHAUSTED, saying when to come back, if too few are free."""
        num_free = self.max_running - self.num_running
        if num_answers > num_free:
            self.num_refused += 1
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{num_free} of {self.max_running} places for running requests are free, {num_answers} are needed; "
                "try again later",
                retry_after_s=self._retry_after_s(num_answers - num_free),
            )
        self.num_running += num_answers
        started_s = self._clock()
        try:
            yield
        finally:
            self.num_running -= num_answers
            self._mean_s += _NEW_SHARE * (self._clock() - started_s - self._mean_s)

    def _retry_after_s(self, num_missing: int) -> float:
        """When so many places should have become free, if they go on being held as long as they have been."""
        return min(_LONGEST_RETRY_S, max(_LEAST_RETRY_S, self._mean_s * num_missing / self.max_running))
