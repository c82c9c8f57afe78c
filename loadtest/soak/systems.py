"""The systems under load, each of real processes, and locust's processes that load them."""

import json
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.churn.requests import MAX_TOKENS, make_requests, spec_bench_prompts
from loadtest.figures import Figures, merged
from loadtest.recorded import record, to_json
from loadtest.schedule import Schedule, soak_schedule
from loadtest.toy import toy_draft
from tandem.client import SyncTandemClient
from tandem.cluster_options import ClusterChoice, PassedOptions
from tandem.defaults import NUM_DRAFT_TOKENS
from tandem.processes import ClusterPlan

REAL_KV_MEMORY = "160M"  # of the demo model 217 blocks; the answers of 24 requests take 235

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_OWN_PORTS = (20_000, 30_000)
_TRIES = 100
_LEAVE_WITHIN_S = 10  # a user that has to go finishes its answer, or hangs up after so long


@dataclass(frozen=True, slots=True)
class Load:
    """What one system has to bear."""

    users: int  # between spikes
    think_s: float  # mean pause of a user
    num_cycles: int
    cycle_s: float
    num_requests: int  # distinct ones
    seed: int
    num_processes: int  # of locust that make the load

    @property
    def schedule(self) -> Schedule:
        return soak_schedule(self.users, self.num_cycles, self.cycle_s)

    @property
    def leave_within_s(self) -> int:
        """A third of the quiet phase at most, so that it is quiet; whole seconds, as locust wants them."""
        begin, end = self.schedule.quiet_times()[0]
        return max(1, int(min(_LEAVE_WITHIN_S, (end - begin) / 3)))


def real_plan(model: str, dtype: str, metrics_port: int) -> ClusterPlan:
    """One thread for the target, drafts by prompt lookup, and a pool that the recorded answers alone fill.

    The pages of a pool are resident from their first use on: one that never fills grows as its cache does.
    """
    passed = PassedOptions(kv_memory=REAL_KV_MEMORY)
    metrics = f"127.0.0.1:{metrics_port}"
    return ClusterChoice(
        model, dtype, None, True, NUM_DRAFT_TOKENS, 1, passed=passed, metrics_address=metrics
    ).plan()


def toy_plan(toy: str, max_requests: int, metrics_port: int) -> ClusterPlan:
    """A toy target, and a toy draft that is often right."""
    passed = PassedOptions(max_requests=max_requests)
    metrics = f"127.0.0.1:{metrics_port}"
    return ClusterChoice(
        "", "float32", toy_draft(toy), False, NUM_DRAFT_TOKENS, 1, toy, passed=passed, metrics_address=metrics
    ).plan()


def metrics_addresses(port: int) -> dict[str, str]:
    """Of a plan's services, by service."""
    return {
        service: f"127.0.0.1:{port + offset}" for offset, service in enumerate(("orchestrator", "target", "draft"))
    }


def record_answers(address: str, load: Load, file: Path) -> None:
    """Every request's answer alone, for the users to compare with."""
    with SyncTandemClient(address) as client:
        recorded = record(client, make_requests(spec_bench_prompts(), load.num_requests, load.seed, MAX_TOKENS))
    file.write_text(to_json(recorded))


@dataclass
class LocustRun:
    """Locust's master, or only process, for one system."""

    process: subprocess.Popen[bytes]
    figures_file: Path
    log_file: Path

    @classmethod
    def start(cls, address: str, load: Load, answers: Path, folder: Path) -> "LocustRun":
        """In `folder`, which must exist."""
        figures, log = folder / "figures.json", folder / "locust.log"
        process = subprocess.Popen(
            locust_command(address, load, answers, figures), stdout=log.open("wb"), stderr=subprocess.STDOUT
        )
        return cls(process, figures, log)

    def stop(self) -> None:
        """Nothing when it has ended; its workers end with it."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def results(self) -> tuple[float, float, Figures]:
        """Beginning and end of the load (Unix), and what the users saw; ValueError, with locust's words, without it."""
        if self.process.returncode != 0 or not self.figures_file.exists():
            raise ValueError(
                f"locust ended with exit code {self.process.returncode}: {self.log_file.read_text()[-2000:]}"
            )
        page = json.loads(self.figures_file.read_text())
        return page["started_at"], page["ended_at"], merged([page["figures"]])


def locust_command(address: str, load: Load, answers: Path, figures: Path) -> Sequence[str]:
    """Failures are judged from the figures, so locust's exit code says only whether it worked."""
    options = {
        "-f": _LOCUSTFILE,
        "--host": address,
        "--answers": answers,
        "--figures": figures,
        "--soak-users": load.users,
        "--cycles": load.num_cycles,
        "--cycle-seconds": load.cycle_s,
        "--think-seconds": load.think_s,
        "--draws": load.seed,
        "--stop-timeout": load.leave_within_s,
        "--exit-code-on-error": 0,
    }
    command = [sys.executable, "-m", "locust", "--headless", "--only-summary"]
    command += [text for name, value in options.items() for text in (name, str(value))]
    if load.num_processes == 1:
        return command
    port = str(free_ports(1))
    master = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    return [*command, "--processes", str(load.num_processes), *master]


def free_ports(number: int) -> int:
    """The first of so many free ports in a row, below those that the system gives to connections."""
    for _ in range(_TRIES):
        first = random.randrange(*_OWN_PORTS)
        if all(map(_is_free, range(first, first + number))):
            return first
    raise ValueError(f"no {number} free ports in a row found from {_OWN_PORTS[0]} to {_OWN_PORTS[1]}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
