"""One answer's hidden states on their way from the target to the draft service.

They come by row, before the verdict that commits the rows, and go out in order, before the round that needs them. What
never came, because the target found the rows in its prefix cache, and what the draft service has lost with its session
is had by a replay at the target, which nothing waits for: until it is there, rounds go without drafts.
"""

import asyncio
import logging
import secrets
import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from google.protobuf.message import Message

from orchestrator.expected_answers import answer_key
from orchestrator.replica_link import LinkLostError, TargetLink
from orchestrator.sequence import Sequence
from tandem import codec
from tandem.common.v1 import common_pb2
from tandem.target.v1 import target_pb2
from tandem.types import HiddenStates, SessionId, Stamp

_log = logging.getLogger(__name__)

_EPOCH = 1  # of a replay's session, which is opened once
_REPEAT_S = 10.0  # a replay without an end is asked for again; the target drops the repeat of one that it works on
_MAX_FAILURES = 3  # replays of one answer; then it goes on without drafts
MAX_HELD_BYTES = 16 << 20  # of one answer, while the draft service takes none; what is dropped then is replayed


class HiddenRelay:
    """Rows by number; the first `sent_end` are with the draft service."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """`layers`: after how many of the target's layers the draft service wants them."""
        self.layers = layers
        self._link: TargetLink | None = None  # of the target that has the session
        self._session_id = 0
        self._chunks: list[HiddenStates] = []  # by first row; they may overlap
        self._held_bytes = 0  # of them
        self._sent_end = 0
        self._is_settled = False  # a verdict has come since the target's session was opened: so have its rows
        self._replay: target_pb2.VerifyItem | None = None  # that has not ended
        self._asked_s = 0.0  # when it was sent last, monotonic clock
        self._num_failures = 0

    def opened(self, link: TargetLink, session_id: int) -> None:
        """The target's session is new: what rows it sends is known with its first verdict."""
        if link is not self._link:
            self.close()
            self._link, self._session_id = link, session_id
        link.answers.listen(session_id, self.take)
        self._is_settled = False

    def decided(self) -> None:
        """A verdict has come, and before it every row that the target's session has computed."""
        self._is_settled = True

    def take(self, states: HiddenStates) -> None:
        """Rows have come; those that the draft service has are dropped, and all of them when too many are held."""
        if states.end_row <= self._sent_end:
            return
        insort(self._chunks, states, key=lambda chunk: chunk.first_row)
        self._held_bytes += len(states.data)
        if self._held_bytes > MAX_HELD_BYTES:
            self._chunks.clear()
            self._held_bytes = 0

    def restart(self) -> None:
        """The draft service has a new session, which has no row."""
        self._sent_end = 0

    def rows_to_send(self, sequence: Sequence) -> list[HiddenStates]:
        """The next rows that the draft service lacks for the round, as far as they are here: it has them now."""
        chunks = list(self._contiguous(len(sequence.tokens) - 1))
        if chunks:
            self._sent_end = chunks[-1].end_row
            self._chunks = [chunk for chunk in self._chunks if chunk.end_row > self._sent_end]
            self._held_bytes = sum(len(chunk.data) for chunk in self._chunks)
        return chunks

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether the draft service has all rows for the current round; what will not come by itself is asked for."""
        num_rows = len(sequence.tokens) - 1
        if self._sent_end >= num_rows:
            return True
        if self._replay is not None:
            self._repeat(self._replay)
        elif self._is_settled:
            later = [chunk.first_row for chunk in self._chunks]
            self._ask(sequence, self._sent_end, min(num_rows, *later) if later else num_rows)
        return False

    def close(self) -> None:
        """The answer has ended, or its session is elsewhere: nothing is wanted any more from the target that had it."""
        link, replay, self._replay = self._link, self._replay, None
        if link is not None:
            link.answers.unlisten(self._session_id)
        if link is None or replay is None:
            return
        link.answers.forget(answer_key(replay.stamp))
        link.answers.unlisten(replay.stamp.session_id)
        if link.is_up:
            stamp = replace(codec.stamp_from_proto(replay.stamp), round=1)
            link.send(_item(stamp, close=common_pb2.CloseSession()))

    def _contiguous(self, num_rows: int) -> Iterator[HiddenStates]:
        """The first so many rows without what is sent and without overlaps, up to the first that is missing."""
        row = self._sent_end
        for chunk in self._chunks:
            if chunk.first_row > row or row >= num_rows:
                return
            if chunk.end_row > row:
                yield chunk.rows_from(row).rows_before(num_rows)
                row = chunk.end_row

    def _ask(self, sequence: Sequence, first_row: int, end_row: int) -> None:
        """Have the target send rows first_row .. end_row - 1 again."""
        link = self._link
        if self._num_failures >= _MAX_FAILURES or link is None or not link.is_up:
            return
        token_ids = sequence.tokens.token_ids[: end_row + 1]
        session_id = SessionId(secrets.randbits(63))
        stamp = Stamp(session_id, _EPOCH, 0, len(token_ids), sequence.tokens.prefix_hash(len(token_ids)))
        wanted = target_pb2.ReplayHiddenStates(token_ids=token_ids, hidden_layers=self.layers, first_row=first_row)
        replay = _item(stamp, replay=wanted)
        self._replay, self._asked_s = replay, time.monotonic()
        link.answers.listen(session_id, self.take)
        link.request(replay).add_done_callback(partial(self._replayed, link, replay))

    def _repeat(self, replay: target_pb2.VerifyItem) -> None:
        """Send it again once it has taken long: it, or its end, may have been lost."""
        if time.monotonic() - self._asked_s > _REPEAT_S and self._link is not None and self._link.is_up:
            self._asked_s = time.monotonic()
            self._link.send(replay)

    def _replayed(
        self,
        link: TargetLink,
        replay: target_pb2.VerifyItem,
        future: "asyncio.Future[target_pb2.VerifyResult]",
    ) -> None:
        """It has ended, unless `close` has given it up."""
        if self._replay is not replay:
            return
        self._replay = None
        link.answers.unlisten(replay.stamp.session_id)
        problem = _problem_of(future)
        if problem:
            self._num_failures += 1
            _log.warning("hidden states cannot be replayed: %s", problem)


def _problem_of(future: "asyncio.Future[target_pb2.VerifyResult]") -> str:
    """Why the replay did not end as it should; empty when it did, or when the stream was lost: that says nothing."""
    error = future.exception()
    if error is not None:
        return "" if isinstance(error, LinkLostError) else str(error)
    result = future.result()
    return str(codec.error_from_proto(result.error)) if result.WhichOneof("outcome") == "error" else ""


def _item(stamp: Stamp, **op: Message) -> target_pb2.VerifyItem:
    return target_pb2.VerifyItem(stamp=codec.stamp_to_proto(stamp), **op)  # type: ignore[arg-type]
