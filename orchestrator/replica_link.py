"""The orchestrator's half of a multiplexed stream: many sessions' items out in batches, each answer to its waiter.

One task owns the connection: handshake, stream, reading, and connecting again when the stream is lost. A second
one, while a stream lives, is the only one that writes. Reads and writes are never cancelled or timed out, since
that would end the stream for every session; whoever waits for an answer limits the wait on the future.
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
from orchestrator.round_times import RoundTimes
from orchestrator.silence import SILENCE_S, Silence
from tandem import codec
from tandem.draft.v1 import draft_pb2
from tandem.serving.batches import batches_of
from tandem.serving.dialer import Dialer
from tandem.serving.stalls import STALL_S
from tandem.target.v1 import target_pb2
from tandem.types import ItemError, Load

_log = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 2.0

_FROZEN = "its engine is frozen"


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
        silence_s: float = SILENCE_S,
        stall_s: float = STALL_S,
        dialer: Dialer | None = None,
    ) -> None:
        """`check` raises HandshakeError for a replica that must not be used; it is asked at every connect.

        A stream is given up when nothing has come on it for `silence_s`, or nothing of what waits to be sent has been
        taken for `stall_s`, which bounds what waits.
        """
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
        self._silence_s = silence_s
        self._dialer = dialer or Dialer()
        self._stall_s = stall_s
        self._is_writing = False
        self._outgoing: list[ItemT] = []
        self._wake = asyncio.Event()
        self._up = asyncio.Event()
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
        return self._up.is_set()

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
        if not self.is_up:
            raise LinkLostError(self.why_not())
        self._outgoing.append(item)
        self._wake.set()

    async def ask_load(self) -> Load:
        """The replica's load now; the last one heard of when it does not answer soon."""
        if self._channel is not None and self.is_up:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await self.api.get_info(self._channel, _LOAD_TIMEOUT_S)).load
        return self.load

    async def close(self) -> None:
        """Write what is queued, end the stream, and stop."""
        self._is_closing = True
        self._wake.set()
        if self._task is None:
            return
        if self.is_up:
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
        """One stream from its attempt to its end, and the wait before the next -> how many have failed in a row."""
        generation, known_failure = self.generation, self._failure
        self._failure = await self._connect(channel)
        num_failures = 1 if self.generation > generation else num_failures + 1
        if not self._is_closing:
            is_news = num_failures == 1 or self._failure != known_failure
            _log.log(logging.WARNING if is_news else logging.DEBUG, "%s: %s", self, self._failure)
            await asyncio.sleep(self._backoff.wait_s(num_failures))
        return num_failures

    async def _connect(self, channel: grpc.aio.Channel) -> str:
        """Hand-shake and serve one stream until it ends; why it ended."""
        try:
            info = await self.api.get_info(channel, _HANDSHAKE_TIMEOUT_S)
            if info.load.frozen:
                return _FROZEN
            self._check(info)
            return await self._serve(self.api.open_stream(channel), info)
        except HandshakeError as error:
            self._refusal = error
            self._checked.set()
            return str(error)
        except grpc.aio.AioRpcError as error:
            return (
                self._dialer.why_not_connected(error.details() or "") or f"{error.code().name}: {error.details()}"
            )
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
        self._up.set()
        self._checked.set()
        self.on_change()
        self._is_writing = False
        silence, stall = Silence(self._silence_s), Silence(self._stall_s)
        writer = asyncio.create_task(self._write(call, stall), name=f"writer to the {self}")
        reader = asyncio.create_task(self._read(call, silence), name=f"reader of the {self}")
        silent = asyncio.create_task(silence.is_too_long(), name=f"watch over the {self}")
        stalled = asyncio.create_task(stall.is_too_long(lambda: self._is_writing), name=f"patience with the {self}")
        try:
            await asyncio.wait({reader, silent, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                return reader.result()
            if silent.done():
                return f"nothing came from it for {self._silence_s:g} s"
            return f"it took nothing of what was sent for {self._stall_s:g} s"
        finally:
            self._up.clear()
            self.on_change()
            self._checked.clear()
            self._outgoing.clear()
            call.cancel()
            tasks = (writer, reader, silent, stalled)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.answers.fail_all(LinkLostError(f"the stream to the {self} was lost"))

    async def _read(self, call: Any, silence: Silence) -> str:
        """Hand out answers until the other side ends the stream, or computes no more; which of both."""
        while (response := await call.read()) is not grpc.aio.EOF:
            silence.heard()
            if response is None:  # bytes that are not a message; grpc has logged them
                continue
            self._take_load(codec.load_from_proto(response.load))
            if self.load.frozen:
                return _FROZEN
            for result in response.results:
                self.answers.take(result)
        return "the stream was ended by the other side"

    def _take_load(self, load: Load) -> None:
        was_leaving, self.load = self.is_leaving, load
        if self.is_leaving != was_leaving:
            self.on_change()

    async def _write(self, call: Any, stall: Silence) -> None:
        """Write whatever has gathered, in as few messages as hold it, whenever there is something.

        A stream that cannot be written is ended here, so that its reader learns of it.
        """
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(0)  # let every session that is ready in this turn of the loop join the message
                self._wake.clear()
                while self._outgoing:
                    outgoing, self._outgoing = self._outgoing, []
                    for items in batches_of(outgoing, self._refuse):
                        self._is_writing = True
                        await call.write(self.api.pack(items))
                        self._is_writing = False
                        stall.heard()
                if self._is_closing:
                    await call.done_writing()
                    return
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the stream is gone; the reader says why
        except Exception:  # noqa: BLE001 - whatever an item did to us, the link must be made again
            _log.exception("%s: cannot write", self)
        call.cancel()

    def _refuse(self, item: ItemT, error: ItemError) -> None:
        """Answer an item that cannot be sent."""
        self.answers.fail(answer_key(item.stamp), error)


TargetLink: TypeAlias = ReplicaLink[target_pb2.VerifyItem, target_pb2.VerifyResult]
DraftLink: TypeAlias = ReplicaLink[draft_pb2.ProposeItem, draft_pb2.ProposeResult]
