"""Whole generations by the million through the real noise, one sweep a draw; a test holds them to real rounds.

Trial n is the answer with sample index n of one request without processors. Keys, q, acceptance probabilities and
residuals are the real functions', tabled for every prefix; only the loop over trials is an array here.

Letters: N trials, L tokens of output, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from engine.sampling import policies
from engine.sampling.draft_sampler import draft_key
from engine.sampling.gumbel import NoiseKey, noise_key
from engine.sampling.policies import VerifyRows
from engine.sampling.rejection import residual
from engine.sampling.rows import Row
from tandem import rng
from tandem.rng import F32, F64, Stream
from tandem.types import Proposal, SessionSpec, VerificationPolicy
from tests.sampling.formulas import Pair
from tests.sampling.helpers import PROMPT
from tests.sampling.tables import LogitsOf, Prefix, table_of

Ints = np.ndarray


@dataclass(frozen=True, slots=True)
class Group:
    """Trials whose outputs are equally long."""

    trials: Ints  # [N]
    tokens: Ints  # [N, L]
    num_accepted: int = 0  # of the last round


class Trials:
    """Generations of one session by an honest drafter and a target."""

    def __init__(self, spec: SessionSpec, target: LogitsOf, draft: LogitsOf) -> None:
        self._spec, self._target, self._draft = spec, target, draft
        self._vocab_size = target(()).shape[0]
        one_hot = not spec.uses_draft_probs
        self._pair = Pair(spec.effective_policy, table_of(target), table_of(draft), one_hot)

    def generate(self, num_trials: int, num_drafts: Sequence[int], num_tokens: int) -> Ints:
        """The first tokens [N, num_tokens] of every trial: rounds of so many drafts, then plain decoding."""
        groups = [self.start(num_trials)]
        for count in num_drafts:
            groups = [longer for group in groups for longer in self.round(group, count)]
        tokens = np.empty((num_trials, num_tokens), dtype=np.int64)
        for group in groups:
            done = group.tokens
            while done.shape[1] < num_tokens:
                done = np.column_stack([done, self._regular(self._target, group.trials, done)])
            tokens[group.trials] = done[:, :num_tokens]
        return tokens

    def start(self, num_trials: int) -> Group:
        """Before the first round."""
        return Group(np.arange(num_trials), np.empty((num_trials, 0), dtype=np.int64))

    def round(self, group: Group, num_drafts: int) -> list[Group]:
        """The trials after a round of at least one draft, by how many of them stood."""
        length, tokens = group.tokens.shape[1], group.tokens
        for index in range(num_drafts):
            tokens = np.column_stack([tokens, self._drafts(group.trials, tokens, index)])
        decide = self._ratio_test if self._spec.effective_policy.is_ratio_test else self._coupled
        num_accepted, recovered = decide(group.trials, tokens, length)
        longer = []
        for count in np.unique(num_accepted):
            here = num_accepted == count
            trials, kept = group.trials[here], tokens[here, : length + count]
            last = recovered[here] if count < num_drafts else self._regular(self._target, trials, kept)
            longer.append(Group(trials, np.column_stack([kept, last]), int(count)))
        return longer

    def _drafts(self, trials: Ints, tokens: Ints, index: int) -> Ints:
        """Draft `index` of a round [N], after the tokens [N, L] with the drafts before it."""
        if not self._spec.effective_policy.is_ratio_test:
            return self._regular(self._draft, trials, tokens)
        length, codes = tokens.shape[1], self._codes(tokens)
        if not self._spec.uses_draft_probs:
            return np.array([np.argmax(self._pair.q(prefix)) for prefix in self._prefixes(length)])[codes]
        # [V^L, V]
        log_q = np.full((self._vocab_size**length, self._vocab_size), -np.inf)
        for code, prefix in enumerate(self._prefixes(length)):
            ids, probs = self._pair.sent(prefix, 0)
            log_q[code, ids] = np.log(probs)
        row = Row(self._spec, range(len(PROMPT) + length - index), (0,) * index)
        return np.asarray(np.argmax(log_q[codes] + self._noise(draft_key(row), trials), axis=1))

    def _regular(self, logits_of: LogitsOf, trials: Ints, tokens: Ints) -> Ints:
        """What the regular sampler takes from these logits [N]: float32 scores, the target's own noise."""
        length = tokens.shape[1]
        logits = np.stack([logits_of(prefix).numpy() for prefix in self._prefixes(length)])
        key = noise_key(self._spec, Stream.TARGET, len(PROMPT) + length)
        return np.asarray(np.argmax(logits[self._codes(tokens)] + self._noise(key, trials), axis=1))

    def _coupled(self, trials: Ints, tokens: Ints, length: int) -> tuple[Ints, Ints]:
        """How many drafts stand [N] and the token after them [N], where not all do."""
        num_accepted, recovered = np.zeros(trials.size, dtype=np.int64), np.zeros(trials.size, dtype=np.int64)
        for index in range(tokens.shape[1] - length):
            chosen, reached = (
                self._regular(self._target, trials, tokens[:, : length + index]),
                num_accepted == index,
            )
            recovered[reached] = chosen[reached]
            num_accepted += reached & (chosen == tokens[:, length + index])
        return num_accepted, recovered

    def _ratio_test(self, trials: Ints, tokens: Ints, length: int) -> tuple[Ints, Ints]:
        """The same under `rejection` and `block`."""
        num_drafts, codes = tokens.shape[1] - length, self._codes(tokens)
        request = VerifyRows(self._spec, range(len(PROMPT) + length), Proposal((0,) * num_drafts))
        uniforms = [self._uniforms(policies._acceptance_key(request, index), trials) for index in range(num_drafts)]
        # one a path [V^L]
        tables = [self._path(path[:length], path[length:]) for path in self._prefixes(tokens.shape[1])]
        # [N, K]
        stands = np.stack(uniforms, axis=1) < np.array([chances for chances, _ in tables])[codes]
        if self._spec.effective_policy is VerificationPolicy.BLOCK:
            num_accepted = np.where(stands.any(axis=1), num_drafts - np.argmax(stands[:, ::-1], axis=1), 0)
        else:
            num_accepted = np.where(stands.all(axis=1), num_drafts, np.argmin(stands, axis=1))
        recovered = np.zeros(trials.size, dtype=np.int64)
        for count in range(num_drafts):
            here = num_accepted == count
            log_residual = np.stack([residuals[count] for _, residuals in tables])[codes[here]]
            noise = self._noise(policies._residual_key(request, count), trials[here])
            recovered[here] = np.argmax(log_residual + noise, axis=1)
        return num_accepted, recovered

    def _path(self, prefix: Prefix, drafts: Prefix) -> tuple[list[float], list[F64]]:
        """Each draft's acceptance probability, and the log residual [V] where it is the first that does not stand."""
        places = [(*prefix, *drafts[:index]) for index in range(len(drafts))]
        q = [self._pair.sent(place, draft) for place, draft in zip(places, drafts, strict=True)]
        steps = self._pair.steps(prefix, drafts, q)
        weights = [1.0, *(weight for weight, _ in steps)]
        with np.errstate(divide="ignore"):
            residuals = [np.log(residual(self._pair.p(place), q[i], weights[i])) for i, place in enumerate(places)]
        return [chance for _, chance in steps], residuals

    def _prefixes(self, length: int) -> product:
        """All outputs of a length, in the order of their codes."""
        return product(range(self._vocab_size), repeat=length)

    def _codes(self, tokens: Ints) -> Ints:
        """Each output's place [N] among all of its length."""
        return np.asarray(tokens @ self._vocab_size ** np.arange(tokens.shape[1])[::-1])

    def _noise(self, key: NoiseKey, trials: Ints) -> F32:
        """Gumbel noise [N, V]."""
        blocks = range((self._vocab_size + 3) // 4)
        bits = [rng.philox4x32((block, key.position, trials, key.word), key.seed) for block in blocks]
        return rng.gumbel_from_bits(np.concatenate(bits, axis=1)[:, : self._vocab_size])

    def _uniforms(self, key: NoiseKey, trials: Ints) -> F64:
        """The scalar uniform [N]."""
        return rng.uniform_from_bits(rng.philox4x32((0, key.position, trials, key.word), key.seed)[:, 0])
