"""The measurement: capacity, then 1 x and 4 x of it offered, while counters and memory are looked at."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.memory import resident_bytes
from loadtest.open_loop import Samples, ask, run_open_loop
from loadtest.recorded import Recorded
from loadtest.soak.monitor import counters_of
from tandem.client import TandemClient, TandemError
from tandem.processes import LocalCluster

_LOOK_EVERY_S = 0.05
SESSION_COUNTERS = ("running requests", "sessions at the target", "sessions at the draft")


@dataclass(slots=True)
class Watched:
    """The most seen of each counter."""

    most: dict[str, int] = field(default_factory=dict)
    num_looks: int = 0

    @property
    def most_sessions(self) -> Mapping[str, int]:
        return {name: self.most.get(name, 0) for name in SESSION_COUNTERS}


@dataclass(frozen=True, slots=True)
class Step:
    """One rate offered."""

    times_capacity: float
    rate: float
    seconds: float  # until the last accepted answer had ended
    samples: Samples
    watched: Watched
    before: Mapping[str, int]  # resident bytes by service
    after: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything."""

    capacity: float  # requests a second
    closed_loop: Samples
    steps: Sequence[Step]


async def measure(
    cluster: LocalCluster,
    recorded: Sequence[Recorded],
    max_requests: int,
    times: Sequence[float],
    seconds: float,
    seed: int,
) -> Measured:
    """Capacity first, as `max_requests` clients get it that never pause; then each multiple of it for `seconds`."""
    async with TandemClient(cluster.addresses["orchestrator"]) as client:
        closed, elapsed_s = await closed_loop(client, recorded, max_requests, seconds)
        capacity = closed.num_finished / elapsed_s
        steps = [
            await offer(cluster, client, recorded, multiple, capacity * multiple, seconds, seed)
            for multiple in times
        ]
    return Measured(capacity, closed, steps)


async def closed_loop(
    client: TandemClient, recorded: Sequence[Recorded], num_clients: int, seconds: float
) -> tuple[Samples, float]:
    """Each client asks again as soon as it has its answer -> samples, seconds until the last answer."""
    samples, cases = Samples(), itertools.cycle(recorded)
    began = time.monotonic()

    async def one() -> None:
        while time.monotonic() - began < seconds:
            await ask(client, next(cases), time.monotonic(), samples)

    await asyncio.gather(*(one() for _ in range(num_clients)))
    return samples, time.monotonic() - began


async def offer(
    cluster: LocalCluster,
    client: TandemClient,
    recorded: Sequence[Recorded],
    multiple: float,
    rate: float,
    seconds: float,
    seed: int,
) -> Step:
    """One step, watched from beginning to end."""
    before, began = resident(cluster), time.monotonic()
    async with watching(client) as watched:
        samples = await run_open_loop(client, recorded, rate, seconds, seed)
    return Step(multiple, rate, time.monotonic() - began, samples, watched, before, resident(cluster))


@contextlib.asynccontextmanager
async def watching(client: TandemClient) -> AsyncIterator[Watched]:
    """Look at the counters while the body runs."""
    watched = Watched()

    async def look() -> None:
        while True:
            with contextlib.suppress(TandemError):  # a busy machine; the next look is soon
                for name, number in counters_of(await client.info()).items():
                    watched.most[name] = max(watched.most.get(name, 0), number)
                watched.num_looks += 1
            await asyncio.sleep(_LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield watched
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def resident(cluster: LocalCluster) -> dict[str, int]:
    """Bytes by service."""
    return {one.service: resident_bytes(one.process.pid) for one in cluster.services}
