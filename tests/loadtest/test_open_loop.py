"""The open loop and the overload test against toy services in processes of their own."""

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.open_loop import Samples, poisson_arrivals, record_requests, run_open_loop
from loadtest.overload.__main__ import build_parser, run
from loadtest.overload.report import goals, report, verdict
from loadtest.overload.run import SESSION_COUNTERS, Measured, Step, Watched
from loadtest.recorded import Recorded
from tandem.client import TandemClient
from tandem.cluster_options import ClusterChoice, PassedOptions
from tandem.processes import LocalCluster

TOY = "hashed:vocab=512,seed=3,delay_ms=5"
MAX_REQUESTS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    passed = PassedOptions(max_requests=MAX_REQUESTS)
    plan = ClusterChoice("", "float32", f"{TOY},blend=0.2", False, 4, 1, TOY, passed=passed).plan()
    with LocalCluster(plan, quiet=True) as running:
        yield running


def options(*extra: str) -> argparse.Namespace:
    arguments = ["--toy", TOY, "--max-requests", str(MAX_REQUESTS), "--requests", "3", "--seconds", "1"]
    return build_parser().parse_args([*arguments, *extra])


def offered(cluster: LocalCluster, recorded: list[Recorded], rate: float) -> Samples:
    async def load() -> Samples:
        async with TandemClient(cluster.addresses["orchestrator"]) as client:
            return await run_open_loop(client, recorded, rate, 1.0, seed=1)

    return asyncio.run(load())


def test_arrivals_repeat_with_their_seed_and_come_at_the_rate() -> None:
    moments = poisson_arrivals(50, 100, seed=3)
    assert moments == poisson_arrivals(50, 100, seed=3)
    assert moments != poisson_arrivals(50, 100, seed=4)
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < 100
    assert len(moments) == pytest.approx(5000, abs=5 * 5000**0.5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)  # of an exponential distribution, and not of even gaps


def test_every_request_offered_is_answered_or_refused_and_every_latency_is_kept(cluster: LocalCluster) -> None:
    recorded = record_requests(cluster.addresses["orchestrator"], 3, seed=1, max_tokens=24)
    assert {len(one.token_ids) for one in recorded} == {24}
    samples = offered(cluster, recorded, rate=60)
    assert samples.problems == []
    assert samples.num_offered == len(poisson_arrivals(60, 1.0, seed=1)) == len(samples.late)
    assert samples.num_finished + len(samples.refused) == samples.num_offered
    assert samples.num_finished == len(samples.first) > 0
    assert len(samples.refused) > 0
    assert samples.num_tokens == 24 * samples.num_finished
    assert min([*samples.first, *samples.gaps, *samples.refused]) >= 0
    assert samples.rows()[0][1] == str(len(samples.refused))


def test_another_answer_than_the_recorded_one_is_a_problem(cluster: LocalCluster) -> None:
    (first, *_) = record_requests(cluster.addresses["orchestrator"], 1, seed=1, max_tokens=4)
    samples = offered(cluster, [replace(first, text="another")], rate=10)
    assert len(samples.problems) == samples.num_finished > 0
    assert "instead of 'another'" in samples.problems[0]


def test_four_times_the_capacity_is_refused_before_anything_is_scheduled(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "overload.md"
    code = run(cluster, options("--out", str(file), "--max-tokens", "24"))
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert file.read_text() == printed
    assert "Verdict: **passed**." in printed
    assert "## 4 x capacity offered" in printed


def measured(refused: list[float], gaps: list[float], most_sessions: int = 3) -> Measured:
    """Two steps; the first had gaps of 20 ms."""

    def step(times: float, samples: Samples) -> Step:
        watched = Watched(dict.fromkeys(SESSION_COUNTERS, most_sessions), num_looks=20)
        return Step(times, 10 * times, 30.0, samples, watched, {"target": 1 << 20}, {"target": 3 << 20})

    first = Samples(num_offered=2, num_finished=2, gaps=[0.02] * 10)
    last = Samples(num_offered=2 + len(refused), num_finished=2, refused=refused, gaps=gaps)
    return Measured(10.0, Samples(num_finished=10), [step(1.0, first), step(4.0, last)])


def test_goals_are_told_and_decide_nothing() -> None:
    slow = measured(refused=[0.2] * 5, gaps=[0.05] * 10)
    assert verdict(slow, 3, []) == []
    assert [line.endswith("**not reached**.") for line in goals(slow)] == [True, True, True]
    assert "200.0 ms" in goals(slow)[0]
    assert "2.50 times" in goals(slow)[1]
    quick = measured(refused=[0.01] * 5, gaps=[0.021] * 10)
    assert [line.endswith(" reached.") for line in goals(quick)] == [True, True, True]
    assert "| target | 1.0 | 3.0 | +2.0 |" in report(quick, 3, [], "What ran.")


def test_a_session_too_many_fails_whatever_the_timings() -> None:
    problems = verdict(measured(refused=[0.01], gaps=[0.02], most_sessions=4), 3, [])
    assert len(problems) == 2 * len(SESSION_COUNTERS)
    assert "at 4 x capacity: sessions at the draft: 4 at once, where 3 places are" in problems


def test_what_is_held_lost_or_never_seen_fails() -> None:
    whole = measured(refused=[0.01], gaps=[0.02])
    assert verdict(whole, 3, ["target at h:1: 1 sessions"]) == ["still in use: target at h:1: 1 sessions"]
    assert verdict(measured(refused=[], gaps=[0.02]), 3, []) == ["nothing is shown: nothing was refused"]
    whole.steps[0].samples.num_offered += 1
    whole.steps[1].watched.num_looks = 0
    whole.steps[1].samples.problems.append("UNKNOWN: why")
    assert verdict(whole, 3, []) == [
        "at 1 x capacity: 3 were offered, 2 have ended",
        "at 4 x capacity: UNKNOWN: why",
        "at 4 x capacity: 3 were offered, 4 have ended",
        "at 4 x capacity: nothing is shown: the counters were never seen",
    ]
