"""Faults, drawn from a seed, one after the other and several at a time; every one is undone.

Of the targets one always serves: a fault strikes a target only while another one serves and is not struck, so the next
waits until the last is ready again. Draft services may all be away.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtest.chaos.fleet import Fleet, Member, gathered


@dataclass(frozen=True, slots=True)
class Times:
    """How long things last, in seconds; each is drawn between 0 and twice that."""

    gap_s: float = 0.8  # between two faults
    pause_s: float = 3.0
    swallow_s: float = 3.0
    away_s: float = 1.0  # from a kill to the start, from a name taken away to its return


class Injector:
    """Strikes until it is told to stop; `counts` says how often, by fault and role."""

    def __init__(self, fleet: Fleet, seed: int, times: Times = Times(), restarts: bool = True) -> None:
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._times = times
        self._faults: Sequence[tuple[str, float, Callable[[Member], Awaitable[None]]]] = (
            ("kill -9 and restart", 4.0 if restarts else 0.0, self._kill),
            ("stop in good order and restart", 1.0 if restarts else 0.0, self._drain),
            ("stand still (SIGSTOP)", 2.0, self._pause),
            ("cut connections", 4.0, self._cut),
            ("swallow bytes", 2.0, self._swallow),
            ("scale down and up", 2.0, self._unname),
        )
        self._at_work: set[asyncio.Task[None]] = set()

    @property
    def num_faults(self) -> int:
        return sum(self.counts.values())

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Strike again and again; what is at work when it is over is undone before this returns."""
        while not is_over():
            await asyncio.sleep(self._drawn(self._times.gap_s))
            self._strike()
            for task in [task for task in self._at_work if task.done()]:
                self._at_work.discard(task)
                task.result()
        await gathered(self._at_work)

    def _strike(self) -> None:
        able = [member for member in self._fleet.members if self._can_be_struck(member)]
        if not able:
            return
        member = self._rng.choice(able)
        name, _, fault = self._rng.choices(self._faults, [weight for _, weight, _ in self._faults])[0]
        self.counts[f"{name}, {member.role}"] += 1
        self.log.append(f"{name}: {member}")
        member.is_struck = True  # before the task runs: the next draw must know
        self._at_work.add(asyncio.create_task(self._run(member, fault)))

    async def _run(self, member: Member, fault: Callable[[Member], Awaitable[None]]) -> None:
        try:
            await fault(member)
        finally:
            member.is_struck = False

    def _can_be_struck(self, member: Member) -> bool:
        if member.is_struck or not member.is_serving:
            return False
        return member.role != "target" or self._fleet.others_serving(member) > 0

    def _drawn(self, mean_s: float) -> float:
        return self._rng.uniform(0.0, 2.0 * mean_s)

    async def _kill(self, member: Member) -> None:
        await member.kill()
        await asyncio.sleep(self._drawn(self._times.away_s))
        await member.start()

    async def _drain(self, member: Member) -> None:
        await member.drain()
        await member.start()

    async def _pause(self, member: Member) -> None:
        await member.pause(self._drawn(self._times.pause_s))

    async def _cut(self, member: Member) -> None:
        member.cable.cut()

    async def _swallow(self, member: Member) -> None:
        await member.cable.swallow(self._drawn(self._times.swallow_s))

    async def _unname(self, member: Member) -> None:
        member.is_named = False
        self._fleet.write()
        await asyncio.sleep(self._drawn(self._times.away_s))
        member.is_named = True
        self._fleet.write()
