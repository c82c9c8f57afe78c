"""Spans are made when OTEL_ variables ask for them, hang below the caller's, and are needed for nothing."""

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from orchestrator.tracing import NoTracer, is_tracing_wanted, tracer_from_environment
from tests.orchestrator.services import all_services, similar_draft

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False),
        ({"OTEL_SDK_DISABLED": "True", **ENDPOINT}, False),
    ],
)
def test_nothing_is_traced_unless_the_variables_ask_for_it(environment: Mapping[str, str], is_wanted: bool) -> None:
    assert is_tracing_wanted(environment) is is_wanted
    if not is_wanted:
        assert isinstance(tracer_from_environment(environment), NoTracer)


def test_without_the_packages_or_with_another_protocol_the_log_says_so_and_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "orchestrator.otel_tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert isinstance(tracer_from_environment(ENDPOINT), NoTracer)
    assert 'pip install ".[otel]" in the folder' in caplog.text
    other = {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    assert isinstance(tracer_from_environment(other), NoTracer)
    assert "'http/protobuf' is not offered" in caplog.text


def test_the_callers_trace_context_goes_on_as_it_came_when_nothing_is_traced() -> None:
    assert NoTracer().start(TRACEPARENT, "mine").traceparent == TRACEPARENT


def test_a_request_is_a_span_below_the_callers_with_an_event_a_round() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from orchestrator.otel_tracer import OtelTracer

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def scenario() -> None:
        async with all_services(similar_draft, tracer=OtelTracer(provider)) as stack:
            result = await stack.client.complete("abc", max_tokens=9, ignore_eos=True, request_id="mine")
            with pytest.raises(Exception, match="temperature"):
                await stack.client.complete("abc", temperature=-1.0)
            served, refused = exporter.get_finished_spans()
            assert served.attributes["tandem.request_id"] == "mine"
            assert (served.attributes["rpc.grpc.status_code"], refused.attributes["rpc.grpc.status_code"]) == (0, 3)
            assert not served.parent
            events = [event.attributes for event in served.events]
            assert len(events) == result.speculation.num_rounds
            assert sum(event["num_tokens"] for event in events) == 9
            assert sum(event["num_accepted"] for event in events) == result.speculation.num_accepted
            total_ms = sum(event["verify_rpc_ms"] for event in events)
            assert total_ms == pytest.approx(result.speculation.verify_wait_s * 1e3, abs=1e-2)

    run(scenario())
    span = OtelTracer(provider).start(TRACEPARENT, "x")
    assert span.traceparent.startswith(f"00-{TRACE_ID}-")
    assert PARENT_ID not in span.traceparent
    provider.shutdown()


def test_spans_reach_the_endpoint_that_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        tracer = tracer_from_environment(os.environ)
        tracer.start(TRACEPARENT, "mine").end(grpc.StatusCode.UNAVAILABLE)
        tracer.close()
        server.stop(0).wait()
    ((resource_spans,),) = (request.resource_spans for request in received)
    (span,) = resource_spans.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.status.message == "UNAVAILABLE"
    names = {one.key: one.value.string_value for one in resource_spans.resource.attributes}
    assert names["service.name"] == "tandem-orchestrator"
