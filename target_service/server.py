"""The servicer: wire items to the session table, its answers back to the wire."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc

from engine.backends.base import EngineCapabilities
from tandem import codec
from tandem.serving.item_stream import serve_items
from tandem.serving.items import Opened, Replayed
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.types import ErrorCode, HiddenStates, ItemError, ModelInfo, Stamp, Verdict
from target_service.answers import Answer, StreamId
from target_service.replays import HiddenReplay
from target_service.scheduler import Scheduler

SERVICE_NAME = "tandem.target.v1.TargetService"

# The stubs know this type as generic, the library does not.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def model_info(
    capabilities: EngineCapabilities, model_id: str, vocab_hash: str, max_draft_tokens: int
) -> ModelInfo:
    """The handshake of this process."""
    info = capabilities.model_info(model_id, vocab_hash)
    return replace(info, max_draft_tokens=max_draft_tokens, incarnation=secrets.randbits(64))


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Streams of items in, batches of results out; all sessions share one scheduler."""

    def __init__(self, scheduler: Scheduler, info: ModelInfo) -> None:
        self._scheduler = scheduler
        self._info = info

    async def GetInfo(  # noqa: N802 - the contract's name
        self,
        request: target_pb2.GetInfoRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> target_pb2.GetInfoResponse:
        return target_pb2.GetInfoResponse(
            model=codec.model_info_to_proto(self._info), load=codec.load_to_proto(self._scheduler.load())
        )

    def Verify(  # noqa: N802 - the contract's name
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        stream_id, outbox = self._scheduler.open_stream()
        return serve_items(
            request_iterator,
            partial(self._take, stream_id),
            outbox,
            result_to_proto,
            self._response,
            settle=partial(self._scheduler.settle_stream, stream_id),
            end=partial(self._scheduler.end_stream, stream_id),
        )

    def _take(
        self,
        stream_id: StreamId,
        item: target_pb2.VerifyItem,
        stamp: Stamp,
        arrived_s: float,
        deadline_s: float | None,
    ) -> None:
        """Decode one item and apply it."""
        table = self._scheduler.table
        self._scheduler.arrived(stream_id, stamp.session_id, arrived_s)
        with table.answering(stream_id, stamp):
            match item.WhichOneof("op"):
                case "open":
                    spec, hidden_layers = codec.session_from_proto(item.open), tuple(item.hidden_layers)
                    table.open(stream_id, stamp, spec, arrived_s, deadline_s, hidden_layers)
                case "verify":
                    proposal = codec.proposal_from_proto(item.verify.proposal)
                    table.verify(stream_id, stamp, proposal, arrived_s, deadline_s)
                case "close":
                    table.close(stream_id, stamp)
                case "replay":
                    what = item.replay
                    wanted = HiddenReplay(tuple(what.token_ids), tuple(what.hidden_layers), what.first_row)
                    table.replay(stream_id, stamp, wanted, arrived_s)
                case _:
                    raise ItemError(ErrorCode.INVALID_ARGUMENT, "item.op: must be open, verify, replay or close")
        self._scheduler.wake()

    def _response(self, results: list[target_pb2.VerifyResult]) -> target_pb2.VerifyResponse:
        """The results, with the load of the moment."""
        return target_pb2.VerifyResponse(results=results, load=codec.load_to_proto(self._scheduler.load()))


def result_to_proto(answer: Answer) -> target_pb2.VerifyResult:
    """One answer as it travels."""
    stamp, outcome = codec.stamp_to_proto(answer.stamp), answer.outcome
    if isinstance(outcome, Verdict):
        return target_pb2.VerifyResult(stamp=stamp, verdict=codec.verdict_to_proto(outcome))
    if isinstance(outcome, ItemError):
        return target_pb2.VerifyResult(stamp=stamp, error=codec.error_to_proto(outcome))
    if isinstance(outcome, HiddenStates):
        return target_pb2.VerifyResult(stamp=stamp, hidden_states=codec.hidden_states_to_proto(outcome))
    if isinstance(outcome, Opened):
        return target_pb2.VerifyResult(stamp=stamp, opened=target_pb2.SessionOpened())
    if isinstance(outcome, Replayed):
        return target_pb2.VerifyResult(stamp=stamp, replayed=target_pb2.HiddenStatesReplayed())
    return target_pb2.VerifyResult(stamp=stamp, closed=target_pb2.SessionClosed())
