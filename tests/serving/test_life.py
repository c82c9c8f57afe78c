"""A server's life: statuses for every kind of error, exclusive ports, loopback by default, a clean stop."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.serving.channels import AddressError, check_bind_address, open_channel, parse_address
from tandem.serving.errors import ServiceError
from tandem.serving.life import PortInUseError, ServerSettings, run_server
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.validation import InvalidArgumentError

NAME = "tandem.target.v1.TargetService"


class Servicer(target_pb2_grpc.TargetServiceServicer):
    """Fails as the test asks, and records whether its stream was closed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.closed = asyncio.Event()

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.GetInfoResponse:
        if self.error is not None:
            raise self.error
        return target_pb2.GetInfoResponse()

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
        try:
            yield target_pb2.VerifyResponse()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


async def started(servicer: Servicer, tmp_path: Path, grace_s: float = 1.0) -> tuple[asyncio.Task[None], str]:
    """A running server and its address."""
    ready_file = tmp_path / "ready"
    settings = ServerSettings(NAME, "127.0.0.1:0", 1 << 20, grace_s=grace_s, ready_file=ready_file)
    task = asyncio.create_task(
        run_server(settings, lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server))
    )
    while not ready_file.exists():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    return task, ready_file.read_text().strip()


async def stop(task: asyncio.Task[None]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 30)


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (InvalidArgumentError("prompt", "is empty"), grpc.StatusCode.INVALID_ARGUMENT, "prompt: is empty"),
        (ServiceError(grpc.StatusCode.UNAVAILABLE, "no target"), grpc.StatusCode.UNAVAILABLE, "no target"),
        (InvalidArgumentError("a", "b" * 20_000), grpc.StatusCode.INVALID_ARGUMENT, "a: " + "b" * 997 + " ..."),
        (RuntimeError("secret path"), grpc.StatusCode.INTERNAL, "internal error"),
        (asyncio.CancelledError(), grpc.StatusCode.INTERNAL, "internal error"),
    ],
)
def test_errors_become_statuses_and_bugs_do_not_leak_their_text(
    error: BaseException, code: grpc.StatusCode, details: str, tmp_path: Path
) -> None:
    async def scenario() -> grpc.aio.AioRpcError:
        task, address = await started(Servicer(error), tmp_path)
        async with open_channel(address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=10)
        await stop(task)
        return caught.value

    failure = asyncio.run(scenario())
    assert failure.code() is code
    assert failure.details() == details


