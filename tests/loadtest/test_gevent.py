"""Locust's users call over gRPC at the same time: its core has been told about gevent before any channel was made."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadtest.__main__ import LOCUSTFILE, locust_command
from loadtest.recorded import Recorded
from loadtest.soak import systems
from tandem.client import GenerateOptions
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.client.scripted_server import FULL
from tests.loadtest.locusts import locust, write_answers

Command = Callable[[str, Path], list[str]]  # by the service's address and the file of answers

NUM_USERS, NUM_WAVES = 24, 40  # more in each of two processes than gevent has threads for unless it is told

HANG_S = 240.0
STUCK_S = 3.0  # after the first wave, when a second has not come
ANSWER = Recorded("abc", GenerateOptions(temperature=0.0), "abc", (1, 2, 3, 4))
UNTOLD = """
import loadtest.gevent_grpc
loadtest.gevent_grpc.prepare = lambda: None
from loadtest.locustfile import *
"""


class Holding(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers in waves: nobody before every user's call is open."""

    def __init__(self) -> None:
        self.num_waves = 0
        self.first_wave, self.all_waves = asyncio.Event(), asyncio.Event()
        self._everybody = asyncio.Barrier(NUM_USERS)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if await self._everybody.wait() == 0:
            self.num_waves += 1
            self.first_wave.set()
            if self.num_waves == NUM_WAVES:
                self.all_waves.set()
        for event in FULL:
            yield event


@asynccontextmanager
async def holding() -> AsyncIterator[tuple[Holding, str]]:
    """The service, and its address."""
    servicer, server = Holding(), grpc.aio.server()
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def soak_command(address: str, answers: Path) -> list[str]:
    load = systems.Load(NUM_USERS, think_s=0, num_cycles=1, cycle_s=60, num_requests=1, seed=1, num_processes=2)
    return [*systems.locust_command(address, load, answers, answers.with_name("figures.json"))]


def command_of(locustfile: Path) -> Command:
    return lambda address, answers: locust_command(address, answers, NUM_USERS, locustfile)


@pytest.mark.parametrize("command", [command_of(LOCUSTFILE), soak_command], ids=["plain", "soak"])
def test_all_users_call_at_once_again_and_again(command: Command, tmp_path: Path) -> None:
    """locust PR #1016, #2543, grpc #27340: one blocked call holds every user."""

    async def scenario() -> None:
        answers = write_answers(tmp_path / "answers.json", [ANSWER])
        async with holding() as (service, address), locust(command(address, answers), tmp_path / "log"):
            await asyncio.wait_for(service.all_waves.wait(), HANG_S)

    asyncio.run(scenario())


def test_with_a_grpc_that_does_not_know_of_gevent_they_are_seen_to_hang(tmp_path: Path) -> None:
    untold = tmp_path / "untold.py"
    untold.write_text(UNTOLD)

    async def scenario() -> None:
        answers = write_answers(tmp_path / "answers.json", [ANSWER])
        command = command_of(untold)
        async with holding() as (service, address), locust(command(address, answers), tmp_path / "log"):
            await asyncio.wait_for(service.first_wave.wait(), HANG_S)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(service.all_waves.wait(), STUCK_S)
            assert service.num_waves == 1

    asyncio.run(scenario())
