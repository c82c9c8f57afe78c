"""Takes what happens to one answer to the process's figures, and to the request's span."""

from orchestrator.metrics import OrchestratorMetrics
from orchestrator.round_phases import PhaseReader
from orchestrator.sequence import RoundOutput, Sequence
from orchestrator.tracing import RequestSpan


class AnswerRecord:
    """Of one answer; `end` it however it ends."""

    def __init__(self, sequence: Sequence, metrics: OrchestratorMetrics, span: RequestSpan) -> None:
        self._sequence = sequence
        self._metrics = metrics
        self._span = span
        self._phases = PhaseReader(sequence.stats)

    def round(self, output: RoundOutput) -> None:
        """A round was committed."""
        phases = self._phases.take()
        self._metrics.count_round(self._sequence, output, phases)
        self._span.round(self._sequence.sample_index, output, phases)

    def end(self) -> None:
        """There are no more rounds; one that was not committed has had its trouble all the same."""
        self._metrics.count_trouble(self._phases.take())

    def complete(self) -> None:
        """The answer has ended as it should."""
        assert self._sequence.finish_reason is not None
        self._metrics.count_answer(self._sequence.finish_reason)
