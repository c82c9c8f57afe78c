"""A draft service that lies: what it says of itself, and what it sends, are the test's."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from tandem.draft.v1 import draft_pb2 as pb
from tandem.types import PROTOCOL_VERSION, DraftProbsTransport
from tests.orchestrator.services import VOCAB, VOCABULARY, DraftReplica, ngram_draft

SERVICE = "tandem.draft.v1.DraftService"
Lie = Callable[[pb.ProposeItem], Iterable[bytes]]  # the messages that an item is answered with


def an_honest_face(**changes: Any) -> pb.GetInfoResponse:
    """What a draft service says that can do everything, changed as told."""
    face = pb.GetInfoResponse(proposer="friend", transports=range(1, len(DraftProbsTransport) + 1))
    face.model.protocol_version = PROTOCOL_VERSION
    face.model.vocab_size = VOCAB
    face.model.vocab_hash = VOCABULARY.id_bytes_hash
    face.model.max_draft_tokens = 8
    face.MergeFrom(pb.GetInfoResponse(**changes))
    return face


class HostileDraft(DraftReplica):
    """Answers each item with whatever the lie makes of it; what cannot be a message travels as it is."""

    def __init__(self, lie: Lie, face: pb.GetInfoResponse | None = None) -> None:
        super().__init__(ngram_draft)
        self.num_lies = 0
        self._lie = lie
        self._face = face or an_honest_face()

    async def start(self) -> None:
        server = self._server = grpc.aio.server()
        handlers = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(self._introduce),
            "Propose": grpc.stream_stream_rpc_method_handler(self._propose),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _introduce(self, request: bytes, context: Any) -> bytes:
        return self._face.SerializeToString()

    async def _propose(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            for item in pb.ProposeRequest.FromString(request).items:
                for message in self._lie(item):
                    self.num_lies += 1
                    yield message


def answered(item: pb.ProposeItem, **outcome: Any) -> bytes:
    """One message with the item's answer."""
    return pb.ProposeResponse(results=[pb.ProposeResult(stamp=item.stamp, **outcome)]).SerializeToString()


def proposing(make: Callable[[int], dict[str, Any]]) -> Lie:
    """Opens and closes like any other; `make` makes the proposal for a round that wants so many drafts."""

    def lie(item: pb.ProposeItem) -> Iterable[bytes]:
        match item.WhichOneof("op"):
            case "open":
                yield answered(item, opened=pb.SessionOpened())
            case "propose":
                yield answered(item, proposal=make(item.propose.num_draft_tokens))

    return lie
