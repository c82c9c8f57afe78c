"""Who waits for which answer of a replica, and who listens to a session's hidden states."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic

from orchestrator.replica_api import ResultT
from tandem import codec
from tandem.types import HiddenStates, ItemError

_log = logging.getLogger(__name__)

AnswerKey = tuple[int, int, int]  # session id, epoch, round; round 0 is the open, so this names the kind as well


def answer_key(stamp: Any) -> AnswerKey:
    """Under which the answer to an item with this stamp is waited for."""
    return stamp.session_id, stamp.epoch, stamp.round


class ExpectedAnswers(Generic[ResultT]):
    """Futures by key, listeners by session. A future is never cancelled but by `forget`."""

    def __init__(self, replica: str) -> None:
        """`replica`: as logs call it."""
        self.num_dropped = 0  # answers nobody waits for: late, repeated or unknown
        self._replica = replica
        self._waiting: dict[AnswerKey, asyncio.Future[ResultT]] = {}
        self._listeners: dict[int, Callable[[HiddenStates], None]] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._listeners)

    def expect(self, key: AnswerKey) -> "asyncio.Future[ResultT]":
        """The future of the answer; one that was expected under the same key before is not any more."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        return future

    def forget(self, key: AnswerKey) -> None:
        """An answer that may still come is not wanted any more."""
        future = self._waiting.pop(key, None)
        if future is not None:
            future.cancel()

    def listen(self, session_id: int, take: Callable[[HiddenStates], None]) -> None:
        """Give the session's hidden states to `take`, before the answer they come with; until `unlisten`."""
        self._listeners[session_id] = take

    def unlisten(self, session_id: int) -> None:
        """Drop what may still come."""
        self._listeners.pop(session_id, None)

    def take(self, result: Any) -> None:
        """One result that has come."""
        outcome = result.WhichOneof("outcome")
        if outcome == "hidden_states":
            self._take_hidden_states(result)
            return
        future = self._waiting.pop(answer_key(result.stamp), None)
        if future is not None and not future.done():
            future.set_result(result)
        elif outcome != "closed":
            self.num_dropped += 1

    def fail(self, key: AnswerKey, error: Exception) -> None:
        """The answer will not come."""
        future = self._waiting.pop(key, None)
        if future is not None:
            _fail(future, error)

    def fail_all(self, error: Exception) -> None:
        """None of them will come."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            _fail(future, error)

    def _take_hidden_states(self, result: Any) -> None:
        """To whoever listens; what cannot be rows is as if it had never come."""
        take = self._listeners.get(result.stamp.session_id)
        if take is None:
            self.num_dropped += 1
            return
        try:
            take(codec.hidden_states_from_proto(result.hidden_states))
        except ItemError as error:
            _log.error("%s: %s", self._replica, error, extra={"session_id": result.stamp.session_id})


def _fail(future: "asyncio.Future[ResultT]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever waited may be gone
