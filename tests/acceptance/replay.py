"""Rounds without a target: drafts are held against tokens that it chose once.

Under `greedy` and `coupled` the text of a request does not depend on drafts, so what becomes of them follows from the
text: a draft is accepted while it is the token that came.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from draft_service.proposers.base import ProposeInput, Proposer, SessionKey
from engine.backends.base import HiddenCapture, SequenceInput, SpeculativeEngine
from tandem.defaults import MAX_STEP_TOKENS
from tandem.types import HiddenStates, Proposal, SessionSpec

StatesOf = Callable[
    [Sequence[int], Sequence[int]], torch.Tensor
]  # (token ids [N], layers [L]) -> bfloat16 [N, L, E]


@dataclass(frozen=True, slots=True)
class Answer:
    """A request, and the tokens that the target chose."""

    spec: SessionSpec  # with the prompt
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Counts:
    """What became of the drafts of many rounds, by position."""

    num_rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One round."""
        self.num_rounds += 1
        self._add([1] * num_drafts, [int(position < num_accepted) for position in range(num_drafts)])

    def add_all(self, others: Iterable["Counts"]) -> "Counts":
        """The rounds of others too; itself."""
        for other in others:
            self.num_rounds += other.num_rounds
            self._add(other.drafted, other.accepted)
        return self

    def _add(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        missing = [0] * (len(drafted) - len(self.drafted))
        self.drafted += missing
        self.accepted += missing
        for position, (num_drafted, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
            self.drafted[position] += num_drafted
            self.accepted[position] += num_accepted

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round: accepted drafts and the target's own."""
        return 1.0 + sum(self.accepted) / self.num_rounds

    @property
    def mean_length_with_drafts(self) -> float:
        """`mean_acceptance_length` of the rounds that had a draft, which is what vLLM reports under that name."""
        return 1.0 + sum(self.accepted) / self.drafted[0] if self.drafted else 1.0

    @property
    def rates(self) -> list[float]:
        """Of drafts at a position, the share that was accepted, whatever became of those before."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]


def replay(
    proposer: Proposer, answers: Iterable[Answer], num_draft_tokens: int, states_of: StatesOf | None = None
) -> Iterator[Counts]:
    """One session after the other, each to its end; `states_of` for a proposer that needs the target's states.

    Such a one has no drafts in the first round of an answer, as behind the services.
    """
    need = proposer.capabilities.hidden_states
    for number, answer in enumerate(answers):
        counts = Counts()
        key, prompt = SessionKey(number), answer.spec.token_ids
        tokens, num_sent, num_out = (*prompt, *answer.token_ids), 0, 0
        states = None
        if need is not None:
            assert states_of is not None
            states = states_of(tokens, need.layers)
            counts.add(0, 0)
            num_out = 1
        while num_out < len(answer.token_ids):
            committed = tokens[: len(prompt) + num_out]
            # The last token of an answer is always the target's own.
            num_useful = min(num_draft_tokens, len(answer.token_ids) - num_out - 1)
            drafts: tuple[int, ...] = ()
            if num_useful:
                rows = () if states is None else _rows(states, num_sent, len(committed) - 1)
                num_sent = len(committed) - 1
                drafts = _drafts(proposer, ProposeInput(key, answer.spec, committed, num_useful, rows))
            num_accepted = _num_same(drafts, answer.token_ids[num_out:])
            counts.add(len(drafts), num_accepted)
            num_out += num_accepted + 1
        proposer.forget(key)
        yield counts


def states_by(engine: SpeculativeEngine, kept_layers: tuple[int, ...]) -> StatesOf:
    """Computed by the target's engine, once for the same tokens; of these layers, for proposers that ask for some."""

    @functools.cache
    def kept_of(token_ids: tuple[int, ...]) -> torch.Tensor:
        sequence, parts = engine.create(), []
        for start in range(0, len(token_ids), MAX_STEP_TOKENS):
            capture = HiddenCapture(kept_layers)
            engine.advance([SequenceInput(sequence, token_ids[start : start + MAX_STEP_TOKENS])], capture)
            assert capture.states is not None
            parts.append(capture.states.bfloat16())
        engine.release(sequence)
        return torch.cat(parts)

    def states_of(token_ids: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        return kept_of(tuple(token_ids))[:, [kept_layers.index(layer) for layer in layers]]

    return states_of


def _rows(states: torch.Tensor, first: int, end: int) -> tuple[HiddenStates, ...]:
    data = states[first:end].view(torch.int16).numpy().tobytes()
    return (HiddenStates(first, end - first, data),)


def _drafts(proposer: Proposer, item: ProposeInput) -> tuple[int, ...]:
    """The proposal, however many batches it takes."""
    answer = None
    while answer is None:
        (answer,) = proposer.propose([item])
    assert isinstance(answer, Proposal)
    return answer.draft_token_ids


def _num_same(drafts: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(drafts, right, strict=False)) if a != b), min(len(drafts), len(right))
    )
