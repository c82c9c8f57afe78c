"""Spans of requests: none, unless the standard OTEL_ variables ask for them and `tandem[otel]` is installed."""

import logging
from collections.abc import Mapping
from typing import Protocol

import grpc

from orchestrator.round_phases import RoundPhases
from orchestrator.sequence import RoundOutput
from tandem.installing import how_to_install

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class RequestSpan(Protocol):
    """One request's."""

    @property
    def traceparent(self) -> str:
        """What is sent on to the services; "" for nothing."""
        ...

    def round(self, sample_index: int, output: RoundOutput, phases: RoundPhases) -> None:
        """One of its answers has grown by a round."""
        ...

    def end(self, status: grpc.StatusCode) -> None:
        """The request has ended so."""
        ...


class Tracer(Protocol):
    """Where spans begin."""

    def start(self, traceparent: str, request_id: str) -> RequestSpan:
        """The span of a request; `traceparent`: the caller's, "" for none."""
        ...

    def close(self) -> None:
        """Send what has not been sent; may take seconds."""
        ...


class _NoSpan:
    """Sends the caller's trace context on as it came."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def round(self, sample_index: int, output: RoundOutput, phases: RoundPhases) -> None:
        """Nobody wants to know."""

    def end(self, status: grpc.StatusCode) -> None:
        """Nobody wants to know."""


class NoTracer:
    """The `Tracer` of a process that traces nothing."""

    def start(self, traceparent: str, request_id: str) -> RequestSpan:  # noqa: ARG002 - the protocol's
        return _NoSpan(traceparent)

    def close(self) -> None:
        """There is nothing to send."""


def tracer_from_environment(environment: Mapping[str, str]) -> Tracer:
    """What the OTEL_ variables ask for; what cannot be done of it is said in the log, and nothing is traced."""
    if not is_tracing_wanted(environment):
        return NoTracer()
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    if protocol != "grpc":
        _log.warning("no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL %r is not offered, grpc is", protocol)
        return NoTracer()
    try:
        from orchestrator.otel_tracer import OtelTracer
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        _log.warning(
            "no traces are sent: OTEL_ variables ask for them, %s is missing: %s",
            error.name,
            how_to_install("otel"),
        )
        return NoTracer()
    return OtelTracer.to_collector(environment)


def is_tracing_wanted(environment: Mapping[str, str]) -> bool:
    """Whether an exporter is named, or an endpoint is and no exporter: where nothing is said nothing is sent."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporters:
        return "otlp" in exporters.split(",")
    return any(environment.get(name) for name in _ENDPOINTS)
