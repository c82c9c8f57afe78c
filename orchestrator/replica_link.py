"""The orchestrator's half of a lasting link: many sessions share one stream, and each answer goes to its waiter.

One task owns the connection: handshake, stream, and connecting again when the stream is lost. Whoever waits for an
answer limits the wait on its future.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

import grpc

from orchestrator.breaker import Backoff, Breaker
from orchestrator.expected_answers import ExpectedAnswers, answer_key
from orchestrator.replica_api import ItemT, ReplicaApi, ReplicaInfo, ResultT
from orchestrator.replica_stream import FROZEN, PATIENCE, MisbehaviourError, ReplicaStream, StreamPatience
from orchestrator.round_times import RoundTimes
from tandem.draft.v1 import draft_pb2
from tandem.serving.dialer import Dialer
from tandem.target.v1 import target_pb2
from tandem.types import Load

_log = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class LinkLostError(Exception):
    """There is no stream to the replica, or it was lost with the answer; the message names the replica."""


class HandshakeError(Exception):
    """A replica that must not be used; the message names both sides of the mismatch."""


class ReplicaLink(Generic[ItemT, ResultT]):
    """A lasting link to one replica. Use on one event loop, between `start` and `close`.

    Every new stream has a new `generation`: sessions opened under an older one are gone.
    """

    def __init__(
        self,
        api: ReplicaApi[ItemT, ResultT],
        address: str,
        check: Callable[[ReplicaInfo], None] = lambda _: None,
        backoff: Backoff | None = None,
        patience: StreamPatience = PATIENCE,
        dialer: Dialer | None = None,
    ) -> None:
        """`check` raises HandshakeError for a replica that must not be used; it is asked at every connect."""
        self.api: ReplicaApi[ItemT, ResultT] = api
        self.address = address
        self.generation = 0
        self.info: ReplicaInfo | None = None  # of the last handshake
        self.load = Load()  # as of the last answer
        self.answers: ExpectedAnswers[ResultT] = ExpectedAnswers(str(self))
        self.num_sessions = 0  # of this orchestrator
        self.is_retired = False  # nobody names it any more
        self.on_change: Callable[[], None] = lambda: None  # called when sessions may be opened here, or no longer
        self.breaker = Breaker(Backoff(1.0, 30.0))
        self.round_times = RoundTimes()
        self._check = check
        self._backoff = backoff or Backoff()
        self._patience = patience
        self._dialer = dialer or Dialer()
        self._stream: ReplicaStream[ItemT, ResultT] | None = None
        self._checked = asyncio.Event()  # up, or refused by the check
        self._refusal: HandshakeError | None = None
        self._failure = "not connected yet"
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None

    def __str__(self) -> str:
        return f"{self.api.role} service at {self.address}"

    @property
    def is_up(self) -> bool:
        """Whether there is a stream now."""
        return self._stream is not None

    @property
    def is_leaving(self) -> bool:
        """Whether no session may be opened here, and those there are should move."""
        return self.load.draining or self.is_retired

    @property
    def busyness(self) -> float:
        """How much a new session would have beside it: sessions, as told or as known here, and what waits."""
        return max(self.load.running, self.num_sessions) + self.load.waiting

    def joined(self) -> None:
        """A session is here now."""
        self.num_sessions += 1

    def left(self) -> None:
        """A session is no longer here."""
        self.num_sessions -= 1
        if not self.num_sessions:
            self.on_change()

    def why_not(self) -> str:
        """Why no session can be opened here."""
        if self.is_up:
            return f"{self} is shutting down" if self.is_leaving else f"{self} cannot take the session"
        return f"{self} is not reachable: {self._failure}"

    def start(self) -> None:
        """Connect, and stay connected, in the background."""
        self._task = asyncio.create_task(self._stay_connected(), name=f"link to the {self}")

    async def wait_checked(self, timeout_s: float) -> None:
        """Return once connected; HandshakeError if the check refuses, LinkLostError after the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._checked.wait(), timeout_s)
        if self._refusal is not None:
            raise self._refusal
        if not self.is_up:
            raise LinkLostError(self.why_not())

    def request(self, item: ItemT) -> "asyncio.Future[ResultT]":
        """Send an item; the future of its answer. LinkLostError without a stream.

        The future fails with LinkLostError, or with ItemError when no message can hold the item. Wait for it with
        `asyncio.wait`, never by cancelling it, and have `answers` forget it when it is not wanted.
        """
        self.send(item)
        return self.answers.expect(answer_key(item.stamp))

    def send(self, item: ItemT) -> None:
        """Send an item without waiting for its answer: a repeat, or a close. LinkLostError without a stream."""
        if self._stream is None:
            raise LinkLostError(self.why_not())
        self._stream.send(item)

    async def ask_load(self) -> Load:
        """The replica's load now; the last one heard of when it does not answer soon."""
        if self._channel is not None and self.is_up:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await self.api.get_info(self._channel, _LOAD_TIMEOUT_S)).load
        return self.load

    async def close(self) -> None:
        """Write what is queued, end the stream, and stop."""
        self._is_closing = True
        if self._task is None:
            return
        if self._stream is not None:
            self._stream.finish()
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _stay_connected(self) -> None:
        num_failures = 0
        while not self._is_closing:
            certificates = self._dialer.refresh()
            async with self._dialer.open(self.address) as channel:
                self._channel = channel
                while not self._is_closing and self._dialer.refresh() == certificates:
                    num_failures = await self._try_once(channel, num_failures)

    async def _try_once(self, channel: grpc.aio.Channel, num_failures: int) -> int:
        """One stream from its attempt to its end, and the wait before the next -> how many have failed in a row.

        One that ended by the replica's misbehaviour has failed too, and sessions go elsewhere for a while.
        """
        generation, known_failure = self.generation, self._failure
        try:
            self._failure = await self._connect(channel)
            was_up = self.generation > generation
        except MisbehaviourError as error:
            self.breaker.failed()
            self._failure, was_up = str(error), False
        num_failures = 1 if was_up else num_failures + 1
        if not self._is_closing:
            is_news = num_failures == 1 or self._failure != known_failure
            what = "is lost" if was_up else "cannot be used"
            _log.log(logging.WARNING if is_news else logging.DEBUG, "%s %s: %s", self, what, self._failure)
            await asyncio.sleep(self._backoff.wait_s(num_failures))
        return num_failures

    async def _connect(self, channel: grpc.aio.Channel) -> str:
        """Hand-shake and serve one stream until it ends; why it ended, unless it is MisbehaviourError."""
        try:
            info = await self.api.get_info(channel, _HANDSHAKE_TIMEOUT_S)
            if info.load.frozen:
                return FROZEN
            self._check(info)
            return await self._serve(self.api.open_stream(channel), info)
        except HandshakeError as error:
            self._refusal = error
            self._checked.set()
            return str(error)
        except grpc.aio.AioRpcError as error:
            no_connection = self._dialer.why_not_connected(self.address, error.details() or "")
            return f"{error.code().name}: {error.details()}" if no_connection is None else no_connection.cause
        except MisbehaviourError:
            raise
        except Exception:  # noqa: BLE001 - whatever an answer did to us, the link must be made again
            _log.exception("%s: unexpected error", self)
            return "an unexpected error, see the log"

    async def _serve(self, call: Any, info: ReplicaInfo) -> str:
        """One stream's life; why it ended, unless grpc raises it."""
        self.info, self.load, self._refusal = info, info.load, None
        if self.api.role == "target" and info.model.backend and not info.model.deterministic:
            _log.warning("%s is not deterministic: its logits may depend on the batch, so texts may differ", self)
        if self._dialer.is_overheard(self.address):
            _log.warning(
                "%s is called in clear text: prompts and answers can be read on the way, and changed", self
            )
        self.generation += 1
        _log.info("%s is connected%s", self, " again" if self.generation > 1 else "")
        stream = self._stream = ReplicaStream(self.api, str(self), self.answers, self._take_load, self._patience)
        self._checked.set()
        self.on_change()
        try:
            return await stream.run(call)
        finally:
            self._stream = None
            self.on_change()
            self._checked.clear()
            self.answers.fail_all(LinkLostError(f"the stream to the {self} was lost"))

    def _take_load(self, load: Load) -> None:
        was_leaving, self.load = self.is_leaving, load
        if self.is_leaving != was_leaving:
            self.on_change()


TargetLink: TypeAlias = ReplicaLink[target_pb2.VerifyItem, target_pb2.VerifyResult]
DraftLink: TypeAlias = ReplicaLink[draft_pb2.ProposeItem, draft_pb2.ProposeResult]
