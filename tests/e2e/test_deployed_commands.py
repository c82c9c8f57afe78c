"""The command lines of the deployment files start, become healthy, work together, and end at SIGTERM with 0."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.client import GenerationResult, SyncTandemClient
from tests.deploy.files import COMMANDS
from tests.fixtures.demo_model import demo_model_dir

TOY_ENGINE, TOY_VOCABULARY = "--toy=hashed:vocab=512,seed=3", "--toy-vocab=512"
WITHIN_S = 120
# What a toy engine is not told, and proposers of a model that it can take the place of.
_OF_A_MODEL, _HEADS = (
    ("--model=", "--head=", "--kv-memory=", "--max-context="),
    ("--proposer=eagle", "--proposer=mtp"),
)


def on_toys(service: str, command: list[str]) -> list[str]:
    """The command with a toy engine where it has a model."""
    if not any(word.startswith("--model=") for word in command):
        return command
    words = [word for word in command if not word.startswith(_OF_A_MODEL)]
    words = ["--proposer=draft_model" if word in _HEADS else word for word in words]
    return [*words, TOY_VOCABULARY if service == "orchestrator" else TOY_ENGINE]


def on_loopback(command: list[str], addresses: dict[str, str], ready_file: Path) -> list[str]:
    """The command, as this build's, with a free port of its own and the others' real ones."""
    program, *words = command
    assert program == "tandem"
    words = [word for word in words if not word.startswith(("--address=", "--metrics-address="))]
    for name, address in addresses.items():
        words = [f"--{name}=dns:{address}" if word.startswith(f"--{name}=dns:") else word for word in words]
    own = ["--address=127.0.0.1:0", "--metrics-address=127.0.0.1:0", f"--ready-file={ready_file}"]
    return [sys.executable, "-m", "tandem", *words, *own]


@dataclass
class Started:
    """One service."""

    process: subprocess.Popen[bytes]
    ready_file: Path

    def address(self) -> str:
        """Once `tandem health`, as the files ask it, says that it serves."""
        deadline = time.monotonic() + WITHIN_S
        while not self.ready_file.exists() or not self._is_healthy():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return self.ready_file.read_text().strip()

    def _is_healthy(self) -> bool:
        command = [sys.executable, "-m", "tandem", "health", "--address", self.ready_file.read_text().strip()]
        asked = subprocess.run(command, check=False, capture_output=True, text=True)
        return (asked.returncode, asked.stdout) == (0, "SERVING\n")

    def end(self) -> int:
        """SIGTERM -> the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=WITHIN_S)


@contextlib.contextmanager
def started(service: str, command: list[str], addresses: dict[str, str], folder: Path) -> Iterator[Started]:
    """Run it; it is gone afterwards, however the test went."""
    ready_file = folder / service
    process = subprocess.Popen(on_loopback(command, addresses, ready_file))
    try:
        yield Started(process, ready_file)
    finally:
        process.kill()
        process.wait()


def start_ask_and_end(commands: dict[str, list[str]], folder: Path) -> GenerationResult:
    """All three, from their start to their end at SIGTERM; the answer to a request in between."""
    with (
        started("target", commands["target"], {}, folder) as target,
        started("draft", commands["draft"], {}, folder) as draft,
    ):
        addresses = {"target": target.address(), "draft": draft.address()}
        with started("orchestrator", commands["orchestrator"], addresses, folder) as orchestrator:
            with SyncTandemClient(orchestrator.address()) as client:
                answer = client.complete("one two three one two three one", max_tokens=16, ignore_eos=True, seed=1)
                replicas = {replica.address: replica.is_connected for replica in client.info().replicas}
            assert replicas == dict.fromkeys(addresses.values(), True)
            assert orchestrator.end() == 0
        assert [target.end(), draft.end()] == [0, 0]
    return answer


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_three_services_start_find_each_other_answer_and_end_at_sigterm(kind: str, tmp_path: Path) -> None:
    commands = {name: on_toys(name, command) for name, command in COMMANDS[kind]().items()}
    answer = start_ask_and_end(commands, tmp_path)
    assert answer.num_completion_tokens == 16
    assert answer.speculation.acceptance_rate == 1.0  # the toy target's drafts are its own


@pytest.mark.model
def test_the_compose_files_own_model_and_head_answer_with_drafts_of_the_head(tmp_path: Path) -> None:
    demo_model_dir()
    answer = start_ask_and_end(COMMANDS["compose"](), tmp_path)
    assert answer.speculation.num_accepted > 0
    assert answer.speculation.num_fallback_rounds == 0
