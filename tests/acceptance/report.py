"""`python -m tests.acceptance.report`: what each proposer's drafts are worth on the recorded answers.

Writes docs/reports/acceptance.md, and beside it the counts that tests/acceptance/test_acceptance.py holds drafts to.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from draft_service.limits import DraftLimits
from draft_service.proposers.base import Proposer
from draft_service.proposers.kind import ProposerSettings
from draft_service.proposers.registry import load_proposer
from engine.backends.registry import load_engine
from engine.backends.settings import EngineSettings
from engine.bench_report import table
from tests.acceptance.replay import Counts, StatesOf, replay, states_by
from tests.acceptance.workloads import MODEL, TEMPERATURES, WORKLOADS, recorded
from tests.every_proposer import own_options

NUM_DRAFT_TOKENS = 4
NUM_CHECKED = 6  # answers of a workload and temperature that the tests replay
HEADS_READ = (10, 20, 30)  # layers of the target
REPORTS = Path(__file__).parents[2] / "docs" / "reports"

# A way to draft, and the options that start it; those with --head stand on the demo model.
WAYS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ngram": (),
        "suffix": (),
        "draft_model": ("--head", f"{MODEL}-shallow"),
        "eagle": ("--head", f"{MODEL}-eagle"),
        "mtp": ("--head", f"{MODEL}-mtp"),
    }
)

METHOD = f"""\
The demo model ({MODEL}, float32) answered 40 prompts of Spec-Bench in its chat template ("chat"), and went on with 24
lines of each of twenty files of Python's standard library ("code"), at most 128 tokens an answer, greedily and at
temperature 0.8 with a seed each, without speculation. None of it is in the training text of the drafts. Under `greedy`
and `coupled` drafts change no token, so rounds of at most {NUM_DRAFT_TOKENS} drafts are replayed on these answers: a
draft is accepted while it is the token that came. Proposers that need the target's hidden states have no drafts in the
first round of an answer, as behind the services. Mean acceptance length: tokens a round, the target's own included; in
brackets that of the rounds that had a draft at all, which is what vLLM calls by this name. By position: of the drafts
made there, the share that was accepted."""


def start(name: str) -> Proposer:
    """The proposer of a way, as the command line would start it."""
    options = own_options(*WAYS[name]).options
    engine = EngineSettings(model=MODEL) if WAYS[name] else None
    return load_proposer(name, ProposerSettings(DraftLimits(), engine, options))


def target_states() -> StatesOf:
    """Of the demo model."""
    return states_by(load_engine(EngineSettings(model=MODEL, prefix_cache=False)).engine, HEADS_READ)


def measure(name: str, states_of: StatesOf) -> dict[str, dict[str, dict[str, object]]]:
    """Counts of a way by workload and temperature: of all answers, and of the first few."""
    measured = {}
    for workload in WORKLOADS:
        for temperature in TEMPERATURES:
            counts = list(replay(start(name), recorded(workload, temperature), NUM_DRAFT_TOKENS, states_of))
            measured[f"{workload} at {temperature:g}"] = {
                "all": asdict(Counts().add_all(counts)),
                "checked": asdict(Counts().add_all(counts[:NUM_CHECKED])),
            }
    return measured


def row(name: str, case: str, counts: Counts) -> list[str]:
    """One line of the table."""
    rates = " ".join(f"{rate:.2f}" for rate in counts.rates)
    share = sum(counts.drafted) / counts.num_rounds
    lengths = f"{counts.mean_acceptance_length:.3f} ({counts.mean_length_with_drafts:.3f})"
    return [f"`{name}`", case, lengths, f"{share:.2f}", rates]


def main() -> None:
    """Measure all ways and write."""
    states_of = target_states()
    measured = {name: measure(name, states_of) for name in WAYS}
    rows = [
        row(name, case, Counts(**counts["all"]))  # type: ignore[arg-type]
        for name, cases in measured.items()
        for case, counts in cases.items()
    ]
    header = ["proposer", "answers", "mean acceptance length", "drafts a round", "accepted, by position"]
    text = "\n".join(["# Acceptance", "", METHOD, "", *table(header, rows), ""])
    (REPORTS / "acceptance.md").write_text(text)
    (REPORTS / "acceptance.json").write_text(json.dumps(measured, indent=1) + "\n")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
