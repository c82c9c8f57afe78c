"""Speculation on, off and batched give the same token lists: the runs, for the tests and for the full report.

`python -m tests.e2e.identity --out docs/reports/identity.md` runs everything in full and writes the report.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import tokenizers

from tandem.client import GenerateOptions, GenerationResult, TandemClient
from tandem.types import TokenLogprobs
from tests.e2e.deployment import Deployment, real_model
from tests.identity import models
from tests.identity.conditions import CONDITIONS, OFF, Condition, Request
from tests.identity.conditions import run as run_under

FIXTURE = Path(__file__).parents[1] / "fixtures" / "greedy_smollm2_135m.json"
BATCH = 8


@dataclass(frozen=True)
class Mode:
    """One way to run the same requests."""

    name: str
    drafts: str  # which orchestrator: "ngram" or "self_draft"
    options: GenerateOptions
    concurrency: int = 1

    def happened(self, num_drafted: int, num_accepted: int) -> bool:
        """Whether the mode drafted at all where it should, and a self-draft was accepted in full."""
        if self.options.get("speculation") is False:
            return num_drafted == 0
        return num_drafted > 0 and (num_accepted == num_drafted or self.drafts != "self_draft")


@dataclass
class ModeResult:
    """Token lists of one mode, and what its drafts did."""

    name: str
    token_ids: list[tuple[int, ...]]
    num_drafted: int
    num_accepted: int
    elapsed_s: float
    happened: bool  # the requests did run in the way the name says
    logprobs: Sequence[tuple[TokenLogprobs, ...]] = ()  # of each list, where they were asked for

    @property
    def acceptance(self) -> str:
        return f"{self.num_accepted / self.num_drafted:.1%}" if self.num_drafted else "n/a"


GREEDY_MODES = [
    Mode("off", "ngram", {"speculation": False}),
    Mode("ngram k=4", "ngram", {"num_draft_tokens": 4}),
    Mode("self-draft k=4", "self_draft", {"num_draft_tokens": 4}),
    Mode(f"ngram k=4, {BATCH} at a time", "ngram", {"num_draft_tokens": 4}, BATCH),
    Mode(f"off, {BATCH} at a time", "ngram", {"speculation": False}, BATCH),
]
BF16_MODES = [GREEDY_MODES[0], GREEDY_MODES[1], GREEDY_MODES[3]]
SAMPLED_MODES = [
    Mode("off", "ngram", {"speculation": False}),
    Mode("ngram k=4", "ngram", {"num_draft_tokens": 4}),
    *(Mode(f"self-draft k={k}", "self_draft", {"num_draft_tokens": k}) for k in range(1, 7)),
    Mode(f"self-draft k=4, {BATCH} at a time", "self_draft", {"num_draft_tokens": 4}, BATCH),
]


def load_fixture() -> list[dict[str, list[int]]]:
    """Prompts with transformers' own greedy token ids, recorded once."""
    return list(json.loads(FIXTURE.read_text())["prompts"])


def greedy_requests(num_prompts: int, num_tokens: int) -> list[Request]:
    options = GenerateOptions(temperature=0.0, max_tokens=num_tokens)
    return [Request(case["prompt_ids"], options) for case in load_fixture()[:num_prompts]]


def sampled_requests(num_seeds: int, num_tokens: int) -> list[Request]:
    """One prompt a seed."""
    cases = load_fixture()
    return [
        Request(
            cases[seed]["prompt_ids"],
            GenerateOptions(temperature=0.8, top_p=0.9, seed=seed, max_tokens=num_tokens, ignore_eos=True),
        )
        for seed in range(num_seeds)
    ]


def mixed_requests(num_of_each: int, num_tokens: int) -> list[Request]:
    """Greedy ones and sampled ones; the sampled ones ask for log-probabilities too."""
    sampled = [
        Request(request.prompt, {**request.options, "logprobs": True, "top_logprobs": 2})
        for request in sampled_requests(num_of_each, num_tokens)
    ]
    return [*greedy_requests(num_of_each, num_tokens), *sampled]


def run_mode(mode: Mode, deployment: Deployment, requests: Sequence[Request]) -> ModeResult:
    """Send the requests in order, `mode.concurrency` at a time."""

    async def run() -> list[GenerationResult]:
        slots = asyncio.Semaphore(mode.concurrency)
        async with TandemClient(getattr(deployment, mode.drafts)) as client:

            async def one(request: Request) -> GenerationResult:
                async with slots:
                    return await client.complete(request.prompt, **{**request.options, **mode.options})

            return list(await asyncio.gather(*(one(request) for request in requests)))

    started = time.monotonic()
    results = asyncio.run(run())
    num_drafted = sum(result.speculation.num_draft_tokens for result in results)
    num_accepted = sum(result.speculation.num_accepted for result in results)
    return ModeResult(
        mode.name,
        [result.token_ids for result in results],
        num_drafted,
        num_accepted,
        time.monotonic() - started,
        mode.happened(num_drafted, num_accepted),
    )


