"""Where the time of each round went: what an answer's figures have grown by since the round before."""

from dataclasses import dataclass

from orchestrator.speculation_stats import SpeculationStats
from tandem.types import ItemTiming


@dataclass(frozen=True, slots=True)
class RoundPhases:
    """Of one round, in seconds; the network's share of a wait is what compute and queue leave of it."""

    draft_rpc_s: float  # wait for the drafts, however it ended; 0: there was none
    verify_rpc_s: float  # wait for the verdict
    draft: ItemTiming  # as the draft service measured it; zero when it sent no drafts
    verify: ItemTiming  # as the target measured it
    num_fallback_rounds: int
    num_reopens: int


class PhaseReader:
    """Reads one answer's figures round by round."""

    def __init__(self, stats: SpeculationStats) -> None:
        self._stats = stats
        self._draft_wait_s = self._verify_wait_s = 0.0
        self._draft = self._verify = ItemTiming()
        self._num_fallback_rounds = self._num_reopens = 0

    def take(self) -> RoundPhases:
        """Since the last time."""
        stats = self._stats
        phases = RoundPhases(
            stats.draft_wait_s - self._draft_wait_s,
            stats.verify_wait_s - self._verify_wait_s,
            stats.draft_timing - self._draft,
            stats.verify_timing - self._verify,
            stats.num_fallback_rounds - self._num_fallback_rounds,
            stats.num_reopens - self._num_reopens,
        )
        self._draft_wait_s, self._verify_wait_s = stats.draft_wait_s, stats.verify_wait_s
        self._draft, self._verify = stats.draft_timing, stats.verify_timing
        self._num_fallback_rounds, self._num_reopens = stats.num_fallback_rounds, stats.num_reopens
        return phases
