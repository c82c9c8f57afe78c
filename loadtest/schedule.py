"""How many users there are at any moment of a run: phases, one after the other.

Free of locust, whose import patches the process that does it: `loadtest/shapes.py` makes shapes of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Phase(Protocol):
    """A stretch of a run."""

    @property
    def seconds(self) -> float: ...

    def users_at(self, elapsed_s: float) -> int:
        """At `elapsed_s` of the phase, 0 <= elapsed_s < seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Ramp:
    """From one number of users to another, evenly."""

    seconds: float
    first: int
    last: int

    def users_at(self, elapsed_s: float) -> int:
        """See `Phase`."""
        return round(self.first + (self.last - self.first) * elapsed_s / self.seconds)


@dataclass(frozen=True, slots=True)
class Hold:
    """The same users; none of them: a quiet phase, in which everything that runs must come to its end."""

    seconds: float
    users: int

    def users_at(self, elapsed_s: float) -> int:  # noqa: ARG002 - always the same
        """See `Phase`."""
        return self.users


@dataclass(frozen=True, slots=True)
class Spike:
    """Many more users at once in the middle third."""

    seconds: float
    users: int
    most: int

    def users_at(self, elapsed_s: float) -> int:
        """See `Phase`."""
        return self.most if 1 <= 3 * elapsed_s / self.seconds < 2 else self.users


@dataclass(frozen=True, slots=True)
class Churn:
    """Users leave, and others come, every `every_s` seconds."""

    seconds: float
    users: int
    least: int
    every_s: float

    def users_at(self, elapsed_s: float) -> int:
        """See `Phase`."""
        return self.users if int(elapsed_s / self.every_s) % 2 else self.least


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases in turn."""

    phases: Sequence[Phase]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def users_at(self, elapsed_s: float) -> int | None:
        """None when the run is over."""
        for phase in self.phases:
            if elapsed_s < phase.seconds:
                return phase.users_at(elapsed_s)
            elapsed_s -= phase.seconds
        return None

    def quiet_times(self) -> list[tuple[float, float]]:
        """Beginning and end, in seconds of the run, of every phase without users."""
        times = []
        begin = 0.0
        for phase in self.phases:
            end = begin + phase.seconds
            if isinstance(phase, Hold) and phase.users == 0:
                times.append((begin, end))
            begin = end
        return times


def soak_schedule(users: int, num_cycles: int, cycle_s: float) -> Schedule:
    """Cycles of `cycle_s` seconds: ramp up, hold, a spike to half as many more, hold, churn, and a quiet phase."""
    cycle: list[Phase] = [
        Ramp(0.10 * cycle_s, 0, users),
        Hold(0.30 * cycle_s, users),
        Spike(0.10 * cycle_s, users, users + (users + 1) // 2),
        Hold(0.10 * cycle_s, users),
        Churn(0.20 * cycle_s, users, users // 3, cycle_s / 20),
        Hold(0.20 * cycle_s, 0),
    ]
    return Schedule(cycle * num_cycles)
