"""The figures of one process, in Prometheus' formats.

They are plain numbers without locks: all figures of a process change on its event loop and are read on it
(metrics_server.py), so that what is read is of one moment. Every process makes its own `Metrics`; nothing is global.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

# On every metric: which service exports it. Not called `service`, which Prometheus adds to what it scrapes itself.
COMPONENT = "component"
SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
WIDTHS = tuple(float(2**power) for power in range(11))  # 1 .. 1024

LabelValues: TypeAlias = tuple[str, ...]
Numbers: TypeAlias = Iterable[tuple[LabelValues, float]]  # of one metric
MetricT = TypeVar("MetricT")


class Counter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, number: float = 1) -> None:
        self.value += number


class Histogram:
    """How many values lay below each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending; values above the last are counted as well."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or as many of the same."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last of which is +Inf."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class ByLabel(dict[str, MetricT]):
    """One metric for each value of a label, made when it is first asked for. Keep what is used often."""

    def __init__(self, make: Callable[[], MetricT], values: Iterable[str]) -> None:
        super().__init__({value: make() for value in values})
        self._make = make

    def __missing__(self, value: str) -> MetricT:
        self[value] = made = self._make()
        return made


@dataclass(frozen=True, slots=True)
class Family:
    """One metric's name, as it is exported, and how its values are read: by the labels' values, in their order."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...]  # besides COMPONENT
    read: Callable[[], Iterable[tuple[LabelValues, float | Histogram]]]

    def collect(self, component: str) -> Metric:
        """As the exposition formats take it."""
        labels = (COMPONENT, *self.labels)
        if self.kind == "histogram":
            histograms = HistogramMetricFamily(self.name, self.meaning, labels=labels)
            for values, one in self.read():
                assert isinstance(one, Histogram)
                histograms.add_metric((component, *values), one.buckets(), one.sum)
            return histograms
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        numbers = make(self.name, self.meaning, labels=labels)
        for values, number in self.read():
            assert not isinstance(number, Histogram)
            numbers.add_metric((component, *values), number)
        return numbers


class Metrics:
    """All metrics of one process, made one by one; ValueError for a name that there is already."""

    def __init__(self, component: str) -> None:
        """`component`: orchestrator, target or draft."""
        self.component = component
        self.families: list[Family] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Of all families, as they are now."""
        for family in self.families:
            yield family.collect(self.component)

    def counter(self, name: str, meaning: str) -> Counter:
        made = Counter()
        self.read_counter(name, meaning, lambda: made.value)
        return made

    def counters(self, name: str, meaning: str, label: str, values: Iterable[str] = ()) -> ByLabel[Counter]:
        """`values`: those that are there, at 0, from the start."""
        made = ByLabel(Counter, values)
        self._add(
            Family(name, "counter", meaning, (label,), lambda: [((key,), one.value) for key, one in made.items()])
        )
        return made

    def histogram(self, name: str, meaning: str, bounds: Sequence[float]) -> Histogram:
        made = Histogram(bounds)
        self._add(Family(name, "histogram", meaning, (), lambda: [((), made)]))
        return made

    def histograms(
        self, name: str, meaning: str, label: str, values: Iterable[str], bounds: Sequence[float]
    ) -> ByLabel[Histogram]:
        """`values`: those that are there from the start."""
        made = ByLabel(lambda: Histogram(bounds), values)
        self._add(
            Family(name, "histogram", meaning, (label,), lambda: [((key,), one) for key, one in made.items()])
        )
        return made

    def read_counter(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A counter that somebody else keeps."""
        self._add(Family(name, "counter", meaning, (), lambda: [((), read())]))

    def read_counters(self, name: str, meaning: str, labels: tuple[str, ...], read: Callable[[], Numbers]) -> None:
        """Counters that somebody else keeps."""
        self._add(Family(name, "counter", meaning, labels, read))

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        self._add(Family(name, "gauge", meaning, (), lambda: [((), read())]))

    def gauges(self, name: str, meaning: str, labels: tuple[str, ...], read: Callable[[], Numbers]) -> None:
        """`read`: the values of now; there may be none."""
        self._add(Family(name, "gauge", meaning, labels, read))

    def _add(self, family: Family) -> None:
        if any(family.name == known.name for known in self.families):
            raise ValueError(f"there is a metric {family.name} already")
        self.families.append(family)
