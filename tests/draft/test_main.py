"""The process: one clear line and exit code 2 when it cannot start, a ready file, a clean stop at SIGTERM."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from draft_service.__main__ import main
from tests.every_proposer import NAMES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--proposer", "medusa"], f"unknown proposer 'medusa'; there are: {', '.join(NAMES)}"),
        (
            ["--proposer", "eagle"],
            "proposer 'eagle': needs a head: name one with --head, a directory or one that comes with tandem (smollm2-",
        ),
        (
            ["--proposer", "mtp", "--head", "h"],
            "proposer 'mtp': needs the target of --head h: name it with --model",
        ),
        (
            ["--proposer", "mtp", "--model", "x", "--head", "y", "--min-confidence", "1"],
            "--min-confidence 1 is outside",
        ),
        (["--min-ngram-size", "4", "--max-ngram-size", "3"], "min_ngram_size 4 is more than max_ngram_size 3"),
        (["--address", "0.0.0.0:0"], "pass --insecure"),
        (["--address", "nowhere"], "HOST:PORT"),
        (["--proposer", "draft_model", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (
            ["--proposer", "draft_model", "--max-batch", "9", "--max-step-tokens", "8", "--model", "x"],
            "--max-batch 9 is more than --max-step-tokens 8",
        ),
        (
            ["--proposer", "draft_model", "--toy", "hashed:blocks=2", "--block-size", "4"],
            "--kv-memory has room for 8 tokens (2 blocks of 4), and one round of --max-draft-tokens 16 needs 16",
        ),
        (["--proposer", "synthetic", "--model", "x"], "proposer 'synthetic': needs --acceptance-rates, e.g. 0.9"),
        (
            ["--proposer", "synthetic", "--acceptance-rates", "1"],
            "'synthetic': needs a model: name one with --model",
        ),
        (["--proposer", "draft_model"], "needs a model: name one with --model"),
        (["--model", "smollm2-135m"], "proposer 'ngram': uses no model"),
        (["--kv-memory", "1M"], "proposer 'ngram': uses no model, so --kv-memory means nothing to it"),
        (["--proposer", "suffix", "--kv-memory", "1M"], "proposer 'suffix': uses no model, so --kv-memory means"),
    ],
)
def test_what_cannot_start_says_so_in_one_line_and_exits_with_2(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draft_service: ")
    assert words in line


def test_a_taken_port_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--address", address]) == 2
    assert address in capsys.readouterr().err


def test_the_process_tells_its_address_and_stops_cleanly_at_sigterm(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    command = [sys.executable, "-m", "draft_service", "--address", "127.0.0.1:0", "--ready-file", str(ready_file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not ready_file.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors
    host, port = ready_file.read_text().strip().split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
