"""`python -m loadtest.speculation`: tokens a second with drafts over those without, through all services, and where
the time of a round goes.

One request at a time. Every prompt is answered without drafts and with them, A B A B, by the same services; each pair
gives one ratio, and all answers of a prompt must have the same tokens, or there is no report. Model services compute
with one thread each, nothing is pinned, and there is no prefix cache, so no answer finds what another has computed.
Tokens a second are counted from an answer's first token on; the time of a round is the whole answer's over its rounds,
so the prompt's forward, part of the first verification, is in it.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench_report import machine_lines, quartiles, table
from loadtest.churn.requests import spec_bench_prompts
from tandem.client import GenerateOptions, GenerationResult, Prompt, SyncTandemClient
from tandem.cluster_options import ClusterChoice, OptionError, PassedOptions
from tandem.processes import LocalCluster, ServiceStartError
from tandem.serving.options import make_parser, positive_int


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds of a round, means over an answer's rounds.

    `compute` and `queue` as the services measured them, `wire` what the orchestrator waited beyond that.
    """

    whole: float
    draft_compute: float
    draft_queue: float
    draft_wire: float
    verify_compute: float
    verify_queue: float
    verify_wire: float

    @classmethod
    def of(cls, answer: GenerationResult) -> "Round":
        """Of the answer's rounds."""
        figures = answer.speculation

        def mean_ms(total_us: float) -> float:
            return total_us / 1e3 / figures.num_rounds

        draft, verify = figures.draft_timing, figures.verify_timing
        return cls(
            whole=mean_ms(1e6 * (answer.time_to_first_token_s + answer.generation_s)),
            draft_compute=mean_ms(draft.compute_us),
            draft_queue=mean_ms(draft.queue_us),
            draft_wire=mean_ms(1e6 * figures.draft_wait_s - draft.compute_us - draft.queue_us),
            verify_compute=mean_ms(verify.compute_us),
            verify_queue=mean_ms(verify.queue_us),
            verify_wire=mean_ms(1e6 * figures.verify_wait_s - verify.compute_us - verify.queue_us),
        )

    @property
    def rest(self) -> float:
        """At the orchestrator, outside its waits."""
        return self.whole - sum(value for name, value in self.parts() if name != "whole")

    def parts(self) -> Iterator[tuple[str, float]]:
        """Names and values as measured."""
        for name in self.__slots__:
            yield name, getattr(self, name)


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt without drafts and with them."""

    plain: GenerationResult
    drafted: GenerationResult

    @property
    def ratio(self) -> float:
        """Tokens a second with drafts over those without."""
        assert self.plain.tokens_per_second is not None
        assert self.drafted.tokens_per_second is not None
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


class DifferentAnswerError(Exception):
    """Drafts changed an answer."""


def measure(
    client: SyncTandemClient, prompts: Sequence[Prompt], options: GenerateOptions, num_pairs: int
) -> list[Pair]:
    """`num_pairs` of every prompt whose answer has more than one round; the first prompt once more, uncounted."""
    pairs = []
    for number, prompt in enumerate([prompts[0], *prompts]):
        both = [GenerateOptions(**{**options, "speculation": drafts}) for drafts in (False, True)]
        for _ in range(num_pairs):
            plain, drafted = (client.complete(prompt, **one) for one in both)
            if plain.token_ids != drafted.token_ids:
                raise DifferentAnswerError(
                    f"{prompt!r}: {plain.token_ids} without drafts, {drafted.token_ids} with"
                )
            if number > 0 and plain.tokens_per_second and drafted.tokens_per_second:
                pairs.append(Pair(plain, drafted))
    return pairs


def report(title: str, pairs: Sequence[Pair], machine: Sequence[str]) -> str:
    """The page; `title` says what ran."""
    ratios = [pair.ratio for pair in pairs]
    lengths = [pair.drafted.num_completion_tokens / pair.drafted.speculation.num_rounds for pair in pairs]
    speeds = [
        [pair.plain.tokens_per_second or 0.0 for pair in pairs],
        [pair.drafted.tokens_per_second or 0.0 for pair in pairs],
    ]
    rounds = [[Round.of(pair.plain) for pair in pairs], [Round.of(pair.drafted) for pair in pairs]]
    names = [name for name, _ in rounds[0][0].parts()] + ["rest"]
    rows = [
        [
            label,
            quartiles(speed, 1),
            *(f"{statistics.median(getattr(one, name) for one in of):.2f}" for name in names),
        ]
        for label, speed, of in zip(("off", "on"), speeds, rounds, strict=True)
    ]
    header = ["drafts", "tokens/s", *(name.replace("_", ", ") for name in names)]
    return "\n".join(
        [
            "# Speculation, end to end",
            "",
            *(__doc__ or "").strip().splitlines(),
            "",
            title,
            *machine,
            "",
            f"**With drafts over without, median of {len(pairs)} pairs: {quartiles(ratios)}**; least "
            f"{min(ratios):.2f}, most {max(ratios):.2f}. Tokens a target pass: {quartiles(lengths)}. All answers were "
            "the same.",
            "",
            "Median (first to third quartile) of tokens a second, and median ms of a round:",
            "",
            *table(header, rows),
            "",
            "`compute` and `queue` are what the services measured, `wire` what the orchestrator waited beyond that,",
            "`rest` its own time and the application's.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the services, measure, write; 1 when drafts changed an answer."""
    parser = make_parser("python -m loadtest.speculation", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target: a name, a directory or a .gguf file")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--proposer", default="eagle", help="whose drafts")
    parser.add_argument("--head", help="of the proposer, if it needs one")
    parser.add_argument("--drafts", type=positive_int, default=4, metavar="K", help="most of a round")
    parser.add_argument("--prompts", type=positive_int, default=12, help="of Spec-Bench, in the chat template")
    parser.add_argument("--pairs", type=positive_int, default=2, help="of every prompt")
    parser.add_argument("--max-tokens", type=positive_int, default=96, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 with seed 1")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    choice = ClusterChoice(
        options.model,
        options.dtype,
        draft_model=None,
        prompt_lookup=True,
        num_draft_tokens=options.drafts,
        threads=1,
        passed=PassedOptions(prefix_cache=False),
        proposer=options.proposer,
        head=options.head,
    )
    prompts = [[{"role": "user", "content": text}] for text in spec_bench_prompts()[: options.prompts]]
    asked = GenerateOptions(max_tokens=options.max_tokens, temperature=options.temperature, seed=1)
    try:
        with (
            LocalCluster(choice.plan(), quiet=True) as cluster,
            SyncTandemClient(cluster.addresses["orchestrator"]) as client,
        ):
            pairs = measure(client, prompts, asked, options.pairs)
    except (DifferentAnswerError, OptionError, ServiceStartError) as error:
        sys.stderr.write(f"speculation: {error}\n")
        return 1
    proposer = f"`{options.proposer}`" + (f" with {options.head}" if options.head else "")
    title = (
        f"Proposer {proposer}, at most {options.drafts} drafts a round; target {options.model}, {options.dtype}; "
        f"{options.prompts} chat prompts of Spec-Bench, at most {options.max_tokens} tokens, "
        f"temperature {options.temperature:g}."
    )
    text = report(title, pairs, machine_lines())
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
