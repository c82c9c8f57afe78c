"""What a target replica exports: the rounds it decided, its steps, its load."""

from collections.abc import Callable

from tandem.serving.load_metrics import StepMetrics, add_load_metrics
from tandem.serving.memory_metrics import add_memory_metrics
from tandem.serving.metrics import WIDTHS, Metrics
from tandem.serving.speculation_metrics import VerdictCounts, round_phases
from tandem.types import ItemError, Load, Verdict
from target_service.step import StepPlan, StepResult


class TargetMetrics:
    """One process's; count on the event loop."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self.all = Metrics("target")
        self._verdicts = VerdictCounts(self.all)
        phases = round_phases(self.all, ("verify_compute", "queue"))
        self._compute, self._queue = phases["verify_compute"], phases["queue"]
        self._steps = StepMetrics(self.all)
        self._rows = self.all.histogram("tandem_step_rows", "Rows of one step's forward.", WIDTHS)
        self._errors = self.all.counters("tandem_item_errors_total", "Items answered with an error.", "code")
        self.all.gauge(
            "tandem_step_overhead_rows",
            "Rows that a step costs beyond its own, as measured; 0: not known.",
            lambda: load().step_overhead_rows,
        )
        self.all.gauge(
            "tandem_step_sessions", "Sessions whose rounds a step decides.", lambda: load().step_sessions
        )
        add_load_metrics(self.all, load)
        add_memory_metrics(self.all)
        self.all.read_counter(
            "tandem_preemptions_total", "Sessions that lost their rows to others.", lambda: load().preemptions
        )

    def count_verdict(self, verdict: Verdict) -> None:
        """A round was decided."""
        self._verdicts.count(verdict.num_draft_tokens, verdict.num_accepted)
        self._compute.observe(verdict.timing.compute_us / 1e6)
        self._queue.observe(verdict.timing.queue_us / 1e6)

    def count_step(self, plan: StepPlan, result: StepResult) -> None:
        """A step was computed; one that only forgot sequences had no forward."""
        if result.batch_rows:
            self._steps.count(len(plan.items), result.compute_us / 1e6)
            self._rows.observe(result.batch_rows)

    def count_error(self, error: ItemError) -> None:
        """An item was answered so."""
        self._errors[error.code.name].add()
