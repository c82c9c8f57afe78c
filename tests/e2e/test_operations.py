"""The three services as processes: metrics where they are asked for, and a log of nothing but JSON."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tandem.client import SyncTandemClient
from tandem.processes import service_command

TOY = "hashed:vocab=512,seed=3"
HANG_S = 120
OPTIONS = ["--address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0", "--log-format", "json"]


class Running:
    """One service."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ready: Path) -> None:
        self.process, self._log = process, log
        deadline = time.monotonic() + HANG_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.address = ready.read_text().strip()

    @property
    def lines(self) -> list[dict[str, object]]:
        """Of the log, each a JSON object."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def metrics_url(self) -> str:
        (url,) = [
            found[1] for line in self.lines if (found := re.match(r"metrics are at (\S+)", str(line["message"])))
        ]
        return url

    def metrics(self) -> str:
        with urllib.request.urlopen(self.metrics_url(), timeout=HANG_S) as page:
            return str(page.read().decode())


@contextmanager
def running(folder: Path, service: str, *arguments: str) -> Iterator[Running]:
    log, ready = folder / f"{service}.log", folder / f"{service}.ready"
    command = service_command(service, [*arguments, *OPTIONS, "--ready-file", str(ready)])
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors)
    try:
        yield Running(process, log, ready)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0


def test_metrics_and_logs_of_all_three_services(tmp_path: Path) -> None:
    with ExitStack() as stack:
        target = stack.enter_context(running(tmp_path, "target", "--toy", TOY))
        draft = stack.enter_context(running(tmp_path, "draft", "--proposer", "ngram"))
        front = stack.enter_context(
            running(
                tmp_path,
                "orchestrator",
                *("--toy-vocab", "512", "--target", target.address, "--draft", draft.address),
            )
        )
        with SyncTandemClient(front.address) as client:
            result = client.complete("abcabc", max_tokens=12, ignore_eos=True)
        services = {"target": target, "draft": draft, "orchestrator": front}
        rounds = f" {float(result.speculation.num_rounds)}"
        for component, service in services.items():
            page = service.metrics()
            labels = f'{{component="{component}"}}'
            if component != "draft":
                assert f"tandem_rounds_total{labels}{rounds}\n" in page
            assert f"tandem_spec_decode_num_drafts_total{labels}" in page
        url = front.metrics_url()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=HANG_S)
    assert {str(line["service"]) for line in front.lines} == {"orchestrator"}
    assert all(line["level"] in ("INFO", "WARNING") for service in services.values() for line in service.lines)


def test_a_metrics_address_that_may_not_be_used_keeps_a_service_from_starting(tmp_path: Path) -> None:
    command = service_command(
        "draft",
        [
            "--proposer",
            "ngram",
            "--address",
            "127.0.0.1:0",
            "--metrics-address",
            "0.0.0.0:0",
            "--log-format",
            "json",
        ],
    )
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 2
    line = json.loads(ended.stderr.splitlines()[-1])
    assert "cannot start: address '0.0.0.0:0' is not a loopback address" in line["message"]
    assert "Traceback" not in ended.stderr


def test_the_doctor_finds_a_machine_and_an_orchestrator_well(tmp_path: Path) -> None:
    with ExitStack() as stack:
        target = stack.enter_context(running(tmp_path, "target", "--toy", TOY))
        front = stack.enter_context(
            running(tmp_path, "orchestrator", "--toy-vocab", "512", "--target", target.address)
        )
        command = [sys.executable, "-m", "tandem", "doctor", "--address", front.address]
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    told = answer.stdout.splitlines()
    assert f"OK       {front.address}: says SERVING" in told
    assert any(line.startswith("WARNING  drafts: none is named") for line in told)
    assert any(line.startswith("OK       numerics: every target computes") for line in told)
    assert answer.returncode == any(line.startswith("PROBLEM") for line in told)
