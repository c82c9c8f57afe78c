"""An interrupt is heard once, between two looks at a service, and stops all of them; none is a traceback."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import cli, processes
from tandem.interrupts import INTERRUPTED, held_back, termination_as_interrupt
from tandem.processes import ClusterPlan, LocalCluster, ServiceProcess

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
HANG_S = 120


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the tests' own process, which goes on after it was interrupted; under nohup as in a terminal."""
    handlers = [signal.getsignal(number) for number in NUMBERS]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip(NUMBERS, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_look_at_a_service_is_finished_before_an_interrupt_is_heard(number: signal.Signals) -> None:
    class Interrupted:
        """A process; the signal comes while it is looked at."""

        is_locked = False

        def poll(self) -> None:
            self.is_locked = True
            os.kill(os.getpid(), number)
            self.is_locked = sum(range(1000)) < 0

    process: Any = Interrupted()
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # the kernel may give it the signal
    other.start()
    try:
        with termination_as_interrupt(), pytest.raises(KeyboardInterrupt):
            ServiceProcess("target", process, Path("ready")).exit_code()
    finally:
        over.set()
        other.join()
    assert not process.is_locked


def test_under_nohup_a_closed_terminal_is_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with termination_as_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def signalled_twice_where_it_is_held_back(number: signal.Signals) -> None:
    with held_back():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_interrupt_is_raised_at_once_where_nothing_holds_it_back(number: signal.Signals) -> None:
    handlers = [signal.getsignal(one) for one in NUMBERS]
    with termination_as_interrupt(), held_back(), held_back():
        pass
    assert [signal.getsignal(one) for one in NUMBERS] == handlers
    with termination_as_interrupt(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_interrupt_is_raised_once_and_those_that_follow_are_ignored_to_the_end(number: signal.Signals) -> None:
    with termination_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signalled_twice_where_it_is_held_back(number)
        for one in NUMBERS:
            os.kill(os.getpid(), one)
        signalled_twice_where_it_is_held_back(number)
    assert [signal.getsignal(one) for one in NUMBERS] == [signal.SIG_IGN] * len(NUMBERS)


def test_every_service_is_stopped_though_ctrl_c_is_pressed_again_meanwhile() -> None:
    stopped = []

    class Interrupting:
        """A service; Ctrl-C is pressed while it is stopped."""

        def stop(self, grace_s: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            stopped.append(self)

    services: list[Any] = [Interrupting(), Interrupting()]

    class Starting(LocalCluster):
        def _start_all(self) -> None:
            self.services.extend(services)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), termination_as_interrupt(), Starting(ClusterPlan([], None, [])):
        pass
    assert stopped == services[::-1]


def test_a_service_that_is_being_started_at_ctrl_c_is_stopped_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = []

    class Started:
        def stop(self, grace_s: float) -> None:
            stopped.append(self)

    def start(*command: Any) -> Started:
        os.kill(os.getpid(), signal.SIGINT)
        return Started()

    monkeypatch.setattr(processes, "start_service", start)
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt(), LocalCluster(ClusterPlan([], None, [])):
        pass
    assert len(stopped) == 1


@pytest.mark.parametrize("number", NUMBERS)
def test_a_command_that_starts_nothing_hears_an_interrupt_once_too(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(prog_name: str) -> None:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            os.kill(os.getpid(), number)
            raise SystemExit(INTERRUPTED) from None

    monkeypatch.setattr(cli, "app", command)
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert signal.getsignal(number) is signal.SIG_IGN


def hear_ctrl_c() -> None:
    """In the child: a suite that runs as a shell's background job hands down that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(
    command: list[str], sign: str, *, times: int = 1, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and press Ctrl-C once it has said `sign` in a line of its output -> how it ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path or ""), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_ctrl_c,
        env=environment,
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if sign in line:
            break
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=HANG_S)
    return subprocess.CompletedProcess(command, process.returncode, said + rest)


@pytest.mark.parametrize(
    "command",
    [["tandem", "status"], ["target_service"], ["draft_service"], ["orchestrator"]],
    ids=lambda one: one[0],
)
def test_a_program_that_still_imports_ends_with_130_and_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text(f"import time\nprint('importing', flush=True)\ntime.sleep({HANG_S})\n")
    ended = interrupted(command, "importing", path=tmp_path)
    assert (ended.returncode, ended.stdout) == (130, "importing\ninterrupted\n")


def test_an_orchestrator_that_still_waits_for_a_target_ends_with_130_and_one_line() -> None:
    options = ["--target", "127.0.0.1:1", "--toy-vocab", "64", "--address", "127.0.0.1:0"]
    ended = interrupted(["orchestrator", *options, "--connect-timeout", str(HANG_S)], "Connection refused")
    assert ended.returncode == 130
    assert ended.stdout.endswith("interrupted\n")
    assert "Traceback" not in ended.stdout


UP = ["tandem", "up", "--port", "0", "--toy", "hashed:vocab=512"]


def test_tandem_up_ends_with_130_when_it_is_interrupted_before_it_is_ready() -> None:
    ended = interrupted(UP, "target_service: serving", times=2)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (130, "stopped")
    assert "Traceback" not in ended.stdout


def test_ctrl_c_is_how_a_tandem_up_that_is_ready_ends() -> None:
    ended = interrupted(UP, "ready", times=2)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "stopped")
    assert "Traceback" not in ended.stdout
