"""docs/operations.md names exactly what the services export and log."""

import re
from pathlib import Path

from tandem.serving.logs import FIELDS
from tests.registries import all_metrics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def rows(header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    _, _, after = PAGE.partition(f"{header}\n")
    table = after.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_metrics_is_what_the_registries_hold() -> None:
    told = {
        name.strip("`"): (kind, tuple(re.findall(r"`(\w+)`", labels)), set(components.split(", ")))
        for name, kind, labels, components, _ in rows("| name | type | labels | exported by | meaning |")
    }
    held: dict[str, tuple[str, tuple[str, ...], set[str]]] = {}
    for metrics in all_metrics():
        for family in metrics.families:
            kind, labels, components = held.get(family.name, (family.kind, family.labels, set()))
            assert (kind, labels) == (family.kind, family.labels), family.name
            held[family.name] = kind, labels, components | {metrics.component}
    assert told == held


def test_the_meanings_are_those_that_a_scraper_is_told() -> None:
    told = {row[0].strip("`"): row[4] for row in rows("| name | type | labels | exported by | meaning |")}
    differing = {
        (family.name, family.meaning)
        for metrics in all_metrics()
        for family in metrics.families
        if told[family.name] != family.meaning
    }
    assert differing == set()


def test_the_fields_of_a_log_line_are_those_there_are() -> None:
    fields = [row[0].strip("`") for row in rows("| field | meaning |")]
    assert fields == ["time", "level", "service", "logger", "message", *FIELDS, "exception"]
