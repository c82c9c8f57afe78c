"""Spans by OpenTelemetry: one a request, a child of the caller's, with an event a round.

Made here and not by OpenTelemetry's gRPC instrumentation, whose server interceptor for asyncio does not know handlers
that are coroutines. Import it only where the packages of `tandem[otel]` may be missing and that is caught.
"""

from collections.abc import Mapping

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from orchestrator.round_phases import RoundPhases
from orchestrator.sequence import RoundOutput

_SERVICE, _METHOD = "tandem.orchestrator.v1.OrchestratorService", "Generate"
# Those that OpenTelemetry's conventions call a server's errors.
_ERRORS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_CONTEXT = TraceContextTextMapPropagator()


class OtelTracer:
    """The `Tracer` of a process that sends its spans somewhere."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem.orchestrator")

    @classmethod
    def to_collector(cls, environment: Mapping[str, str]) -> "OtelTracer":
        """To an OTLP endpoint, in batches; endpoint, headers, sampler and limits are those of the OTEL_ variables."""
        is_named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        resource = Resource.create({} if is_named else {"service.name": "tandem-orchestrator"})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def start(self, traceparent: str, request_id: str) -> "OtelSpan":
        parent = _CONTEXT.extract({"traceparent": traceparent})
        span = self._tracer.start_span(
            f"{_SERVICE}/{_METHOD}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": _SERVICE,
                "rpc.method": _METHOD,
                "tandem.request_id": request_id,
            },
        )
        return OtelSpan(span)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


class OtelSpan:
    """One request's span. The SDK keeps OTEL_SPAN_EVENT_COUNT_LIMIT events of it, 128 by default: the last ones."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get("traceparent", "")

    def round(self, sample_index: int, output: RoundOutput, phases: RoundPhases) -> None:
        if not self._span.is_recording():
            return
        self._span.add_event(
            "round",
            {
                "sample_index": sample_index,
                "num_tokens": len(output.token_ids),
                "num_draft_tokens": output.num_draft_tokens,
                "num_accepted": output.num_accepted,
                "draft_rpc_ms": phases.draft_rpc_s * 1e3,
                "draft_compute_ms": phases.draft.compute_us / 1e3,
                "verify_rpc_ms": phases.verify_rpc_s * 1e3,
                "verify_compute_ms": phases.verify.compute_us / 1e3,
                "queue_ms": (phases.draft.queue_us + phases.verify.queue_us) / 1e3,
                "num_fallback_rounds": phases.num_fallback_rounds,
                "num_reopens": phases.num_reopens,
            },
        )

    def end(self, status: grpc.StatusCode) -> None:
        number: int = status.value[0]
        self._span.set_attribute("rpc.grpc.status_code", number)
        if status in _ERRORS:
            self._span.set_status(trace.StatusCode.ERROR, status.name)
        self._span.end()
