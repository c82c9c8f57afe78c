"""Faults that were reported of other systems in containers and beside other processes, to real processes."""

import asyncio
import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tandem.client import SyncTandemClient, TandemClient
from tandem.processes import ClusterPlan, LocalCluster

TOY = "hashed:vocab=512,seed=3"
DRAFT = ["--proposer", "draft_model", "--toy", TOY]
PLAN = ClusterPlan(["--toy", f"{TOY},delay_ms=5"], DRAFT, ["--toy-vocab", "512"])
HANG_S = 120.0
PROXY_VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What every program is told to go through; it takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name in PROXY_VARIABLES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield listener


def was_asked(listener: socket.socket) -> bool:
    """Whether anybody has connected."""
    listener.setblocking(False)
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def test_no_service_and_no_client_goes_through_the_proxy_of_the_environment(proxy: socket.socket) -> None:
    """grpc #11896, #15942, #29718: http_proxy takes even localhost."""
    with LocalCluster(PLAN, quiet=True) as cluster:
        front = cluster.addresses["orchestrator"]
        with SyncTandemClient(front) as client:
            answer = client.complete("abc", max_tokens=20, ignore_eos=True, seed=1)
        assert answer.speculation.acceptance_rate == 1.0
        for words in (["status"], ["health"], ["generate", "abc", "--max-tokens", "2"]):
            command = [sys.executable, "-m", "tandem", *words, "--address", front]
            asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
            assert asked.returncode == 0, asked.stderr
    assert not was_asked(proxy)


def start_a_service_while_a_call_runs() -> None:
    """Of a process whose gRPC is at work."""

    async def scenario() -> None:
        with LocalCluster(PLAN, quiet=True) as cluster:
            async with TandemClient(cluster.addresses["orchestrator"]) as client:
                chunks = aiter(client.generate("abc", max_tokens=200, ignore_eos=True, num_draft_tokens=0))
                await anext(chunks)
                links = ["--target", cluster.addresses["target"], "--toy-vocab", "512", "--address", "127.0.0.1:0"]
                second = cluster.start("orchestrator", links)
                await asyncio.to_thread(cluster.wait_ready, second)
                async with TandemClient(second.address) as other:
                    assert (await other.complete("abc", max_tokens=3)).num_completion_tokens > 0
                assert len([chunk async for chunk in chunks]) > 100

    asyncio.run(scenario())


def test_a_service_starts_from_a_process_in_which_calls_run() -> None:
    """grpc #22624, #17986, #13464, #31885: a child made after gRPC has begun hangs, or hangs its parent."""
    process = multiprocessing.get_context("spawn").Process(target=start_a_service_while_a_call_runs)
    process.start()
    process.join(HANG_S)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
