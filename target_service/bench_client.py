"""The service's side of `tandem bench target`: many sessions on one stream, with as little around them as there can be.

Whatever is answered goes on to its next round in the next message. The drafts of a round repeat the last committed
token, as `target_service/bench_bare.py` does.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from tandem import codec
from tandem.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.types import Proposal, SamplingParams, SessionId, SessionSpec, Stamp

_OPEN_DEADLINE_MS = 5_000


@dataclass(frozen=True, slots=True)
class Segment:
    """Some rounds of all sessions as the client saw them: seconds of a round, means of the segment."""

    round_s: float
    queue_s: float  # from an item's arrival to the start of its step
    compute_s: float  # of the step
    client_s: float  # from a message's arrival until the next rounds are handed over
    rows: float  # of the step

    @property
    def rest_s(self) -> float:
        """The way between client and step: gRPC, both event loops, the wire."""
        return self.round_s - self.queue_s - self.compute_s - self.client_s


class _ClientSession:
    """One session as the client knows it."""

    def __init__(self, session_id: int, prompt: Sequence[int]) -> None:
        self.session_id = SessionId(session_id)
        self.tokens = list(prompt)
        self.prefix_hash = extend_prefix_hash(EMPTY_PREFIX_HASH, prompt)
        self.round = 0
        self.num_rounds_left = 0

    def stamp(self) -> Stamp:
        return Stamp(self.session_id, 1, self.round, len(self.tokens), self.prefix_hash)

    def take(self, token_ids: Sequence[int]) -> None:
        """Commit a verdict."""
        self.tokens += token_ids
        self.prefix_hash = extend_prefix_hash(self.prefix_hash, token_ids)

    def next_round(self, num_drafts: int) -> target_pb2.VerifyItem:
        """The item of the next round."""
        self.round += 1
        self.num_rounds_left -= 1
        proposal = Proposal(tuple(self.tokens[-1:] * num_drafts))
        step = target_pb2.VerifyStep(proposal=codec.proposal_to_proto(proposal))
        return target_pb2.VerifyItem(stamp=codec.stamp_to_proto(self.stamp()), verify=step)


class ServiceSessions:
    """Greedy decoding of some prompts, each a session of one stream; `tokens` grow with every round."""

    def __init__(self, channel: grpc.aio.Channel, prompts: Sequence[Sequence[int]], num_drafts: int) -> None:
        self._call: Any = target_pb2_grpc.TargetServiceStub(channel).Verify()
        self._sessions = {index: _ClientSession(index, prompt) for index, prompt in enumerate(prompts, 1)}
        self._num_drafts = num_drafts

    @property
    def tokens(self) -> list[list[int]]:
        """Of every session, prompt first."""
        return [session.tokens for session in self._sessions.values()]

    async def open(self, max_tokens: int) -> None:
        """Open every session; ItemError when the service has no room for one, now or before long."""
        items = []
        for session in self._sessions.values():
            spec = SessionSpec(
                tuple(session.tokens), len(session.tokens), SamplingParams(temperature=0.0, seed=0), max_tokens
            )
            stamp, opened = codec.stamp_to_proto(session.stamp()), codec.session_to_proto(spec)
            items.append(target_pb2.VerifyItem(stamp=stamp, open=opened, deadline_ms=_OPEN_DEADLINE_MS))
        await self._call.write(target_pb2.VerifyRequest(items=items))
        num_opened = 0
        while num_opened < len(items):
            num_opened += len(await self._read())

    async def run(self, num_rounds: int, late_s: float | None = None) -> Segment:
        """That many rounds of every session; with `late_s`, the second half begins so many seconds after the first."""
        start = time.perf_counter()
        for session in self._sessions.values():
            session.num_rounds_left = num_rounds
        items = [session.next_round(self._num_drafts) for session in self._sessions.values()]
        num_late = 0 if late_s is None else len(items) // 2
        await self._call.write(target_pb2.VerifyRequest(items=items[num_late:]))
        client_s = time.perf_counter() - start
        if late_s is not None:
            await asyncio.sleep(late_s)
            await self._call.write(target_pb2.VerifyRequest(items=items[:num_late]))
        verdicts: list[target_pb2.Verdict] = []
        while len(verdicts) < num_rounds * len(self._sessions):
            results = await self._read()
            received = time.perf_counter()
            items = [item for result in results if (item := self._take(result, verdicts)) is not None]
            if items:
                await self._call.write(target_pb2.VerifyRequest(items=items))
                client_s += time.perf_counter() - received
        round_s = (time.perf_counter() - start) / num_rounds
        queue_us = float(np.mean([verdict.timing.queue_us for verdict in verdicts]))
        compute_us = float(np.mean([verdict.timing.compute_us for verdict in verdicts]))
        rows = float(np.mean([verdict.batch_rows for verdict in verdicts]))
        return Segment(round_s, queue_us / 1e6, compute_us / 1e6, client_s / num_rounds, rows)

    async def end(self) -> None:
        """End the stream; its sessions are freed when this returns."""
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass

    def _take(
        self, result: target_pb2.VerifyResult, verdicts: list[target_pb2.Verdict]
    ) -> target_pb2.VerifyItem | None:
        """Commit one verdict; the item of the next round while there is one."""
        verdicts.append(result.verdict)
        session = self._sessions[result.stamp.session_id]
        session.take(result.verdict.token_ids)
        return session.next_round(self._num_drafts) if session.num_rounds_left else None

    async def _read(self) -> Sequence[target_pb2.VerifyResult]:
        """The results of the next message; ItemError when one is an error, RuntimeError when the stream has ended."""
        response = await self._call.read()
        if response is grpc.aio.EOF:
            raise RuntimeError("the service has ended the stream")
        results: Sequence[target_pb2.VerifyResult] = response.results
        for result in results:
            if result.HasField("error"):
                raise codec.error_from_proto(result.error)
        return results
