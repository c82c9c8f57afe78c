"""The soak in words, tables and plots."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.bench_report import machine_lines, table
from loadtest.churn.calls import Ending
from loadtest.figures import WINDOW_S, acceptance_rate, tokens_a_round
from loadtest.soak.gates import (
    ALLOCATOR_BYTES,
    CANCELLED_STREAM_BYTES,
    MALLOC_BYTES,
    PYTHON_BLOCKS,
    Gate,
    SystemRun,
    all_gates,
    growth,
)
from loadtest.soak.monitor import Sample, malloc_bytes_of, own_bytes_of, python_blocks_of, resident_bytes_of
from loadtest.soak.plots import plots
from loadtest.versions import versions_line

METHOD = f"""\
Made by `make soak` (`loadtest/soak/`). Two systems of real processes run at the same time, each a target, a draft
service and an orchestrator: one with the real model at a rate that the machine holds, one with a toy engine and many
users. Locust's users pause between calls and follow a schedule of cycles: ramp up, hold, a spike to half as many more,
hold, churn (two of three users leave and others come, again and again), and a quiet phase without users. A user that
leaves finishes its answer, or hangs up when that takes too long.

Every call is a request whose answer was recorded before, alone and without speculation. Of twelve calls eight mean to
finish, two cancel after 1 to 12 chunks, two have a deadline of 0.02 to 20 s. A finished answer must be the recorded
one, text and tokens; one that was cut short must be a beginning of it. A refusal is expected where an orchestrator's
places are taken, and must say when to come back; any other end is a failure.

Inter-token latency is the time between two chunks of an answer as a user sees it; a chunk has a round's tokens.
Latencies are known within 1 %, over windows of {WINDOW_S} s in the plots.

Before the load the real target meets every number of rows that a step can have, because oneDNN keeps generated code for
each of them (`loadtest/soak/row_counts.py`). The first cycle is the warm-up. What a process holds is what its
allocators say (`tandem_malloc_bytes`, `tandem_python_blocks` of its metrics): what was given out and not freed yet. Its
growth is the Theil–Sen slope over all samples after the warm-up times the time they span, and may be
{MALLOC_BYTES >> 20} MiB and {PYTHON_BLOCKS:,} blocks, as the load happens to be, and {CANCELLED_STREAM_BYTES} bytes for
every stream that was cut short, which gRPC itself is known to keep. Resident memory is that and what allocators keep of
what was freed, which moves by tens of MiB between equal loads: the median of the last cycle may be
{ALLOCATOR_BYTES >> 20} MiB, and those of the streams, above the most until the end of the first. Pages of files, which
the kernel takes and gives back as it needs memory, are left out of it."""


def page(runs: Sequence[SystemRun], settings: Sequence[str]) -> str:
    """Of the whole run; `settings` say what ran, a line a system."""
    judged = all_gates(runs)
    has_failed = any(gate.passed is False for _, gate in judged)
    rows = [[name, gate.name, gate.seen, gate.limit, _word(gate)] for name, gate in judged]
    lines = ["# Soak", "", METHOD, "", *(f"- {line}" for line in settings), "", *machine_lines(), versions_line()]
    lines += ["", f"Verdict: **{'NOT passed' if has_failed else 'passed'}**.", ""]
    lines += table(["system", "gate", "seen", "limit", "result"], rows)
    lines += [
        "",
        "## What the users saw",
        "",
        *_figures(runs),
        "",
        "## Memory",
        "",
        *_memory(runs),
        "",
    ]
    for run in runs:
        lines += [f"- {run.name}: {problem}" for problem in run.figures.problems]
    return "\n".join(lines)


def _word(gate: Gate) -> str:
    return {True: "passed", False: "**failed**", None: "not judged"}[gate.passed]


def _figures(runs: Sequence[SystemRun]) -> list[str]:
    names = ["calls", *(ending.value for ending in Ending), "refusals", "left", "tokens", "fallback rounds"]
    names += ["re-opened sessions"]
    rows = [[name, *(str(run.figures.total(name)) for run in runs)] for name in names]
    rows.append(["acceptance rate", *(_decimal(acceptance_rate(run.figures)) for run in runs)])
    rows.append(["tokens a round", *(_decimal(tokens_a_round(run.figures)) for run in runs)])
    for name in ("first token", "inter-token"):
        for percent in (50, 99):
            values = [run.figures.percentile(name, percent) for run in runs]
            rows.append([f"{name}, p{percent}, ms", *(_decimal(value and 1e3 * value, 1) for value in values)])
    return table(["", *(run.name for run in runs)], rows)


def _memory(runs: Sequence[SystemRun]) -> list[str]:
    kinds = [
        ("given by malloc, MiB", malloc_bytes_of, 2**20),
        ("Python blocks, thousands", python_blocks_of, 1000),
        ("resident, own, MiB", own_bytes_of, 2**20),
        ("resident, all, MiB", resident_bytes_of, 2**20),
    ]
    rows = [
        [run.name, service, kind, *_sizes(run, service, read, unit)]
        for run in runs
        for service in run.samples[0].resident
        for kind, read, unit in kinds
    ]
    times = ["before the load", "after the warm-up", "at the end", "most", "growth by slope"]
    return table(["system", "service", "", *times], rows)


def _sizes(run: SystemRun, service: str, read: Callable[[Sample], Mapping[str, int]], unit: float) -> list[str]:
    sizes = [read(sample)[service] for sample in run.samples if service in read(sample)]
    if not sizes:
        return ["–"] * 5
    warm = [read(sample)[service] for sample in run.warm if service in read(sample)]
    grown = growth(run, read, service)
    figures = (sizes[0], warm[0] if warm else None, sizes[-1], max(sizes), grown)
    return [_decimal(None if figure is None else figure / unit) for figure in figures]


def _decimal(value: float | None, decimals: int = 2) -> str:
    return "–" if value is None else f"{value:.{decimals}f}"


def write(path: Path, runs: Sequence[SystemRun], settings: Sequence[str]) -> None:
    """The page, and its plots beside it."""
    lines = [page(runs, settings), "## Plots", ""]
    for name, text in plots(runs).items():
        file = path.with_name(f"{path.stem}_{name}.svg")
        file.write_text(text, encoding="utf-8")
        lines += [f"![{name}]({file.name})", ""]
    path.write_text("\n".join(lines), encoding="utf-8")
