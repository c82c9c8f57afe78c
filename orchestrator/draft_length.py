"""How many drafts a round is worth where sessions share a target's steps.

A step of n sessions with K drafts each has n * (K + 1) rows and takes time in proportion to `overhead + n * (K + 1)`,
where the target measures its overhead in rows. It gives n * E(K) tokens, with E(K) = 1 + S(1) + ... + S(K) and S(i) the
probability that the first i drafts are accepted. The K with the most tokens in a time is the one to draft: most of them
for few sessions, whose rows cost nearly nothing beside the step itself, and none for many.

Source: Liu et al., "Optimizing speculative decoding for serving large language models using goodput", 2024.
"""

from collections.abc import Callable, Sequence

from orchestrator.speculation_stats import SpeculationStats
from tandem.types import Load

_SHARED_FROM = 1.5  # sessions a step
_GUESS = 0.7  # acceptance of a draft, while there is nothing to know it by
_GUESS_WEIGHT = 4.0  # rounds that the guess counts as
_SHARED_WEIGHT = 8.0  # rounds of one answer that what all answers have in common counts as
_KEPT = 0.999  # of what is known, a round later: what was too seldom right to be drafted is tried again one day


class AcceptanceKnown:
    """How often drafts at each position were accepted, in all answers of this process."""

    def __init__(self) -> None:
        self._num_rounds: list[float] = []  # that had a draft at the position; older ones count less
        self._num_accepted: list[float] = []

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """A round was committed, with drafts or without."""
        self._num_rounds = [_KEPT * number for number in self._num_rounds]
        self._num_accepted = [_KEPT * number for number in self._num_accepted]
        missing = num_draft_tokens - len(self._num_rounds)
        self._num_rounds += [0.0] * missing
        self._num_accepted += [0.0] * missing
        for position in range(num_draft_tokens):
            self._num_rounds[position] += 1.0
            self._num_accepted[position] += position < num_accepted

    def survival(self, position: int) -> float:
        """Probability that the draft at the position (0 is the first), and all before it, are accepted."""
        rounds, accepted = 0.0, 0.0
        if position < len(self._num_rounds):
            rounds, accepted = self._num_rounds[position], self._num_accepted[position]
        return (accepted + _GUESS_WEIGHT * _GUESS ** (position + 1)) / (rounds + _GUESS_WEIGHT)


class DraftLength:
    """Of one answer."""

    def __init__(self, known: AcceptanceKnown, stats: SpeculationStats, load: Callable[[], Load]) -> None:
        """`stats`: the answer's; `load`: of the target that has its session."""
        self._known = known
        self._stats = stats
        self._load = load

    def most(self, num_wanted: int) -> int:
        """Drafts of the next round, at most `num_wanted`; all of them for a session alone, which slows nobody."""
        load = self._load()
        if load.step_sessions < _SHARED_FROM or load.step_overhead_rows <= 0.0:
            return num_wanted
        survival = [self._survival(position) for position in range(num_wanted)]
        return best_length(survival, load.step_sessions, load.step_overhead_rows)

    def _survival(self, position: int) -> float:
        """As in all answers, and the more as in this one the longer it is."""
        shared, stats = self._known.survival(position), self._stats
        if position >= len(stats.num_draft_tokens_per_pos):
            return shared
        rounds, accepted = stats.num_draft_tokens_per_pos[position], stats.num_accepted_per_pos[position]
        return (accepted + _SHARED_WEIGHT * shared) / (rounds + _SHARED_WEIGHT)


def best_length(survival: Sequence[float], num_sessions: float, overhead_rows: float) -> int:
    """The K, 0 to len(survival), with the most tokens in a time; `survival[i]` is S(i + 1)."""
    best, tokens = 0, 1.0
    best_rate = tokens / (overhead_rows + num_sessions)
    for length, probability in enumerate(survival, 1):
        tokens += probability
        rate = tokens / (overhead_rows + num_sessions * (length + 1))
        if rate > best_rate:
            best, best_rate = length, rate
    return best
