"""The soak's plots: a panel a system, over minutes of the run."""

from collections.abc import Callable, Mapping, Sequence

from loadtest.figures import Figures
from loadtest.line_plot import Line, Panel, draw
from loadtest.soak.gates import SystemRun
from loadtest.soak.monitor import Sample, malloc_bytes_of, own_bytes_of

_MINUTES = "minutes since the load began"


def plots(runs: Sequence[SystemRun]) -> Mapping[str, str]:
    """SVG by name; none of what never happened."""
    panels = {
        "malloc": [panel for run in runs for panel in _memory(run, "given by malloc", malloc_bytes_of)],
        "resident": [panel for run in runs for panel in _memory(run, "own resident memory", own_bytes_of)],
        "requests": [_requests(run) for run in runs],
        "latency": [panel for run in runs for panel in _latency(run)],
        "blocks": [_counters(run, ("used blocks at the target", "used blocks at the draft")) for run in runs],
        "sessions": [
            _counters(run, ("running requests", "sessions at the target", "sessions at the draft")) for run in runs
        ],
    }
    return {
        name: draw(some, _MINUTES)
        for name, some in panels.items()
        if any(line.points for panel in some for line in panel.lines)
    }


def _memory(run: SystemRun, title: str, sizes: Callable[[Sample], Mapping[str, int]]) -> list[Panel]:
    """A panel a process, or growth would not be seen beside a model's weights."""
    return [
        Panel(
            f"{run.name}, {service}: {title}, MiB",
            [
                Line(
                    service,
                    [
                        (_minutes(run, one.at_s), sizes(one)[service] / 2**20)
                        for one in run.samples
                        if service in sizes(one)
                    ],
                )
            ],
        )
        for service in run.samples[0].resident
    ]


def _requests(run: SystemRun) -> Panel:
    names = ("calls", "cancelled", "deadline passed", "refusals")
    lines = [Line(name, _over_minutes(run, run.figures.series(name))) for name in names]
    return Panel(f"{run.name}: calls a second", lines)


def _latency(run: SystemRun) -> list[Panel]:
    return [
        Panel(f"{run.name}: {title}, ms", _percentiles(run, run.figures, name))
        for name, title in {"first token": "time to first token", "inter-token": "inter-token latency"}.items()
    ]


def _percentiles(run: SystemRun, figures: Figures, name: str) -> list[Line]:
    return [
        Line(
            f"p{percent}",
            _over_minutes(run, [(at_s, 1e3 * value) for at_s, value in figures.percentiles(name, percent)]),
        )
        for percent in (50, 99)
    ]


def _counters(run: SystemRun, names: Sequence[str]) -> Panel:
    lines = [
        Line(
            name,
            [
                (_minutes(run, one.at_s), float(one.counters[name]))
                for one in run.samples
                if one.counters is not None
            ],
        )
        for name in names
    ]
    return Panel(f"{run.name}: what is held", lines)


def _over_minutes(run: SystemRun, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(_minutes(run, at_s), value) for at_s, value in points]


def _minutes(run: SystemRun, at_s: float) -> float:
    return (at_s - run.started_at) / 60
