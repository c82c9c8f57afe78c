"""A link without a wire: it keeps what is sent, and the test answers when and how it likes."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic

from orchestrator.breaker import Backoff, Breaker
from orchestrator.expected_answers import AnswerKey
from orchestrator.replica_api import ItemT, ReplicaApi, ReplicaInfo, ResultT
from orchestrator.replica_link import LinkLostError
from orchestrator.round_times import RoundTimes
from tandem.types import HiddenStates, Load, ModelInfo


class FakeLink(Generic[ItemT, ResultT]):
    """As much of `ReplicaLink` as sessions use. `answer` is asked for each item; None leaves it open."""

    def __init__(self, api: ReplicaApi[ItemT, ResultT], answer: Callable[[ItemT], ResultT | None]) -> None:
        self.api: ReplicaApi[ItemT, ResultT] = api
        self.answer: Callable[[ItemT], ResultT | None] = answer
        self.sent: list[ItemT] = []
        self.open_futures: dict[AnswerKey, asyncio.Future[ResultT]] = {}
        self.is_up = True
        self.generation = 1
        self.load = Load()
        self.info = ReplicaInfo(ModelInfo(), Load())
        self.answers = self  # what is expected is here too
        self.breaker = Breaker(Backoff())
        self.round_times = RoundTimes()
        self.num_sessions = 0
        self.listeners: dict[int, Callable[[HiddenStates], None]] = {}

    def __str__(self) -> str:
        return f"{self.api.role} service at nowhere"

    @property
    def is_leaving(self) -> bool:
        return self.load.draining

    @property
    def kinds(self) -> list[str]:
        """What was sent, by kind."""
        return [str(item.WhichOneof("op")) for item in self.sent]

    def request(self, item: ItemT) -> "asyncio.Future[ResultT]":
        self.send(item)
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self.open_futures[_key(item)] = future
        result = self.answer(item)
        if result is not None:
            result.stamp.CopyFrom(item.stamp)
            future.set_result(result)
        return future

    def send(self, item: ItemT) -> None:
        if not self.is_up:
            raise LinkLostError("down")
        self.sent.append(item)

    def joined(self) -> None:
        self.num_sessions += 1

    def left(self) -> None:
        self.num_sessions -= 1

    def listen(self, session_id: int, take: Callable[[HiddenStates], None]) -> None:
        self.listeners[session_id] = take

    def unlisten(self, session_id: int) -> None:
        self.listeners.pop(session_id, None)

    def forget(self, key: AnswerKey) -> None:
        future = self.open_futures.pop(key, None)
        if future is not None:
            future.cancel()

    def lose(self) -> None:
        """The stream is lost, and with it whatever was open."""
        self.is_up = False
        for future in self.open_futures.values():
            if not future.done():
                future.set_exception(LinkLostError("lost"))
                future.exception()

    def come_back(self) -> None:
        self.is_up = True
        self.generation += 1


class OnePlace(Generic[ItemT, ResultT]):
    """As much of `ReplicaPool` as sessions use, with fake links in it."""

    def __init__(self, *links: FakeLink[ItemT, ResultT]) -> None:
        self.links = links

    def choose(self, fits: Callable[[Any], bool] = lambda _: True) -> Any:
        """The first that can be had."""
        return next((link for link in self.links if link.is_up and not link.is_leaving and fits(link)), None)

    async def wait_for(self, timeout_s: float, fits: Callable[[Any], bool] = lambda _: True) -> Any:
        if (link := self.choose(fits)) is None:
            raise LinkLostError(self.why_none())
        return link

    def why_none(self) -> str:
        return "; ".join(f"{link} is not reachable: down" for link in self.links)


def _key(item: Any) -> AnswerKey:
    return item.stamp.session_id, item.stamp.epoch, item.stamp.round
