"""Bad weather between real services: items and answers that are lost, late, doubled or out of order."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc

from draft_service.proposers.base import Proposer
from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem.draft.v1 import draft_pb2_grpc
from tandem.serving.channels import open_channel
from tandem.serving.errors import LifecycleInterceptor
from tandem.target.v1 import target_pb2_grpc
from tests.orchestrator.services import (
    DraftReplica,
    Stack,
    TargetReplica,
    orchestrating,
    replicas,
    similar_draft,
)


class Weather(Protocol):
    """What happens to the messages of a link."""

    def strike(self, batch: list[Any]) -> list[Any]:
        """The entries of a message that arrive, in the order they do."""
        ...

    def hangs_up(self) -> bool:
        """Whether the stream ends now."""
        ...


class Storm:
    """Mostly nothing happens. One random generator, so that a storm can be repeated."""

    def __init__(self, seed: int, severity: float) -> None:
        self._random = random.Random(seed)
        self._severity = severity
        self.num_lost = 0

    def strike(self, batch: list[Any]) -> list[Any]:
        arriving = [entry for entry in batch if self._random.random() >= self._severity]
        self.num_lost += len(batch) - len(arriving)
        arriving += [entry for entry in arriving if self._random.random() < self._severity]
        if self._random.random() < self._severity:
            self._random.shuffle(arriving)
        return arriving

    def hangs_up(self) -> bool:
        return self._random.random() < self._severity / 10


class Echo:
    """Everything arrives twice."""

    def strike(self, batch: list[Any]) -> list[Any]:
        return [*batch, *batch]

    def hangs_up(self) -> bool:
        return False


class Forgetful:
    """The first answer to every round is lost; `bases` are those that each round was asked for, in order."""

    def __init__(self) -> None:
        self.bases: dict[tuple[str, int, int, int], list[tuple[int, int]]] = {}
        self._lost: set[tuple[str, int, int, int]] = set()

    def strike(self, batch: list[Any]) -> list[Any]:
        return [entry for entry in batch if entry.stamp.round == 0 or self._arrives(entry)]

    def hangs_up(self) -> bool:
        return False

    def _arrives(self, entry: Any) -> bool:
        stamp, kind = entry.stamp, type(entry).__name__
        key = (kind, stamp.session_id, stamp.epoch, stamp.round)
        if kind in ("VerifyItem", "ProposeItem"):
            if entry.WhichOneof("op") != "close":
                self.bases.setdefault(key, []).append((stamp.committed_len, stamp.prefix_hash))
            return True
        is_first = key not in self._lost
        self._lost.add(key)
        return not is_first


class _Relay:
    """Both directions of one stream through the weather."""

    def __init__(self, weather: Weather, stub_of: Any, method: str, entries_in: str, entries_out: str) -> None:
        self._weather = weather
        self._stub_of = stub_of
        self._method = method
        self._entries_in, self._entries_out = entries_in, entries_out
        self.channel: grpc.aio.Channel | None = None

    async def info(self, request: Any) -> Any:
        return await self._stub_of(self.channel).GetInfo(request)

    async def stream(self, requests: Any) -> AsyncIterator[Any]:
        async def upstream() -> AsyncIterator[Any]:
            async for message in requests:
                yield self._struck(message, self._entries_in)

        call = getattr(self._stub_of(self.channel), self._method)(upstream())
        try:
            async for message in call:
                if self._weather.hangs_up():
                    return
                yield self._struck(message, self._entries_out)
        finally:
            call.cancel()

    def _struck(self, message: Any, entries: str) -> Any:
        arriving = self._weather.strike(list(getattr(message, entries)))
        struck = type(message)()
        struck.CopyFrom(message)
        struck.ClearField(entries)
        getattr(struck, entries).extend(arriving)
        return struck


class _TargetRelay(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, weather: Weather) -> None:
        self.relay = _Relay(weather, target_pb2_grpc.TargetServiceStub, "Verify", "items", "results")

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return await self.relay.info(request)

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.relay.stream(request_iterator):
            yield message


class _DraftRelay(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, weather: Weather) -> None:
        self.relay = _Relay(weather, draft_pb2_grpc.DraftServiceStub, "Propose", "items", "results")

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return await self.relay.info(request)

    async def Propose(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.relay.stream(request_iterator):
            yield message


@asynccontextmanager
async def behind_weather(replica: TargetReplica | DraftReplica, weather: Weather) -> AsyncIterator[None]:
    """The replica's address is the relay's while this lasts."""
    server = grpc.aio.server(interceptors=[LifecycleInterceptor()])
    servicer: _TargetRelay | _DraftRelay
    if isinstance(replica, TargetReplica):
        servicer = _TargetRelay(weather)
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    else:
        servicer = _DraftRelay(weather)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    own_address = replica.address
    async with open_channel(own_address) as channel:
        servicer.relay.channel = channel
        replica.address = f"127.0.0.1:{port}"
        try:
            yield
        finally:
            replica.address = own_address
            await server.stop(0)


@asynccontextmanager
async def under(
    weather: Weather, answer_s: float = 0.5, make_proposer: Callable[[], Proposer] = similar_draft
) -> AsyncIterator[Stack]:
    """All services, with weather on both links of the orchestrator."""
    settings = OrchestratorSettings(draft_timeout_s=0.15, target_patience=TargetPatience(answer_s=answer_s))
    async with replicas(make_proposer) as (target, draft), behind_weather(target, weather):
        assert draft is not None
        async with behind_weather(draft, weather), orchestrating(target, draft, settings) as stack:
            yield stack
