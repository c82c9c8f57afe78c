"""The service applications call: from a request to a stream of rounds."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import grpc

from orchestrator import messages, speculative_loop
from orchestrator.answers import interleaved
from orchestrator.draft_session import DraftSession, NoDrafts
from orchestrator.handshake import hidden_states_problem
from orchestrator.hidden_relay import HiddenRelay
from orchestrator.replica_link import LinkLostError, ReplicaLink
from orchestrator.requests import CheckedRequest, Offer, check_answers, check_request
from orchestrator.sequence import BadVerdictError, Sequence
from orchestrator.session_handle import Deadline, SessionHandle
from orchestrator.target_session import TargetPatience, TargetSession, not_reached
from orchestrator.text_stream import TextStream
from tandem import codec
from tandem.defaults import MAX_SESSIONS, NUM_DRAFT_TOKENS
from tandem.draft.v1 import draft_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.errors import ServiceError
from tandem.target.v1 import target_pb2
from tandem.types import SessionId
from tandem.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.orchestrator.v1.OrchestratorService"
UNLIMITED_CONTEXT = 2**31 - 1  # of a target that names no limit
_NOTICE_S, _NOTICE_SHARE = 0.05, 0.05  # of a call's time, whichever is less

TargetLink: TypeAlias = ReplicaLink[target_pb2.VerifyItem, target_pb2.VerifyResult]
DraftLink: TypeAlias = ReplicaLink[draft_pb2.ProposeItem, draft_pb2.ProposeResult]
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """What the operator chose."""

    num_draft_tokens: int = NUM_DRAFT_TOKENS  # of a round, unless the request says otherwise
    draft_timeout_s: float = 5.0
    max_requests: int = MAX_SESSIONS  # running; a request takes a place for each of its answers
    target_patience: TargetPatience = field(default_factory=TargetPatience)


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves applications over one link to a target replica and, if there is one, one to a draft replica."""

    def __init__(
        self, vocabulary: Vocabulary, target: TargetLink, draft: DraftLink | None, settings: OrchestratorSettings
    ) -> None:
        self._vocabulary = vocabulary
        self._target = target
        self._draft = draft
        self._settings = settings
        self._num_running = 0

    async def Generate(  # noqa: N802 - the proto's name
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Started, then of each answer a chunk a round and complete; errors are statuses."""
        arrived_at = time.monotonic()
        sample_indices = check_answers(request, self._settings.max_requests)
        with self._admitted(len(sample_indices)):
            deadline = Deadline(_time_to_answer(context))
            if deadline.is_over:
                raise ServiceError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline had passed on arrival"
                )
            offer = await self._offer(deadline)
            checked = await asyncio.to_thread(check_request, request, offer)
            assert self._target.info is not None  # as it made the offer
            yield messages.started(checked, self._target.info.model.model_id)
            answers = [
                _answer(
                    self._vocabulary,
                    self._sequence(checked, sample_index, offer, arrived_at),
                    *self._sessions(checked, offer, deadline, context),
                )
                for sample_index in sample_indices
            ]
            try:
                async with aclosing(interleaved(answers)) as events:
                    async for event in events:
                        yield event
            except BadVerdictError as error:
                _log.error(
                    "request %r: the %s sent a verdict that cannot be: %s", checked.request_id, self._target, error
                )
                raise ServiceError(grpc.StatusCode.INTERNAL, "internal error") from error
            except ServiceError as error:
                _log.info("request %r: %s: %s", checked.request_id, error.code.name, error)
                raise

    async def GetInfo(self, request: pb.GetInfoRequest, context: _Context) -> pb.GetInfoResponse:  # noqa: N802, ARG002
        """What both replicas said at the last connect, and their loads now."""
        answer = pb.GetInfoResponse(
            num_running_requests=self._num_running,
            is_target_connected=self._target.is_up,
            is_draft_connected=self._draft is not None and self._draft.is_up,
        )
        if self._target.info is not None:
            answer.target.CopyFrom(codec.model_info_to_proto(self._target.info.model))
            answer.target_load.CopyFrom(codec.load_to_proto(await self._target.ask_load()))
        if self._draft is not None and self._draft.info is not None:
            answer.draft.CopyFrom(codec.model_info_to_proto(self._draft.info.model))
            answer.draft_load.CopyFrom(codec.load_to_proto(await self._draft.ask_load()))
            answer.proposer = self._draft.info.proposer
        return answer

    @contextlib.contextmanager
    def _admitted(self, num_answers: int) -> Iterator[None]:
        """A place an answer among the running requests; ServiceError RESOURCE_EXHAUSTED when too few are free."""
        max_requests = self._settings.max_requests
        num_free = max_requests - self._num_running
        if num_answers > num_free:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{num_free} of {max_requests} places for running requests are free, {num_answers} are needed; "
                "try again later",
            )
        self._num_running += num_answers
        try:
            yield
        finally:
            self._num_running -= num_answers

    async def _offer(self, deadline: Deadline) -> Offer:
        """What can be served now. Without a target to ask, ServiceError UNAVAILABLE or DEADLINE_EXCEEDED."""
        try:
            await self._target.wait_up(deadline.remaining_s(self._settings.target_patience.reconnect_s))
        except LinkLostError as error:
            raise not_reached(error, deadline) from error
        if self._target.load.draining:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, f"{self._target} is shutting down; try again later")
        assert self._target.info is not None  # a link that was up has it
        model = self._target.info.model
        draft_info = self._draft.info if self._draft is not None else None
        return Offer(
            vocabulary=self._vocabulary,
            vocab_size=model.vocab_size or self._vocabulary.vocab_size,
            max_context=model.max_context or UNLIMITED_CONTEXT,
            num_draft_tokens=self._settings.num_draft_tokens,
            max_draft_tokens=model.max_draft_tokens,
            draft_transports=draft_info.transports if draft_info is not None else frozenset(),
        )

    def _sequence(self, checked: CheckedRequest, sample_index: int, offer: Offer, started_at: float) -> Sequence:
        text = TextStream(self._vocabulary, checked.stops, checked.include_stop)
        return Sequence(
            replace(checked.spec, sample_index=sample_index),
            text,
            num_draft_tokens=checked.num_draft_tokens if self._draft is not None else 0,
            vocab_size=offer.vocab_size,
            started_at=started_at,
        )

    def _sessions(
        self, checked: CheckedRequest, offer: Offer, deadline: Deadline, context: _Context
    ) -> tuple[DraftSession | NoDrafts, TargetSession]:
        """One answer's two sessions; they share an id."""
        session_id = SessionId(secrets.randbits(63))
        traceparent = _traceparent(context)
        is_speculating = self._draft is not None and checked.num_draft_tokens > 0
        relay = self._relay() if is_speculating else None
        target = TargetSession(
            SessionHandle(self._target, session_id, deadline, traceparent), self._settings.target_patience, relay
        )
        if self._draft is None or not is_speculating:
            return NoDrafts(), target
        handle = SessionHandle(self._draft, session_id, deadline, traceparent)
        return DraftSession(handle, self._settings.draft_timeout_s, offer.vocab_size, relay), target

    def _relay(self) -> HiddenRelay | None:
        """For the hidden states that the draft service needs, if it needs any and the target has them.

        Where it has them not, because it came back as another, the draft service misses them and rounds go without.
        """
        draft = self._draft.info if self._draft is not None else None
        if draft is None or not draft.hidden_layers or self._target.info is None:
            return None
        problem = hidden_states_problem(draft, self._target.info)
        if problem:
            _log.warning("answers go without drafts: %s", problem)
            return None
        return HiddenRelay(self._target, draft.hidden_layers)


def _time_to_answer(context: _Context) -> float | None:
    """Seconds; the last of a call's time is kept to tell the client, before its own clock does, who was waited for."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else remaining_s - min(_NOTICE_S, _NOTICE_SHARE * remaining_s)


def _traceparent(context: _Context) -> str:
    """The caller's W3C trace context, if it sent one."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""


async def _answer(
    vocabulary: Vocabulary,
    sequence: Sequence,
    proposer: speculative_loop.ProposerSession,
    verifier: speculative_loop.VerifierSession,
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """One answer's messages: a chunk a round, then complete."""
    async with aclosing(speculative_loop.generate(sequence, proposer, verifier)) as rounds:
        async for output in rounds:
            yield messages.chunk(output, sequence.sample_index, vocabulary)
    yield messages.complete(sequence)
