"""DraftService on the wire: messages to items, results to messages."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from draft_service.service import Done, DraftService, DraftStream, Result
from draft_service.sessions import Step
from tandem import codec
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc
from tandem.types import ErrorCode, ItemError, Proposal
from tandem.validation import InvalidArgumentError

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = "tandem.draft.v1.DraftService"
_log = logging.getLogger(__name__)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One `DraftStream` per call of Propose."""

    def __init__(self, service: DraftService) -> None:
        self._service = service

    async def GetInfo(  # noqa: N802 - the contract's name
        self,
        request: pb.GetInfoRequest,  # noqa: ARG002
        context: "_Context",  # noqa: ARG002
    ) -> pb.GetInfoResponse:
        """Handshake and load."""
        what = self._service.capabilities
        return pb.GetInfoResponse(
            model=codec.model_info_to_proto(self._service.model_info),
            load=codec.load_to_proto(self._service.load),
            proposer=what.name,
            transports=sorted(codec.transport_to_proto(transport) for transport in what.transports),
            needs_hidden_states=what.needs_hidden_states,
        )

    async def Propose(  # noqa: N802 - the contract's name
        self,
        request_iterator: AsyncIterator[pb.ProposeRequest],
        context: "_Context",  # noqa: ARG002
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Read items in a task of their own; write whatever results there are, with the load of the moment."""
        stream = self._service.open_stream()
        reader = asyncio.create_task(_read(request_iterator, stream))
        try:
            async for results in stream.outbox.batches():
                yield pb.ProposeResponse(
                    results=[_result_to_proto(result) for result in results],
                    load=codec.load_to_proto(self._service.load),
                )
        finally:
            reader.cancel()
            stream.end()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(requests: AsyncIterator[pb.ProposeRequest], stream: DraftStream) -> None:
    """Every item of every message; the stream ends with its reader."""
    try:
        async for request in requests:
            for item in request.items:
                _handle(item, stream)
    finally:
        stream.outbox.close()


def _handle(item: pb.ProposeItem, stream: DraftStream) -> None:
    """One item, whose errors are its own."""
    stamp = codec.stamp_from_proto(item.stamp)
    try:
        match item.WhichOneof("op"):
            case "open":
                stream.open_session(stamp, codec.session_from_proto(item.open))
            case "propose":
                step = Step(item.propose.tail_start, tuple(item.propose.committed_token_ids))
                stream.propose(stamp, step, item.propose.num_draft_tokens, item.deadline_ms)
            case "close":
                stream.close_session(stamp)
            case _:
                raise ItemError(ErrorCode.INVALID_ARGUMENT, "item.op: must be open, propose or close")
    except ItemError as error:
        stream.outbox.put(Result(stamp, error))
    except InvalidArgumentError as error:
        stream.outbox.put(Result(stamp, ItemError(ErrorCode.INVALID_ARGUMENT, str(error))))
    except Exception:  # noqa: BLE001 - a bug in one item must not end the other sessions' stream
        _log.exception("item of session %d failed", stamp.session_id)
        stream.outbox.put(Result(stamp, ItemError(ErrorCode.INTERNAL, "internal error")))


def _result_to_proto(result: Result) -> pb.ProposeResult:
    message = pb.ProposeResult(
        stamp=codec.stamp_to_proto(result.stamp), timing=codec.timing_to_proto(result.timing)
    )
    match result.outcome:
        case Done.OPENED:
            message.opened.SetInParent()
        case Done.CLOSED:
            message.closed.SetInParent()
        case Proposal():
            message.proposal.CopyFrom(codec.proposal_to_proto(result.outcome))
        case ItemError():
            message.error.CopyFrom(codec.error_to_proto(result.outcome))
    return message
