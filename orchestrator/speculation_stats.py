"""One answer's speculation figures."""

from dataclasses import dataclass, field

from tandem import codec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import ItemTiming


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request; a draft is counted once a verdict about it has been committed.

    Acceptance rate = num_accepted / num_draft_tokens; mean acceptance length = 1 + num_accepted / num_rounds.
    """

    num_rounds: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_per_pos: list[int] = field(default_factory=list)
    num_fallback_rounds: int = 0
    num_reopens: int = 0
    draft_wait_s: float = 0.0
    verify_wait_s: float = 0.0
    draft_timing: ItemTiming = field(default_factory=ItemTiming)  # of the waits, as the services measured it
    verify_timing: ItemTiming = field(default_factory=ItemTiming)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.num_draft_tokens_per_pos)

    @property
    def num_accepted(self) -> int:
        """Drafts that are part of the answer."""
        return sum(self.num_accepted_per_pos)

    def count_round(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add one committed round."""
        self.num_rounds += 1
        missing = num_draft_tokens - len(self.num_draft_tokens_per_pos)
        self.num_draft_tokens_per_pos += [0] * missing
        self.num_accepted_per_pos += [0] * missing
        for position in range(num_draft_tokens):
            self.num_draft_tokens_per_pos[position] += 1
            self.num_accepted_per_pos[position] += position < num_accepted

    def to_proto(self) -> pb.SpeculationStats:
        return pb.SpeculationStats(
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted=self.num_accepted,
            num_draft_tokens_per_pos=self.num_draft_tokens_per_pos,
            num_accepted_per_pos=self.num_accepted_per_pos,
            num_fallback_rounds=self.num_fallback_rounds,
            num_reopens=self.num_reopens,
            draft_wait_us=round(self.draft_wait_s * 1e6),
            verify_wait_us=round(self.verify_wait_s * 1e6),
            draft_timing=codec.timing_to_proto(self.draft_timing),
            verify_timing=codec.timing_to_proto(self.verify_timing),
        )
