"""`python -m loadtest.saturation`: whether speculation costs tokens a second once many users share the target.

So many users at a time, each with a request of its own, all begun at once, until the last answer has ended. Every such
wave is run without drafts, with as many drafts as the server chooses (which is fewer the more users there are), and
with a fixed number of drafts a round, in turn, A B C A B C; each turn gives a ratio to its run without drafts. All
three must give every request the same tokens, or there is no report. Model services compute with one thread each,
nothing is pinned, and there is no prefix cache, so that no answer finds what another has computed.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.bench_report import machine_lines, quartiles, table
from loadtest.churn.requests import spec_bench_prompts
from loadtest.percentiles import percentile
from loadtest.versions import versions_line
from tandem.client import GenerateOptions, GenerationResult, TandemClient
from tandem.cluster_options import ClusterChoice, PassedOptions
from tandem.defaults import NUM_DRAFT_TOKENS
from tandem.processes import LocalCluster
from tandem.serving.options import make_parser, positive_int

USERS = (1, 4, 16, 64)
WAYS: dict[str, GenerateOptions] = {
    "none": {"speculation": False},
    "the server's choice": {},
    f"always {NUM_DRAFT_TOKENS}": {"num_draft_tokens": NUM_DRAFT_TOKENS},
}


@dataclass(slots=True)
class Waves:
    """Of one number of users, in one way."""

    speeds: list[float] = field(default_factory=list)  # tokens a second, one a wave
    first_s: list[float] = field(default_factory=list)  # to the first token, one an answer
    num_drafts: int = 0
    num_rounds: int = 0

    def add(self, answers: Sequence[GenerationResult], elapsed_s: float) -> None:
        """One wave."""
        self.speeds.append(sum(len(answer.token_ids) for answer in answers) / elapsed_s)
        self.first_s += [answer.time_to_first_token_s for answer in answers]
        self.num_drafts += sum(answer.speculation.num_draft_tokens for answer in answers)
        self.num_rounds += sum(answer.speculation.num_rounds for answer in answers)


class DifferentAnswerError(Exception):
    """Drafts changed an answer."""


def _asked(user: int, max_tokens: int) -> GenerateOptions:
    return {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.8 * (user % 2), "seed": user}


async def measure(client: TandemClient, num_users: int, num_turns: int, max_tokens: int) -> dict[str, Waves]:
    """By way; one uncounted turn first."""
    prompts = spec_bench_prompts()
    ways = {way: Waves() for way in WAYS}
    for turn in range(num_turns + 1):
        known: list[tuple[int, ...]] | None = None
        for way, options in WAYS.items():
            started = time.monotonic()
            answers = await asyncio.gather(
                *(
                    client.complete(
                        [{"role": "user", "content": prompts[user % len(prompts)]}],
                        **GenerateOptions(**{**_asked(user, max_tokens), **options}),
                    )
                    for user in range(num_users)
                )
            )
            elapsed_s = time.monotonic() - started
            tokens = [answer.token_ids for answer in answers]
            if known not in (None, tokens):
                raise DifferentAnswerError(f"{num_users} users: drafts ({way}) changed an answer")
            known = tokens
            if turn:
                ways[way].add(answers, elapsed_s)
    return ways


def report(title: str, levels: dict[int, dict[str, Waves]]) -> str:
    """The page."""
    rows = []
    for num_users, ways in levels.items():
        plain = ways["none"].speeds
        for way, waves in ways.items():
            ratios = [speed / other for speed, other in zip(waves.speeds, plain, strict=True)]
            rows.append(
                [
                    str(num_users),
                    way,
                    quartiles(waves.speeds, 1),
                    quartiles(ratios),
                    f"{waves.num_drafts / waves.num_rounds:.2f}",
                    f"{percentile(waves.first_s, 50):.2f}",
                    f"{percentile(waves.first_s, 99):.2f}",
                ]
            )
    header = ["users", "drafts", "tokens/s", "over none", "drafts a round", "first token, p50 s", "p99 s"]
    return "\n".join(
        [
            "# Speculation at saturation",
            "",
            *(__doc__ or "").strip().splitlines(),
            "",
            title,
            *machine_lines(),
            versions_line(),
            "",
            "Tokens a second of all users together, and their ratio to no drafts: median of the turns (first to third",
            "quartile). All answers were the same in all three ways.",
            "",
            *table(header, rows),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the services, measure, write; 1 when drafts changed an answer."""
    parser = make_parser("python -m loadtest.saturation", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target: a name, a directory or a .gguf file")
    parser.add_argument("--proposer", default="eagle", help="whose drafts")
    parser.add_argument("--head", default="smollm2-135m-eagle", help="of the proposer")
    parser.add_argument("--turns", type=positive_int, default=3, help="of every number of users")
    parser.add_argument("--max-tokens", type=positive_int, default=48, help="of an answer")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    choice = ClusterChoice(
        options.model,
        "float32",
        draft_model=None,
        prompt_lookup=True,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        threads=1,
        passed=PassedOptions(prefix_cache=False),
        proposer=options.proposer,
        head=options.head,
    )

    async def levels(address: str) -> dict[int, dict[str, Waves]]:
        async with TandemClient(address) as client:
            return {users: await measure(client, users, options.turns, options.max_tokens) for users in USERS}

    try:
        with LocalCluster(choice.plan(), quiet=True) as cluster:
            measured = asyncio.run(levels(cluster.addresses["orchestrator"]))
    except DifferentAnswerError as error:
        sys.stderr.write(f"saturation: {error}\n")
        return 1
    title = (
        f"Proposer `{options.proposer}` with {options.head}; target {options.model}, float32; chat prompts of "
        f"Spec-Bench, {options.max_tokens} tokens an answer, every other one greedy, the others sampled at 0.8; "
        f"{options.turns} turns after one uncounted."
    )
    text = report(title, measured)
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
