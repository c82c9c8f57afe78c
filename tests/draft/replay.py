"""Rounds of greedy decoding without a model: drafts are held against tokens that were recorded once.

`python -m tests.draft.replay` prints the table of docs/proposers/suffix.md.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from draft_service.proposers.base import ProposeInput, Proposer, SessionKey
from draft_service.proposers.registry import load_proposer
from engine.bench_report import table
from tests.draft.support import make_spec
from tests.every_proposer import own_options

FIXTURES = Path(__file__).parents[1] / "fixtures"
WIDTHS = (4, 16)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt, and the target's greedy tokens after it."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the drafts."""

    num_rounds: int
    num_draft_tokens: int
    num_accepted: int

    @property
    def cells(self) -> list[str]:
        """Mean acceptance length, drafts a round, acceptance rate."""
        return [
            f"{1 + self.num_accepted / self.num_rounds:.2f}",
            f"{self.num_draft_tokens / self.num_rounds:.2f}",
            f"{self.num_accepted / self.num_draft_tokens:.0%}",
        ]


def replay(proposer: Proposer, recorded: Sequence[Recorded], num_draft_tokens: int) -> Replayed:
    """One session after the other, each to its recorded end."""
    num_rounds = num_drafted = num_accepted = 0
    for number, record in enumerate(recorded):
        key, spec = SessionKey(number), make_spec(record.prompt_ids, max_tokens=len(record.token_ids))
        num_out = 0
        while num_out < len(record.token_ids):
            drafts = _drafts(proposer, ProposeInput(key, spec, _committed(record, num_out), num_draft_tokens))
            right = record.token_ids[num_out : num_out + len(drafts)]
            accepted = next(
                (index for index, pair in enumerate(zip(drafts, right, strict=False)) if pair[0] != pair[1]),
                len(right),
            )
            num_rounds, num_drafted, num_accepted = (
                num_rounds + 1,
                num_drafted + len(drafts),
                num_accepted + accepted,
            )
            num_out += accepted + 1
        proposer.forget(key)
    return Replayed(num_rounds, num_drafted, num_accepted)


def _committed(record: Recorded, num_out: int) -> tuple[int, ...]:
    return (*record.prompt_ids, *record.token_ids[:num_out])


def _drafts(proposer: Proposer, item: ProposeInput) -> Sequence[int]:
    """As many as can be of use: the last token of an answer is always the target's own."""
    num_useful = min(item.num_draft_tokens, item.spec.max_len - len(item.committed_token_ids) - 1)
    if num_useful < 1:
        return ()
    (proposal,) = proposer.propose(
        [ProposeInput(item.session_key, item.spec, item.committed_token_ids, num_useful)]
    )
    assert proposal is not None
    return proposal.draft_token_ids


def chat() -> list[Recorded]:
    """40 prompts of Spec-Bench in the demo model's chat template, at most 96 tokens each."""
    cases = json.loads((FIXTURES / "greedy_smollm2_135m.json").read_text())["prompts"]
    return [Recorded(case["prompt_ids"], case["token_ids"]) for case in cases]


def code() -> list[Recorded]:
    """The demo's prompt, 160 tokens."""
    case = json.loads((FIXTURES / "greedy_code_smollm2_135m.json").read_text())
    return [Recorded(case["prompt_ids"], case["token_ids"])]


TEXTS: Mapping[str, Callable[[], list[Recorded]]] = MappingProxyType(
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
            *replay(load_proposer(way.split()[0], own_options(*arguments)), recorded(), width).cells,
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
