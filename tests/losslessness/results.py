"""What a cell gave, as it is kept: raw bin counts and everything they were got with."""

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

from engine.bench_report import cpu_name
from tandem.rng import F64
from tests.losslessness.answers import Answer
from tests.losslessness.cells import CELLS, WRONG_CELLS, Cell
from tests.losslessness.statistics import ChiSquare, bins_of_numbers, bins_of_pairs
from tests.losslessness.transform import ORDERS

_log = logging.getLogger(__name__)

MAX_FALLBACK_SHARE = 0.01  # of the rounds
TESTS = tuple(f"{kind} by {order}" for order in ORDERS for kind in ("tokens", "pairs"))


class CellError(Exception):
    """A run that did not test what its cell says; the message names both."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell's result; `counts` by the names of `TESTS`."""

    settings: dict[str, Any]
    num_tokens: int  # that were tested: the first of all answers'
    num_answers: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted: int
    num_fallback_rounds: int  # that went without the draft service
    counts: dict[str, list[int]]
    seconds: float
    date: str
    environment: str

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.num_accepted / self.num_draft_tokens

    @property
    def tests(self) -> dict[str, ChiSquare]:
        """By the names of `TESTS`."""
        return {name: ChiSquare(tuple(self.counts[name])) for name in TESTS}

    @property
    def smallest_p(self) -> float:
        """Of all tests."""
        return min(test.p_value for test in self.tests.values())


def measure(cell: Cell, num_tokens: int, run: Callable[[Cell, int], tuple[list[Answer], F64]]) -> Outcome:
    """Run a cell; CellError when what ran was something else."""
    started = time.monotonic()
    answers, numbers = run(cell, num_tokens)
    check_answers(cell, answers)
    figures = [answer.result.speculation for answer in answers]
    tests = [test(row) for row in numbers for test in (bins_of_numbers, bins_of_pairs)]
    return Outcome(
        settings=cell.settings,
        num_tokens=numbers.shape[1],
        num_answers=len(answers),
        num_rounds=sum(figure.num_rounds for figure in figures),
        num_draft_tokens=sum(figure.num_draft_tokens for figure in figures),
        num_accepted=sum(figure.num_accepted for figure in figures),
        num_fallback_rounds=sum(figure.num_fallback_rounds for figure in figures),
        counts={name: list(test.counts) for name, test in zip(TESTS, tests, strict=True)},
        seconds=round(time.monotonic() - started, 1),
        date=date.today().isoformat(),
        environment=environment(),
    )


def check_answers(cell: Cell, answers: Sequence[Answer]) -> None:
    """CellError unless the answers were made as the cell says, and the draft service had its part in them."""
    for answer in answers:
        result = answer.result
        if (result.verification_policy, result.draft_probs_transport) != (cell.policy, cell.transport):
            raise CellError(
                f"{cell.name}: request {result.request_id} ran under {result.verification_policy} with "
                f"{result.draft_probs_transport}, not {cell.policy} with {cell.transport}"
            )
    figures = [answer.result.speculation for answer in answers]
    num_rounds = sum(figure.num_rounds for figure in figures)
    num_alone = sum(figure.num_fallback_rounds for figure in figures)
    if num_alone > num_rounds * MAX_FALLBACK_SHARE:
        raise CellError(f"{cell.name}: {num_alone} of {num_rounds} rounds went without the draft service")
    if not any(figure.num_draft_tokens for figure in figures):
        raise CellError(f"{cell.name}: nothing was drafted in {len(answers)} answers")


def environment() -> str:
    """The machine by its processor, and the versions that compute."""
    return (
        f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {numpy.__version__}, scipy {scipy.__version__}"
    )


def load(path: Path) -> dict[str, Outcome]:
    """The outcomes in the file by cell name, of cells that are still what they were; none without a file.

    Others are named in a warning.
    """
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = [*CELLS, *WRONG_CELLS, *(repeat for cell in CELLS for repeat in cell.repeats)]
    settings = {cell.name: cell.settings for cell in cells}
    changed = [name for name, fields in kept.items() if fields["settings"] != settings.get(name)]
    if changed:
        _log.warning("%s: left out, since these cells are gone or have changed: %s", path, ", ".join(changed))
    return {name: Outcome(**fields) for name, fields in kept.items() if name not in changed}


def save(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Write all outcomes, a cell a line; a crash leaves the file as it was before."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(outcomes[name]))}" for name in sorted(outcomes)]
    beside = path.with_suffix(".tmp")
    beside.write_text('{"cells": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    beside.replace(path)
