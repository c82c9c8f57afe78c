"""When to come back travels as google.rpc.RetryInfo, and whatever else stands there is no harm."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.serving.channels import open_channel
from tandem.serving.errors import LifecycleInterceptor, ServiceError
from tandem.serving.retry import retry_after_s, retry_metadata
from tandem.target.v1 import target_pb2, target_pb2_grpc


class Refusing(target_pb2_grpc.TargetServiceServicer):
    """Refuses every call."""

    def __init__(self, wait_s: float | None) -> None:
        self.wait_s = wait_s

    async def GetInfo(self, request: Any, context: Any) -> Any:
        raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", self.wait_s)

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", self.wait_s)
        yield


@pytest.mark.parametrize("wait_s", [None, 0.0, 0.25, 3.5, 1e6])
def test_a_client_reads_what_a_server_has_said(wait_s: float | None) -> None:
    async def scenario() -> None:
        server = grpc.aio.server(interceptors=[LifecycleInterceptor()])
        target_pb2_grpc.add_TargetServiceServicer_to_server(Refusing(wait_s), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with open_channel(address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            for call in (stub.GetInfo(target_pb2.GetInfoRequest()), stub.Verify().read()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                assert retry_after_s(caught.value) == wait_s
        await server.stop(0)

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Failed:
    """As much of an error as is looked at."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def trailing_metadata(self) -> Any:
        return self.metadata


@pytest.mark.parametrize(
    "metadata",
    [None, (), (("other", "x"),), (("grpc-status-details-bin", b"\xff\xff"),), (("grpc-status-details-bin", b""),)],
)
def test_a_status_that_says_nothing_of_it_is_no_error(metadata: Any) -> None:
    assert retry_after_s(Failed(metadata)) is None


def test_parts_of_a_second_are_kept() -> None:
    metadata = retry_metadata(grpc.StatusCode.UNAVAILABLE, "x", 0.123456789)
    assert retry_after_s(Failed(metadata)) == pytest.approx(0.123456789)
