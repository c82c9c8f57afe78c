"""`tandem bench engine`: an engine step against a bare forward of the same weights, side by side in one run.

A is one step of the native engine: ragged batch, paged memory, compiled kernels, the argmax of every row, and the
rollback of what was drafted. B is `engine/bare_forward.py`. They alternate A B A B, so whatever
else the machine does meets both; each pair gives one ratio.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.backends.base import SequenceInput
from engine.backends.torch_backend import TorchEngine
from engine.backends.torch_loading import DTYPES, load_torch_engine
from engine.bare_forward import BareForward
from engine.bench_report import machine_lines, quartiles, table
from engine.models.config import LoadedModel, ModelFileError
from engine.models.llama import LlamaModel
from engine.models.loading import load_model
from tandem.models import ModelNotFoundError, resolve_model
from tandem.serving.options import make_parser

WIDTHS = (1, 2, 4, 5, 8)  # rows a sequence; 5 is one committed token and four drafts
BATCH_SIZES = (1, 8)
BOUND = 1.2


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one shape in milliseconds, pair by pair."""

    dtype: str
    batch_size: int
    width: int
    engine_ms: tuple[float, ...]
    bare_ms: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Engine over bare, pair by pair."""
        return [a / b for a, b in zip(self.engine_ms, self.bare_ms, strict=True)]


def bench_engine(model: LoadedModel, dtype: str, runs: int, context_len: int) -> list[Measurement]:
    """Every batch size and width, `runs` pairs each after one uncounted pair.

    AssertionError when engine and bare forward do not compute the same logits.
    """
    block_size = 16
    rows = context_len + max(WIDTHS)
    num_blocks = max(BATCH_SIZES) * -(-rows // block_size)
    engine = load_torch_engine(model, dtype, num_blocks=num_blocks, block_size=block_size, max_context=rows)
    return [_measure(engine, size, width, runs, context_len) for size in BATCH_SIZES for width in WIDTHS]


def _measure(engine: TorchEngine, batch_size: int, width: int, runs: int, context_len: int) -> Measurement:
    vocab_size = engine.capabilities.vocab_size
    generator = torch.Generator().manual_seed(width)
    prompts = torch.randint(vocab_size, (batch_size, context_len), generator=generator)
    tokens = torch.randint(vocab_size, (batch_size, width), generator=generator)
    assert isinstance(engine.model, LlamaModel)
    bare = BareForward(engine.model, batch_size, context_len + width)
    bare(prompts, 0)
    sequences = [engine.create() for _ in range(batch_size)]
    engine.advance([SequenceInput(s, p) for s, p in zip(sequences, prompts.tolist(), strict=True)])
    inputs = [SequenceInput(s, t, width) for s, t in zip(sequences, tokens.tolist(), strict=True)]

    def engine_step() -> None:
        engine.forward_per_position_argmax(inputs)
        for sequence in sequences:
            engine.truncate(sequence, context_len)

    def bare_step() -> None:
        bare(tokens, context_len)

    _check_same(engine.forward_per_position_logits(inputs), bare(tokens, context_len).float())
    for sequence in sequences:
        engine.truncate(sequence, context_len)
    pairs = [(_time_ms(engine_step), _time_ms(bare_step)) for _ in range(runs + 1)][1:]
    for sequence in sequences:
        engine.release(sequence)
    engine_ms, bare_ms = zip(*pairs, strict=True)
    return Measurement(engine.capabilities.dtype, batch_size, width, engine_ms, bare_ms)


def _check_same(engine_logits: torch.Tensor, bare_logits: torch.Tensor) -> None:
    """Both compute one function, up to rounding (bfloat16 rounds every activation)."""
    error = (engine_logits - bare_logits).std() / bare_logits.std()
    assert error < 0.1, f"engine and bare forward differ by {error:.3f} of the logits' spread"


def _time_ms(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def render_report(measurements: Sequence[Measurement], name: str, runs: int, context_len: int) -> str:
    """Markdown: method, machine, every shape with its spread, and what four drafted rows cost."""
    shapes = [
        [
            m.dtype,
            str(m.batch_size),
            str(m.width),
            quartiles(m.engine_ms),
            quartiles(m.bare_ms),
            quartiles(m.ratios),
        ]
        for m in measurements
    ]
    medians = {(m.dtype, m.batch_size, m.width): m for m in measurements}
    drafted = [
        [dtype, str(size), *(_drafted_cost(medians, dtype, size, side) for side in ("engine_ms", "bare_ms"))]
        for dtype, size in sorted({(m.dtype, m.batch_size) for m in measurements})
    ]
    worst = max(measurements, key=lambda m: statistics.median(m.ratios))
    worst_ratio = statistics.median(worst.ratios)
    verdict = "met" if worst_ratio <= BOUND else "missed"
    return "\n".join(
        [
            "# Engine step against a bare forward",
            "",
            (__doc__ or "").split("\n\n", 1)[1].strip(),
            "",
            f"Model: {name}. Context {context_len} tokens, {runs} pairs a shape after one uncounted pair.",
            *machine_lines(),
            "",
            f"Bound: median ratio at most {BOUND} for every shape: **{verdict}**; the largest is {worst_ratio:.2f} "
            f"({worst.dtype}, batch {worst.batch_size}, width {worst.width}).",
            "",
            "Median (first to third quartile):",
            "",
            *table(["dtype", "batch", "width", "engine ms", "bare ms", "engine / bare"], shapes),
            "",
            "Cost of four drafted rows, forward(1 + 4 rows) / forward(1 row), of medians:",
            "",
            *table(["dtype", "batch", "engine", "bare"], drafted),
            "",
        ]
    )


def _drafted_cost(by_shape: dict[tuple[str, int, int], Measurement], dtype: str, batch_size: int, side: str) -> str:
    wide, narrow = (statistics.median(getattr(by_shape[dtype, batch_size, width], side)) for width in (5, 1))
    return f"{wide / narrow:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: measure, write the report, and show it."""
    parser = make_parser("tandem bench engine", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a pulled name, a model directory or a .gguf file")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="repeatable; default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="intra-op threads")
    parser.add_argument("--runs", type=int, default=30, help="pairs a shape")
    parser.add_argument("--context", type=int, default=256, help="tokens a sequence has before the step")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        model = load_model(resolve_model(options.model))
    except (ModelNotFoundError, ModelFileError) as error:
        parser.error(str(error))
    measurements = [
        m for dtype in options.dtype or DTYPES for m in bench_engine(model, dtype, options.runs, options.context)
    ]
    report = render_report(measurements, options.model, options.runs, options.context)
    if options.out is not None:
        options.out.write_text(report)
    sys.stdout.write(report)


if __name__ == "__main__":
    main()