def test_bytes_that_are_no_request_are_the_peers_fault_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reader(Servicer):
        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
            async for _ in request_iterator:
                yield target_pb2.VerifyResponse()

    async def scenario() -> list[grpc.aio.AioRpcError]:
        task, address = await started(Reader(), tmp_path)
        failures = []
        async with open_channel(address) as channel:
            unary = channel.unary_unary(f"/{NAME}/GetInfo")
            stream = channel.stream_stream(f"/{NAME}/Verify")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unary(b"\xff" * 7, timeout=10)
            failures.append(caught.value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stream(iter([b"", b"\xff" * 9]), timeout=10):
                    pass
            failures.append(caught.value)
        await stop(task)
        return failures

    failures = asyncio.run(scenario())
    assert [failure.code() for failure in failures] == [grpc.StatusCode.INVALID_ARGUMENT] * 2
    assert [failure.details() for failure in failures] == [
        "request: 7 bytes cannot be read as a GetInfoRequest",
        "request: 9 bytes cannot be read as a VerifyRequest",
    ]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_message_beyond_the_servers_limit_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async def scenario() -> grpc.aio.AioRpcError:
        task, address = await started(Servicer(), tmp_path)
        async with open_channel(address) as channel:
            method = channel.unary_unary(f"/{NAME}/GetInfo")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(bytes((1 << 20) + 1), timeout=10)
            await target_pb2_grpc.TargetServiceStub(channel).GetInfo(target_pb2.GetInfoRequest(), timeout=10)
        await stop(task)
        return caught.value

    failure = asyncio.run(scenario())
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "message larger than max (1048577 vs. 1048576)" in str(failure.details())


def test_a_client_that_has_gone_before_its_status_is_noted_and_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Servicer):
        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
            yield target_pb2.VerifyResponse()
            time.sleep(context.time_remaining() + 0.05)  # noqa: ASYNC251 - the loop must not hear of the end
            raise ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

    async def scenario() -> grpc.aio.AioRpcError:
        task, address = await started(Late(), tmp_path)
        async with open_channel(address) as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).Verify(iter(()), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        await stop(task)
        return caught.value

    with caplog.at_level("INFO"):
        assert asyncio.run(scenario()).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (record,) = [one for one in caplog.records if hasattr(one, "status")]
    assert (record.status, record.levelname) == ("DEADLINE_EXCEEDED", "INFO")
    assert record.getMessage() == "the client went away before it could be told: too late"


def test_health_is_serving_and_a_cancelled_stream_is_closed_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        servicer = Servicer()
        task, address = await started(servicer, tmp_path)
        async with open_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            call = target_pb2_grpc.TargetServiceStub(channel).Verify(iter(()))
            await call.read()
            call.cancel()
            await asyncio.wait_for(servicer.closed.wait(), 10)
        await stop(task)

    asyncio.run(scenario())


def test_a_taken_port_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        task, address = await started(Servicer(), tmp_path)
        with pytest.raises(PortInUseError, match=address):
            await run_server(ServerSettings(NAME, address, 1 << 20), lambda server: None)
        await stop(task)

    asyncio.run(scenario())


def test_addresses_are_loopback_unless_insecure_is_accepted() -> None:
    for address in ("127.0.0.1:1", "localhost:0", "[::1]:65535"):
        check_bind_address(address, insecure=False)
    with pytest.raises(AddressError, match="--insecure"):
        check_bind_address("0.0.0.0:1", insecure=False)
    check_bind_address("0.0.0.0:1", insecure=True)
    for address in ("nowhere", "host:", ":1", "host:65536", "host:x"):
        with pytest.raises(AddressError, match=r"0\.\.65535"):
            parse_address(address)


def test_health_tells_whether_the_service_is_healthy_all_the_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        is_healthy = True
        ready_file = tmp_path / "ready"
        settings = ServerSettings(NAME, "127.0.0.1:0", 1 << 20, grace_s=1, ready_file=ready_file)
        task = asyncio.create_task(run_server(settings, lambda _: None, is_healthy=lambda: is_healthy))
        while not ready_file.exists():
            await asyncio.sleep(0.01)
        states = health_pb2.HealthCheckResponse
        async with open_channel(ready_file.read_text().strip()) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)

            async def until_state(wanted: int) -> None:
                for service in ("", NAME):
                    while (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status != wanted:
                        await asyncio.sleep(0.02)

            await asyncio.wait_for(until_state(states.SERVING), 20)
            is_healthy = False
            await asyncio.wait_for(until_state(states.NOT_SERVING), 20)
            is_healthy = True
            await asyncio.wait_for(until_state(states.SERVING), 20)
        await stop(task)

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_lets_the_drain_go_on_and_the_handlers_are_as_before_at_its_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    async def scenario() -> bool:
        handler, drained = signal.getsignal(number), False

        async def drain() -> None:
            nonlocal drained
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            drained = True

        settings = ServerSettings(NAME, "127.0.0.1:0", 1 << 20, ready_file=tmp_path / "ready")
        task = asyncio.create_task(run_server(settings, lambda _: None, on_drain=drain))
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(task, 30)
        return drained and signal.getsignal(number) is handler

    assert asyncio.run(scenario())


def test_a_standard_input_that_never_ends_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(NAME, "127.0.0.1:0", 1 << 20, stop_at_eof=True)
    (tmp_path / "file").write_text("words")
    with (tmp_path / "file").open() as file, open(os.devnull) as nothing, open(os.devnull) as closed:
        closed.close()
        for standard_input in (file, nothing, closed, None):
            monkeypatch.setattr(sys, "stdin", standard_input)
            with pytest.raises(
                OSError, match="--stop-at-eof: standard input is closed, /dev/null or a file, whose"
            ):
                settings.check()
    reading, writing = os.pipe()
    with open(reading) as pipe, open(writing, "w"):
        monkeypatch.setattr(sys, "stdin", pipe)
        settings.check()
