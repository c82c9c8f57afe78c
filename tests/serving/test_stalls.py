"""A call whose client takes nothing is ended and frees what it holds; one that takes a little now and then is not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tandem.serving.channels import channel_options
from tandem.serving.errors import LifecycleInterceptor
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.orchestrator.fakes import until

# A window of a kilobyte, so that a few messages fill it.
NARROW = [*channel_options(1 << 20), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
MESSAGE = target_pb2.VerifyResponse(results=[target_pb2.VerifyResult() for _ in range(100)])


class Talker(target_pb2_grpc.TargetServiceServicer):
    """Says so many messages on each stream, and remembers what became of it."""

    def __init__(self, num_messages: int) -> None:
        self.num_messages = num_messages
        self.num_said = 0
        self.num_closed = 0

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
        try:
            for _ in range(self.num_messages):
                self.num_said += 1
                yield MESSAGE
        finally:
            await asyncio.sleep(0)  # as what frees something may do
            self.num_closed += 1


@asynccontextmanager
async def calling(talker: Talker, stall_s: float) -> AsyncIterator[Callable[[], Any]]:
    """What opens a stream to the served talker through a narrow window."""
    server = grpc.aio.server(interceptors=[LifecycleInterceptor(stall_s)])
    target_pb2_grpc.add_TargetServiceServicer_to_server(talker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW) as channel:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            yield lambda: stub.Verify(iter(()))
    finally:
        await server.stop(0)


async def read_all(call: Any) -> int:
    count = 0
    while await call.read() is not grpc.aio.EOF:
        count += 1
    return count


def handler_tasks() -> list[Any]:
    """Calls that the server has not done with, and what they run."""
    names = ("_handle_exceptions", "_schedule_rpc_coro", "free")
    coroutines: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
    return [one for one in coroutines if one.__qualname__.endswith(names)]


def test_who_takes_nothing_loses_the_call_and_is_told_on_coming_back(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        talker = Talker(1000)
        async with calling(talker, 0.3) as call:
            still = call()
            await still.read()
            await until(lambda: talker.num_closed == 1)
            num_said = talker.num_said
            assert num_said < 20  # what the window holds, and the one that waits
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(still)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert caught.value.details() == "the client took nothing of what waited for it for 0.3 s"
            assert (talker.num_said, talker.num_closed) == (num_said, 1)
            await until(lambda: not handler_tasks())

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "/Verify: the client took nothing" in caplog.text
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_who_leaves_after_having_lost_the_call_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        talker = Talker(1000)
        async with calling(talker, 0.1) as call:
            still = [call() for _ in range(20)]
            for one in still:
                await one.read()
            await until(lambda: talker.num_closed == 20)
            assert handler_tasks() != []  # their status still waits
            for one in still:
                one.cancel()
            await until(lambda: not handler_tasks())

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert caplog.records == []


def test_who_takes_a_little_now_and_then_has_everything() -> None:
    async def scenario() -> None:
        talker = Talker(40)
        async with calling(talker, 1.0) as call:
            slow = call()
            count = 0
            while await slow.read() is not grpc.aio.EOF:
                count += 1
                await asyncio.sleep(0.05)
            assert (count, await slow.code()) == (40, grpc.StatusCode.OK)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_room_that_comes_at_the_last_moment_harms_nothing() -> None:
    async def scenario() -> None:
        talker = Talker(30)
        async with calling(talker, 0.01) as call:

            async def late(number: int) -> grpc.StatusCode:
                one = call()
                try:
                    while await one.read() is not grpc.aio.EOF:
                        await asyncio.sleep(0.009 + number * 0.0001)
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            codes = await asyncio.gather(*(late(number) for number in range(40)))
            assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.ABORTED}
            await until(lambda: not handler_tasks())
            assert talker.num_closed == 40

    asyncio.run(asyncio.wait_for(scenario(), 60))
