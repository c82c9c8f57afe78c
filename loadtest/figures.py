"""What the users of several processes have seen: counts and latencies by time, which add up whoever counted them."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from loadtest.churn.calls import Call

WINDOW_S = 10
MAX_PROBLEMS = 20  # kept in words; all are counted
_BUCKET = math.log(1.02)  # a latency is known within 1 %


class Figures:
    """Counts by name and window, latencies by name, window and bucket; windows are of the clock, so processes agree."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self.latencies: Counter[tuple[str, int, int]] = Counter()
        self.problems: list[str] = []

    def count(self, name: str, at_s: float, number: int = 1) -> None:
        """`number` more at the time `at_s` (Unix)."""
        self.counts[name, int(at_s // WINDOW_S)] += number

    def add_latency(self, name: str, at_s: float, latency_s: float) -> None:
        """One sample."""
        self.latencies[name, int(at_s // WINDOW_S), math.floor(math.log(max(latency_s, 1e-6)) / _BUCKET)] += 1

    def add_call(self, call: Call, at_s: float) -> None:
        """What a call has brought, in tokens and drafts."""
        added = {
            "tokens": len(call.token_ids),
            "rounds": call.num_chunks,
            "draft tokens": call.num_draft_tokens,
            "accepted drafts": call.num_accepted,
            "fallback rounds": call.num_fallback_rounds,
            "re-opened sessions": call.num_reopens,
        }
        for name, number in added.items():
            self.count(name, at_s, number)

    def add_problem(self, name: str, at_s: float, problem: str) -> None:
        """Something that must not be."""
        self.count(name, at_s)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def total(self, name: str) -> int:
        """Over the whole run."""
        return sum(number for (what, _), number in self.counts.items() if what == name)

    def series(self, name: str) -> list[tuple[float, float]]:
        """(Unix time of a window's middle, count a second) for every window from the first to the last of any count."""
        windows = [window for _, window in self.counts]
        if not windows:
            return []
        return [
            (_middle(window), self.counts[name, window] / WINDOW_S)
            for window in range(min(windows), max(windows) + 1)
        ]

    def percentiles(self, name: str, percent: float) -> list[tuple[float, float]]:
        """(Unix time of a window's middle, seconds) for every window that has samples."""
        windows = sorted({window for what, window, _ in self.latencies if what == name})
        return [(_middle(window), self._percentile(name, percent, {window})) for window in windows]

    def percentile(self, name: str, percent: float) -> float | None:
        """Seconds, of all samples; None without any."""
        windows = {window for what, window, _ in self.latencies if what == name}
        return self._percentile(name, percent, windows) if windows else None

    def _percentile(self, name: str, percent: float, windows: set[int]) -> float:
        buckets: Counter[int] = Counter()
        for (what, window, bucket), number in self.latencies.items():
            if what == name and window in windows:
                buckets[bucket] += number
        rank, seen = max(1, math.ceil(percent / 100 * buckets.total())), 0
        for bucket in sorted(buckets):
            seen += buckets[bucket]
            if seen >= rank:
                return math.exp((bucket + 0.5) * _BUCKET)
        raise AssertionError("a rank is never past the last sample")

    def take(self) -> dict[str, Any]:
        """Everything so far in plain lists, for the wire; it begins anew."""
        taken = {
            "counts": _rows(self.counts),
            "latencies": _rows(self.latencies),
            "problems": list(self.problems),
        }
        self.counts.clear()
        self.latencies.clear()
        self.problems.clear()
        return taken

    def merge(self, taken: Mapping[str, Any]) -> None:
        """Add what another has taken."""
        for *key, number in taken["counts"]:
            self.counts[key[0], key[1]] += number
        for *key, number in taken["latencies"]:
            self.latencies[key[0], key[1], key[2]] += number
        self.problems = [*self.problems, *taken["problems"]][:MAX_PROBLEMS]


def _rows(counter: Mapping[tuple[Any, ...], int]) -> list[list[Any]]:
    return [[*key, number] for key, number in counter.items()]


def _middle(window: int) -> float:
    return (window + 0.5) * WINDOW_S


def acceptance_rate(figures: Figures) -> float | None:
    """Accepted / drafted; None when nothing was drafted."""
    drafted = figures.total("draft tokens")
    return figures.total("accepted drafts") / drafted if drafted else None


def tokens_a_round(figures: Figures) -> float | None:
    """Tokens that a target pass gave; None without one."""
    rounds = figures.total("rounds")
    return figures.total("tokens") / rounds if rounds else None


def merged(parts: Iterable[Mapping[str, Any]]) -> Figures:
    """One of many."""
    figures = Figures()
    for part in parts:
        figures.merge(part)
    return figures
