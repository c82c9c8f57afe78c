"""What a soak must have shown, each gate in words with what was seen and its limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.churn.calls import Ending
from loadtest.figures import Figures
from loadtest.schedule import Schedule
from loadtest.soak.monitor import Sample
from loadtest.trend import theil_sen

MIN_TREND_S = 600.0  # what allocators do in a minute looks like growth
CANCELLED_STREAM_BYTES = 200  # what gRPC keeps for good of a stream that is cut short: 100 to 200 were measured
ALLOCATOR_BYTES = 8 << 20  # what a process's allocator moves between two equal loads


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
        begin, end = self.started_at + self.warm_up_s, self.started_at + self.schedule.seconds
        return [sample for sample in self.samples if begin <= sample.at_s <= end]


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


def _memory(run: SystemRun) -> list[Gate]:
    seconds = run.schedule.seconds - run.warm_up_s
    if seconds < MIN_TREND_S or len(run.warm) < 2:
        reason = f"not judged: {max(seconds, 0):.0f} s after the warm-up, a trend needs {MIN_TREND_S:.0f} s"
        return [Gate("own resident memory does not grow", reason, "–", None)]
    allowed = allowed_growth_bytes(run)
    return [
        Gate(
            f"growth of the {service} process's own resident memory after the warm-up",
            f"{growth / 2**20:+.2f} MiB",
            f"{allowed / 2**20:.2f} MiB",
            growth <= allowed,
        )
        for service, growth in growths(run).items()
    ]


def growths(run: SystemRun) -> dict[str, float]:
    """Bytes by service: the robust slope times the time after the warm-up."""
    warm = run.warm
    times = [sample.at_s for sample in warm]
    return {
        service: theil_sen(times, [sample.own[service] for sample in warm]) * (times[-1] - times[0])
        for service in warm[0].own
    }


def allowed_growth_bytes(run: SystemRun) -> float:
    """After the warm-up: the allocator's, and gRPC's for the streams that were cut short in that time, in share."""
    share = 1 - run.warm_up_s / run.schedule.seconds
    return ALLOCATOR_BYTES + CANCELLED_STREAM_BYTES * run.num_cut_short * share
