"""`python -m loadtest.soak`: the real model and a toy engine under users that come and go, at the same time.

Exit code 0 only when every gate passes: recorded answers, no failures, nothing held afterwards, flat memory.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.idle import wait_idle
from loadtest.soak.gates import SystemRun, all_gates, judges_memory
from loadtest.soak.monitor import Monitor
from loadtest.soak.report import page, write
from loadtest.soak.row_counts import meet_row_counts
from loadtest.soak.systems import (
    REAL_KV_MEMORY,
    Load,
    LocustRun,
    free_ports,
    metrics_addresses,
    real_plan,
    record_answers,
    toy_plan,
)
from tandem.client import SyncTandemClient
from tandem.processes import ClusterPlan, LocalCluster, ServiceStartError
from tandem.serving.options import make_parser, positive_int

_LOOK_EVERY_S = 1.0
_LATE_S = 120.0  # locust's start and end beside its schedule; after that it hangs


@dataclass(frozen=True, slots=True)
class System:
    """What is started, and what loads it."""

    name: str
    plan: ClusterPlan
    metrics_port: int
    load: Load
    keeps_code: bool  # for each number of rows that its target has met
    what: str  # for the report


@dataclass(frozen=True, slots=True)
class Running:
    """One system under load."""

    system: System
    client: SyncTandemClient
    monitor: Monitor
    locust: LocustRun


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; the exit code."""
    options = build_parser().parse_args(arguments)
    systems = make_systems(options)
    try:
        runs = run(systems)
    except (ServiceStartError, ValueError) as error:
        sys.stderr.write(f"soak: {error}\n")
        return 1
    settings = [f"{system.name}: {system.what}" for system in systems]
    sys.stdout.write(page(runs, settings))
    if options.out is not None:
        write(options.out, runs, settings)
    return 0 if all(gate.passed is not False for _, gate in all_gates(runs)) else 1


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    parser = make_parser("python -m loadtest.soak", __doc__)
    parser.add_argument("--cycles", type=positive_int, default=6, help="ramp, hold, spike, hold, churn, quiet")
    parser.add_argument("--cycle-seconds", type=float, default=300.0, help="of one; the first is the warm-up")
    parser.add_argument("--model", default="smollm2-135m", help="the real one: a name, a directory or a .gguf file")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--real-users", type=positive_int, default=3, help="of the real model, between spikes")
    parser.add_argument("--real-think", type=float, default=10.0, help="mean seconds between a user's calls")
    parser.add_argument("--toy", default="hashed:vocab=512,seed=3,delay_ms=10", help="the toy engine")
    parser.add_argument("--toy-users", type=positive_int, default=150, help="of the toy engine, between spikes")
    parser.add_argument("--toy-think", type=float, default=12.0, help="mean seconds between a user's calls")
    parser.add_argument(
        "--toy-max-requests", type=positive_int, default=64, help="that run at once; spikes ask for more"
    )
    parser.add_argument("--requests", type=positive_int, default=24, help="distinct ones, of each system")
    parser.add_argument("--processes", type=positive_int, default=2, help="locust workers for the toy's users")
    parser.add_argument("--seed", type=int, default=1, help="of requests, picks, fates and pauses")
    parser.add_argument("--out", type=Path, help="also write the report to this file, and its plots beside it")
    return parser


def make_systems(options: argparse.Namespace) -> list[System]:
    """The real model, and the toy."""

    def load(users: int, think_s: float, num_processes: int) -> Load:
        cycles, cycle_s = options.cycles, options.cycle_seconds
        return Load(users, think_s, cycles, cycle_s, options.requests, options.seed, num_processes)

    def words(load: Load) -> str:
        return (
            f"{load.users} users in {load.num_processes} locust process(es), mean pause {load.think_s:g} s; "
            f"{load.num_cycles} cycle(s) of {load.cycle_s:g} s; {load.num_requests} distinct requests, "
            f"seed {load.seed}."
        )

    port = free_ports(6)
    real = load(options.real_users, options.real_think, 1)
    toy = load(options.toy_users, options.toy_think, options.processes)
    return [
        System(
            "real",
            real_plan(options.model, options.dtype, port),
            port,
            real,
            True,
            f"{options.model}, {options.dtype}, one thread, {REAL_KV_MEMORY} of key-value memory, drafts by prompt "
            f"lookup; {words(real)}",
        ),
        System(
            "toy",
            toy_plan(options.toy, options.toy_max_requests, port + 3),
            port + 3,
            toy,
            False,
            f"toy engine {options.toy}, at most {options.toy_max_requests} requests at once; {words(toy)}",
        ),
    ]


def run(systems: Sequence[System]) -> list[SystemRun]:
    """Start everything, record, load, watch, let everything end; ValueError when locust did not do its work."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-soak-")))
        started = []
        for system in systems:
            cluster = stack.enter_context(LocalCluster(system.plan, quiet=True))
            client = stack.enter_context(SyncTandemClient(cluster.addresses["orchestrator"]))
            (folder / system.name).mkdir()
            if system.keeps_code and judges_memory(system.load.schedule, system.load.cycle_s):
                meet_row_counts(client.address)
            record_answers(client.address, system.load, folder / system.name / "answers.json")
            started.append((system, client, Monitor(cluster, client, metrics_addresses(system.metrics_port))))
        running = []
        for system, client, monitor in started:
            place = folder / system.name
            locust = LocustRun.start(client.address, system.load, place / "answers.json", place)
            stack.callback(locust.stop)
            running.append(Running(system, client, monitor, locust))
        watch(running)
        return [finish(one) for one in running]


def watch(running: Sequence[Running]) -> None:
    """Until locust has ended for all; ValueError when it goes on for much longer than its schedule."""
    deadline = time.monotonic() + max(one.system.load.schedule.seconds for one in running) + _LATE_S
    while any(one.locust.process.poll() is None for one in running):
        for one in running:
            one.monitor.look()
        if time.monotonic() > deadline:
            raise ValueError(f"locust has not ended {_LATE_S:g} s after its schedule")
        time.sleep(_LOOK_EVERY_S)


def finish(one: Running) -> SystemRun:
    """What it has shown."""
    started_at, ended_at, figures = one.locust.results()
    held = wait_idle(one.client) if not one.monitor.deaths else []
    return SystemRun(
        name=one.system.name,
        figures=figures,
        samples=one.monitor.samples,
        deaths=one.monitor.deaths,
        held=held,
        schedule=one.system.load.schedule,
        started_at=started_at,
        ended_at=ended_at,
        warm_up_s=one.system.load.cycle_s,
    )


if __name__ == "__main__":
    sys.exit(main())
