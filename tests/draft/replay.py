"""What `ngram` and `suffix` draft for greedy texts that were recorded once.

`python -m tests.draft.replay` prints the table of docs/proposers/suffix.md.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draft_service.proposers.registry import load_proposer
from engine.bench_report import table
from tests.acceptance.replay import Answer, Counts, replay
from tests.draft.support import make_spec
from tests.every_proposer import own_options

FIXTURES = Path(__file__).parents[1] / "fixtures"
WIDTHS = (4, 16)


def cells(counts: Counts) -> list[str]:
    """Mean acceptance length, drafts a round, acceptance rate."""
    num_drafted = sum(counts.drafted)
    return [
        f"{counts.mean_acceptance_length:.2f}",
        f"{num_drafted / counts.num_rounds:.2f}",
        f"{sum(counts.accepted) / num_drafted:.0%}",
    ]


def _greedy(case: Mapping[str, Any]) -> Answer:
    return Answer(make_spec(case["prompt_ids"], max_tokens=len(case["token_ids"])), tuple(case["token_ids"]))


def chat() -> list[Answer]:
    """40 prompts of Spec-Bench in the demo model's chat template, at most 96 tokens each."""
    cases = json.loads((FIXTURES / "greedy_smollm2_135m.json").read_text())["prompts"]
    return [_greedy(case) for case in cases]


def code() -> list[Answer]:
    """The demo's prompt, 160 tokens."""
    case = json.loads((FIXTURES / "greedy_code_smollm2_135m.json").read_text())
    return [_greedy(case)]


TEXTS: Mapping[str, Callable[[], list[Answer]]] = MappingProxyType(
    {"code": code, "chat": chat, "chat, twice": lambda: chat() * 2}
)
WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"ngram": (), "suffix": (), "suffix --own-tokens-only": ("--own-tokens-only",)}
)


def rows() -> list[list[str]]:
    """The table's rows."""
    return [
        [
            text,
            str(width),
            f"`{way}`",
            *cells(
                Counts().add_all(replay(load_proposer(way.split()[0], own_options(*arguments)), recorded(), width))
            ),
        ]
        for text, recorded in TEXTS.items()
        for width in WIDTHS
        for way, arguments in WAYS.items()
    ]


def report() -> str:
    """The table."""
    header = ["text", "K", "proposer", "mean acceptance length", "drafts a round", "acceptance rate"]
    return "\n".join(table(header, rows())) + "\n"


if __name__ == "__main__":
    sys.stdout.write(report())
