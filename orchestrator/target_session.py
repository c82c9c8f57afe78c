"""One request's session at the target: verdicts, whatever happens to the stream or the session in between.

A verdict is a function of the committed tokens, the proposal and the request's seed. So a session that was lost
is opened again with the committed tokens, the round is asked again, and the answer is the one that was lost.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn

import grpc

from orchestrator.breaker import Backoff
from orchestrator.handshake import computes_the_same
from orchestrator.hidden_relay import HiddenRelay
from orchestrator.replica_link import LinkLostError, TargetLink
from orchestrator.sequence import BadVerdictError, Sequence
from orchestrator.session_handle import Deadline, SessionHandle, answer_of
from tandem import codec
from tandem.serving.errors import ServiceError
from tandem.target.v1 import target_pb2
from tandem.types import ErrorCode, ItemError, ModelInfo, Proposal, Verdict

_RETRY_S = 1.0  # said to clients for whom no target could be had, or no room on one
_ROOM_BACKOFF = Backoff()  # between looks for room
_MAX_TRIES = 8  # of one round: times that it is asked anew because session or stream was lost
_REOPEN_CODES = {ErrorCode.UNKNOWN_SESSION, ErrorCode.PREFIX_MISMATCH}
_REFUSAL_CODES = {ErrorCode.INVALID_ARGUMENT, ErrorCode.UNIMPLEMENTED}
_STATUSES = {
    ErrorCode.NO_CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True, slots=True)
class TargetPatience:
    """How long a request waits for the target."""

    answer_s: float = 60.0  # before the same item is sent again
    reconnect_s: float = 60.0  # for a lost stream to come back; a target loads its model in that time


class TargetSession:
    """The `VerifierSession` of one request."""

    def __init__(
        self,
        handle: SessionHandle[target_pb2.VerifyItem, target_pb2.VerifyResult],
        patience: TargetPatience,
        model: ModelInfo,
        relay: HiddenRelay | None = None,
    ) -> None:
        """`model`: what every token must come from.

        `relay` takes the hidden states that the draft service needs; None when it needs none.
        """
        self._handle = handle
        self._handle.fits = self._is_same_model
        self._patience = patience
        self._relay = relay
        self._opening: asyncio.Future[target_pb2.VerifyResult] | None = None  # until a verdict shows that it worked
        self._refused_at: float | None = None  # since when no target has had room
        self._num_refusals = 0
        self._model = model

    def open(self, sequence: Sequence) -> None:
        """Let a target begin with the prompt. Without one nothing happens: `verify` opens as well."""
        if self._handle.next_place() is not None:
            self._open(sequence)

    async def verify(self, sequence: Sequence, proposal: Proposal) -> Verdict:
        """The verdict about the current round.

        A proposal the target refuses is dropped and the round becomes plain decoding, counted as a fallback.
        ServiceError when the target refuses the request, has no room, cannot be reached, or time is up;
        BadVerdictError for one that is larger than it can be.
        """
        started = time.monotonic()
        try:
            num_tries = 0
            while num_tries < _MAX_TRIES:
                self._check_time(sequence, started)
                try:
                    return await self._try(sequence, proposal)
                except LinkLostError:
                    num_tries += 1
                except TimeoutError:
                    assert self._handle.link is not None
                    self._handle.link.breaker.failed()
                    self._handle.avoid(sequence)  # where there is no other place, it is asked again there
                except ItemError as error:
                    if error.code in _REOPEN_CODES:
                        num_tries += 1
                        self._handle.mark_lost()
                    elif error.code is ErrorCode.NO_CAPACITY:
                        await self._find_room(sequence, error)
                    elif error.code in _REFUSAL_CODES and proposal.draft_token_ids:
                        proposal = Proposal()
                        sequence.skip_round()
                        sequence.stats.num_fallback_rounds += 1
                    else:
                        raise self._service_error(error) from error
            self._check_time(sequence, started)
        finally:
            sequence.stats.verify_wait_s += time.monotonic() - started
        raise ServiceError(
            grpc.StatusCode.UNAVAILABLE, f"{self._handle}: no verdict after {_MAX_TRIES} tries of one round"
        )

    async def _find_room(self, sequence: Sequence, refusal: ItemError) -> None:
        """Return when the session may be opened again, elsewhere or later; ServiceError where there is no use in that.

        A request that has not begun ends, and its client decides when to come back. An answer that has begun waits for
        room, and whoever was refused by a target that is about to go, for another one.
        """
        assert self._handle.link is not None
        is_leaving = self._handle.link.is_leaving
        if self._handle.avoid(sequence):
            return
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        may_wait = is_leaving or sequence.num_completion_tokens > 0
        if not may_wait or now - self._refused_at > self._patience.reconnect_s:
            raise self._service_error(refusal) from refusal
        self._handle.mark_lost()
        if not is_leaving:
            self._num_refusals += 1
            await asyncio.sleep(self._limit_s(_ROOM_BACKOFF.wait_s(self._num_refusals)))

    def close(self, sequence: Sequence) -> None:
        """Free the session."""
        if self._relay is not None:
            self._relay.close()
        self._handle.close(sequence)

    def _open(self, sequence: Sequence) -> None:
        """Send an open, for hidden states too if they are needed."""
        relay, handle = self._relay, self._handle
        if relay is None:
            self._opening = handle.open(sequence)
            return
        self._opening = handle.open(sequence, lambda item: item.hidden_layers.extend(relay.layers))
        assert handle.link is not None
        relay.opened(handle.link, handle.session_id)

    async def _try(self, sequence: Sequence, proposal: Proposal) -> Verdict:
        """Open if needed, ask once, wait once."""
        self._handle.move_if_leaving(sequence)
        if self._handle.needs_open:
            await self._wait_for_place()
            self._open(sequence)
        item = self._handle.step_item(sequence)
        item.verify.proposal.CopyFrom(codec.proposal_to_proto(proposal))
        asked_s = time.monotonic()
        future = self._handle.request(item)
        try:
            result = await answer_of(future, self._limit_s(self._patience.answer_s), "target", "verdict")
        except ItemError as error:
            if error.code is ErrorCode.UNKNOWN_SESSION:
                await self._check_opening()
            raise
        self._opening = self._refused_at = None
        self._num_refusals = 0
        if self._relay is not None:
            self._relay.decided()
        link = self._handle.link
        assert link is not None
        link.breaker.worked()
        _check_size(result.verdict, proposal)
        verdict = codec.verdict_from_proto(result.verdict)
        sequence.stats.verify_timing += verdict.timing.within(time.monotonic() - asked_s)
        return verdict

    async def _check_opening(self) -> None:
        """ServiceError, or ItemError NO_CAPACITY, if the session is unknown because the target did not open it."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        try:
            await answer_of(opening, self._limit_s(self._patience.answer_s), "target", "opened")
        except ItemError as error:
            if error.code is ErrorCode.NO_CAPACITY:
                raise
            raise self._service_error(error) from error

    async def _wait_for_place(self) -> None:
        """Until the session can be opened somewhere; ServiceError when it cannot be for too long, or never can."""
        try:
            misfit = await self._handle.wait_for_place(self._patience.reconnect_s)
        except LinkLostError as error:
            raise not_reached(error, self._handle.deadline) from error
        if misfit is not None:
            self._raise_other_model(misfit)

    def _is_same_model(self, link: TargetLink) -> bool:
        """Whether it computes what the request was begun with: half an answer of each of two is no answer."""
        return link.info is not None and computes_the_same(self._model, link.info.model)

    def _raise_other_model(self, link: TargetLink) -> NoReturn:
        assert link.info is not None
        raise ServiceError(
            grpc.StatusCode.ABORTED,
            f"{link} came back with other numerics during the request: {self._model.numerics} before, "
            f"{link.info.model.numerics} now",
        )

    def _limit_s(self, limit_s: float) -> float:
        return self._handle.deadline.remaining_s(limit_s)

    def _check_time(self, sequence: Sequence, started: float) -> None:
        """ServiceError, saying who was waited for, once the deadline has passed; `started`: this round's wait."""
        if not self._handle.deadline.is_over:
            return
        verify_wait_s = sequence.stats.verify_wait_s + time.monotonic() - started
        raise ServiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the request's deadline has passed in round {sequence.round}, after waiting {verify_wait_s:.2f} s for the "
            f"{self._handle} and {sequence.stats.draft_wait_s:.2f} s for drafts",
        )

    def _service_error(self, error: ItemError) -> ServiceError:
        """The status an application sees; what the target calls its own fault is no more than `internal error`."""
        status = _STATUSES.get(error.code, grpc.StatusCode.INTERNAL)
        is_internal = status is grpc.StatusCode.INTERNAL
        retry_after_s = _RETRY_S if status is grpc.StatusCode.RESOURCE_EXHAUSTED else None
        return ServiceError(
            status, "internal error" if is_internal else f"{self._handle}: {error.message}", retry_after_s
        )


def _check_size(verdict: target_pb2.Verdict, proposal: Proposal) -> None:
    """BadVerdictError for more than the proposal allows, before it is read: that could hold the loop for seconds."""
    num_tokens, num_logprobs = len(verdict.token_ids), len(verdict.logprobs)
    most = len(proposal.draft_token_ids) + 1
    if max(num_tokens, num_logprobs) > most:
        raise BadVerdictError(f"{num_tokens} tokens and {num_logprobs} logprobs where at most {most} can be")


def not_reached(error: LinkLostError, deadline: Deadline) -> ServiceError:
    """The status of a request whose target could not be reached for as long as it could wait."""
    if deadline.is_over:
        return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request's deadline has passed: {error}")
    return ServiceError(grpc.StatusCode.UNAVAILABLE, str(error), retry_after_s=_RETRY_S)
