"""The cells: every verification policy with every kind of drafts, and rules that are wrong on purpose.

Seeds are fixed here, before anything runs: request n of a cell has the seed `cell.seed + n`, and v of the transform
is drawn from `cell.seed`. A run of all cells begun anew gets other seeds by its number, and the one before is kept.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from tandem.client import GenerateOptions
from tandem.types import DraftProbsTransport, VerificationPolicy
from tests import every_proposer
from tests.losslessness.answers import Request

Model = Literal["toy", "real"]

COUPLED, REJECTION, BLOCK = VerificationPolicy.COUPLED, VerificationPolicy.REJECTION, VerificationPolicy.BLOCK
ONE_HOT, SPARSE, FULL = DraftProbsTransport.ONE_HOT, DraftProbsTransport.SPARSE, DraftProbsTransport.FULL
RATIO_TRANSPORTS = (ONE_HOT, SPARSE, FULL)
RUN = 2  # docs/reports/losslessness_run1.md is the first
FAMILY_ALPHA = 0.05  # the chance that any test of a lossless system fails
NUM_TOKENS = 100_000  # of a cell
NUM_REPEATS = 10
TIMEOUT_S = 600.0  # of a request: nothing waits for ever

# What the requests of a cell ask for, in turn; numbers that float32 holds, which is what travels.
MIXES: Mapping[str, tuple[GenerateOptions, ...]] = MappingProxyType(
    {
        "past EOS": ({"ignore_eos": True},),
        "to EOS": ({},),
        "no EOS yet": ({"min_tokens": 48},),
        "past EOS and to EOS": ({"ignore_eos": True}, {}),
        "processors": (
            {"top_p": 0.875, "min_tokens": 6},
            {"top_k": 12, "temperature": 1.5, "presence_penalty": 0.75, "min_tokens": 12},
            {"min_p": 0.03125, "frequency_penalty": 1.25, "logit_bias": {7: 2.0, 12: -3.0}, "ignore_eos": True},
            {"temperature": 0.75, "repetition_penalty": 1.5, "logit_bias": {63: 3.0}, "min_tokens": 9},
            {"top_p": 0.75, "top_k": 30, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "min_tokens": 3},
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination; its name says all of it."""

    model: Model
    policy: VerificationPolicy
    drafts: str  # a registered proposer, or one of adversaries.py
    transport: DraftProbsTransport
    mix: str = "past EOS"  # of MIXES
    num_draft_tokens: int = 3
    max_tokens: int = 64
    rule: str | None = None  # of wrong_rules.py, in force instead of the right one
    repeat: int = 0  # 1 ..: the same again with other seeds

    @property
    def name(self) -> str:
        """Unique among the cells; results are kept under it."""
        parts = ["wrong" if self.rule else self.model, self.policy.value, self.drafts, self.transport.value]
        name = ":".join([*parts, *([self.rule] if self.rule else []), *([] if self.mix in _PLAIN else [self.mix])])
        return f"{name}#{self.repeat}" if self.repeat else name

    @property
    def repeats(self) -> list["Cell"]:
        """What a cell below its bound is looked at again with; the first figure stays."""
        return [replace(self, repeat=number) for number in range(1, NUM_REPEATS + 1)]

    @property
    def seed(self) -> int:
        """Of request 0; neither cells nor runs share seeds."""
        return zlib.crc32(f"run {RUN}:{self.name}".encode()) << 32

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the result but the weights, as JSON has it."""
        settings = {
            "options": MIXES[self.mix],
            "num_draft_tokens": self.num_draft_tokens,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return dict(json.loads(json.dumps(settings)))

    def request(self, number: int, prompt_ids: tuple[int, ...]) -> Request:
        """Request `number` of the cell."""
        mix = MIXES[self.mix]
        options: GenerateOptions = {
            **mix[number % len(mix)],
            "seed": self.seed + number,
            "max_tokens": self.max_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "verification_policy": self.policy,
            "draft_probs_transport": self.transport,
            "timeout": TIMEOUT_S,
        }
        return Request(prompt_ids, options)


_PLAIN = ("past EOS", "to EOS")  # which of them follows from the rest of the name


def _registered_cells() -> list[Cell]:
    """Every registered proposer under every policy and with every transport of q that it serves."""
    transports = {COUPLED: (DraftProbsTransport.COUPLED,), REJECTION: RATIO_TRANSPORTS, BLOCK: RATIO_TRANSPORTS}
    return [
        Cell("toy", policy, name, transport)
        for name in every_proposer.NAMES
        for policy, usable in transports.items()
        for transport in usable
        if every_proposer.serves(name, policy, transport)
    ]


def _toy_cells() -> list[Cell]:
    coupled, both_ends = DraftProbsTransport.COUPLED, "past EOS and to EOS"
    cells = [*_registered_cells(), *(Cell("toy", COUPLED, drafts, coupled) for drafts in ("reversed", "constant"))]
    cells += [Cell("toy", COUPLED, "random", coupled), Cell("toy", COUPLED, "eos", coupled, both_ends)]
    cells += [Cell("toy", COUPLED, "draft_model", coupled, "processors")]
    for policy in (REJECTION, BLOCK):
        cells += [Cell("toy", policy, "reversed", transport) for transport in (SPARSE, FULL)]
        cells.append(Cell("toy", policy, "constant", ONE_HOT))
        cells += [Cell("toy", policy, "random", transport) for transport in (ONE_HOT, SPARSE)]
        cells += [Cell("toy", policy, "eos", transport, both_ends) for transport in (ONE_HOT, FULL)]
        cells.append(Cell("toy", policy, "draft_model", SPARSE, "processors"))
        cells.append(Cell("toy", policy, "often EOS", SPARSE, "no EOS yet"))
    return cells


def _real_cells() -> list[Cell]:
    common: dict[str, Any] = {"mix": "to EOS", "max_tokens": 256}
    return [
        Cell("real", COUPLED, "ngram", DraftProbsTransport.COUPLED, num_draft_tokens=2, **common),
        Cell("real", REJECTION, "draft_model", SPARSE, **common),
        Cell("real", BLOCK, "draft_model", SPARSE, **common),
    ]


def _wrong_cells() -> list[Cell]:
    rules = [
        (COUPLED, "a draft that differs is followed by a fresh draw"),
        (REJECTION, "rejected drafts are replaced from p"),
        (REJECTION, "residual draws use the draft's noise"),
        (BLOCK, "residual draws use the draft's noise"),
        (BLOCK, "the search ends at the first failure"),
        (BLOCK, "weights are not carried on"),
    ]
    transports = {COUPLED: DraftProbsTransport.COUPLED, REJECTION: SPARSE, BLOCK: SPARSE}
    return [Cell("toy", policy, "draft_model", transports[policy], rule=rule) for policy, rule in rules]


CELLS: tuple[Cell, ...] = (*_real_cells(), *_toy_cells())
WRONG_CELLS: tuple[Cell, ...] = tuple(_wrong_cells())
ALPHA = FAMILY_ALPHA / (4 * len(CELLS))  # of one test: Bonferroni, four tests a cell
