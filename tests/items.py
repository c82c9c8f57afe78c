"""Items as an orchestrator makes them for either model service, and a server to send them to."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from tandem import codec
from tandem.draft.v1 import draft_pb2
from tandem.prefix_hash import HashedTokens
from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES, open_channel, server_options
from tandem.serving.errors import LifecycleInterceptor
from tandem.target.v1 import target_pb2
from tandem.types import SessionId, SessionSpec, Stamp

ItemT = TypeVar("ItemT", target_pb2.VerifyItem, draft_pb2.ProposeItem)


def stamp(tokens: Sequence[int], round_number: int = 0, session: int = 1, epoch: int = 1) -> Stamp:
    """The stamp of an item made for these committed tokens."""
    return Stamp(SessionId(session), epoch, round_number, len(tokens), HashedTokens(tokens).prefix_hash())


def open_item(
    kind: type[ItemT], spec: SessionSpec, session: int = 1, epoch: int = 1, deadline_ms: int = 0
) -> ItemT:
    made_for = codec.stamp_to_proto(stamp(spec.token_ids, 0, session, epoch))
    return kind(stamp=made_for, open=codec.session_to_proto(spec), deadline_ms=deadline_ms)


def close_item(kind: type[ItemT], made_for: Stamp) -> ItemT:
    item = kind(stamp=codec.stamp_to_proto(made_for))
    item.close.SetInParent()
    return item


@asynccontextmanager
async def channel_to(register: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a real server on a free port of the loopback, which stops when the block ends."""
    server = grpc.aio.server(interceptors=[LifecycleInterceptor()], options=server_options(MAX_INNER_MESSAGE_BYTES))
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)
