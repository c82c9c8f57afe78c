"""What a draft replica exports: the drafts it made, its batches, its load."""

from collections.abc import Callable

from tandem.serving.load_metrics import StepMetrics, add_load_metrics
from tandem.serving.memory_metrics import add_memory_metrics
from tandem.serving.metrics import Metrics
from tandem.serving.speculation_metrics import DraftCounts, round_phases
from tandem.types import ItemError, ItemTiming, Load, Proposal


class DraftMetrics:
    """One process's; count on the event loop."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self.all = Metrics("draft")
        self._drafts = DraftCounts(self.all)
        phases = round_phases(self.all, ("draft_compute", "queue"))
        self._compute, self._queue = phases["draft_compute"], phases["queue"]
        self.steps = StepMetrics(self.all)
        self._errors = self.all.counters("tandem_item_errors_total", "Items answered with an error.", "code")
        add_load_metrics(self.all, load)
        add_memory_metrics(self.all)

    def count_proposal(self, proposal: Proposal, timing: ItemTiming) -> None:
        """A round was answered; one that no draft can be of use to took no time."""
        self._drafts.count(len(proposal.draft_token_ids))
        if timing == ItemTiming():
            return
        self._compute.observe(timing.compute_us / 1e6)
        self._queue.observe(timing.queue_us / 1e6)

    def count_error(self, error: ItemError) -> None:
        """An item was answered so."""
        self._errors[error.code.name].add()
