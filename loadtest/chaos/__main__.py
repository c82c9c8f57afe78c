"""`python -m loadtest.chaos`: streams on several replicas of each service while faults strike them.

Every stream must end OK with the tokens and the text of its undisturbed run, and afterwards nobody may hold anything.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.chaos.faults import Injector, Times
from loadtest.chaos.fleet import Fleet, Member
from loadtest.chaos.machines import ProcessMachine
from loadtest.chaos.report import Outcome, report
from loadtest.chaos.streams import run_streams
from loadtest.churn.requests import make_requests, spec_bench_prompts
from loadtest.idle import wait_idle
from loadtest.recorded import Recorded, record
from tandem.client import GenerateOptions, SyncTandemClient
from tandem.cluster_options import ClusterChoice

_GRACE_S = 5.0
_TOY_TOKENS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 1 when the run has not passed."""
    options = build_parser().parse_args(arguments)
    outcome = asyncio.run(run(options))
    page = report(outcome, what_ran(options), options.faults)
    sys.stdout.write(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")
    return 1 if outcome.verdict(options.faults) else 0


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.chaos", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--toy", help="a toy engine instead, e.g. hashed:vocab=512,seed=3,blocks=4000")
    parser.add_argument("--targets", type=int, default=2, help="target replicas")
    parser.add_argument("--drafts", type=int, default=2, help="draft replicas")
    parser.add_argument("--streams", type=int, default=16, help="answers at a time")
    parser.add_argument("--requests", type=int, default=12, help="distinct requests, greedy and sampled in turn")
    parser.add_argument("--seconds", type=float, default=180.0, help="from the first fault to the last")
    parser.add_argument(
        "--faults", type=int, default=60, help="fewest that the run must have; it goes on until then"
    )
    parser.add_argument("--gap", type=float, default=Times().gap_s, help="mean seconds between two faults")
    parser.add_argument("--stall-seconds", type=float, default=120.0, help="an answer that takes longer has hung")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    return parser


async def run(options: argparse.Namespace) -> Outcome:
    """Start everything, record, strike, let everything end."""
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as name:
        folder = Path(name)
        machines = make_machines(options, folder)
        fleet = Fleet([Member(role, number, machine) for role, number, machine in machines], folder)
        front = ProcessMachine("orchestrator", orchestrator_arguments(options, fleet), folder, _GRACE_S)
        try:
            await fleet.start()
            address = await front.start()
            recorded = await asyncio.to_thread(recordings, options, address)
            started = time.monotonic()
            injector = Injector(fleet, options.seed, Times(gap_s=options.gap))

            def is_over() -> bool:
                return bool(time.monotonic() - started > options.seconds and injector.num_faults >= options.faults)

            striking = asyncio.create_task(injector.run(is_over))
            tally = await run_streams(
                address, recorded, options.streams, options.seed, striking.done, options.stall_seconds
            )
            await striking
            with SyncTandemClient(address) as client:
                held = await asyncio.to_thread(wait_idle, client)
            codes = [code for _, _, machine in machines for code in machine.exit_codes]
            return Outcome(tally, injector, held, codes, time.monotonic() - started)
        finally:
            await front.kill()
            await fleet.stop()


def make_machines(options: argparse.Namespace, folder: Path) -> list[tuple[str, int, ProcessMachine]]:
    """Targets with one thread each; drafts by prompt lookup, or by a toy engine that is often right."""
    choice = ClusterChoice(
        options.model, "float32", options.toy and f"{options.toy},blend=0.2", not options.toy, 4, 1, options.toy
    )
    plan = choice.plan()
    assert plan.draft is not None
    kinds = [("target", options.targets, plan.target), ("draft", options.drafts, plan.draft)]
    return [
        (role, number, ProcessMachine(role, arguments, folder, _GRACE_S))
        for role, count, arguments in kinds
        for number in range(1, count + 1)
    ]


def orchestrator_arguments(options: argparse.Namespace, fleet: Fleet) -> list[str]:
    """It finds the replicas in files, and does not wait long for one that is silent."""
    plan = ClusterChoice(options.model, "float32", None, True, 4, 1, options.toy).plan()
    files = [f"--{role}=file:{fleet.file(role)}" for role in ("target", "draft")]
    patience = ["--lookup-interval", "0.5", "--silence-timeout", "2", "--max-requests", str(2 * options.streams)]
    return [*plan.orchestrator, *files, *patience]


def recordings(options: argparse.Namespace, address: str) -> list[Recorded]:
    """The undisturbed runs, before the first fault."""
    if options.toy is None:
        requests = make_requests(spec_bench_prompts(), options.requests, options.seed)
    else:
        rng = random.Random(options.seed)
        requests = [
            (
                f"prompt {rng.random()}",
                GenerateOptions(
                    max_tokens=rng.randint(1, _TOY_TOKENS),
                    temperature=0.8 * (number % 2),
                    seed=rng.getrandbits(64),
                    ignore_eos=True,
                ),
            )
            for number in range(options.requests)
        ]
    with SyncTandemClient(address) as client:
        return record(client, requests)


def what_ran(options: argparse.Namespace) -> str:
    """For the report."""
    model = f"toy engine {options.toy}" if options.toy else f"{options.model}, float32"
    return (
        f"{options.streams} streams at a time on {options.targets} targets ({model}, one thread each) and "
        f"{options.drafts} draft services; {options.requests} distinct requests, greedy and sampled (`coupled`) in "
        f"turn, seed {options.seed}."
    )


if __name__ == "__main__":
    sys.exit(main())
