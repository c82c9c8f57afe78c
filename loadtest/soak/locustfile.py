"""Users that come and go by a schedule, pause between calls, cancel some and let some meet a deadline.

gRPC's core blocks gevent unless it is told about it before any channel is made, hence the order below.
"""

from loadtest.gevent_grpc import prepare

prepare()

import json  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
from argparse import ArgumentParser  # noqa: E402
from contextlib import closing  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
from locust import User, events, runners, task  # noqa: E402
from locust.env import Environment  # noqa: E402

from loadtest.churn.calls import Call, Ending, Plan, draw_fate, problem_of  # noqa: E402
from loadtest.figures import Figures  # noqa: E402
from loadtest.recorded import from_json  # noqa: E402
from loadtest.schedule import Schedule, soak_schedule  # noqa: E402
from loadtest.shapes import ScheduledShape  # noqa: E402
from tandem.client import OverloadedError, SyncTandemClient, TandemError  # noqa: E402

runners.HEARTBEAT_LIVENESS = 60  # seconds; with the 3 there are, a busy machine loses its workers
FATES = {Plan.FINISH: 8, Plan.CANCEL: 2, Plan.DEADLINE: 2}  # one in so many
FIGURES = Figures()  # of this process; a worker's go to the master, which has everyone's


class UnexpectedEndError(Exception):
    """A call that failed, or an answer that is not the recorded one."""


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """What the soak passes on."""
    parser.add_argument("--answers", type=str, required=True, help="JSON: prompts, options, recorded answers")
    parser.add_argument("--figures", type=str, required=True, help="where to write what the users have seen")
    parser.add_argument("--soak-users", type=int, required=True, help="between spikes")
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--cycle-seconds", type=float, required=True)
    parser.add_argument("--think-seconds", type=float, required=True, help="mean pause of a user between two calls")
    parser.add_argument("--draws", type=str, required=True, help="seed of picks, fates and pauses")


@events.report_to_master.add_listener
def send_figures(client_id: str, data: dict[str, Any]) -> None:  # noqa: ARG001 - locust's signature
    """A worker's, every few seconds and at its end."""
    data["tandem"] = FIGURES.take()


@events.worker_report.add_listener
def add_figures(client_id: str, data: dict[str, Any]) -> None:  # noqa: ARG001 - locust's signature
    """Everyone's, at the master."""
    FIGURES.merge(data["tandem"])


@events.test_start.add_listener
def note_start(**_: object) -> None:
    """The schedule's beginning, on the clock."""
    SoakShape.started_at = time.time()


@events.quitting.add_listener
def write_figures(environment: Environment, **_: object) -> None:
    """Once, where all figures have come together."""
    if isinstance(environment.runner, runners.WorkerRunner) or environment.parsed_options is None:
        return
    page = {"started_at": SoakShape.started_at, "ended_at": time.time(), "figures": FIGURES.take()}
    Path(environment.parsed_options.figures).write_text(json.dumps(page))


class SoakShape(ScheduledShape):
    """As the options say."""

    started_at = 0.0

    def schedule(self) -> Schedule:
        """See `ScheduledShape`."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        return soak_schedule(options.soak_users, options.cycles, options.cycle_seconds)


class PacedUser(User):
    """Asks recorded questions and pauses between them."""

    num_users = 0  # that there were in this process
    num_calls = 0

    def wait_time(self) -> float:
        """Half to one and a half times the mean."""
        return float(self.rng.uniform(0.5, 1.5) * self.environment.parsed_options.think_seconds)

    def on_start(self) -> None:
        """A client, and draws of its own."""
        options = self.environment.parsed_options
        worker = getattr(self.environment.runner, "worker_index", 0)
        self.rng = random.Random(f"{options.draws} {worker} {PacedUser.num_users}")
        PacedUser.num_users += 1
        assert self.host is not None
        self.client = SyncTandemClient(self.host)
        self.recorded = from_json(Path(options.answers).read_text())

    def on_stop(self) -> None:
        """Goodbye."""
        self.client.close()

    @task
    def call(self) -> None:
        """One call, judged."""
        PacedUser.num_calls += 1
        call = Call(PacedUser.num_calls, self.rng.choice(self.recorded), draw_fate(self.rng, FATES))
        started_at, started = time.time(), time.perf_counter()
        FIGURES.count("begun", started_at)
        try:
            run_call(call, self.client)
        except OverloadedError as error:
            self.refused(error, started_at)
            return
        except gevent.GreenletExit:
            FIGURES.count("left", started_at)
            raise
        self.judge(call, started_at, time.perf_counter() - started)

    def judge(self, call: Call, started_at: float, lasted_s: float) -> None:
        """Count it, by its ending and by what is wrong with it."""
        assert call.ending is not None
        FIGURES.count("calls", started_at)
        FIGURES.count(call.ending.value, started_at)
        FIGURES.add_call(call, started_at)
        problem = problem_of(call)
        if problem is not None:
            has_failed = call.ending is Ending.FAILED or problem.find("did not have") >= 0
            FIGURES.add_problem("failures" if has_failed else "wrong answers", started_at, problem)
        error = UnexpectedEndError(problem) if problem is not None else None
        self.environment.events.request.fire(
            request_type="grpc",
            name=f"Generate, {call.ending}",
            response_time=1000 * lasted_s,
            response_length=len(call.text.encode()),
            exception=error,
            context={},
        )

    def refused(self, error: OverloadedError, at_s: float) -> None:
        """Come back when the service says; a refusal that does not say it is a failure."""
        FIGURES.count("refusals", at_s)
        if error.retry_after_s is None:
            FIGURES.add_problem("failures", at_s, f"refused without a time to come back: {error}")
            return
        gevent.sleep(error.retry_after_s)


def run_call(call: Call, client: SyncTandemClient) -> None:
    """Send the request and meet its fate; OverloadedError when it is refused.

    Every chunk has its latency: the first from the call's start, each later one from the one before.
    """
    generation = client.generate(call.recorded.prompt, **call.options())
    before = time.perf_counter()
    try:
        with closing(iter(generation)) as chunks:
            for chunk in chunks:
                now = time.perf_counter()
                FIGURES.add_latency("inter-token" if call.num_chunks else "first token", time.time(), now - before)
                before = now
                if call.has_enough(chunk):
                    call.ending = Ending.CANCELLED
                    return
        call.finish(generation.result)
    except OverloadedError:
        raise
    except TandemError as error:
        call.fail(error)
    finally:
        call.text, call.token_ids = generation.text, generation.token_ids
