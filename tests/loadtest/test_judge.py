"""The judge of a churn run: what it calls wrong, and which runs show nothing."""

from dataclasses import replace

import pytest

from loadtest.churn.calls import Call, Ending, Fate, Plan, problem_of
from loadtest.churn.judge import Outcome, Tally, verdict
from loadtest.churn.report import report, summary
from loadtest.memory import PROCESS_BYTES, MemoryPlan, MemorySeen
from loadtest.recorded import Recorded

RECORDED = Recorded("Name three colours.", {"temperature": 0.7, "seed": 4711}, "red, green", (7, 8, 9))
GREEDY = replace(RECORDED, options={"temperature": 0.0})
PLANS = {
    Ending.FINISHED: Fate(Plan.FINISH),
    Ending.CANCELLED: Fate(Plan.CANCEL, num_chunks=2),
    Ending.DEADLINE: Fate(Plan.DEADLINE, limit_s=1.0),
    Ending.FAILED: Fate(Plan.FINISH),
}


def ended(ending: Ending, text: str, *token_ids: int, recorded: Recorded = RECORDED) -> Call:
    return Call(1, recorded, PLANS[ending], ending, text=text, token_ids=token_ids, num_chunks=2, num_accepted=1)


def whole_run() -> Outcome:
    """A run with nothing to complain about."""
    tally = Tally()
    for recorded in (RECORDED, GREEDY):
        tally.add(ended(Ending.FINISHED, "red, green", 7, 8, 9, recorded=recorded))
    tally.add(ended(Ending.CANCELLED, "red", 7))
    tally.add(ended(Ending.DEADLINE, ""))
    return Outcome(tally, (), {"requests running": 64}, 0.9, (), 3.0)


def test_the_whole_answer_and_every_beginning_of_it_are_right() -> None:
    assert problem_of(ended(Ending.FINISHED, "red, green", 7, 8, 9)) is None
    for ending in (Ending.CANCELLED, Ending.DEADLINE):
        assert problem_of(ended(ending, "")) is None
        assert problem_of(ended(ending, "red", 7, 8)) is None
        assert problem_of(ended(ending, "red, green", 7, 8, 9)) is None


@pytest.mark.parametrize(
    "call",
    [
        ended(Ending.FINISHED, "red, greet", 7, 8, 9),
        ended(Ending.FINISHED, "red, green", 7, 8, 8),
        ended(Ending.FINISHED, "red", 7, 8),
        ended(Ending.CANCELLED, "reb", 7),
        ended(Ending.CANCELLED, "red", 8),
        ended(Ending.DEADLINE, "red, greens", 7, 8, 9),
        ended(Ending.DEADLINE, "red, green", 7, 8, 9, 10),
    ],
    ids=["text", "tokens", "cut", "no beginning", "other tokens", "more text", "more tokens"],
)
def test_a_wrong_answer_is_told_with_prompt_and_seed(call: Call) -> None:
    problem = problem_of(call)
    assert problem is not None
    assert "Name three colours." in problem
    assert "4711" in problem
    assert repr(call.text) in problem


def test_a_failure_and_a_deadline_that_nobody_set_are_wrong() -> None:
    failed = replace(ended(Ending.FAILED, ""), error="UNAVAILABLE: gone")
    assert "UNAVAILABLE: gone" in str(problem_of(failed))
    unasked = replace(ended(Ending.DEADLINE, "red", 7), fate=Fate(Plan.FINISH))
    assert "met a deadline that it did not have" in str(problem_of(unasked))


def test_a_run_that_shows_everything_passes() -> None:
    assert verdict(whole_run()) == []
    assert "Verdict: **passed**." in summary(whole_run())


def test_resident_memory_past_its_tolerance_is_told_with_both_figures() -> None:
    plan = MemoryPlan(weights=400 << 20, kv_per_token=1024, pool=40 << 20)
    total = 440 * 2**20 + PROCESS_BYTES
    seen = MemorySeen(plan, before=total // 2, most=total * 114 // 100, after=total * 86 // 100, peak=2 * total)
    run = replace(whole_run(), memory=seen)
    assert verdict(run) == []
    assert f"| most under the load, looking five times a second | {seen.most >> 20} | +14.0% |" in report(run, "")
    for name, wrong in {"under": {"most": total * 116 // 100}, "after": {"after": total * 84 // 100}}.items():
        (problem,) = verdict(replace(run, memory=replace(seen, **wrong)))
        assert f"resident memory {name} the load" in problem
        assert f"the {total >> 20} MiB" in problem


@pytest.mark.parametrize(
    ("ending", "recorded", "missing"),
    [
        (Ending.CANCELLED, RECORDED, "a request was cancelled"),
        (Ending.DEADLINE, RECORDED, "a request's deadline passed"),
        (Ending.FINISHED, RECORDED, "a sampled request finished"),
        (Ending.FINISHED, GREEDY, "a greedy request finished"),
    ],
)
def test_a_run_that_lacks_an_ending_does_not_pass(ending: Ending, recorded: Recorded, missing: str) -> None:
    whole, tally = whole_run(), Tally()
    for kind in (Ending.CANCELLED, Ending.DEADLINE):
        if kind is not ending:
            tally.add(ended(kind, "red", 7))
    for answer in (RECORDED, GREEDY):
        if (Ending.FINISHED, answer) != (ending, recorded):
            tally.add(ended(Ending.FINISHED, "red, green", 7, 8, 9, recorded=answer))
    assert verdict(replace(whole, tally=tally)) == [f"nothing is shown: it never happened that {missing}"]


def test_a_run_without_a_draft_or_with_a_large_pool_does_not_pass() -> None:
    whole = whole_run()
    whole.tally.num_accepted = 0
    (undrafted,) = verdict(whole)
    assert undrafted.endswith("a draft was accepted")
    (roomy,) = verdict(replace(whole_run(), kv_usage=0.4))
    assert roomy.endswith("the target's pool was 75% full")


def test_what_hangs_and_what_is_still_in_use_are_told() -> None:
    outcome = replace(whole_run(), hanging=("request 5",), in_use=("target: 1 sessions",))
    assert verdict(outcome) == ["did not end: request 5", "still in use: target: 1 sessions"]
    assert "Verdict: **not passed**." in summary(outcome)
