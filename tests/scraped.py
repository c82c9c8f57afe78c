"""Metrics as a scraper sees them."""

from dataclasses import dataclass

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tandem.serving.metrics import COMPONENT, Metrics


@dataclass(frozen=True)
class Scraped:
    """One page."""

    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, metrics: Metrics) -> "Scraped":
        """What the page says now."""
        text = generate_latest(metrics.registry).decode()
        return cls(tuple(one for family in text_string_to_metric_families(text) for one in family.samples))

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    def __getitem__(self, name: str) -> float:
        """Of a metric without labels of its own."""
        return self.value(name)

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample with exactly these labels."""
        (value,) = [
            sample.value
            for sample in self.samples
            if sample.name == name
            and {key: one for key, one in sample.labels.items() if key != COMPONENT} == labels
        ]
        return value

    def by(self, name: str, label: str) -> dict[str, float]:
        """Every sample of a metric by one label; those of 0 as well."""
        return {sample.labels[label]: sample.value for sample in self.samples if sample.name == name}
