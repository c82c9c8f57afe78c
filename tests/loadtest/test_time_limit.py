"""Locust at its time limit with answers in flight: it ends, and every call that was sent is in its figures."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import locust_command
from loadtest.churn.calls import Ending
from loadtest.figures import merged
from loadtest.recorded import Recorded, record
from loadtest.soak import systems
from tandem.client import GenerateOptions, SyncTandemClient
from tests.loadtest.locusts import locust, write_answers
from tests.orchestrator.services import Stack, all_services, similar_draft, toy_engine
from tests.scraped import Scraped

NUM_USERS = 6
HANG_S = 240.0
STEP_S = 0.03
# Without drafts a token takes a step, so that no answer ends before the time limit, however quick the machine.
LONG = GenerateOptions(max_tokens=60, ignore_eos=True, temperature=0.0, speculation=False)
SHORT = GenerateOptions(max_tokens=12, ignore_eos=True, temperature=0.0)
WITHIN_LONG = "1s"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, HANG_S))


async def recorded(stack: Stack, *asked: GenerateOptions) -> list[Recorded]:
    """Each alone."""

    def ask() -> list[Recorded]:
        with SyncTandemClient(stack.client.address) as client:
            return record(client, [("abc", options) for options in asked])

    return await asyncio.to_thread(ask)


def num_asked(stack: Stack) -> int:
    """Requests that have come to their end at the orchestrator, whatever end it was."""
    samples = Scraped.of(stack.servicer.metrics.all).samples
    return round(sum(one.value for one in samples if one.name == "tandem_requests_total"))


async def ended(command: list[str], folder: Path) -> None:
    """Once locust has, by itself."""
    log = folder / "log"
    async with locust(command, log) as process:
        assert await process.wait() == 0, log.read_text()


@pytest.mark.parametrize(("stop_timeout_s", "name"), [(0, "left"), (60, "Generate")])
def test_a_call_in_flight_is_counted_as_left_or_is_waited_for(
    stop_timeout_s: int, name: str, tmp_path: Path
) -> None:
    """locust #1676, #1393, #1936, #3010: it does not end, or what was in flight is in no figure."""

    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=STEP_S)) as stack:
            answers = write_answers(tmp_path / "answers.json", await recorded(stack, LONG))
            before = num_asked(stack)
            command = locust_command(stack.client.address, answers, NUM_USERS)
            command += ["--run-time", WITHIN_LONG, "--stop-timeout", str(stop_timeout_s)]
            await ended([*command, "--json-file", str(tmp_path / "stats")], tmp_path)
            await stack.until_free()
            entries = json.loads((tmp_path / "stats.json").read_text())
            ends = {one["name"]: one["num_requests"] for one in entries if one["name"] != "time to first token"}
            assert ends == {name: num_asked(stack) - before}
            assert not any(one["num_failures"] for one in entries)
            assert 0 < ends[name] <= NUM_USERS

    run(scenario())


@pytest.mark.parametrize("stop_timeout_s", [0, 60])
def test_the_soaks_figures_have_every_call_that_began(stop_timeout_s: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=STEP_S)) as stack:
            answers = write_answers(tmp_path / "answers.json", await recorded(stack, LONG, SHORT))
            before = num_asked(stack)
            load = systems.Load(
                NUM_USERS, think_s=0, num_cycles=1, cycle_s=3, num_requests=2, seed=1, num_processes=1
            )
            command = systems.locust_command(stack.client.address, load, answers, tmp_path / "figures.json")
            await ended([*command, "--stop-timeout", str(stop_timeout_s)], tmp_path)
            await stack.until_free()
            figures = merged([json.loads((tmp_path / "figures.json").read_text())["figures"]])
            begun, left = figures.total("begun"), figures.total("left")
            assert begun == sum(figures.total(ending.value) for ending in Ending) + left
            assert figures.problems == []
            assert (left > 0) == (stop_timeout_s == 0)
            # One that was left may not have been sent yet.
            assert begun - left <= num_asked(stack) - before <= begun

    run(scenario())
