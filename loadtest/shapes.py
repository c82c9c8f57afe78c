"""Locust's side of a schedule."""

import abc

from locust import LoadTestShape

from loadtest.schedule import Schedule

MAX_SPAWN_RATE = 100  # users a second; locust warns of more


class ScheduledShape(LoadTestShape):
    """Follows a schedule, whose phases ramp, hold, spike and churn; at its end the run is over."""

    abstract = True

    @abc.abstractmethod
    def schedule(self) -> Schedule:
        """What to follow; asked at every tick, since locust parses options after it makes the shape."""

    def tick(self) -> tuple[int, float] | None:
        """See locust."""
        users = self.schedule().users_at(self.get_run_time())  # type: ignore[no-untyped-call]
        return None if users is None else (users, MAX_SPAWN_RATE)
