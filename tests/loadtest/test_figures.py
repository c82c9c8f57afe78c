"""Counts and latencies of several processes add up to what one would have seen; exact percentiles; trends; plots."""

import json
import random
import xml.etree.ElementTree as ElementTree

import pytest

from loadtest.churn.calls import Call, Fate, Plan
from loadtest.figures import MAX_PROBLEMS, WINDOW_S, Figures, acceptance_rate, merged, tokens_a_round
from loadtest.line_plot import Line, Panel, draw, figure_of
from loadtest.percentiles import milliseconds, percentile
from loadtest.recorded import Recorded
from loadtest.trend import theil_sen

RECORDED = Recorded("p", {}, "text", (1, 2, 3))
START = 100.0 * WINDOW_S
SVG = "{http://www.w3.org/2000/svg}"


def call_with(num_tokens: int, rounds: int, drafted: int, accepted: int, fallback: int) -> Call:
    call = Call(1, RECORDED, Fate(Plan.FINISH), token_ids=tuple(range(num_tokens)), num_chunks=rounds)
    call.num_draft_tokens, call.num_accepted, call.num_fallback_rounds = drafted, accepted, fallback
    return call


def test_speculation_of_all_workers_is_of_all_their_rounds_not_a_mean_of_their_rates() -> None:
    workers = [Figures(), Figures()]
    workers[0].add_call(call_with(30, 10, 40, 20, 0), START)
    workers[1].add_call(call_with(2, 2, 8, 0, 1), START)
    together = merged(json.loads(json.dumps(worker.take())) for worker in workers)
    assert acceptance_rate(together) == 20 / 48
    assert tokens_a_round(together) == 32 / 12
    assert together.total("fallback rounds") == 1


def test_without_drafts_or_rounds_there_are_no_rates() -> None:
    assert acceptance_rate(Figures()) is None
    assert tokens_a_round(Figures()) is None
    assert Figures().percentile("first token", 50) is None
    assert Figures().series("calls") == []


def test_what_was_taken_is_not_taken_again() -> None:
    worker, master = Figures(), Figures()
    for _ in range(3):
        worker.count("calls", START)
        worker.add_latency("first token", START, 0.1)
        worker.add_problem("wrong answers", START, "this one")
        master.merge(worker.take())
    master.merge(worker.take())
    assert master.total("calls") == master.total("wrong answers") == 3
    assert master.latencies.total() == 3
    assert master.problems == ["this one"] * 3


def test_all_problems_are_counted_and_the_first_are_told() -> None:
    figures = Figures()
    for number in range(MAX_PROBLEMS + 5):
        figures.add_problem("failures", START, str(number))
    assert figures.total("failures") == MAX_PROBLEMS + 5
    assert figures.problems == [str(number) for number in range(MAX_PROBLEMS)]
    more = Figures()
    more.add_problem("failures", START, "one more")
    figures.merge(more.take())
    assert figures.total("failures") == MAX_PROBLEMS + 6
    assert len(figures.problems) == MAX_PROBLEMS


def test_series_are_a_second_and_have_the_empty_windows_too() -> None:
    figures = Figures()
    figures.count("calls", START, 5)
    figures.count("calls", START + 2 * WINDOW_S, 20)
    assert figures.series("calls") == [
        (START + WINDOW_S / 2, 5 / WINDOW_S),
        (START + 1.5 * WINDOW_S, 0.0),
        (START + 2.5 * WINDOW_S, 20 / WINDOW_S),
    ]


def test_percentiles_of_workers_are_within_a_hundredth_of_the_exact_ones() -> None:
    rng = random.Random(7)
    latencies = [rng.lognormvariate(-3, 1.5) for _ in range(2000)]
    workers = [Figures() for _ in range(3)]
    for number, latency in enumerate(latencies):
        workers[number % 3].add_latency("inter-token", START + number / 100, latency)
        workers[number % 3].add_latency("first token", START, 1000.0)
    together = merged(worker.take() for worker in workers)
    for percent in (1, 50, 99):
        assert together.percentile("inter-token", percent) == pytest.approx(
            percentile(latencies, percent), rel=0.01
        )
    (first, second) = together.percentiles("inter-token", 50)
    assert (first[0], second[0]) == (START + WINDOW_S / 2, START + 1.5 * WINDOW_S)
    assert first[1] == pytest.approx(percentile(latencies[:1000], 50), rel=0.01)


def test_exact_percentiles_are_samples_by_nearest_rank() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 99.5, 100)] == [1, 100, 198, 199, 200]
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError, match="no percentiles"):
        percentile([], 50)
    assert milliseconds([0.001, 0.002, 0.0105]) == ["3", "2.0", "10.5", "10.5", "10.5"]
    assert milliseconds([])[0] == "0"


def test_a_trend_is_the_slope_whatever_a_quarter_of_the_samples_do() -> None:
    times = [2.0 * number for number in range(40)]
    values = [5.0 + 3.0 * at_s for at_s in times]
    assert theil_sen(times, values) == pytest.approx(3.0)
    for number in range(0, 40, 4):
        values[number] += 1e6
    assert theil_sen(times, values) == pytest.approx(3.0)
    assert theil_sen(times, [7.0] * 40) == 0.0


def test_a_step_in_one_half_of_the_run_is_a_trend() -> None:
    assert theil_sen(list(range(100)), [0.0] * 50 + [100.0] * 50) > 0.5


@pytest.mark.parametrize(("times", "values"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 1.0], [1.0, 2.0])])
def test_what_makes_no_slope_is_refused(times: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="time"):
        theil_sen(times, values)


def test_a_plot_has_every_series_in_its_panel_over_one_axis() -> None:
    lines = [Line("a < b", [(0.0, 10.0), (30.0, 50.0)]), Line("c", [(0.0, 20.0), (30.0, 30.0)])]
    panels = [Panel("first", lines), Panel("second", [Line("d", [(0.0, 1000.0), (30.0, 1001.0)])])]
    first, second = figure_of(panels, "minutes").axes
    assert [list(zip(*line.get_data(), strict=True)) for line in first.lines] == [
        list(line.points) for line in lines
    ]
    assert first.get_ylim()[0] == 0.0
    assert second.get_ylim()[0] > 900.0
    assert first.get_xlim() == second.get_xlim()
    labels = {text.text for text in ElementTree.fromstring(draw(panels, "minutes")).iter(f"{SVG}text")}
    assert {"a < b", "c", "d", "first", "second", "minutes"} <= labels


def test_a_value_that_never_changes_is_drawn() -> None:
    for value in (0.0, 400.0):
        panel = Panel("flat", [Line("a", [(0.0, value), (9.0, value)])])
        assert draw([panel], "") == draw([panel], "")


def test_nothing_is_no_plot() -> None:
    with pytest.raises(ValueError, match="no points"):
        draw([Panel("first", [Line("a", [])])], "minutes")
