"""`tandem bench draft`: what a draft costs beside a forward of the target with one row a session.

A is the target's forward: its next row of each of B sessions, in this process. B is a propose of the proposer for the
same sessions: catching up with what a round with every draft accepted has committed, then K drafts each. They alternate
A B A B, so whatever else the machine does meets both; each pair gives one ratio, of a draft (a propose divided by K) to
the forward. Greedy sessions; the target's hidden states are made before, and their bytes are part of B's input.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from draft_service.limits import DraftLimits
from draft_service.proposers.base import HiddenStatesNeed, ProposeInput, Proposer, SessionKey
from draft_service.proposers.kind import ProposerError, ProposerSettings
from draft_service.proposers.registry import add_proposer_arguments, load_proposer
from engine.backends.base import EngineError, HiddenCapture, SequenceInput, SpeculativeEngine
from engine.backends.options import add_engine_arguments, engine_settings
from engine.backends.registry import load_engine
from engine.bench_report import machine_lines, quartiles, table
from tandem.serving.options import make_parser, positive_int
from tandem.types import HiddenStates, Proposal, SamplingParams, SessionSpec

BATCH_SIZES = (1, 8)
CONTEXT_LEN = 128  # before the first round
BOUND = 0.12  # of the forward, for a draft


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of one batch size, pair by pair."""

    batch_size: int
    num_drafts: int  # K
    forward_ms: tuple[float, ...]
    propose_ms: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A draft over the forward, pair by pair."""
        pairs = zip(self.forward_ms, self.propose_ms, strict=True)
        return [propose / self.num_drafts / forward for forward, propose in pairs]


class Sessions:
    """B sequences of random tokens at the target, and rounds of them for a proposer."""

    def __init__(
        self, engine: SpeculativeEngine, batch_size: int, num_tokens: int, need: HiddenStatesNeed | None
    ) -> None:
        generator = torch.Generator().manual_seed(batch_size)
        vocab_size = engine.capabilities.vocab_size
        self._engine, self._need = engine, need
        self._tokens: list[list[int]] = torch.randint(
            vocab_size, (batch_size, num_tokens), generator=generator
        ).tolist()
        self._states = [self._states_of(tokens) for tokens in self._tokens]
        self._sequences = [engine.create() for _ in self._tokens]
        for sequence, tokens in zip(self._sequences, self._tokens, strict=True):
            engine.advance([SequenceInput(sequence, tokens[: CONTEXT_LEN - 1])])

    def forward(self) -> None:
        """The target's row of the context's last token, of every session; taken back again."""
        inputs = [
            SequenceInput(sequence, tokens[CONTEXT_LEN - 1 : CONTEXT_LEN], 1)
            for sequence, tokens in zip(self._sequences, self._tokens, strict=True)
        ]
        self._engine.forward_per_position_argmax(inputs)
        for sequence in self._sequences:
            self._engine.truncate(sequence, CONTEXT_LEN - 1)

    def round(self, committed_len: int, num_known_rows: int, num_drafts: int) -> list[ProposeInput]:
        """Every session at so many tokens, of whose rows so many were given before."""
        items = []
        for number, tokens in enumerate(self._tokens):
            spec = SessionSpec(tuple(tokens[:1]), 1, SamplingParams(temperature=0.0, seed=0), len(tokens))
            rows = self._rows(number, num_known_rows, committed_len - 1)
            items.append(ProposeInput(SessionKey(number), spec, tuple(tokens[:committed_len]), num_drafts, rows))
        return items

    def _rows(self, number: int, first: int, end: int) -> tuple[HiddenStates, ...]:
        states = self._states[number]
        if states is None:
            return ()
        return (HiddenStates(first, end - first, states[first:end].view(torch.int16).numpy().tobytes()),)

    def _states_of(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Bfloat16 [tokens, L, E]."""
        if self._need is None:
            return None
        sequence, capture = self._engine.create(), HiddenCapture(self._need.layers)
        self._engine.advance([SequenceInput(sequence, tokens)], capture)
        self._engine.release(sequence)
        assert capture.states is not None
        return capture.states.bfloat16()


def measure(
    engine: SpeculativeEngine, proposer: Proposer, batch_size: int, num_drafts: int, num_pairs: int
) -> Measurement:
    """Rounds that each commit K + 1 tokens, as if every draft were accepted; the first two pairs are not counted."""
    num_rounds = num_pairs + 3
    sessions = Sessions(
        engine, batch_size, CONTEXT_LEN + num_rounds * (num_drafts + 1), proposer.capabilities.hidden_states
    )
    prompts = sessions.round(CONTEXT_LEN, 0, num_drafts)
    while None in proposer.propose(prompts):
        pass  # a step holds only so much of them
    forward_ms, propose_ms = [], []
    for number in range(1, num_rounds):
        committed_len = CONTEXT_LEN + number * (num_drafts + 1)
        items = sessions.round(committed_len, committed_len - num_drafts - 2, num_drafts)
        started = time.perf_counter()
        sessions.forward()
        between = time.perf_counter()
        proposals = proposer.propose(items)
        ended = time.perf_counter()
        assert all(isinstance(one, Proposal) and len(one.draft_token_ids) == num_drafts for one in proposals)
        forward_ms.append((between - started) * 1e3)
        propose_ms.append((ended - between) * 1e3)
    for number in range(batch_size):
        proposer.forget(SessionKey(number))
    return Measurement(batch_size, num_drafts, tuple(forward_ms[2:]), tuple(propose_ms[2:]))


def report(title: str, measurements: Sequence[Measurement]) -> str:
    """The page; `title` says what was measured."""
    worst = max(measurements, key=lambda one: statistics.median(one.ratios))
    is_met = statistics.median(worst.ratios) <= BOUND
    rows = [
        [
            str(one.batch_size),
            str(one.num_drafts),
            quartiles(one.forward_ms),
            quartiles(one.propose_ms),
            quartiles([ms / one.num_drafts for ms in one.propose_ms]),
            quartiles(one.ratios, 3),
        ]
        for one in measurements
    ]
    header = ["sessions", "K", "forward, 1 row each, ms", "propose, ms", "a draft, ms", "draft / forward"]
    return "\n".join(
        [
            "# A draft beside the target's forward",
            "",
            *(__doc__ or "").strip().splitlines()[2:],
            "",
            title,
            *machine_lines(),
            "",
            f"Bound: median ratio at most {BOUND} in every case: **{'met' if is_met else 'not met'}**; the largest is "
            f"{statistics.median(worst.ratios):.3f} ({worst.batch_size} sessions).",
            "",
            "Median (first to third quartile):",
            "",
            *table(header, rows),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 2 for what cannot be measured."""
    parser = make_parser("tandem bench draft", __doc__)
    add_proposer_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(proposer="eagle")
    parser.add_argument("--drafts", type=positive_int, default=4, metavar="K", help="of a round")
    parser.add_argument("--pairs", type=positive_int, default=20, help="of a forward and a propose, a batch size")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    settings = engine_settings(options)
    try:
        target = load_engine(replace(settings, kv_memory_bytes=256 << 20, prefix_cache=False)).engine
        proposer = load_proposer(options.proposer, ProposerSettings(DraftLimits(max_batch=8), settings, options))
    except (EngineError, ProposerError, ValueError) as error:
        sys.stderr.write(f"bench_draft: {error}\n")
        return 2
    measurements = [measure(target, proposer, size, options.drafts, options.pairs) for size in BATCH_SIZES]
    model_id = proposer.capabilities.model.model_id
    title = f"Proposer `{options.proposer}`, {model_id}; target {settings.model}, {settings.dtype}."
    text = report(title, measurements)
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
