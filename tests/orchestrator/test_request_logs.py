"""Every refused or failed request leaves exactly one line, with its id, the caller's trace and its status."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from orchestrator.server import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import open_channel
from tandem.serving.logs import JsonFormatter
from tests.orchestrator.fakes import until
from tests.orchestrator.services import Stack, all_services, self_draft, toy_engine

METHOD = "/tandem.orchestrator.v1.OrchestratorService/Generate"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Ends(logging.Handler):
    """The lines that say how a request ended, as they are written."""

    def __init__(self) -> None:
        super().__init__("INFO")
        self.setFormatter(JsonFormatter("orchestrator"))
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = json.loads(self.format(record))
        if "status" in line:
            self.lines.append(line)


@pytest.fixture
def ends(caplog: pytest.LogCaptureFixture) -> Iterator[Ends]:
    handler = Ends()
    root = logging.getLogger()
    root.addHandler(handler)
    with caplog.at_level("INFO"):
        yield handler
    root.removeHandler(handler)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def code_of(stack: Stack, request: pb.GenerateRequest, **options: Any) -> str:
    """The status that the request ends with."""
    async with open_channel(stack.client.address) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        call = stub.Generate(request, metadata=(("traceparent", TRACEPARENT),), **options)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


def bad(request: pb.GenerateRequest) -> None:
    request.sampling.temperature = -1


def unknown_policy(request: pb.GenerateRequest) -> None:
    request.speculation.verification_policy = 99  # type: ignore[assignment]


def too_many(request: pb.GenerateRequest) -> None:
    request.n = 3


@pytest.mark.parametrize(
    ("spoil", "status"),
    [(bad, "INVALID_ARGUMENT"), (too_many, "INVALID_ARGUMENT"), (unknown_policy, "UNIMPLEMENTED")],
)
def test_a_refused_request_leaves_one_line(
    spoil: Callable[[pb.GenerateRequest], None], status: str, ends: Ends
) -> None:
    async def scenario() -> None:
        async with all_services(None, settings=OrchestratorSettings(max_requests=2)) as stack:
            request = pb.GenerateRequest(text="abc", request_id="mine")
            spoil(request)
            assert await code_of(stack, request) == status
            (line,) = ends.lines
            expected = {"request_id": "mine", "trace_id": TRACE_ID, "method": METHOD, "status": status}
            assert {name: line[name] for name in expected} == expected
            assert line["level"] == "INFO"

    run(scenario())


def test_a_served_request_leaves_none_and_one_without_an_id_is_given_one(ends: Ends) -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            request = pb.GenerateRequest(text="abc")
            request.stopping.max_tokens = 3
            assert await code_of(stack, request) == "OK"
            assert ends.lines == []
            bad(request)
            await code_of(stack, request)
            (line,) = ends.lines
            assert line["request_id"].startswith("req-")

    run(scenario())


def test_a_request_that_fails_amid_its_answers_leaves_one_line_and_a_bug_its_traceback(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with all_services(None) as stack:
            request = pb.GenerateRequest(text="abc", request_id="mine", n=3)
            monkeypatch.setattr("orchestrator.messages.chunk", lambda *_: 1 / 0)
            assert await code_of(stack, request) == "INTERNAL"
            (line,) = ends.lines
            assert (line["request_id"], line["status"], line["level"]) == ("mine", "INTERNAL", "ERROR")
            assert "ZeroDivisionError" in line["exception"]
            assert line["message"] == "internal error"

    run(scenario())


def test_a_deadline_and_a_client_that_goes_leave_one_line_each(ends: Ends) -> None:
    async def scenario() -> None:
        async with all_services(None, engine=toy_engine(step_delay_s=0.02)) as stack:
            request = pb.GenerateRequest(text="abc", request_id="late")
            request.stopping.max_tokens, request.stopping.ignore_eos = 200, True
            assert await code_of(stack, request, timeout=0.4) == "DEADLINE_EXCEEDED"
            await until(lambda: len(ends.lines) == 1)
            assert (ends.lines[0]["request_id"], ends.lines[0]["status"]) == ("late", "DEADLINE_EXCEEDED")
            generation = stack.client.generate("abc", request_id="gone", max_tokens=200, ignore_eos=True)
            async with aclosing(aiter(generation)) as chunks:
                await anext(chunks)
            await stack.until_free()
            await until(lambda: len(ends.lines) == 2)
            assert (ends.lines[1]["request_id"], ends.lines[1]["status"]) == ("gone", "CANCELLED")

    run(scenario())


def test_an_id_that_is_too_long_is_refused_and_shortened_in_the_log(ends: Ends) -> None:
    async def scenario() -> None:
        async with all_services(None) as stack:
            request = pb.GenerateRequest(text="abc", request_id="x" * 5000)
            assert await code_of(stack, request) == "INVALID_ARGUMENT"
            (line,) = ends.lines
            assert line["request_id"] == "x" * 128

    run(scenario())
