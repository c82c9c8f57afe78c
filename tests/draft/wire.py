"""A real server and one stream to it, spoken to in values."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from draft_service.proposers.base import Proposer
from draft_service.server import DraftServicer
from draft_service.service import DraftLimits, DraftService
from tandem import codec
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc
from tandem.prefix_hash import HashedTokens
from tandem.serving.channels import open_channel
from tandem.serving.compute import ComputeThread
from tandem.serving.errors import LifecycleInterceptor
from tandem.types import ErrorCode, Proposal, SessionId, SessionSpec, Stamp


@dataclass
class Running:
    """The service under test and a stub of it."""

    service: DraftService
    stub: Any


@asynccontextmanager
async def running(proposer: Proposer, limits: DraftLimits = DraftLimits()) -> AsyncIterator[Running]:  # noqa: B008
    """Serve on a free port until the block ends."""
    service = DraftService(proposer, limits, ComputeThread("draft-compute"))
    server = grpc.aio.server(interceptors=[LifecycleInterceptor()])
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(service), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Running(service, draft_pb2_grpc.DraftServiceStub(channel))
    finally:
        await server.stop(0)
        await service.batcher.aclose()


@dataclass
class Peer:
    """One stream, as an orchestrator holds it."""

    call: Any
    results: list[pb.ProposeResult] = field(default_factory=list)
    last_response: pb.ProposeResponse = field(default_factory=pb.ProposeResponse)

    async def send(self, *items: pb.ProposeItem) -> None:
        await self.call.write(pb.ProposeRequest(items=items))

    async def receive(self) -> pb.ProposeResult:
        """The next result, in the order they come."""
        while not self.results:
            self.last_response = await self.call.read()
            self.results += self.last_response.results
        return self.results.pop(0)

    async def ask(self, item: pb.ProposeItem) -> pb.ProposeResult:
        await self.send(item)
        return await self.receive()


def stamp(tokens: Sequence[int], session: int = 1, epoch: int = 1, round_index: int = 0) -> Stamp:
    """A stamp for these committed tokens."""
    return Stamp(SessionId(session), epoch, round_index, len(tokens), HashedTokens(tokens).prefix_hash())


def open_item(spec: SessionSpec, session: int = 1, epoch: int = 1) -> pb.ProposeItem:
    made_for = stamp(spec.token_ids, session, epoch)
    return pb.ProposeItem(stamp=codec.stamp_to_proto(made_for), open=codec.session_to_proto(spec))


def propose_item(
    tokens: Sequence[int],
    round_index: int,
    tail_start: int,
    num_draft_tokens: int = 2,
    session: int = 1,
    epoch: int = 1,
) -> pb.ProposeItem:
    """A round whose committed tokens are `tokens`, of which those before `tail_start` are known."""
    step = pb.ProposeStep(
        tail_start=tail_start, committed_token_ids=tokens[tail_start:], num_draft_tokens=num_draft_tokens
    )
    made_for = stamp(tokens, session, epoch, round_index)
    return pb.ProposeItem(stamp=codec.stamp_to_proto(made_for), propose=step)


def close_item(session: int = 1, epoch: int = 1) -> pb.ProposeItem:
    item = pb.ProposeItem(stamp=codec.stamp_to_proto(stamp((), session, epoch)))
    item.close.SetInParent()
    return item


def proposal_of(result: pb.ProposeResult) -> Proposal:
    assert result.WhichOneof("outcome") == "proposal", result
    return codec.proposal_from_proto(result.proposal)


def error_of(result: pb.ProposeResult) -> tuple[ErrorCode, str]:
    assert result.WhichOneof("outcome") == "error", result
    error = codec.error_from_proto(result.error)
    return error.code, error.message
