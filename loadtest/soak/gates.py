"""What a soak must have shown, each gate in words with what was seen and its limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.churn.calls import Ending
from loadtest.figures import Figures
from loadtest.schedule import Schedule
from loadtest.soak.monitor import Sample, malloc_bytes_of, python_blocks_of
from loadtest.trend import theil_sen

MIN_TREND_S = 600.0  # what allocators do in a minute looks like growth
CANCELLED_STREAM_BYTES = 200  # what gRPC keeps for good of a stream that is cut short: 100 to 200 were measured
ALLOCATOR_BYTES = 8 << 20  # what a process's allocator keeps more or less of between two equal loads
MALLOC_BYTES = 2 << 20  # that grow and shrink as the load happens to be
PYTHON_BLOCKS = 10_000  # likewise


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition; `passed` None: it could not be judged, which `seen` explains, and which fails nothing."""

    name: str
    seen: str
    limit: str
    passed: bool | None


@dataclass(frozen=True, slots=True)
class SystemRun:
    """One system's soak."""

    name: str
    figures: Figures
    samples: Sequence[Sample]
    deaths: Sequence[str]
    held: Sequence[str]  # when all was over
    schedule: Schedule
    started_at: float  # the schedule's beginning, Unix
    ended_at: float  # of the load
    warm_up_s: float

    @property
    def num_cut_short(self) -> int:
        """Streams that did not come to their end."""
        names = (Ending.CANCELLED.value, Ending.DEADLINE.value, "left")
        return sum(map(self.figures.total, names))

    @property
    def num_unaccounted(self) -> int:
        """Calls that began and are in no figure of how calls end."""
        return self.figures.total("begun") - sum(map(self.figures.total, ("calls", "refusals", "left")))

    @property
    def warm(self) -> list[Sample]:
        """Samples from the end of the warm-up to the end of the schedule."""
        return self._between(self.warm_up_s, self.schedule.seconds)

    @property
    def last_cycle(self) -> list[Sample]:
        """Samples of as long a time as the warm-up, at the end of the schedule."""
        return self._between(self.schedule.seconds - self.warm_up_s, self.schedule.seconds)

    @property
    def first(self) -> list[Sample]:
        """Samples until the end of the warm-up."""
        return [sample for sample in self.samples if sample.at_s <= self.started_at + self.warm_up_s]

    def _between(self, begin_s: float, end_s: float) -> list[Sample]:
        return [sample for sample in self.samples if begin_s <= sample.at_s - self.started_at <= end_s]


def all_gates(runs: Sequence[SystemRun]) -> list[tuple[str, Gate]]:
    """Every system's with its name, and those of all together."""
    each = [(run.name, gate) for run in runs for gate in gates(run)]
    kinds = (Ending.CANCELLED.value, Ending.DEADLINE.value)
    return [*each, ("together", _happened([run.figures for run in runs], kinds))]


def gates(run: SystemRun) -> list[Gate]:
    """One system's."""
    return [*_answers(run), *_ends(run), *_quiet(run), *_memory(run)]


def _answers(run: SystemRun) -> list[Gate]:
    figures = run.figures
    wrong, failed = figures.total("wrong answers"), figures.total("failures")
    return [
        Gate("answers that are not the recorded ones", str(wrong), "0", wrong == 0),
        Gate("failures, refusals with a time to come back aside", str(failed), "0", failed == 0),
        _happened([figures], (Ending.FINISHED.value, "accepted drafts")),
    ]


def _happened(several: Sequence[Figures], names: Sequence[str]) -> Gate:
    """A run in which nothing happened shows nothing."""
    shown = {name: sum(figures.total(name) for figures in several) for name in names}
    seen = ", ".join(f"{name}: {number}" for name, number in shown.items())
    return Gate("what must have happened for the run to show anything", seen, "1 of each", all(shown.values()))


def _ends(run: SystemRun) -> list[Gate]:
    lasted_s = run.ended_at - run.started_at
    return [
        Gate(
            "the load followed its schedule to the end",
            f"{lasted_s:.0f} s",
            f"at least {run.schedule.seconds:.0f} s",
            lasted_s >= run.schedule.seconds,
        ),
        Gate(
            "calls that began and are in no figure of how calls end",
            str(run.num_unaccounted),
            "0",
            run.num_unaccounted == 0,
        ),
        Gate("services that ended by themselves", "; ".join(run.deaths) or "none", "none", not run.deaths),
        Gate("sessions and blocks held at the end", "; ".join(run.held) or "none", "none", not run.held),
    ]


def _quiet(run: SystemRun) -> list[Gate]:
    """In every quiet phase there was a moment at which every counter was 0."""
    times = run.schedule.quiet_times()
    quiet = [
        any(
            sample.is_idle
            for sample in run.samples
            if run.started_at + begin <= sample.at_s <= run.started_at + end
        )
        for begin, end in times
    ]
    seen = f"{sum(quiet)} of {len(quiet)}"
    return [Gate("quiet phases in which running, sessions and used blocks came to 0", seen, "all", all(quiet))]


def judges_memory(schedule: Schedule, warm_up_s: float) -> bool:
    """Whether a run is long enough for it."""
    return schedule.seconds - warm_up_s >= MIN_TREND_S


def _memory(run: SystemRun) -> list[Gate]:
    seconds = run.schedule.seconds - run.warm_up_s
    if not judges_memory(run.schedule, run.warm_up_s) or len(run.warm) < 2:
        reason = f"not judged: {max(seconds, 0):.0f} s after the warm-up, a trend needs {MIN_TREND_S:.0f} s"
        return [Gate("memory does not grow", reason, "–", None)]
    return [gate for service in run.warm[0].own for gate in _memory_of(service, run)]


def _memory_of(service: str, run: SystemRun) -> list[Gate]:
    streams = cut_short_bytes(run)
    blocks = growth(run, python_blocks_of, service)
    above = median(one.own[service] for one in run.last_cycle) - max(one.own[service] for one in run.first)
    return [
        _mib_gate(
            f"growth of what malloc has given to the {service} process",
            growth(run, malloc_bytes_of, service),
            MALLOC_BYTES + streams,
        ),
        Gate(
            f"growth of the {service} process's Python blocks",
            "not known" if blocks is None else f"{blocks:+,.0f}",
            f"{PYTHON_BLOCKS:,}",
            blocks is not None and blocks <= PYTHON_BLOCKS,
        ),
        _mib_gate(
            f"own resident memory of the {service} process in the last cycle, above the most in the first",
            above,
            ALLOCATOR_BYTES + streams,
        ),
    ]


def _mib_gate(name: str, num_bytes: float | None, limit: float) -> Gate:
    seen = "not known" if num_bytes is None else f"{num_bytes / 2**20:+.2f} MiB"
    return Gate(name, seen, f"{limit / 2**20:.2f} MiB", num_bytes is not None and num_bytes <= limit)


def growth(run: SystemRun, read: Callable[[Sample], Mapping[str, int]], service: str) -> float | None:
    """Of a figure after the warm-up: the robust slope times the time; None where half of the samples lack it."""
    points = [(one.at_s, float(read(one)[service])) for one in run.warm if service in read(one)]
    if len(points) < max(2, len(run.warm) / 2):
        return None
    times = [at_s for at_s, _ in points]
    return theil_sen(times, [value for _, value in points]) * (times[-1] - times[0])


def cut_short_bytes(run: SystemRun) -> float:
    """What gRPC keeps of the streams that were cut short after the warm-up, in share."""
    return CANCELLED_STREAM_BYTES * run.num_cut_short * (1 - run.warm_up_s / run.schedule.seconds)
