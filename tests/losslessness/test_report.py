"""The verdict follows from the outcomes, and outcomes survive a crash but not a change of their cell."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.losslessness import results
from tests.losslessness.cells import CELLS, NUM_TOKENS, WRONG_CELLS, Cell
from tests.losslessness.report import render
from tests.losslessness.results import TESTS, CellError, Outcome, check_answers

NUM_BINS = {"tokens": 50, "pairs": 49}


def outcome(cell: Cell, excess: int = 0, num_tokens: int = NUM_TOKENS) -> Outcome:
    """Even counts, but for `excess` tokens in the first bin of the last test."""
    counts = {name: [1000] * NUM_BINS[name.split()[0]] for name in TESTS}
    counts[TESTS[-1]][0] += excess
    return Outcome(
        settings=cell.settings,
        num_tokens=num_tokens,
        num_answers=10,
        num_rounds=5000,
        num_draft_tokens=9000,
        num_accepted=4500,
        num_fallback_rounds=0,
        counts=counts,
        seconds=60.0,
        date="2030-01-02",
        environment="a processor",
    )


@pytest.fixture
def outcomes() -> dict[str, Outcome]:
    """As they should be."""
    wrong = {cell.name: outcome(cell, excess=500) for cell in WRONG_CELLS}
    return {**{cell.name: outcome(cell) for cell in CELLS}, **wrong}


def test_lossless_when_no_cell_fails_and_every_wrong_rule_is_found(outcomes: dict[str, Outcome]) -> None:
    report, is_shown = render(outcomes)
    assert is_shown
    assert "Verdict: **lossless**" in report
    assert "50.0%" in report
    assert all(cell.rule in report for cell in WRONG_CELLS if cell.rule)


@pytest.mark.parametrize("problem", ["fails", "has not been run", "tokens only", "is not found"])
def test_one_cell_that_is_not_as_it_should_be_is_named_and_decides(
    outcomes: dict[str, Outcome], problem: str
) -> None:
    cell = WRONG_CELLS[0] if problem == "is not found" else CELLS[5]
    changed = {
        "fails": outcome(cell, excess=500),
        "tokens only": outcome(cell, num_tokens=NUM_TOKENS - 1),
        "is not found": outcome(cell),
    }
    del outcomes[cell.name]
    if problem in changed:
        outcomes[cell.name] = changed[problem]
    report, is_shown = render(outcomes)
    assert not is_shown
    assert "Verdict: **not shown**" in report
    (line,) = [line for line in report.splitlines() if line.startswith("- `")]
    assert cell.name in line
    assert problem in line


def test_repeats_are_told_and_do_not_undo_a_failure(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    cell = CELLS[5]
    outcomes[cell.name] = outcome(cell, excess=500)
    outcomes |= {repeat.name: outcome(repeat) for repeat in cell.repeats[:3]}
    results.save(tmp_path / "results.json", outcomes)
    report, is_shown = render(results.load(tmp_path / "results.json"))
    assert not is_shown
    assert f"`{cell.name}` fails" in report
    assert "3 of 10 repeats made" in report
    assert "300,000 tokens: tokens by p" in report
    assert len({repeat.seed for repeat in cell.repeats} | {cell.seed}) == 11


def test_outcomes_are_kept_as_they_are(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert results.load(path) == {}
    results.save(path, outcomes)
    assert results.load(path) == outcomes
    assert len(path.read_text().splitlines()) == len(outcomes) + 2


def test_an_outcome_of_a_cell_that_has_changed_is_left_out_and_named(
    outcomes: dict[str, Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = CELLS[3].name
    changed = {**outcomes, name: replace(outcomes[name], settings={**outcomes[name].settings, "max_tokens": 65})}
    results.save(tmp_path / "results.json", changed)
    assert results.load(tmp_path / "results.json").keys() == outcomes.keys() - {name}
    assert name in caplog.text


def test_answers_that_show_nothing_do_not_count() -> None:
    with pytest.raises(CellError, match="nothing was drafted"):
        check_answers(CELLS[0], [])
