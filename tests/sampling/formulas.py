"""What rounds emit by the policies' own formulas: every draft and every acceptance weighed by its probability.

rounds.py runs all of the real code on small cases; this takes only its acceptance probabilities and residuals, so
that more drafts and larger vocabularies stay quick. Letters: K drafts, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.sampling.block import acceptance_steps
from engine.sampling.rejection import Q, acceptance_probability, one_hot_q, residual, sent_q
from tandem.rng import F64
from tandem.types import VerificationPolicy
from tests.sampling.helpers import sparse
from tests.sampling.tables import Prefix, Table, joint, total_variation


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, a drafter, and the policy between them."""

    policy: VerificationPolicy
    p: Table
    q: Table
    one_hot: bool = False  # the drafter says nothing of q
    last_draft: int | None = None  # the drafter ends its proposal with this token

    def deviation(self, num_drafts: Sequence[int]) -> float:
        """Total variation between what rounds of so many drafts emit and what the target does."""
        emitted = self._emitted((), tuple(num_drafts), sum(num_drafts) + len(num_drafts))
        return total_variation(emitted, joint(self.p, (), emitted.ndim))

    def expected_accepted(self, num_drafts: int) -> float:
        """How many drafts of a round stand on average."""
        return sum(
            chance * sum(num_accepted * prob for num_accepted, _, prob in self._outcomes((), drafts, q))
            for drafts, q, chance in self._proposals((), num_drafts)
        )

    def steps(self, prefix: Prefix, drafts: Prefix, q: Sequence[Q]) -> list[tuple[float, float]]:
        """(weight of p, acceptance probability) of each draft."""
        p = [self.p((*prefix, *drafts[:index])) for index in range(len(drafts))]
        if self.policy is VerificationPolicy.BLOCK:
            return list(acceptance_steps(p, q, drafts))
        return [(1.0, acceptance_probability(p[index], q[index], draft)) for index, draft in enumerate(drafts)]

    def sent(self, prefix: Prefix, draft: int) -> Q:
        """What the target is told that a draft came from."""
        return one_hot_q(draft) if self.one_hot else sent_q(sparse(self.q(prefix)))

    def _proposals(self, prefix: Prefix, num_drafts: int) -> Iterator[tuple[Prefix, tuple[Q, ...], float]]:
        """Every proposal, q as it is sent, and the proposal's probability."""
        if num_drafts == 0 or (prefix and prefix[-1] == self.last_draft):
            yield (), (), 1.0
            return
        ids, probs = sent_q(sparse(self.q(prefix)))
        for draft, prob in zip(ids.tolist(), probs.tolist(), strict=True):
            for drafts, q, chance in self._proposals((*prefix, draft), num_drafts - 1):
                yield (draft, *drafts), (self.sent(prefix, draft), *q), prob * chance

    def _outcomes(self, prefix: Prefix, drafts: Prefix, q: Sequence[Q]) -> Iterator[tuple[int, float, float]]:
        """How many drafts may stand, the weight of p in the residual then, and the probability of it."""
        steps = [(1.0, 1.0), *self.steps(prefix, drafts, q)]
        if self.policy is VerificationPolicy.BLOCK:  # the last that passes
            chances = [
                chance * np.prod([1.0 - later for _, later in steps[i + 1 :]])
                for i, (_, chance) in enumerate(steps)
            ]
        else:  # those before the first that fails
            failing = [*(1.0 - chance for _, chance in steps[1:]), 1.0]
            chances = [fails * np.prod([chance for _, chance in steps[: i + 1]]) for i, fails in enumerate(failing)]
        for num_accepted, chance in enumerate(chances):
            if chance > 0.0:
                yield num_accepted, steps[num_accepted][0], float(chance)

    def _emitted(self, prefix: Prefix, num_drafts: tuple[int, ...], num_tokens: int) -> F64:
        """The distribution of the tokens [V, ..., V] of these rounds, and then of plain decoding."""
        if not num_drafts:
            return joint(self.p, prefix, num_tokens)
        emitted = np.zeros((self.p(prefix).size,) * num_tokens)
        for accepted, last in self._round(prefix, num_drafts[0]).items():
            for token in np.flatnonzero(last):
                tokens = (*accepted, int(token))
                after = self._emitted((*prefix, *tokens), num_drafts[1:], num_tokens - len(tokens))
                emitted[tokens] += last[token] * after
        return emitted

    def _round(self, prefix: Prefix, num_drafts: int) -> dict[Prefix, F64]:
        """For each run of accepted drafts, the probability [V] of it and of the token after it."""
        found: dict[Prefix, F64] = defaultdict(lambda: np.zeros(self.p(prefix).size))
        for drafts, q, chance in self._proposals(prefix, num_drafts):
            for num_accepted, weight, prob in self._outcomes(prefix, drafts, q):
                last = self.p((*prefix, *drafts[:num_accepted]))
                if num_accepted < len(drafts):
                    last = residual(last, q[num_accepted], weight)
                found[drafts[:num_accepted]] += chance * prob * last / last.sum()
        return found
