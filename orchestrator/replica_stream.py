"""One stream to a replica, from its beginning to its end: items out in batches, answers in.

One task reads, and a second one is the only one that writes. Neither is cancelled or timed out while the stream lives,
since that would end it for every session.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import grpc

from orchestrator.expected_answers import ExpectedAnswers, answer_key
from orchestrator.replica_api import ItemT, ReplicaApi, ResultT
from orchestrator.silence import SILENCE_S, Silence
from tandem import codec
from tandem.serving.batches import MAX_BATCH_ITEMS, batches_of
from tandem.serving.item_stream import MAX_MESSAGE_ITEMS
from tandem.serving.stalls import STALL_S
from tandem.types import ItemError, Load

_log = logging.getLogger(__name__)

FROZEN = "its engine is frozen"


@dataclass(frozen=True, slots=True)
class StreamPatience:
    """After how long a stream is given up, in seconds."""

    silence_s: float = SILENCE_S  # nothing has come
    stall_s: float = STALL_S  # nothing of what waits to be sent has been taken, which bounds what waits


PATIENCE = StreamPatience()


class MisbehaviourError(Exception):
    """The replica sends what no correct one does; the message says what."""


class ReplicaStream(Generic[ItemT, ResultT]):
    """Send while `run` has not returned."""

    def __init__(
        self,
        api: ReplicaApi[ItemT, ResultT],
        name: str,
        answers: ExpectedAnswers[ResultT],
        take_load: Callable[[Load], None],
        patience: StreamPatience,
    ) -> None:
        """`name`: of the replica. `take_load` is given the load that every message carries."""
        self._api: ReplicaApi[ItemT, ResultT] = api
        self._name = name
        self._answers: ExpectedAnswers[ResultT] = answers
        self._take_load = take_load
        self._patience = patience
        self._silence, self._stall = Silence(patience.silence_s), Silence(patience.stall_s)
        self._outgoing: list[ItemT] = []
        self._wake = asyncio.Event()
        self._is_writing = False
        self._is_finishing = False

    def send(self, item: ItemT) -> None:
        """With the next message; an item that no message can hold is answered with an ItemError."""
        self._outgoing.append(item)
        self._wake.set()

    def finish(self) -> None:
        """Write what waits, then end this side of the stream."""
        self._is_finishing = True
        self._wake.set()

    async def run(self, call: Any) -> str:
        """Until the stream ends; why it did, unless grpc raises it. MisbehaviourError if the replica is to blame."""
        reader, silent, stalled, _ = tasks = (
            asyncio.create_task(self._read(call), name=f"reader of the {self._name}"),
            asyncio.create_task(self._silence.is_too_long(), name=f"watch over the {self._name}"),
            asyncio.create_task(
                self._stall.is_too_long(lambda: self._is_writing), name=f"patience with the {self._name}"
            ),
            asyncio.create_task(self._write(call), name=f"writer to the {self._name}"),
        )
        try:
            await asyncio.wait({reader, silent, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                return reader.result()
            if silent.done():
                return f"nothing came from it for {self._patience.silence_s:g} s"
            return f"it took nothing of what was sent for {self._patience.stall_s:g} s"
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> str:
        """Hand out answers until the other side ends the stream, or computes no more; which of both."""
        while (response := await call.read()) is not grpc.aio.EOF:
            self._silence.heard()
            if response is None:  # bytes that are not a message; grpc has logged them
                continue
            load = codec.load_from_proto(response.load)
            self._take_load(load)
            if load.frozen:
                return FROZEN
            await self._take_all(response.results)
        return "the stream was ended by the other side"

    async def _take_all(self, results: Sequence[ResultT]) -> None:
        """Hand out one message's answers; other tasks have their turn in between.

        MisbehaviourError, before any is looked at, for more than the replica itself would read as items.
        """
        if len(results) > MAX_MESSAGE_ITEMS:
            raise MisbehaviourError(
                f"it sent {len(results)} results in one message, more than the limit of {MAX_MESSAGE_ITEMS}"
            )
        for index, result in enumerate(results):
            if index > 0 and index % MAX_BATCH_ITEMS == 0:
                await asyncio.sleep(0)
            self._answers.take(result)

    async def _write(self, call: Any) -> None:
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
                        await call.write(self._api.pack(items))
                        self._is_writing = False
                        self._stall.heard()
                if self._is_finishing:
                    await call.done_writing()
                    return
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the stream is gone; the reader says why
        except Exception:  # noqa: BLE001 - whatever an item did to us, the link must be made again
            _log.exception("%s: cannot write", self._name)
        call.cancel()

    def _refuse(self, item: ItemT, error: ItemError) -> None:
        """Answer an item that cannot be sent."""
        self._answers.fail(answer_key(item.stamp), error)
