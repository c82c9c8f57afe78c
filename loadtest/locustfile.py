"""Users that stream generations and compare every text with the answer recorded while nothing else ran.

gRPC's core blocks gevent unless it is told about it before any channel is made, hence the order below.
"""

from loadtest.gevent_grpc import prepare

prepare()

import json  # noqa: E402
import time  # noqa: E402
from argparse import ArgumentParser  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
from locust import User, constant, events, task  # noqa: E402

from tandem.client import GenerateOptions, SyncTandemClient, TandemError  # noqa: E402


class WrongTextError(Exception):
    """An answer that is not the recorded one: what this project must never give."""


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """The file of recorded answers."""
    parser.add_argument("--answers", type=str, required=True, help="JSON: prompts, options and recorded token ids")


class StreamingUser(User):
    """Asks the recorded questions one after the other, each user beginning at another one."""

    wait_time = constant(0)
    num_users = 0

    def on_start(self) -> None:
        assert self.host is not None
        self.client = SyncTandemClient(self.host)
        self.cases: list[dict[str, Any]] = json.loads(Path(self.environment.parsed_options.answers).read_text())
        self.next_case = StreamingUser.num_users
        StreamingUser.num_users += 1

    def on_stop(self) -> None:
        self.client.close()

    @task
    def generate(self) -> None:
        case = self.cases[self.next_case % len(self.cases)]
        self.next_case += 1
        options: GenerateOptions = case["options"]
        generation = self.client.generate(case["prompt"], **options)
        started = time.perf_counter()
        error: Exception | None = None
        try:
            for index, _ in enumerate(generation):
                if index == 0:
                    self.report("time to first token", started, 0, None)
            if list(generation.token_ids) != case["token_ids"] or generation.text != case["text"]:
                error = WrongTextError(
                    f"{case['prompt'][:40]!r} gave {generation.text!r} instead of {case['text']!r}"
                )
        except TandemError as failure:
            error = failure
        except gevent.GreenletExit:
            self.report("left", started, len(generation.text.encode()), None)
            raise
        self.report("Generate", started, len(generation.text.encode()), error)

    def report(self, name: str, started: float, num_bytes: int, error: Exception | None) -> None:
        """One entry of locust's statistics."""
        self.environment.events.request.fire(
            request_type="grpc",
            name=name,
            response_time=(time.perf_counter() - started) * 1000,
            response_length=num_bytes,
            exception=error,
            context={},
        )
