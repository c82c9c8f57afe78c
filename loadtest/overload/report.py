"""Whether the excess was refused before anything was scheduled, and what it cost those who were accepted."""

from collections.abc import Sequence

from engine.bench_report import machine_lines, table
from loadtest.open_loop import MAX_PROBLEMS
from loadtest.overload.run import Measured, Step
from loadtest.percentiles import MILLISECONDS_HEADER, percentile
from loadtest.versions import versions_line

REFUSED_WITHIN_MS = 100.0  # p99, the goal
MOST_SLOWER = 1.5  # inter-token latency against that at capacity, the goal

METHOD = """\
Made by `make overload` (`loadtest/overload/`). Capacity is what as many clients as the orchestrator has places
(`--max-requests`) get that ask again as soon as they have their answer. Then requests arrive as a Poisson process, at
capacity and at multiples of it, whatever the system does (`loadtest/open_loop.py`): every latency is kept and counted
from the moment the request was due. Client, orchestrator, target and draft share the machine, so the client's lateness
is in every figure; it is in the tables too. All answers are compared with recorded ones.

The run passes when every request either gave its recorded answer or was refused at once with RESOURCE_EXHAUSTED and
RetryInfo, when the counters of running requests and of sessions at target and draft, looked at up to twenty times a
second, never passed the number of places (so the excess was refused before anything of it was scheduled), and when
nothing is held afterwards. Timings never decide: they are goals, and the page says whether they were reached."""


def verdict(measured: Measured, max_requests: int, held: Sequence[str]) -> list[str]:
    """Why the run does not pass; empty when it does. Of counters and answers only."""
    problems = [*measured.closed_loop.problems, *(f"still in use: {one}" for one in held)]
    for step in measured.steps:
        at = f"at {step.times_capacity:g} x capacity"
        problems += [f"{at}: {problem}" for problem in step.samples.problems]
        problems += [
            f"{at}: {name}: {number} at once, where {max_requests} places are"
            for name, number in step.watched.most_sessions.items()
            if number > max_requests
        ]
        ended = step.samples.num_finished + len(step.samples.refused) + len(step.samples.problems)
        if ended != step.samples.num_offered:
            problems.append(f"{at}: {step.samples.num_offered} were offered, {ended} have ended")
        if not step.watched.num_looks:
            problems.append(f"{at}: nothing is shown: the counters were never seen")
    if not measured.steps[-1].samples.refused:
        problems.append("nothing is shown: nothing was refused")
    return problems


def goals(measured: Measured) -> list[str]:
    """In words: what was to be reached at the last step against the first, and whether it was."""
    first, last = measured.steps[0].samples, measured.steps[-1].samples
    lines = []
    if last.refused:
        refused_ms = 1e3 * percentile(last.refused, 99)
        reached = _reached(refused_ms <= REFUSED_WITHIN_MS)
        lines.append(f"99 % of refusals within {REFUSED_WITHIN_MS:g} ms: {refused_ms:.1f} ms, {reached}.")
    if first.gaps and last.gaps:
        for percent in (50, 99):
            ratio = percentile(last.gaps, percent) / percentile(first.gaps, percent)
            lines.append(
                f"Inter-token latency p{percent} at most {MOST_SLOWER:g} times that at capacity: {ratio:.2f} times, "
                f"{_reached(ratio <= MOST_SLOWER)}."
            )
    return lines


def _reached(is_reached: bool) -> str:
    return "reached" if is_reached else "**not reached**"


def report(measured: Measured, max_requests: int, held: Sequence[str], what: str) -> str:
    """The page; `what` ran."""
    problems = verdict(measured, max_requests, held)
    lines = ["# Overload", "", METHOD, "", what, "", *machine_lines(), versions_line(), ""]
    lines += [
        f"Verdict: **{'NOT passed' if problems else 'passed'}**.",
        *(f"- {one}" for one in problems[:MAX_PROBLEMS]),
    ]
    lines += ["", f"Capacity: {measured.capacity:.2f} requests a second, with all {max_requests} places taken.", ""]
    lines += [f"- {line}" for line in goals(measured)]
    lines += ["", "## At capacity, places always taken", ""]
    lines += table(["", *MILLISECONDS_HEADER], measured.closed_loop.rows())
    for step in measured.steps:
        lines += _step(step)
    return "\n".join([*lines, ""])


def _step(step: Step) -> list[str]:
    samples = step.samples
    most = ", ".join(f"{name} {number}" for name, number in step.watched.most.items())
    resident = [
        [
            service,
            *(f"{size / 2**20:.1f}" for size in (step.before[service], step.after[service])),
            f"{(step.after[service] - step.before[service]) / 2**20:+.1f}",
        ]
        for service in step.before
    ]
    return [
        "",
        f"## {step.times_capacity:g} x capacity offered: {step.rate:.2f} requests a second",
        "",
        f"{samples.num_offered} offered in {step.seconds:.0f} s, {samples.num_finished} finished, "
        f"{len(samples.refused)} refused, {samples.num_tokens} tokens. Most at once, of {step.watched.num_looks} "
        f"looks: {most}.",
        "",
        *table(["", *MILLISECONDS_HEADER], samples.rows()),
        "",
        *table(["resident, MiB", "before", "after", "growth"], resident),
    ]
