"""How many users a schedule wants, and when."""

import subprocess
import sys

import pytest

from loadtest.schedule import Churn, Hold, Ramp, Schedule, Spike, soak_schedule


def test_a_ramp_goes_evenly_from_one_number_to_the_other() -> None:
    ramp = Ramp(10, 4, 24)
    assert [ramp.users_at(elapsed_s) for elapsed_s in (0, 2.5, 5, 9.99)] == [4, 9, 14, 24]


def test_a_spike_is_in_the_middle_third_only() -> None:
    spike = Spike(9, 10, 15)
    assert [spike.users_at(elapsed_s) for elapsed_s in (0, 2.9, 3, 5.9, 6, 8.9)] == [10, 10, 15, 15, 10, 10]


def test_churn_takes_users_away_and_brings_them_back() -> None:
    churn = Churn(8, 9, 3, every_s=2)
    assert [churn.users_at(elapsed_s) for elapsed_s in (0, 1.9, 2, 3.9, 4, 6)] == [3, 3, 9, 9, 3, 9]


def test_phases_follow_each_other_and_then_the_run_is_over() -> None:
    schedule = Schedule([Hold(2, 7), Hold(3, 0), Hold(1, 5)])
    assert schedule.seconds == 6
    assert [schedule.users_at(elapsed_s) for elapsed_s in (0, 1.9, 2, 4.9, 5, 6, 60)] == [7, 7, 0, 0, 5, None, None]
    assert schedule.quiet_times() == [(2, 5)]


def test_a_soak_has_everything_in_every_cycle() -> None:
    schedule = soak_schedule(150, num_cycles=3, cycle_s=300)
    assert schedule.seconds == pytest.approx(900)
    seconds = [schedule.users_at(second) for second in range(900)]
    for cycle in (seconds[:300], seconds[300:600], seconds[600:]):
        assert max(cycle) == 225  # type: ignore[type-var]
        assert cycle[0] == 0
        assert cycle[100] == 150
        assert cycle.count(50) > 10
        assert set(cycle[-60:]) == {0}
    assert [end for _, end in schedule.quiet_times()] == pytest.approx([300, 600, 900])


def test_locust_s_shape_follows_the_schedule_by_its_own_clock() -> None:
    # In a process of its own: importing locust patches the one that does it.
    code = """
from loadtest.schedule import Hold, Schedule
from loadtest.shapes import ScheduledShape

class Shape(ScheduledShape):
    def schedule(self):
        return Schedule([Hold(2, 7), Hold(2, 0)])

shape = Shape()
for elapsed_s in (0, 1, 3, 5):
    shape.get_run_time = lambda: elapsed_s
    print(shape.tick() or "over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["(7, 100)", "(7, 100)", "(0, 100)", "over"]
