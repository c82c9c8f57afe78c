"""What consecutive rounds emit, exactly: the real drafter and the real verifier over every outcome of the noise.

Letters: V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.gumbel import NoiseKey
from engine.sampling.policies import VerifyRows, check_proposal, rows_of, verify
from engine.sampling.processors import process
from engine.sampling.rejection import probabilities
from engine.sampling.rows import Row
from tandem.rng import F64
from tandem.types import Proposal, SessionSpec
from tests.sampling.enumeration import Branch, Knowledge, branches
from tests.sampling.helpers import PROMPT
from tests.sampling.tables import LogitsOf, Prefix, joint, total_variation

S, T = TypeVar("S"), TypeVar("T")


def one_more_draft(spec: SessionSpec, draft: LogitsOf, committed: Prefix, proposal: Proposal) -> Proposal:
    """The proposal with the honest drafter's next draft."""
    drafts = proposal.draft_token_ids
    logits = draft((*committed[len(PROMPT) :], *drafts)).clone()
    (token,), (probs,) = sample_drafts(logits[None], [Row(spec, committed, drafts)])
    return Proposal((*drafts, token), (*proposal.draft_probs, *(() if probs is None else (probs,))))


def emitted_tokens(spec: SessionSpec, target: LogitsOf, committed: Prefix, proposal: Proposal) -> Prefix:
    """The tokens that the target commits in the proposal's round."""
    check_proposal(spec, proposal, target(()).shape[0])
    request = VerifyRows(spec, committed, proposal)
    output, drafts = committed[len(PROMPT) :], proposal.draft_token_ids
    logits = torch.stack([target((*output, *drafts[:index])) for index in range(request.num_rows)])
    (decision,) = verify(process(logits, rows_of([request])), [request])
    return (*drafts[: decision.num_accepted], decision.next_token_id)


class Rounds:
    """One session of `num_drafts[r]` drafts in round r, an honest drafter's and a target's logits."""

    def __init__(self, spec: SessionSpec, target: LogitsOf, draft: LogitsOf, num_drafts: tuple[int, ...]) -> None:
        self._spec, self._target, self._draft, self._num_drafts = spec, target, draft, num_drafts
        self._vocab_size = target(()).shape[0]
        self._num_tokens = sum(num_drafts) + len(num_drafts)  # the most that can be out
        self._fresh: dict[tuple[Prefix, int], tuple[F64, frozenset[NoiseKey]]] = {}
        self._plain: dict[Prefix, F64] = {}

    def deviation(self) -> float:
        """Total variation between what the rounds emit and what plain decoding would, over all the tokens.

        Where the rounds emit fewer than the most, plain decoding adds the rest.
        """
        emitted, _ = self._emitted((), {}, 0)
        return total_variation(emitted, joint(self._plain_next, (), self._num_tokens))

    def _emitted(self, prefix: Prefix, seen: Knowledge, number: int) -> tuple[F64, frozenset[NoiseKey]]:
        """The distribution of what follows from round `number` on [V, ..., V], and every key that is looked at."""
        num_tokens = self._num_tokens - len(prefix)
        if number == len(self._num_drafts):
            return joint(self._plain_next, prefix, num_tokens), frozenset()
        emitted, keys = np.zeros((self._vocab_size,) * num_tokens), set[NoiseKey]()
        for branch in self._round(prefix, self._num_drafts[number], seen):
            after, later_keys = self._after((*prefix, *branch.result), branch.seen, number + 1)
            emitted[branch.result] += branch.probability * after
            keys |= branch.seen.keys() | later_keys
        return emitted, frozenset(keys)

    def _after(self, prefix: Prefix, seen: Knowledge, number: int) -> tuple[F64, frozenset[NoiseKey]]:
        """`_emitted`, once a prefix for everyone who has seen nothing of the noise that it looks at."""
        if (prefix, number) not in self._fresh:
            self._fresh[prefix, number] = self._emitted(prefix, {}, number)
        fresh = self._fresh[prefix, number]
        return fresh if fresh[1].isdisjoint(seen) else self._emitted(prefix, seen, number)

    def _round(self, prefix: Prefix, num_drafts: int, seen: Knowledge) -> Iterator[Branch[Prefix]]:
        """The tokens that one round may commit."""
        committed = (*PROMPT, *prefix)
        for proposal in self._proposals(committed, num_drafts, seen):
            yield from _then(proposal, partial(emitted_tokens, self._spec, self._target, committed))

    def _proposals(self, committed: Prefix, num_drafts: int, seen: Knowledge) -> list[Branch[Proposal]]:
        """What the drafter may propose."""
        proposals = [Branch(1.0, Proposal(), seen)]
        for _ in range(num_drafts):
            proposals = [
                longer
                for proposal in proposals
                for longer in _then(proposal, partial(one_more_draft, self._spec, self._draft, committed))
            ]
        return proposals

    def _plain_next(self, prefix: Prefix) -> F64:
        """The definition: softmax of the one processed row."""
        if prefix not in self._plain:
            row = Row(self._spec, (*PROMPT, *prefix))
            self._plain[prefix] = probabilities(process(self._target(prefix).clone()[None], [row])[0])
        return self._plain[prefix]


def _then(before: Branch[S], step: Callable[[S], T]) -> Iterator[Branch[T]]:
    """Every way on from a branch."""
    for after in branches(partial(step, before.result), before.seen):
        yield Branch(before.probability * after.probability, after.result, after.seen)