def run_conditions(conditions: Sequence[Condition], requests: Sequence[Request]) -> list[ModeResult]:
    """Speculation off first, then each condition, in one process around the demo model in float32."""
    results = []
    for condition in (OFF, *conditions):
        started = time.monotonic()
        ran = asyncio.run(run_under(models.real(), condition, requests))
        results.append(
            ModeResult(
                condition.name,
                ran.token_ids,
                ran.num_drafted,
                ran.num_accepted,
                time.monotonic() - started,
                condition.happened(ran),
                ran.logprobs,
            )
        )
    return results


def _report_section(title: str, results: list[ModeResult], expected: list[tuple[int, ...]]) -> tuple[str, int]:
    """A table of one experiment; how many lists differ, or modes did not run as they should."""
    lines = [
        f"## {title}",
        "",
        "| mode | lists equal | tokens | drafted | acceptance | seconds |",
        "|---|---|---|---|---|---|",
    ]
    num_wrong = 0
    for result in results:
        num_equal = sum(ours == theirs for ours, theirs in zip(result.token_ids, expected, strict=True))
        num_wrong += len(expected) - num_equal + (not result.happened) + (result.logprobs != results[0].logprobs)
        lines.append(
            f"| {result.name} | {num_equal} of {len(expected)} | {sum(map(len, result.token_ids))} "
            f"| {result.num_drafted} | {result.acceptance} | {result.elapsed_s:.0f} |"
        )
    return "\n".join([*lines, ""]), num_wrong


def full_report() -> tuple[str, int]:
    """Run everything in full; the report and the number of failures in it."""
    sections = []
    total_wrong = 0
    greedy = greedy_requests(40, 96)
    recorded = [tuple(case["token_ids"]) for case in load_fixture()]
    with real_model("float32") as deployment:
        results = [run_mode(mode, deployment, greedy) for mode in GREEDY_MODES]
        sections.append(
            _report_section("Greedy, float32, against transformers' recorded tokens", results, recorded)
        )
        sampled = sampled_requests(20, 64)
        results = [run_mode(mode, deployment, sampled) for mode in SAMPLED_MODES]
        title = (
            "Coupled sampling, float32, temperature 0.8, top_p 0.9, 20 seeds x 64 tokens, against speculation off"
        )
        sections.append(_report_section(title, results, results[0].token_ids))
    with real_model("bfloat16") as deployment:
        results = [run_mode(mode, deployment, greedy) for mode in BF16_MODES]
        sections.append(_report_section("Greedy, bfloat16, against speculation off", results, results[0].token_ids))
    results = run_conditions(CONDITIONS, mixed_requests(8, 32))
    title = "Conditions, float32, 8 greedy and 8 sampled requests at once, against each alone with speculation off"
    sections.append(_report_section(title, results, results[0].token_ids))
    head = [
        "# Identity",
        "",
        "Does speculation change any token? Every mode runs the same requests through the three services as separate",
        "processes and is compared token by token. Greedy: 40 prompts of Spec-Bench in the model's chat template, at",
        "most 96 tokens each. The conditions (tests/identity/conditions.py) need proposers, limits and losses that no",
        "command line offers, so their services run in one process; a mode counts only where it is shown that the",
        "condition was there, and log-probabilities of sampled tokens are compared bit for bit. Made by",
        "`make identity` (tests/e2e/identity.py); the tests run a shorter form.",
        "",
        f"Run on {date.today().isoformat()}: SmolLM2-135M-Instruct (Q4_1 weights, dequantised), "
        f"Python {platform.python_version()}, numpy {np.__version__}, tokenizers {tokenizers.__version__}, "
        f"{os.cpu_count()} cores, one thread a model service. Seconds are wall clock of a whole mode, for scale only.",
        "",
    ]
    for text, num_wrong in sections:
        head.append(text)
        total_wrong += num_wrong
    head.append(
        "Lists that differ, in log-probabilities too where asked, and modes that did not run as their names say: "
        f"**{total_wrong}**.\n"
    )
    return "\n".join(head), total_wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    report, wrong = full_report()
    arguments.out.write_text(report)
    sys.stdout.write(report)
    sys.exit(1 if wrong else 0)
