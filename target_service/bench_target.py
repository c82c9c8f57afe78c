"""`tandem bench target`: what the target service costs over the bare engine that steps the same batch.

A is the service in a process of its own: N sessions on one stream, each sending its next round as soon as it has its
verdict. B is the same engine in the benchmark's process with nothing around it, stepping the same N sequences: same
prompts, contexts and drafts. They alternate A B A B in segments of some rounds, so whatever else the machine does
meets both; each pair gives one ratio, and after each pair both must have the same tokens. All of the service has one
core, the bare engine has the same one, and both compute with one thread; the client, which does nothing but speak the
protocol, has the other core. The drafts of a round repeat the last committed token, so that both sides know them.
Prefill is not timed. "Apart": half of the sessions begin each segment in the middle of the step of the others.
"""

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engine.backends.base import EngineError
from engine.backends.options import engine_settings
from engine.backends.registry import load_engine
from engine.bench_report import machine_lines, quartiles, table
from tandem.processes import ServiceStartError, start_service, wait_ready
from tandem.serving.channels import open_channel
from tandem.serving.compute import ComputeThread
from tandem.serving.options import make_parser, natural_int, positive_int
from tandem.types import ItemError
from target_service.__main__ import build_parser as service_parser
from target_service.bench_pairs import Case, Measurement, Pair, measure_all

BOUND = 0.9
SESSIONS = (1, 4, 16, 64)
DRAFTS = (0, 4)
# One core needs one thread; the memory is for the most sessions with all their tokens. Later options win.
_SERVICE_OPTIONS = ("--address", "127.0.0.1:0", "--threads", "1", "--log-level", "WARNING")
_START_TIMEOUT_S = 300.0
_GRACE_S = 10.0


def bench_target(
    service_options: Sequence[str], cases: Sequence[Case], runs: int, context_len: int
) -> tuple[list[Measurement], list[str]]:
    """Every case, and lines that say what the figures depend on; `service_options` also make the bare engine.

    EngineError, ValueError or ServiceStartError when the engine cannot be loaded here or there; ItemError when it has
    no room for the sessions of a case.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-"))
        compute = ComputeThread("bare-engine")
        stack.callback(compute.close)
        with _on_core(cores[0]):  # inherited by the process and the thread that start here
            settings = engine_settings(service_parser().parse_args(service_options))
            engine = compute.run_blocking(load_engine, settings).engine
            service = start_service("target", service_options, Path(folder) / "ready")
            stack.callback(service.stop, _GRACE_S)
        wait_ready([service], _START_TIMEOUT_S)

        async def measure() -> list[Measurement]:
            async with open_channel(service.address) as channel:
                return await measure_all(channel, engine, compute, cases, runs, context_len)

        with _on_core(cores[-1]):
            measurements = asyncio.run(measure())
        machine = compute.run_blocking(machine_lines)
    return measurements, [*machine, f"Service and bare engine on core {cores[0]}, client on core {cores[-1]}."]


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """This thread, and whatever processes and threads it starts meanwhile, on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def render_report(
    measurements: Sequence[Measurement], machine: Sequence[str], name: str, runs: int, context_len: int
) -> str:
    """Markdown: method, machine, verdict, throughput with its spread, and where a round's time goes."""
    worst = min(measurements, key=lambda m: statistics.median(m.ratios))
    worst_ratio = statistics.median(worst.ratios)
    verdict = "met" if worst_ratio >= BOUND else "missed"
    return "\n".join(
        [
            "# The target service against the bare engine",
            "",
            (__doc__ or "").split("\n\n", 1)[1].strip(),
            "",
            f"Model: {name}. Prompts of {context_len} tokens, {runs} pairs a case after one uncounted pair.",
            *machine,
            "",
            f"Bound: median throughput of the service at least {BOUND} of the bare engine's in every case: "
            f"**{verdict}**; the smallest is {worst_ratio:.3f} ({worst.case}).",
            "",
            "Tokens a second, median (first to third quartile):",
            "",
            *table(
                [
                    "sessions",
                    "drafts",
                    "begun",
                    "rounds a segment",
                    "service",
                    "bare",
                    "service / bare",
                    "least–most",
                ],
                [_throughput_row(m) for m in measurements],
            ),
            "",
            "A ratio above 1 says that the step inside the service was faster than the same step in the benchmark's",
            "process (compute and bare step, below).",
            "",
            "Where a round goes, median ms. Wait: from an item's arrival to its step; compute: the service's step, to",
            "compare with the bare engine's; client: between a message and the next rounds; rest: gRPC, both event",
            "loops, and for sessions that begin apart the time between the first and the last. Rows: of a step.",
            "",
            *table(
                ["sessions", "drafts", "begun", "round", "wait", "compute", "client", "rest", "bare step", "rows"],
                [_round_row(m) for m in measurements],
            ),
            "",
        ]
    )


def _case_cells(case: Case) -> list[str]:
    return [str(case.num_sessions), str(case.num_drafts), "apart" if case.begins_apart else "at once"]


def _throughput_row(m: Measurement) -> list[str]:
    return [
        *_case_cells(m.case),
        str(m.case.num_rounds),
        quartiles([pair.num_tokens / pair.service.round_s for pair in m.pairs]),
        quartiles([pair.num_tokens / pair.bare_s for pair in m.pairs]),
        quartiles(m.ratios, 3),
        f"{min(m.ratios):.3f}–{max(m.ratios):.3f}",
    ]


def _round_row(m: Measurement) -> list[str]:
    def median_ms(seconds_of: Callable[[Pair], float]) -> str:
        return f"{statistics.median(map(seconds_of, m.pairs)) * 1e3:.2f}"

    return [
        *_case_cells(m.case),
        median_ms(lambda pair: pair.service.round_s),
        median_ms(lambda pair: pair.service.queue_s),
        median_ms(lambda pair: pair.service.compute_s),
        median_ms(lambda pair: pair.service.client_s),
        median_ms(lambda pair: pair.service.rest_s),
        median_ms(lambda pair: pair.bare_s),
        f"{statistics.mean(pair.service.rows for pair in m.pairs):.1f} of {m.case.num_rows}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: measure, write the report, and show it."""
    parser = make_parser("tandem bench target", __doc__)
    parser.epilog = "Any other option is one of the target service's: --model, --dtype, --toy, ..."
    parser.add_argument("--sessions", type=positive_int, action="append", help="repeatable; default: 1, 4, 16, 64")
    parser.add_argument("--drafts", type=natural_int, action="append", help="a round; repeatable; default: 0 and 4")
    parser.add_argument("--runs", type=positive_int, default=10, help="pairs a case")
    parser.add_argument("--context", type=positive_int, default=128, help="tokens of a prompt")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options, rest = parser.parse_known_args(arguments)
    engine = service_parser().parse_args(rest)
    pool = () if engine.toy else ("--kv-memory", "2G")
    service_options = [*_SERVICE_OPTIONS, *pool, *rest]
    counts = options.sessions or SESSIONS
    cases = [Case(n, k) for k in options.drafts or DRAFTS for n in counts]
    cases += [Case(n, 0, begins_apart=True) for n in counts if n > 1]
    try:
        measurements, machine = bench_target(service_options, cases, options.runs, options.context)
    except (EngineError, ItemError, ServiceStartError, ValueError) as error:
        parser.error(str(error))
    name = f"toy {engine.toy}" if engine.toy else f"{engine.model}, {engine.dtype}"
    report = render_report(measurements, machine, name, options.runs, options.context)
    if options.out is not None:
        options.out.write_text(report)
    sys.stdout.write(report)


if __name__ == "__main__":
    main()
