"""The dashboard is one that Grafana takes, and asks only for what the services export."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.exported import complaints
from tests.deploy.promql import PromqlError, read_promql

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "tandem.json").read_text()
)
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[title for title, _ in TARGETS])
def test_every_query_asks_for_metrics_and_labels_that_are_exported(title: str, target: dict[str, Any]) -> None:
    assert complaints(target["expr"], target["legendFormat"]) == []


@pytest.mark.parametrize(
    ("expression", "legend", "expected"),
    [
        ("sum(rate(tandem_roundz_total[5m]))", "", ["tandem_roundz_total of any service"]),
        ("sum by (colour) (rate(tandem_rounds_total[5m]))", "", ["tandem_rounds_total: colour"]),
        ('tandem_rounds_total{colour="red"}', "", ["tandem_rounds_total: colour"]),
        ('tandem_rounds_total{component="draft"}', "", ["tandem_rounds_total of draft"]),
        ('tandem_rounds_total{component="targets"}', "", ["tandem_rounds_total of targets"]),
        ("tandem_step_seconds", "", ["tandem_step_seconds of any service"]),
        ("sum by (le) (tandem_step_seconds_sum)", "", ["tandem_step_seconds_sum: le"]),
        ('tandem_round_phase_seconds_sum{phase=~"queue|sleep"}', "", ["phase sleep"]),
        ("sum(tandem_rounds_total)", "{{component}}", ["legend: component"]),
        ('tandem_round_phase_seconds_sum{component=~"draft|target"}', "{{phase}} {{instance}}", []),
        ("1 + 1", "", ["it names no metric"]),
        ('sum by (le, component) (tandem_step_seconds_bucket{component=~"target|draft"})', "{{component}}", []),
    ],
)
def test_what_is_not_exported_is_found(expression: str, legend: str, expected: list[str]) -> None:
    assert complaints(expression, legend) == expected


@pytest.mark.parametrize("expression", ["rate", "nonsense(x)", "a{b}", "a;b"])
def test_what_cannot_be_read_is_no_silence(expression: str) -> None:
    with pytest.raises(PromqlError):
        read_promql(expression)


def test_its_panels_are_what_grafana_can_draw() -> None:
    assert BOARD["schemaVersion"] >= 36
    assert 0 < len(BOARD["uid"]) <= 40
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["type"] == "timeseries"
        assert panel["title"]
        assert panel["description"]
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0


def test_the_data_source_is_chosen_on_the_page() -> None:
    (variable,) = BOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    sources = [one["datasource"] for panel in PANELS for one in (panel, *panel["targets"])]
    assert sources == [{"type": "prometheus", "uid": "${datasource}"}] * len(sources)


@pytest.mark.parametrize(
    "metric",
    [
        *("tandem_requests_total", "tandem_time_to_first_token_seconds", "tandem_inter_token_latency_seconds"),
        *("tandem_spec_decode_num_accepted_tokens_per_pos_total", "tandem_rounds_total"),
        *("tandem_round_phase_seconds", "tandem_kv_usage_ratio", "tandem_requests_waiting"),
        *("tandem_fallback_rounds_total", "tandem_reopens_total", "tandem_replicas_up"),
    ],
)
def test_what_operators_look_for_is_on_it(metric: str) -> None:
    assert any(metric in target["expr"] for _, target in TARGETS)
