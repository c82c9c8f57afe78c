"""What differs between the two kinds of replica, so that one link serves both: stubs and message types."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import grpc

from tandem import codec
from tandem.draft.v1 import draft_pb2, draft_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.types import DraftProbsTransport, Load, ModelInfo

_MAX_NAME_CHARS = 200

ItemT = TypeVar("ItemT", target_pb2.VerifyItem, draft_pb2.ProposeItem)
ResultT = TypeVar("ResultT", target_pb2.VerifyResult, draft_pb2.ProposeResult)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica said of itself at the last connect."""

    model: ModelInfo
    load: Load
    proposer: str = ""
    transports: frozenset[DraftProbsTransport] = frozenset()
    hidden_layers: tuple[int, ...] = ()  # of the target, after which a draft replica needs hidden states
    hidden_size: int = 0  # of the target that it was made for


@dataclass(frozen=True, slots=True)
class ReplicaApi(Generic[ItemT, ResultT]):
    """One kind of replica: how to ask it, open its stream, make an item, and batch items into a message."""

    role: str  # as errors and logs call it
    get_info: Callable[[grpc.aio.Channel, float], Awaitable[ReplicaInfo]]  # (channel, timeout in seconds)
    open_stream: Callable[[grpc.aio.Channel], Any]  # the stub's call; its request type is `pack`'s
    new_item: Callable[[], ItemT]
    pack: Callable[[Sequence[ItemT]], Any]


async def _target_info(channel: grpc.aio.Channel, timeout_s: float) -> ReplicaInfo:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    answer = await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=timeout_s)
    return ReplicaInfo(codec.model_info_from_proto(answer.model), codec.load_from_proto(answer.load))


async def _draft_info(channel: grpc.aio.Channel, timeout_s: float) -> ReplicaInfo:
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    answer = await stub.GetInfo(draft_pb2.GetInfoRequest(), timeout=timeout_s)
    model = codec.model_info_from_proto(answer.model)
    return ReplicaInfo(
        replace(
            model,
            model_id=_shown(model.model_id),
            backend=_shown(model.backend),
            vocab_hash=_shown(model.vocab_hash),
            dtype=_shown(model.dtype),
            device=_shown(model.device),
        ),
        codec.load_from_proto(answer.load),
        _shown(answer.proposer),
        codec.known_transports(answer.transports),
        tuple(answer.hidden_layers),
        answer.hidden_size,
    )


def _shown(name: str) -> str:
    """What a draft service calls something is repeated in logs and on terminals: readable, and not at any length."""
    name = "".join(one if one.isprintable() else "?" for one in name[: _MAX_NAME_CHARS + 1])
    return name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + " ..."


TARGET_API: ReplicaApi[target_pb2.VerifyItem, target_pb2.VerifyResult] = ReplicaApi(
    role="target",
    get_info=_target_info,
    open_stream=lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify(),
    new_item=target_pb2.VerifyItem,
    pack=lambda items: target_pb2.VerifyRequest(items=items),
)
DRAFT_API: ReplicaApi[draft_pb2.ProposeItem, draft_pb2.ProposeResult] = ReplicaApi(
    role="draft",
    get_info=_draft_info,
    open_stream=lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose(),
    new_item=draft_pb2.ProposeItem,
    pack=lambda items: draft_pb2.ProposeRequest(items=items),
)
