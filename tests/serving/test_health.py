"""Health as clients watch it: each hears every change, whoever else leaves, and none keeps a server from ending."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.serving.channels import open_channel
from tandem.serving.health import Health
from tests.serving.test_life import NAME, Servicer, started, stop

States = health_pb2.HealthCheckResponse


async def watched(channel: grpc.aio.Channel, name: str) -> Any:
    """A watch that has heard its first state."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
    assert (await watch.read()).status == States.SERVING
    return watch


def test_a_watch_hears_of_the_drain_and_then_ends_though_another_has_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        task, address = await started(Servicer(), tmp_path, grace_s=120)
        async with open_channel(address) as channel:
            watches = [await watched(channel, name) for name in ("", NAME, NAME, NAME)]
            watches.pop(1).cancel()
            await asyncio.sleep(0.2)  # until the server knows
            await stop(task)  # in less than the grace
            for watch in watches:
                assert (await watch.read()).status == States.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert caught.value.details() == "the service is shutting down"

    asyncio.run(scenario())


def test_a_name_that_there_is_not_is_unknown(tmp_path: Path) -> None:
    async def scenario() -> None:
        task, address = await started(Servicer(), tmp_path)
        async with open_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="x"))
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.NOT_FOUND,
                "there is no service 'x' here",
            )
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
            assert (await watch.read()).status == States.SERVICE_UNKNOWN
            watch.cancel()
        await stop(task)

    asyncio.run(scenario())


def test_nothing_is_serving_before_it_is_set_nor_once_draining() -> None:
    async def states(health: Health) -> set[int]:
        return {
            (await health.Check(health_pb2.HealthCheckRequest(service=name), None)).status for name in ("", "a")
        }

    async def scenario() -> None:
        health = Health("", "a")
        assert await states(health) == {States.NOT_SERVING}
        health.set(is_serving=True)
        assert await states(health) == {States.SERVING}
        health.drain()
        health.set(is_serving=True)
        assert await states(health) == {States.NOT_SERVING}

    asyncio.run(scenario())
