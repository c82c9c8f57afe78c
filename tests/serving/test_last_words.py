"""What still runs at the end of the grace is cut off, and told so as far as it listens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.serving.channels import open_channel
from tandem.serving.errors import status_of
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.serving.test_life import Servicer, started, stop


def test_a_call_that_outlasts_the_grace_is_told_so_and_logged_as_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[grpc.StatusCode] = []  # as a handler finds it, for what it counts

    class Endless(Servicer):
        async def GetInfo(self, request: Any, context: Any) -> target_pb2.GetInfoResponse:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                statuses.append(status_of(error, context))
                raise
            raise AssertionError

    async def scenario() -> list[grpc.aio.AioRpcError]:
        servicer, failures = Endless(), []
        task, address = await started(servicer, tmp_path, grace_s=0.25)
        async with open_channel(address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            stream, unary = stub.Verify(iter(())), stub.GetInfo(target_pb2.GetInfoRequest())
            await stream.read()
            await stop(task)
            for ended in (stream.read(), unary):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ended
                failures.append(caught.value)
        assert servicer.closed.is_set()
        return failures

    with caplog.at_level("INFO"):
        failures = asyncio.run(scenario())
    details = "the service is shutting down, and cut off what still ran after the 0.25 s of --grace"
    assert statuses == [grpc.StatusCode.UNAVAILABLE]
    assert [(one.code(), one.details()) for one in failures] == [(grpc.StatusCode.UNAVAILABLE, details)] * 2
    told = [one for one in caplog.records if hasattr(one, "status")]
    assert [(one.status, one.levelname, one.getMessage()) for one in told] == [("UNAVAILABLE", "INFO", details)] * 2


def test_a_client_that_takes_nothing_does_not_keep_a_server_from_ending(tmp_path: Path) -> None:
    class Talker(Servicer):
        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
            try:
                while True:
                    yield target_pb2.VerifyResponse(results=[target_pb2.VerifyResult()] * 50_000)
            finally:
                self.closed.set()

    async def scenario() -> None:
        servicer = Talker()
        task, address = await started(servicer, tmp_path, grace_s=0.25)
        async with open_channel(address) as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).Verify(iter(()))
            await call.read()
            await asyncio.sleep(0.5)  # until nothing more is taken
            await stop(task)
        assert servicer.closed.is_set()

    asyncio.run(scenario())
