"""`tandem bench sampling`: what deciding a verification costs, beside the forward of the real model that it follows.

A is the forward: 8 requests, each with its last committed token and 4 drafts, 40 rows of logits. B is all that the
target does with these rows before it has verdicts: checks, processors, policy. They alternate A B A B, so whatever
else the machine does meets both; each pair gives one ratio. Every draft is accepted, which is the most that `coupled`
can cost: no row goes unsampled. The ratio tests then compute p at every draft's row, and `block` the residuals too.
The committed tokens were sampled by the model itself. There is no model at V = 151,936: its rows are normal noise
with the spread of the real logits, and only B is timed.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.backends.torch_loading import load_torch_engine
from engine.bench_report import machine_lines, quartiles, table
from engine.models.config import LoadedModel, ModelFileError
from engine.models.loading import load_model
from engine.sampling.policies import VerifyRows
from engine.sampling.processors import needs_no_logits
from engine.sampling.sampler import finite_argmax
from tandem.models import ModelNotFoundError, resolve_model
from tandem.serving.options import make_parser
from tandem.types import Verdict, VerificationPolicy
from target_service.sampling_workload import NUM_DRAFTS, Case, accepted_requests, all_cases, sampled_contexts
from target_service.verifier import decide_argmax, decide_each, decide_logits

BATCH_SIZE = 8
WIDE_VOCAB_SIZE = 151_936
BOUND = 0.08  # of the forward, for `coupled` without filters on the most threads measured
_BOUND_CASE = Case(VerificationPolicy.COUPLED, "none")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one case in milliseconds, pair by pair; `wide_ms` at V = 151,936."""

    case: Case
    forward_ms: tuple[float, ...]
    sampling_ms: tuple[float, ...]
    wide_ms: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Sampling over forward, pair by pair."""
        return [b / a for a, b in zip(self.forward_ms, self.sampling_ms, strict=True)]


@dataclass(frozen=True, slots=True)
class Section:
    """All cases on one number of threads, and what the machine was meanwhile."""

    num_threads: int
    machine: list[str]
    measurements: list[Measurement]


class Workload:
    """A verification by a loaded model, and rows of a wide vocabulary for the same requests."""

    def __init__(self, model: LoadedModel, context_len: int) -> None:
        self._context_len = context_len
        rows = context_len + NUM_DRAFTS
        self._engine = load_torch_engine(model, num_blocks=BATCH_SIZE * -(-rows // 16), max_context=rows)
        self._inputs, self._contexts = sampled_contexts(self._engine, BATCH_SIZE, context_len)
        self._logits = self._engine.forward_per_position_logits(self._inputs)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((self._logits.shape[0], WIDE_VOCAB_SIZE), generator=generator)
        self._wide_logits = noise * self._logits.std()

    def measure(self, case: Case, runs: int) -> Measurement:
        """`runs` pairs after one that is not counted. AssertionError unless every draft stands."""
        requests = accepted_requests(case, self._logits, self._contexts)
        wide_requests = accepted_requests(case, self._wide_logits, self._contexts)
        times = [
            (self._forward_ms(), decision_ms(self._logits, requests), decision_ms(self._wide_logits, wide_requests))
            for _ in range(runs + 1)
        ][1:]
        forward_ms, sampling_ms, wide_ms = zip(*times, strict=True)
        return Measurement(case, forward_ms, sampling_ms, wide_ms)

    def _forward_ms(self) -> float:
        for sequence_input in self._inputs:
            self._engine.truncate(sequence_input.sequence_id, self._context_len - 1)
        start = time.perf_counter()
        self._engine.forward_per_position_logits(self._inputs)
        return (time.perf_counter() - start) * 1e3


def decision_ms(logits: torch.Tensor, requests: Sequence[VerifyRows]) -> float:
    """The time from raw rows [T, V] to verdicts, as the verifier spends it; AssertionError for a rejected draft."""
    rows = logits.clone()  # processing overwrites them
    if all(needs_no_logits(request.spec, request.row(0).output_len) for request in requests):
        start = time.perf_counter()
        verdicts = decide_each(finite_argmax(rows), requests, partial(decide_argmax, batch_rows=rows.shape[0]))
    else:
        start = time.perf_counter()
        verdicts = decide_each(rows, requests, partial(decide_logits, batch_rows=rows.shape[0]))
    elapsed_ms = (time.perf_counter() - start) * 1e3
    for verdict in verdicts:
        assert isinstance(verdict, Verdict), verdict
        assert verdict.num_accepted == NUM_DRAFTS, f"{verdict.num_accepted} of {NUM_DRAFTS} drafts stand"
    return elapsed_ms


def bench_sampling(model: LoadedModel, threads: Sequence[int], runs: int, context_len: int) -> list[Section]:
    """Every case on each number of threads."""
    workload = Workload(model, context_len)
    sections = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        measurements = [workload.measure(case, runs) for case in all_cases()]
        sections.append(Section(num_threads, machine_lines(), measurements))
    return sections


def render_report(sections: Sequence[Section], name: str, runs: int, context_len: int) -> str:
    """Markdown: method, verdict, and a table with the machine for each number of threads."""
    most = max(sections, key=lambda section: section.num_threads)
    bound_case = next(m for m in most.measurements if m.case == _BOUND_CASE)
    share = statistics.median(bound_case.ratios)
    verdict = "met" if share <= BOUND else "missed"
    return "\n".join(
        [
            "# Cost of sampling",
            "",
            (__doc__ or "").split("\n\n", 1)[1].strip(),
            "",
            f"Model: {name}, float32. Context {context_len} tokens, {runs} pairs a case after one uncounted pair.",
            "",
            f"Bound: `coupled` without filters at most {BOUND:.0%} of the forward: **{verdict}**; it is {share:.1%} on "
            f"{most.num_threads} threads.",
            *(line for section in sections for line in _section_lines(section)),
            "",
        ]
    )


def _section_lines(section: Section) -> list[str]:
    rows = [
        [
            m.case.policy.value,
            m.case.filters,
            quartiles(m.sampling_ms),
            f"{statistics.median(m.ratios):.1%}",
            quartiles(m.wide_ms),
        ]
        for m in section.measurements
    ]
    forward_ms = [value for m in section.measurements for value in m.forward_ms]
    return [
        "",
        f"## Threads: {section.num_threads}",
        "",
        *section.machine,
        "",
        f"Forward: {quartiles(forward_ms)} ms. Sampling, median (first to third quartile):",
        "",
        *table(["policy", "filters", "ms", "of the forward", f"ms at V = {WIDE_VOCAB_SIZE:,}"], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: measure, write the report, and show it."""
    parser = make_parser("tandem bench sampling", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a pulled name, a model directory or a .gguf file")
    parser.add_argument(
        "--threads", type=int, action="append", help="intra-op threads; repeatable; default: 2 and 1"
    )
    parser.add_argument("--runs", type=int, default=30, help="pairs a case")
    parser.add_argument("--context", type=int, default=256, help="committed tokens of a request")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    try:
        model = load_model(resolve_model(options.model))
    except (ModelNotFoundError, ModelFileError) as error:
        parser.error(str(error))
    sections = bench_sampling(model, options.threads or (2, 1), options.runs, options.context)
    report = render_report(sections, options.model, options.runs, options.context)
    if options.out is not None:
        options.out.write_text(report)
    sys.stdout.write(report)


if __name__ == "__main__":
    main()
