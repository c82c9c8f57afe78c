"""Who gets memory in a step: decided on the compute thread right before the forward, from the engine's own accounting.

In order of rank every item first gets the rows it must have, the committed tokens of its part. Where they do not fit,
the sequence with the highest rank that has rows is preempted, but never one that ranks before the item: then the item
gets what there is, or waits. Drafts come after all of that, from what is left; nobody is preempted for them.
Letters: K draft tokens of a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.backends.base import SequenceId, SequenceInput, SpeculativeEngine
from engine.sampling.policies import VerifyRows
from target_service.step import StepItem, StepPlan


@dataclass(frozen=True, slots=True)
class Grant:
    """What one item may append behind its `num_rows` rows; no sequence if it was preempted or has no room to begin."""

    sequence_id: SequenceId | None = None
    num_rows: int = 0
    token_ids: Sequence[int] = ()  # committed tokens
    verify: VerifyRows | None = None  # the round it decides, with as many drafts as there is room for
    num_found: int | None = None  # rows found in the prefix cache by a sequence created here

    @property
    def appended(self) -> Sequence[int]:
        """The tokens of its new rows: committed ones, then drafts."""
        return [*self.token_ids, *self.verify.proposal.draft_token_ids] if self.verify else self.token_ids

    @property
    def num_appended(self) -> int:
        """How many those are."""
        return len(self.token_ids) + (self.verify.num_rows - 1 if self.verify else 0)


def reserve_speculative(num_drafts: int, tokens_left: int, free_rows: int) -> int:
    """Drafts that may be verified beside the one row every round has.

    Args:
        num_drafts: those that were sent, already within the generation and the service's limit.
        tokens_left: of the step for this round.
        free_rows: in blocks that nobody uses, cached ones included, and in the sequence's last block.
    """
    return max(0, min(num_drafts, tokens_left - 1, free_rows - 1))


class Reservation:
    """One step's; the engine's sequences have been released and rolled back before.

    It creates sequences and releases those that are preempted: `created` and `preempted` say which, also when
    something raises.
    """

    def __init__(self, engine: SpeculativeEngine, plan: StepPlan) -> None:
        self.created: list[SequenceId] = []
        self.preempted: list[SequenceId] = []
        self._engine = engine
        self._items = plan.items
        self._block_size = engine.kv_usage().block_size
        holders = [(item.rank, item.sequence_id) for item in plan.items if item.sequence_id is not None]
        self._holders = sorted([*holders, *((idle.rank, idle.sequence_id) for idle in plan.idle)])
        self._num_granted: dict[SequenceId, int] = {}  # rows of committed tokens
        self._num_left = engine.kv_usage().available_blocks  # granted to nobody

    def grants(self) -> list[Grant]:
        """One for each item, in order; a forward of them all fits into the pool."""
        committed = [self._grant_committed(item) for item in self._items]
        return [self._grant_drafts(item, grant) for item, grant in zip(self._items, committed, strict=True)]

    def _grant_committed(self, item: StepItem) -> Grant:
        if item.sequence_id is None:
            return self._begin(item)
        if item.sequence_id in self.preempted:
            return Grant()
        return self._append(item, Grant(item.sequence_id, item.num_rows), item.token_ids)

    def _begin(self, item: StepItem) -> Grant:
        """Create the sequence at its turn, so that the cached rows it finds are not taken from a better rank.

        The last committed token is left out: its row is where the next token comes from.
        """
        num_findable = len(item.token_ids) - 1 if item.num_findable is None else item.num_findable
        sequence_id = self._engine.create(item.token_ids[:num_findable])
        self.created.append(sequence_id)
        self._recount()  # others may share a block with it now, and would have to copy that
        num_found = self._engine.num_cached_tokens(sequence_id)
        grant = self._append(item, Grant(sequence_id, num_found, num_found=num_found), item.token_ids[num_found:])
        has_all = num_found == len(item.token_ids) - 1 and item.verify is None
        if self._num_left >= 0 and (grant.token_ids or has_all):
            return grant
        self._engine.release(sequence_id)
        self.created.remove(sequence_id)
        self._recount()
        return Grant()

    def _append(self, item: StepItem, at: Grant, token_ids: Sequence[int]) -> Grant:
        """Room for the item's committed tokens, the round's own one included if the whole round fits the step."""
        assert at.sequence_id is not None
        num_drafts = len(item.verify.proposal.draft_token_ids) if item.verify else 0
        is_round = item.verify is not None and len(token_ids) + num_drafts <= item.max_rows
        wanted = len(token_ids) if is_round else min(len(token_ids) - 1, item.max_rows)
        needed = self._num_blocks_for(at.sequence_id, wanted)
        while needed > self._num_left and self._preempt_after(item.rank):
            needed = self._num_blocks_for(at.sequence_id, wanted)
        if needed > self._num_left:
            wanted = self._rows_that_fit(at, wanted)
            needed = self._num_blocks_for(at.sequence_id, wanted)
        if wanted:
            self._num_granted[at.sequence_id] = wanted
            self._num_left -= needed
        verify = item.verify if is_round and wanted == len(token_ids) else None
        return replace(at, token_ids=token_ids[:wanted], verify=verify)

    def _grant_drafts(self, item: StepItem, grant: Grant) -> Grant:
        """As many of the round's drafts as fit behind its committed tokens."""
        if grant.verify is None:
            return grant
        num_rows, proposal = grant.num_rows + len(grant.token_ids), grant.verify.proposal
        tokens_left = item.max_rows - len(grant.token_ids) + 1
        free_rows = 1 + self._slack(num_rows) + self._num_left * self._block_size
        num_drafts = reserve_speculative(len(proposal.draft_token_ids), tokens_left, free_rows)
        self._num_left -= max(0, num_drafts - self._slack(num_rows) + self._block_size - 1) // self._block_size
        return replace(grant, verify=replace(grant.verify, proposal=proposal.first(num_drafts)))

    def _preempt_after(self, rank: int) -> bool:
        """Release the sequence of the highest rank past `rank` that has rows; False when there is none."""
        while self._holders and self._holders[-1][0] > rank:
            _, sequence_id = self._holders.pop()
            if self._engine.num_cached_tokens(sequence_id) > 0:
                self._engine.release(sequence_id)
                self.preempted.append(sequence_id)
                self._recount()
                return True
        return False

    def _rows_that_fit(self, at: Grant, wanted: int) -> int:
        """Rows of `wanted` that the blocks left hold, besides the sequence's last block."""
        if self._num_left < 0 or at.sequence_id is None:
            return 0
        slack = self._slack(at.num_rows)
        num_rows = min(wanted, slack + self._num_left * self._block_size)
        if self._num_blocks_for(at.sequence_id, num_rows) > self._num_left:  # it must copy a shared last block
            num_rows = max(0, min(num_rows, slack + (self._num_left - 1) * self._block_size))
        return num_rows

    def _slack(self, num_rows: int) -> int:
        """Rows that fit behind so many in their last block."""
        return -num_rows % self._block_size

    def _num_blocks_for(self, sequence_id: SequenceId, num_rows: int) -> int:
        return self._engine.num_blocks_for([SequenceInput(sequence_id, range(num_rows))]) if num_rows else 0

    def _recount(self) -> None:
        """After a sequence was created or released: what is left, the grants so far counted as the forward will.

        Below 0 when a sequence just created found rows in blocks that were granted. Later grants are counted one by
        one, which may count a block that several share once too often, never once too few.
        """
        inputs = [
            SequenceInput(sequence_id, range(num_rows)) for sequence_id, num_rows in self._num_granted.items()
        ]
        self._num_left = self._engine.kv_usage().available_blocks - self._engine.num_blocks_for(inputs)
