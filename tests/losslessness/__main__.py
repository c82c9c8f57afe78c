"""`python -m tests.losslessness`: run cells, keep what they gave, write the report.

Every cell is kept as soon as it is done; `--resume` runs only what is not there yet.
"""

import argparse
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from tests.losslessness import real, results, toy
from tests.losslessness.cells import CELLS, NUM_TOKENS, WRONG_CELLS, Cell
from tests.losslessness.report import render
from tests.losslessness.results import Outcome

_log = logging.getLogger(__name__)
_ALL = (*CELLS, *WRONG_CELLS)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the report shows what it should, 1 when it does not or a cell broke, 2 for cells that do not exist."""
    options = _parser().parse_args(arguments)
    chosen = [cell for cell in _ALL if cell.name.startswith(tuple(options.only or ("",)))]
    if options.again:
        chosen = [repeat for cell in chosen for repeat in cell.repeats]
    if not chosen:
        names = "\n".join(cell.name for cell in _ALL)
        sys.stderr.write(f"--only {options.only}: no cell's name starts so; there are:\n{names}\n")
        return 2
    if options.resume:
        kept = results.load(options.json)
        done = {name for name, outcome in kept.items() if outcome.num_tokens >= options.tokens}
        chosen = [cell for cell in chosen if cell.name not in done]
    num_broken = 0
    for cell, outcome_of in _run(chosen, options.tokens, options.jobs):
        try:
            outcome = outcome_of()
        except Exception:  # noqa: BLE001 - whatever a cell meets, the others are worth an hour
            _log.exception("%s broke", cell.name)
            num_broken += 1
            continue
        results.save(options.json, {**results.load(options.json), cell.name: outcome})  # parts may run side by side
        sys.stdout.write(f"{cell.name}: smallest p {outcome.smallest_p:.2g}, {outcome.seconds:.0f} s\n")
        sys.stdout.flush()
    report, is_shown = render(results.load(options.json))
    options.out.write_text(report, encoding="utf-8")
    return 0 if is_shown and not num_broken else 1


def _run(cells: Sequence[Cell], num_tokens: int, num_jobs: int) -> Iterator[tuple[Cell, Callable[[], Outcome]]]:
    """Each cell as it is done, and what gives its outcome or raises what broke it; real ones one at a time, first."""
    for cell in cells:
        if cell.model == "real":
            yield cell, lambda cell=cell: results.measure(cell, num_tokens, real.run)  # type: ignore[misc]
    toys = [cell for cell in cells if cell.model == "toy"]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(results.measure, cell, num_tokens, toy.run): cell for cell in toys}
        for done in as_completed(running):
            yield running[done], done.result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.losslessness", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where raw results are kept, and added to")
    parser.add_argument("--out", type=Path, required=True, help="the report")
    parser.add_argument("--only", action="append", help="cells whose name starts so, e.g. real:block; repeatable")
    parser.add_argument(
        "--again", action="store_true", help="run the repeats of these cells, with other seeds, instead"
    )
    parser.add_argument("--resume", action="store_true", help="leave out cells that are there with so many tokens")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of a cell")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="toy cells at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
