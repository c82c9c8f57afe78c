"""What the orchestrator exports: what applications saw, and what it knows of its replicas."""

from collections.abc import Callable, Sequence
from itertools import chain

import grpc

from orchestrator.pools import DraftPool, TargetPool
from orchestrator.replica_link import DraftLink, TargetLink
from orchestrator.round_phases import RoundPhases
from orchestrator.sequence import RoundOutput
from orchestrator.sequence import Sequence as AnswerSequence
from tandem.serving.memory_metrics import add_memory_metrics
from tandem.serving.metrics import SECONDS, Metrics, Numbers
from tandem.serving.speculation_metrics import VerdictCounts, round_phases
from tandem.types import FinishReason

# Every status a request may end with, so that each is there, at 0, from the start.
_STATUSES = (
    *(grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.INVALID_ARGUMENT),
    *(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE),
    *(grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL),
)
_PHASES = ("draft_rpc", "draft_compute", "verify_rpc", "verify_compute", "queue")


class OrchestratorMetrics:
    """One process's; count on the event loop."""

    def __init__(self, targets: TargetPool, drafts: DraftPool | None, num_running: Callable[[], int]) -> None:
        """`num_running`: answers that have a place."""
        self.all = metrics = Metrics("orchestrator")
        self._verdicts = VerdictCounts(metrics)
        phases = round_phases(metrics, _PHASES)
        self._draft_rpc, self._draft_compute, self._verify_rpc, self._verify_compute, self._queue = (
            phases[phase] for phase in _PHASES
        )
        self._fallbacks = metrics.counter(
            "tandem_fallback_rounds_total", "Rounds that the draft service, asked or not, made no drafts for."
        )
        self._reopens = metrics.counter("tandem_reopens_total", "Sessions that were opened again.")
        self._first_token = metrics.histogram(
            "tandem_time_to_first_token_seconds", "From a request's arrival to an answer's first token.", SECONDS
        )
        self._between_tokens = metrics.histogram(
            "tandem_inter_token_latency_seconds", "Time a token took after the one before it.", SECONDS
        )
        self._prompt_tokens = metrics.counter("tandem_prompt_tokens_total", "Prompt tokens of answers that began.")
        self._cached_tokens = metrics.counter(
            "tandem_cached_prompt_tokens_total", "Those of them found in a prefix cache."
        )
        self._tokens = metrics.counter("tandem_generated_tokens_total", "Tokens of answers.")
        self._answers = metrics.counters(
            "tandem_answers_total",
            "Complete answers, by how they ended.",
            "finish_reason",
            (FinishReason.STOP.value, FinishReason.LENGTH.value),
        )
        self._requests = metrics.counters(
            "tandem_requests_total",
            "Requests, by the status they ended with.",
            "status",
            (status.name for status in _STATUSES),
        )
        metrics.gauge("tandem_requests_running", "Requests that have their place.", num_running)
        _add_replica_metrics(metrics, targets, drafts)
        add_memory_metrics(metrics)

    def count_round(self, sequence: AnswerSequence, output: RoundOutput, phases: RoundPhases) -> None:
        """A round was committed: once for each, in order."""
        num_tokens = len(output.token_ids)
        self._verdicts.count(output.num_draft_tokens, output.num_accepted)
        self._tokens.value += num_tokens
        if sequence.stats.num_rounds == 1:
            self._first_token.observe(sequence.time_to_first_token_s)
            self._between_tokens.observe(0.0, num_tokens - 1)
            self._prompt_tokens.value += sequence.num_prompt_tokens
            self._cached_tokens.value += sequence.num_cached_tokens
        else:
            self._between_tokens.observe(sequence.last_round_s / num_tokens, num_tokens)
        self._count_phases(phases)
        self.count_trouble(phases)

    def _count_phases(self, phases: RoundPhases) -> None:
        draft, verify = phases.draft, phases.verify
        if phases.draft_rpc_s:
            self._draft_rpc.observe(phases.draft_rpc_s)
        if draft.compute_us or draft.queue_us:
            self._draft_compute.observe(draft.compute_us / 1e6)
        self._verify_rpc.observe(phases.verify_rpc_s)
        self._verify_compute.observe(verify.compute_us / 1e6)
        self._queue.observe((draft.queue_us + verify.queue_us) / 1e6)

    def count_trouble(self, phases: RoundPhases) -> None:
        """Of a round, committed or not."""
        self._fallbacks.value += phases.num_fallback_rounds
        self._reopens.value += phases.num_reopens

    def count_answer(self, reason: FinishReason) -> None:
        """An answer is complete."""
        self._answers[reason.value].add()

    def count_request(self, status: grpc.StatusCode) -> None:
        """A request has ended."""
        self._requests[status.name].add()


def _add_replica_metrics(metrics: Metrics, targets: TargetPool, drafts: DraftPool | None) -> None:
    pools: list[TargetPool | DraftPool] = [pool for pool in (targets, drafts) if pool is not None]

    def links() -> list[TargetLink | DraftLink]:
        return list(chain.from_iterable(pool.links for pool in pools))

    def by_role(count: Callable[[Sequence[TargetLink | DraftLink]], float]) -> Numbers:
        return [((pool.role,), count(pool.links)) for pool in pools]

    metrics.gauges("tandem_replicas", "Replicas that are named.", ("role",), lambda: by_role(len))
    metrics.gauges(
        "tandem_replicas_up",
        "Replicas there is a stream to.",
        ("role",),
        lambda: by_role(lambda known: sum(link.is_up for link in known)),
    )
    metrics.gauges(
        "tandem_replica_breaker_open",
        "1 while new sessions are kept away from a replica that failed some.",
        ("role", "address"),
        lambda: [((link.api.role, link.address), float(link.breaker.is_open)) for link in links()],
    )
    metrics.read_counters(
        "tandem_stale_results_total",
        "Results of replicas that nobody waited for any more.",
        ("role", "address"),
        lambda: [((link.api.role, link.address), link.answers.num_dropped) for link in links()],
    )
