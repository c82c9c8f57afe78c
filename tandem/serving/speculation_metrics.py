"""What the services count alike about drafts: the same names, told apart by the component that exports them."""

from collections.abc import Iterable

from tandem.serving.metrics import SECONDS, ByLabel, Counter, Histogram, Metrics

_PREFIX = "tandem_spec_decode_num_"


class DraftCounts:
    """Drafts, in all and by their position in a round (from 0), so that rates are right where K varies."""

    def __init__(self, metrics: Metrics) -> None:
        self._drafts = metrics.counter(f"{_PREFIX}drafts_total", "Rounds with at least one draft token.")
        self._tokens = metrics.counter(f"{_PREFIX}draft_tokens_total", "Draft tokens.")
        self._tokens_per_pos = _PerPosition(metrics, f"{_PREFIX}draft_tokens_per_pos_total", "Draft tokens")

    def count(self, num_draft_tokens: int) -> None:
        """One round's."""
        if num_draft_tokens:
            self._drafts.value += 1
            self._tokens.value += num_draft_tokens
            self._tokens_per_pos.add_first(num_draft_tokens)


class VerdictCounts:
    """Drafts and what became of them.

    Acceptance rate = accepted / draft tokens; mean acceptance length = 1 + accepted / rounds.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._rounds = metrics.counter("tandem_rounds_total", "Rounds, with drafts or without.")
        self._drafts = DraftCounts(metrics)
        self._accepted = metrics.counter(f"{_PREFIX}accepted_tokens_total", "Draft tokens that were accepted.")
        self._accepted_per_pos = _PerPosition(
            metrics, f"{_PREFIX}accepted_tokens_per_pos_total", "Draft tokens that were accepted"
        )

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One round."""
        self._rounds.value += 1
        self._drafts.count(num_draft_tokens)
        if num_accepted:
            self._accepted.value += num_accepted
            self._accepted_per_pos.add_first(num_accepted)


class _PerPosition:
    """A counter a position."""

    def __init__(self, metrics: Metrics, name: str, what: str) -> None:
        self._by_label = metrics.counters(name, f"{what}, by position in the round, from 0.", "position")
        self._counters: list[Counter] = []

    def add_first(self, number: int) -> None:
        """One at each of the first positions."""
        while len(self._counters) < number:
            self._counters.append(self._by_label[str(len(self._counters))])
        for position in range(number):
            self._counters[position].value += 1


def round_phases(metrics: Metrics, phases: Iterable[str]) -> ByLabel[Histogram]:
    """Histograms of where rounds' time goes, by phase."""
    return metrics.histograms("tandem_round_phase_seconds", "Where a round's time goes.", "phase", phases, SECONDS)
