"""`python -m target_service`: serves the toy model, and says in one line why it cannot start."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tandem.serving.channels import channel_options
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_service.__main__ import main
from tests.target.harness import close_item, open_item, plain_decode, spec, stamp, verify_item

COMMAND = [sys.executable, "-m", "target_service", "--address", "127.0.0.1:0", "--toy", "hashed:vocab=32,seed=5"]


def address_of(process: "subprocess.Popen[str]", ready_file: Path) -> str:
    for _ in range(3000):
        if ready_file.exists():
            return ready_file.read_text().strip()
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    raise AssertionError("not ready in 30 s")


def one_message_then_silence(end: threading.Event) -> Iterator[target_pb2.VerifyRequest]:
    yield target_pb2.VerifyRequest(items=[close_item(stamp((), 0))])
    end.wait()


def test_the_process_serves_and_stops_cleanly_at_a_signal_while_an_idle_stream_is_open(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    process = subprocess.Popen(
        [*COMMAND, "--ready-file", str(ready_file), "--grace", "600"], stderr=subprocess.PIPE, text=True
    )
    try:
        address = address_of(process, ready_file)
        with grpc.insecure_channel(address, options=channel_options(1 << 20)) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            info = stub.GetInfo(target_pb2.GetInfoRequest(), timeout=10)
            assert (info.model.vocab_size, len(info.model.vocab_hash)) == (32, 64)
            items = [open_item(spec()), verify_item(stamp(spec().token_ids, 1))]
            responses = stub.Verify(iter([target_pb2.VerifyRequest(items=items)]), timeout=10)
            results = [result for response in responses for result in response.results]
            assert [result.WhichOneof("outcome") for result in results] == ["opened", "verdict"]
            assert list(results[1].verdict.token_ids) == plain_decode(spec(), most=1)
            end = threading.Event()
            idle = stub.Verify(one_message_then_silence(end))
            assert [result.WhichOneof("outcome") for result in next(idle).results] == ["closed"]
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)  # far less than the grace: nobody has a session open
            end.set()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, log
    assert "numerics" in log
    assert "deterministic" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_drains_and_ends_with_0_however_often_it_is_told_to_stop(
    number: signal.Signals, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    process = subprocess.Popen([*COMMAND, "--ready-file", str(ready_file)], stderr=subprocess.PIPE, text=True)
    try:
        address_of(process, ready_file)
        while process.poll() is None:  # also while the interpreter ends
            process.send_signal(number)
            time.sleep(0.001)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, log
    assert "stopped tandem.target.v1.TargetService" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "nowhere"], "HOST:PORT"),
        (["--address", "0.0.0.0:1"], "--insecure"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--toy", "hashed:vocab=32", "--max-step-tokens", "8"], "--max-draft-tokens 16"),
        (["--toy", "hashed:vocab=32", "--max-waiting-sessions", "-1"], "--max-waiting-sessions -1"),
        (["--toy", "hashed:vocab=32", "--max-prefill-tokens", "600"], "--max-step-tokens 512"),
        (["--toy", "hashed:vocab=32", "--max-batch", "300"], "--max-sessions 256"),
        (["--toy", "hashed:vocab=32,blocks=1"], "--kv-memory holds 16 tokens"),
        (["--toy", "hashed:blocks=9", "--kv-memory", "1K"], "--kv-memory 1024 bytes mean nothing to a toy engine"),
        (["--toy", "hashed:blocks=9", "--kv-memory", "1K"], "its pool is set in blocks: --toy hashed:blocks=9"),
        (["--backend", "abacus"], "abacus"),
    ],
)
def test_what_it_cannot_start_with_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--address", "127.0.0.1:0", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_taken_port_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--address", f"127.0.0.1:{port}", "--toy", "hashed:vocab=32"]) == 2
    assert f"127.0.0.1:{port}: cannot be bound" in capsys.readouterr().err
