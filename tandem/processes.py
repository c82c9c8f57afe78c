"""Starting, watching and stopping the three services as processes of this machine.

Each child tells that it serves by writing its bound address to a ready file, so any port may be 0. A child that
ends before it is ready has said why on its standard error.
"""

import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tandem.installing import how_to_install
from tandem.interrupts import held_back

MODULES = {"target": "target_service", "draft": "draft_service", "orchestrator": "orchestrator"}
_POLL_S = 0.05


class ServiceStartError(Exception):
    """A service that did not become ready; the message says which and how it ended."""


def require_engine() -> None:
    """Raise ServiceStartError when what the model services stand on is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ServiceStartError(
            f"the model services need torch, which is not installed: {how_to_install('engine')}"
        )


def service_command(service: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs one service: target, draft or orchestrator."""
    return [sys.executable, "-m", MODULES[service], *arguments]


@dataclass
class ServiceProcess:
    """One running service."""

    service: str
    process: subprocess.Popen[bytes]
    ready_file: Path

    @property
    def address(self) -> str:
        """The bound HOST:PORT of a ready service."""
        return self.ready_file.read_text().strip()

    def exit_code(self) -> int | None:
        """None while it runs.

        An interrupt inside `Popen.poll` can leave its lock taken, and the wait for a process that was killed would
        then never end.
        """
        with held_back():
            return self.process.poll()

    def is_ready(self) -> bool:
        """Whether it serves; ServiceStartError when it has ended instead."""
        if self.ready_file.exists():
            return True
        code = self.exit_code()
        if code is not None:
            raise ServiceStartError(f"the {self.service} service ended with exit code {code} before it was ready")
        return False

    def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL after the grace; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.exit_code() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start_service(service: str, arguments: Sequence[str], ready_file: Path) -> ServiceProcess:
    """Start one service; it ends by itself should this process be killed."""
    command = service_command(service, [*arguments, "--ready-file", str(ready_file), "--stop-at-eof"])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    return ServiceProcess(service, process, ready_file)


def wait_ready(services: Sequence[ServiceProcess], timeout_s: float) -> None:
    """Until all serve; ServiceStartError as soon as one has ended, or when one takes too long."""
    deadline = time.monotonic() + timeout_s
    while late := [service.service for service in services if not service.is_ready()]:
        if time.monotonic() > deadline:
            raise ServiceStartError(f"not ready within {timeout_s:g} s: {', '.join(late)}")
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class ClusterPlan:
    """What to start and with which options; addresses default to free loopback ports."""

    target: Sequence[str]
    draft: Sequence[str] | None  # None: no draft service
    orchestrator: Sequence[str]
    target_address: str = "127.0.0.1:0"
    draft_address: str = "127.0.0.1:0"
    orchestrator_address: str = "127.0.0.1:0"
    start_timeout_s: float = 300.0
    grace_s: float = 10.0


@dataclass
class LocalCluster:
    """A context manager: inside it the services of a plan run and are ready.

    Children are in their own process groups, so that a Ctrl-C in the terminal reaches only the parent, which stops
    them in order: orchestrator first, so that it can say goodbye to the others. Their standard input is a pipe from
    the parent: should it be killed, the pipe ends, and they stop by themselves.
    """

    plan: ClusterPlan
    quiet: bool = False  # drop the services' logs; their start-up errors stay visible
    addresses: dict[str, str] = field(default_factory=dict)
    services: list[ServiceProcess] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "LocalCluster":
        require_engine()
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-")
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_all(self) -> None:
        plan = self.plan
        models = [self.start("target", [*plan.target, "--address", plan.target_address])]
        if plan.draft is not None:
            models.append(self.start("draft", [*plan.draft, "--address", plan.draft_address]))
        self.wait_ready(*models)
        for service in models:
            self.addresses[service.service] = service.address
        arguments = [*plan.orchestrator, "--target", self.addresses["target"]]
        if plan.draft is not None:
            arguments += ["--draft", self.addresses["draft"]]
        front = self.start("orchestrator", [*arguments, "--address", plan.orchestrator_address])
        self.wait_ready(front)
        self.addresses["orchestrator"] = front.address

    def start(self, service: str, arguments: Sequence[str]) -> ServiceProcess:
        """Start one more service; it is stopped with the others."""
        assert self._folder is not None
        ready_file = Path(self._folder.name) / f"{service}-{len(self.services)}.ready"
        if self.quiet:
            arguments = [*arguments, "--log-level", "ERROR"]
        with held_back():  # a process that is not in the list would be left behind
            started = start_service(service, arguments, ready_file)
            self.services.append(started)
        return started

    def wait_ready(self, *services: ServiceProcess) -> None:
        """Until all serve; ServiceStartError as soon as one has ended, or when one takes too long."""
        wait_ready(services, self.plan.start_timeout_s)

    def wait_for_end(self) -> ServiceProcess:
        """Block until one of the services ends by itself; that service."""
        while True:
            for service in self.services:
                if service.exit_code() is not None:
                    return service
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop everything that runs, newest first."""
        for service in reversed(self.services):
            service.stop(self.plan.grace_s)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
