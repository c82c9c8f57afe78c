"""The load: clients that each make one call after the other, while the services' loads are looked at."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from loadtest.churn.calls import Call, Fate, draw_fate
from loadtest.churn.judge import MAX_PROBLEMS, Outcome, Tally
from loadtest.idle import wait_idle
from loadtest.recorded import Recorded
from tandem.client import ServerInfo, SyncTandemClient, TandemClient, TandemError

_LOOK_EVERY_S = 0.2
Figure = Callable[[ServerInfo], float]


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How much, and for how long. A run ends by itself, on a slow machine too: answers are short."""

    num_clients: int = 64
    seconds: float = 300.0  # no call begins later
    max_calls: int = 100_000
    stall_s: float = 120.0  # with no chunk and no end of any call for so long, those that run hang
    idle_within_s: float = 10.0
    seed: int = 1
    draw_fate: Callable[[random.Random], Fate] = draw_fate


# What is told of the pressure: the most seen of each.
PRESSURE: Mapping[str, Figure] = {
    "requests running": lambda info: info.num_running_requests,
    "sessions with a place at the target": lambda info: info.target_load.running,
    "requests without a place there": lambda info: max(0, info.num_running_requests - info.target_load.running),
    "blocks used at the target": lambda info: info.target_load.used_blocks,
    "blocks used at the draft": lambda info: info.draft_load.used_blocks,
    "preemptions at the target": lambda info: info.target_load.preemptions,
    "draft tokens that found no block there": lambda info: info.target_load.shrunk_draft_tokens,
    "blocks cached at the target": lambda info: info.target_load.cached_blocks,
    "blocks found in its cache": lambda info: info.target_load.hit_blocks,
    "sessions evicted at the draft": lambda info: info.draft_load.evicted_sessions,
    "stale items at the target": lambda info: info.target_load.stale_items,
}


def run_load(
    address: str, recorded: Sequence[Recorded], settings: LoadSettings, figures: Mapping[str, Figure] = PRESSURE
) -> Outcome:
    """Load the orchestrator at `address`, let everything end, see what is still in use."""
    started = time.monotonic()
    load = _Load(address, recorded, settings, figures)
    asyncio.run(load.run())
    elapsed_s = time.monotonic() - started
    with SyncTandemClient(address) as client:
        in_use = wait_idle(client, settings.idle_within_s)
    return Outcome(load.tally, tuple(load.hanging), load.most, load.kv_usage, tuple(in_use), elapsed_s)


class _Load:
    """One run's clients and what they have seen."""

    def __init__(
        self, address: str, recorded: Sequence[Recorded], settings: LoadSettings, figures: Mapping[str, Figure]
    ) -> None:
        self.tally = Tally()
        self.most: dict[str, float] = dict.fromkeys(figures, 0)
        self.kv_usage = 0.0
        self.hanging: list[str] = []
        self._address = address
        self._recorded = recorded
        self._settings = settings
        self._figures = figures
        self._numbers = itertools.count(1)
        self._running: dict[int, Call] = {}
        self._end = 0.0  # on the monotonic clock: when no call begins any more

    async def run(self) -> None:
        """Until every client is done, or nothing happens any more."""
        settings = self._settings
        self._end = time.monotonic() + settings.seconds
        async with TandemClient(self._address) as client:
            looking = asyncio.create_task(self._look(client))
            clients = [asyncio.create_task(self._client(client, index)) for index in range(settings.num_clients)]
            await self._wait_for(clients)
            self.hanging = [str(call) for call in self._running.values()]
            for task in (looking, *clients):
                task.cancel()
            for outcome in await asyncio.gather(looking, *clients, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def _wait_for(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """Until all are done, or nothing has come for any of them for `stall_s`."""
        pending: Collection[asyncio.Task[None]] = clients
        seen, seen_at = self._progress(), time.monotonic()
        while pending and time.monotonic() - seen_at < self._settings.stall_s:
            _, pending = await asyncio.wait(pending, timeout=_LOOK_EVERY_S)
            if self._progress() != seen:
                seen, seen_at = self._progress(), time.monotonic()

    def _progress(self) -> tuple[int, int]:
        """Changes with every chunk and every end."""
        return self.tally.num_calls, sum(call.num_chunks for call in self._running.values())

    async def _client(self, client: TandemClient, index: int) -> None:
        """Calls until the end; each client draws from a generator of its own."""
        rng = random.Random(f"{self._settings.seed} {index}")
        while time.monotonic() < self._end and len(self.tally.problems) < MAX_PROBLEMS:
            number = next(self._numbers)
            if number > self._settings.max_calls:
                return
            call = Call(number, rng.choice(self._recorded), self._settings.draw_fate(rng))
            self._running[number] = call
            await call.run(client)
            del self._running[number]
            self.tally.add(call)

    async def _look(self, client: TandemClient) -> None:
        """Keep the most seen of each figure."""
        while True:
            with contextlib.suppress(TandemError):  # a busy machine; the next look is soon
                info = await client.info()
                self.kv_usage = max(self.kv_usage, info.target_load.kv_usage)
                for name, figure in self._figures.items():
                    self.most[name] = max(self.most[name], figure(info))
            await asyncio.sleep(_LOOK_EVERY_S)
