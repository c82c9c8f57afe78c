"""`python -m orchestrator`: serves, stops cleanly, and says in one line why it cannot start."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.__main__ import main
from orchestrator.server import SERVICE_NAME
from tandem.client import TandemClient
from tandem.serving.channels import open_channel
from tests.orchestrator.fakes import until
from tests.orchestrator.services import TargetReplica, replicas, self_draft, toy_engine


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", *arguments, stderr=asyncio.subprocess.PIPE
    )


def test_it_serves_between_its_ready_file_and_sigterm(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"

    async def scenario() -> None:
        async with replicas(self_draft) as (target, draft):
            assert draft is not None
            process = await start(
                *("--address", "127.0.0.1:0", "--target", target.address, "--draft", draft.address),
                *("--toy-vocab", "64", "--num-draft-tokens", "3", "--ready-file", str(ready_file)),
            )
            await until(ready_file.exists)
            async with TandemClient(ready_file.read_text().strip()) as client:
                result = await client.complete("abc", max_tokens=8, temperature=0.0, ignore_eos=True)
                assert result.speculation.num_draft_tokens_per_pos == (2, 2, 2)
                assert result.speculation.acceptance_rate == 1.0
                process.send_signal(signal.SIGTERM)
                await process.communicate()
            assert process.returncode == 0
            await until(lambda: target.num_sessions == draft.num_sessions == 0)

    run(scenario())


def test_without_a_target_it_stays_serving_and_what_is_asked_meanwhile_waits_for_one(tmp_path: Path) -> None:
    """Health is what probes restart it by and take it out of turn for, and a target that is gone ends in neither."""
    ready_file = tmp_path / "ready"

    async def scenario() -> None:
        async with replicas(None) as (target, _):
            process = await start(
                *("--address", "127.0.0.1:0", "--target", target.address, "--toy-vocab", "64"),
                *("--ready-file", str(ready_file)),
            )
            try:
                await until(ready_file.exists)
                address = ready_file.read_text().strip()
                async with TandemClient(address) as client, open_channel(address) as channel:
                    await target.stop()
                    while (await client.info()).targets[0].is_connected:
                        await asyncio.sleep(0.02)
                    asked = asyncio.create_task(client.complete("abc", max_tokens=4, ignore_eos=True))
                    while not (await client.info()).num_running_requests:
                        await asyncio.sleep(0.02)
                    await asyncio.sleep(1.2)  # the state is looked at twice a second
                    health: Any = health_pb2_grpc.HealthStub(channel)
                    for name in ("", SERVICE_NAME):
                        state = await health.Check(health_pb2.HealthCheckRequest(service=name))
                        assert state.status == health_pb2.HealthCheckResponse.SERVING
                    await target.start()
                    assert (await asked).num_completion_tokens == 4
            finally:
                process.send_signal(signal.SIGTERM)
                await process.communicate()

    run(scenario())


def test_another_vocabulary_is_refused_at_start_and_both_sides_are_named() -> None:
    async def scenario() -> None:
        target = TargetReplica(toy_engine())
        await target.start()
        process = await start("--target", target.address, "--toy-vocab", "65", "--address", "127.0.0.1:0")
        _, errors = await process.communicate()
        await target.stop()
        assert process.returncode == 2
        last = errors.decode().splitlines()[-1]
        assert last.startswith(
            f"orchestrator: cannot start: vocabularies differ: target service at {target.address}"
        )
        assert "64 ids" in last
        assert "'toy:65' has 65 ids" in last
        assert "Traceback" not in errors.decode()

    run(scenario())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "127.0.0.1:1", "--toy-vocab", "8"], "target service at 127.0.0.1:1 is not reachable"),
        (["--target", "nowhere", "--toy-vocab", "8"], "address 'nowhere' is not HOST:PORT"),
        (["--target", "127.0.0.1:1", "--draft", "x", "--toy-vocab", "8"], "address 'x' is not HOST:PORT"),
        (["--target", "127.0.0.1:1", "--model", "/no/such/model"], "'/no/such/model' is neither a path"),
        (["--target", "127.0.0.1:1", "--toy-vocab", "8", "--address", "0.0.0.0:0"], "pass --insecure"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--connect-timeout", "0.2"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("orchestrator: cannot start: ")
    assert message in last


@pytest.mark.parametrize(
    "arguments",
    [
        ["--toy-vocab", "8"],
        ["--target", "127.0.0.1:1"],
        ["--target", "127.0.0.1:1", "--toy-vocab", "8", "--num-draft-tokens", "-1"],
        ["--target", "127.0.0.1:1", "--toy-vocab", "8", "--draft-timeout", "0"],
        ["--target", "127.0.0.1:1", "--toy-vocab", "8", "--max-requests", "none"],
        ["--target", "127.0.0.1:1", "--toy-vocab", "8", "--stall-timeout", "0"],
        ["--target", "127.0.0.1:1", "--toy-vocab", "8", "--stall-timeout", "-1"],
        ["--target", "127.0.0.1:1", "--toy-vocab", "8", "--stall-timeout", "nan"],
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
