"""A real server and one stream to it, spoken to in values."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draft_service.limits import DraftLimits
from draft_service.proposers.base import Proposer
from draft_service.server import DraftServicer
from draft_service.service import DraftService
from tandem import codec
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1.draft_pb2_grpc import DraftServiceStub, add_DraftServiceServicer_to_server
from tandem.serving.compute import ComputeThread
from tandem.types import ErrorCode, Proposal
from tests import items


@dataclass
class Running:
    """The service under test and a stub of it."""

    service: DraftService
    stub: Any


@asynccontextmanager
async def running(proposer: Proposer, limits: DraftLimits = DraftLimits()) -> AsyncIterator[Running]:  # noqa: B008
    """Serve on a free port until the block ends."""
    service = DraftService(proposer, limits, ComputeThread("draft-compute"))
    servicer = DraftServicer(service)
    try:
        async with items.channel_to(lambda server: add_DraftServiceServicer_to_server(servicer, server)) as channel:
            yield Running(service, DraftServiceStub(channel))
    finally:
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


open_item = partial(items.open_item, pb.ProposeItem)


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
    made_for = items.stamp(tokens, round_index, session, epoch)
    return pb.ProposeItem(stamp=codec.stamp_to_proto(made_for), propose=step)


def close_item(session: int = 1, epoch: int = 1) -> pb.ProposeItem:
    return items.close_item(pb.ProposeItem, items.stamp((), 0, session, epoch))


def proposal_of(result: pb.ProposeResult) -> Proposal:
    assert result.WhichOneof("outcome") == "proposal", result
    return codec.proposal_from_proto(result.proposal)


def error_of(result: pb.ProposeResult) -> tuple[ErrorCode, str]:
    assert result.WhichOneof("outcome") == "error", result
    error = codec.error_from_proto(result.error)
    return error.code, error.message


def play(scenario: "Scenario", proposer: Proposer, limits: DraftLimits = DraftLimits()) -> None:  # noqa: B008
    """Run a scenario against a server with one stream."""

    async def run() -> None:
        async with running(proposer, limits) as server:
            call = server.stub.Propose()
            await asyncio.wait_for(scenario(server, Peer(call)), 20)
            call.cancel()

    asyncio.run(run())


Scenario = Callable[[Running, Peer], Awaitable[None]]
