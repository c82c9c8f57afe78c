"""One session's draft of one round, while it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.proposers.base import ProposeInput, SessionKey
from engine.sampling.rows import Row
from tandem.types import DraftProbs, Proposal


@dataclass(slots=True)
class DraftRound:
    """What is wanted, what may be had, and what there is."""

    item: ProposeInput
    num_wanted: int  # drafts
    tokens: Sequence[int]  # that the model's rows stand for; its last has none yet
    num_granted: int = 0  # drafts that there is memory for
    pending: list[int] = field(default_factory=list)  # tokens that have no row yet and are fed next
    num_fed: int = 0  # of the pending ones, in the next forward
    token_ids: list[int] = field(default_factory=list)
    draft_probs: list[DraftProbs] = field(default_factory=list)

    @property
    def key(self) -> SessionKey:
        """The session."""
        return self.item.session_key

    @property
    def is_behind(self) -> bool:
        """Whether the next forward cannot take all that is pending, so that it gives no draft yet."""
        return self.num_fed < len(self.pending)

    @property
    def wants_more(self) -> bool:
        """Not after an ending id: whatever came then would never be used."""
        return len(self.token_ids) < self.num_granted and not self._has_ended

    @property
    def num_shrunk(self) -> int:
        """Drafts not made for want of memory."""
        is_at_limit = len(self.token_ids) == self.num_granted and not self._has_ended
        return self.num_wanted - self.num_granted if is_at_limit else 0

    @property
    def next_row(self) -> Row:
        """What the next draft is decided for."""
        return Row(self.item.spec, self.item.committed_token_ids, tuple(self.token_ids))

    @property
    def proposal(self) -> Proposal:
        """The drafts there are."""
        return Proposal(tuple(self.token_ids), tuple(self.draft_probs))

    def take_fed(self) -> list[int]:
        """The tokens that a forward has given rows; they are pending no more."""
        fed, self.pending = self.pending[: self.num_fed], self.pending[self.num_fed :]
        return fed

    def add(self, token_id: int, draft_probs: DraftProbs | None) -> None:
        """Append a draft, which is what the next forward feeds."""
        self.token_ids.append(token_id)
        self.pending, self.num_fed = [token_id], 1
        if draft_probs is not None:
            self.draft_probs.append(draft_probs)

    def stop(self) -> None:
        """There is no next draft."""
        self.num_wanted = self.num_granted = len(self.token_ids)

    @property
    def _has_ended(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.item.spec.ending_token_ids
