"""`python -m loadtest.open_loop`: requests arrive when they arrive, whether the system keeps up or not.

Arrivals are a Poisson process drawn from a seed. Every latency is kept, and counted from the moment the request was
due, so a client that is late itself makes the figures worse, not better. Percentiles are exact.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from engine.bench_report import machine_lines, table
from loadtest.churn.requests import MAX_TOKENS, make_requests, spec_bench_prompts
from loadtest.percentiles import MILLISECONDS_HEADER, milliseconds
from loadtest.recorded import Recorded, record
from loadtest.toy import toy_draft
from loadtest.versions import versions_line
from tandem.client import GenerateOptions, OverloadedError, SyncTandemClient, TandemClient, TandemError
from tandem.cluster_options import ClusterChoice, PassedOptions
from tandem.defaults import NUM_DRAFT_TOKENS
from tandem.processes import LocalCluster
from tandem.serving.options import make_parser, positive_int

MAX_PROBLEMS = 20  # in words


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments in 0..seconds, `rate` a second on average, with independent exponential gaps; one list a seed."""
    rng = random.Random(seed)
    moments: list[float] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        moments.append(at_s)
        at_s += rng.expovariate(rate)
    return moments


@dataclass(slots=True)
class Samples:
    """What became of all requests; seconds."""

    num_offered: int = 0
    num_finished: int = 0
    num_tokens: int = 0
    late: list[float] = field(default_factory=list)  # how long after its moment each was sent
    refused: list[float] = field(default_factory=list)  # until each refusal that said when to come back
    first: list[float] = field(default_factory=list)  # until the first token
    gaps: list[float] = field(default_factory=list)  # between two chunks of an answer
    problems: list[str] = field(default_factory=list)  # what must not be: failures, other answers, other refusals

    def rows(self) -> list[list[str]]:
        """Of a table under MILLISECONDS_HEADER, each with its name."""
        named = {
            "refusal": self.refused,
            "time to first token": self.first,
            "inter-token latency": self.gaps,
            "lateness of the client": self.late,
        }
        return [[name, *milliseconds(values)] for name, values in named.items()]


async def ask(client: TandemClient, recorded: Recorded, due_s: float, samples: Samples) -> None:
    """One request that was due at `due_s` (monotonic)."""
    samples.num_offered += 1
    samples.late.append(time.monotonic() - due_s)
    generation = client.generate(recorded.prompt, **recorded.options)
    before: float | None = None
    try:
        async with aclosing(aiter(generation)) as chunks:
            async for _ in chunks:
                now = time.monotonic()
                if before is None:
                    samples.first.append(now - due_s)
                else:
                    samples.gaps.append(now - before)
                before = now
    except OverloadedError as error:
        if error.retry_after_s is None or before is not None:
            samples.problems.append(f"{recorded}: refused late, or without a time to come back: {error}")
        else:
            samples.refused.append(time.monotonic() - due_s)
        return
    except TandemError as error:
        samples.problems.append(f"{recorded}: {error}")
        return
    samples.num_finished += 1
    samples.num_tokens += len(generation.token_ids)
    if (generation.token_ids, generation.text) != (recorded.token_ids, recorded.text):
        samples.problems.append(f"{recorded}: gave {generation.text!r} instead of {recorded.text!r}")


async def run_open_loop(
    client: TandemClient, recorded: Sequence[Recorded], rate: float, seconds: float, seed: int
) -> Samples:
    """Offer `rate` requests a second for so long, and wait for what has been accepted."""
    samples, rng = Samples(), random.Random(f"{seed} picks")
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for moment in poisson_arrivals(rate, seconds, seed):
            await asyncio.sleep(began + moment - time.monotonic())
            tasks.create_task(ask(client, rng.choice(recorded), began + moment, samples))
    return samples


@contextlib.contextmanager
def system_of(options: argparse.Namespace) -> Iterator[tuple[str, LocalCluster | None]]:
    """The address to load, and the processes behind it where they are started here."""
    if getattr(options, "address", None):
        yield options.address, None
        return
    draft = toy_draft(options.toy) if options.toy else None
    passed = PassedOptions(max_requests=options.max_requests)
    choice = ClusterChoice(
        options.model, "float32", draft, draft is None, NUM_DRAFT_TOKENS, 1, options.toy, passed=passed
    )
    with LocalCluster(choice.plan(), quiet=True) as cluster:
        yield cluster.addresses["orchestrator"], cluster


def record_requests(address: str, num_requests: int, seed: int, max_tokens: int | None = None) -> list[Recorded]:
    """Requests of the churn's kind with their answers alone; `max_tokens` gives all answers one length."""
    requests = make_requests(spec_bench_prompts(), num_requests, seed, MAX_TOKENS)
    if max_tokens is not None:
        fixed = GenerateOptions(max_tokens=max_tokens, min_tokens=0, stop=[], ignore_eos=True)
        requests = [(prompt, GenerateOptions(**{**options, **fixed})) for prompt, options in requests]
    with SyncTandemClient(address) as client:
        return record(client, requests)


def add_system_options(parser: argparse.ArgumentParser) -> None:
    """What `system_of` starts."""
    parser.add_argument("--model", default="smollm2-135m", help="the target: a name, a directory or a .gguf file")
    parser.add_argument("--toy", help="a toy engine instead, e.g. hashed:vocab=512,seed=3,delay_ms=20")
    parser.add_argument("--max-requests", type=positive_int, default=16, help="that run at once; more are refused")
    parser.add_argument("--requests", type=positive_int, default=8, help="distinct ones")
    parser.add_argument("--seed", type=int, default=1, help="of requests, picks and arrivals")
    parser.add_argument("--out", type=Path, help="also write the report to this file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, report; 1 when an answer was wrong or a request failed."""
    parser = make_parser("python -m loadtest.open_loop", __doc__)
    add_system_options(parser)
    parser.add_argument("--address", metavar="HOST:PORT", help="of a running orchestrator; default: one is started")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which they arrive")
    options = parser.parse_args(arguments)
    with system_of(options) as (address, _):
        recorded = record_requests(address, options.requests, options.seed)
        samples = asyncio.run(_load(address, recorded, options))
    what = f"at {options.address}" if options.address else f"{options.toy or options.model}"
    text = "\n".join(
        [
            "# Open loop",
            "",
            *(__doc__ or "").strip().splitlines(),
            "",
            f"System: {what}; {options.rate:g} requests a second for {options.seconds:g} s, {options.requests} "
            f"distinct requests, seed {options.seed}.",
            *machine_lines(),
            versions_line(),
            "",
            f"{samples.num_offered} offered, {samples.num_finished} finished with the recorded answer, "
            f"{len(samples.refused)} refused with a time to come back, {len(samples.problems)} problems.",
            *(f"- {problem}" for problem in samples.problems[:MAX_PROBLEMS]),
            "",
            *table(["", *MILLISECONDS_HEADER], samples.rows()),
            "",
        ]
    )
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 1 if samples.problems else 0


async def _load(address: str, recorded: Sequence[Recorded], options: argparse.Namespace) -> Samples:
    async with TandemClient(address) as client:
        return await run_open_loop(client, recorded, options.rate, options.seconds, options.seed)


if __name__ == "__main__":
    sys.exit(main())
