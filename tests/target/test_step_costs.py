"""What a step costs beyond its rows is found from steps of any widths, and never made up."""

import pytest

from target_service.step_costs import MAX_ROWS, StepCosts


def counted(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, seconds in steps:
        costs.count(1, rows, seconds)
    return costs


def test_two_widths_give_the_line_through_them() -> None:
    assert counted((1, 0.012), (20, 0.031)).overhead_rows == pytest.approx(11.0)


def test_one_width_says_nothing() -> None:
    assert counted(*[(5, 0.03)] * 9).overhead_rows == 0.0


def test_rows_that_cost_nothing_make_the_overhead_as_large_as_it_gets() -> None:
    assert counted((1, 0.05), (300, 0.05)).overhead_rows == MAX_ROWS
    assert counted((1, 0.06), (300, 0.05)).overhead_rows == MAX_ROWS


def test_a_step_that_is_nothing_but_rows_has_the_least_overhead() -> None:
    assert counted((1, 0.001), (300, 0.4)).overhead_rows == 1.0


def test_a_width_counts_once_however_many_its_steps_were() -> None:
    few = counted((1, 0.012), (20, 0.031), (60, 0.071))
    many = counted((1, 0.012), *[(20, 0.031)] * 500, (60, 0.071))
    assert many.overhead_rows == pytest.approx(few.overhead_rows) == pytest.approx(11.0)


def test_what_is_measured_later_counts_more() -> None:
    costs = counted((1, 0.012), (20, 0.031))
    for _ in range(60):  # the machine has become slower for rows
        costs.count(1, 1, 0.012)
        costs.count(1, 20, 0.050)
    assert costs.overhead_rows == pytest.approx(0.012 / 0.002 - 1, rel=0.01)


def test_a_step_without_a_time_is_as_if_it_had_not_been() -> None:
    assert counted((1, 0.0), (20, 0.031)).overhead_rows == 0.0


def test_the_sessions_of_a_step_are_those_of_late() -> None:
    costs = StepCosts()
    costs.count(64, 64, 0.1)
    assert costs.sessions == 64
    costs.count(0, 500, 0.1)  # a prompt, and nobody's round
    assert costs.sessions == 64
    for _ in range(60):
        costs.count(1, 5, 0.01)
    assert costs.sessions == pytest.approx(1, abs=0.1)
