"""DraftService on the wire: messages to items, results to messages."""

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from draft_service.service import DraftService, DraftStream, Result
from draft_service.sessions import Step
from tandem import codec
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc
from tandem.serving.item_stream import serve_items
from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Proposal, Stamp

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = "tandem.draft.v1.DraftService"


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
        what = self._service.offer.capabilities
        return pb.GetInfoResponse(
            model=codec.model_info_to_proto(self._service.model_info),
            load=codec.load_to_proto(self._service.load),
            proposer=what.name,
            transports=sorted(codec.transport_to_proto(transport) for transport in what.transports),
            needs_hidden_states=what.needs_hidden_states,
            hidden_layers=what.hidden_states.layers if what.hidden_states else (),
            hidden_size=what.hidden_states.size if what.hidden_states else 0,
        )

    def Propose(  # noqa: N802 - the contract's name
        self,
        request_iterator: AsyncIterator[pb.ProposeRequest],
        context: "_Context",  # noqa: ARG002
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Items in, whatever results there are out."""
        stream = self._service.open_stream()
        return serve_items(
            request_iterator,
            partial(_take, stream),
            stream.outbox,
            _result_to_proto,
            self._response,
            settle=stream.settle,
            end=stream.end,
        )

    def _response(self, results: list[pb.ProposeResult]) -> pb.ProposeResponse:
        """The results, with the load of the moment."""
        return pb.ProposeResponse(results=results, load=codec.load_to_proto(self._service.load))


def _take(
    stream: DraftStream, item: pb.ProposeItem, stamp: Stamp, arrived_s: float, deadline_s: float | None
) -> None:
    """Decode one item and apply it."""
    with stream.answering(stamp):
        match item.WhichOneof("op"):
            case "open":
                stream.open_session(stamp, codec.session_from_proto(item.open), arrived_s)
            case "propose":
                step = Step(item.propose.tail_start, tuple(item.propose.committed_token_ids))
                stream.propose(stamp, step, item.propose.num_draft_tokens, arrived_s, deadline_s)
            case "hidden_states":
                stream.take_hidden_states(stamp, codec.hidden_states_from_proto(item.hidden_states), arrived_s)
            case "close":
                stream.close_session(stamp)
            case _:
                raise ItemError(
                    ErrorCode.INVALID_ARGUMENT, "item.op: must be open, hidden_states, propose or close"
                )


def _result_to_proto(result: Result) -> pb.ProposeResult:
    message = pb.ProposeResult(
        stamp=codec.stamp_to_proto(result.stamp), timing=codec.timing_to_proto(result.timing)
    )
    match result.outcome:
        case Opened():
            message.opened.SetInParent()
        case Closed():
            message.closed.SetInParent()
        case Proposal():
            message.proposal.CopyFrom(codec.proposal_to_proto(result.outcome))
        case ItemError():
            message.error.CopyFrom(codec.error_to_proto(result.outcome))
    return message
