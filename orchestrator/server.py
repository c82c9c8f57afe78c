"""The service applications call: from a request to a stream of rounds."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc

from orchestrator import messages, speculative_loop
from orchestrator.admission import Admission
from orchestrator.answers import interleaved
from orchestrator.call import Context, time_to_answer, traceparent_of
from orchestrator.draft_length import AcceptanceKnown, DraftLength
from orchestrator.draft_session import DraftSession, NoDrafts
from orchestrator.handshake import hidden_states_problem
from orchestrator.hidden_relay import HiddenRelay
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.pools import DraftPool, TargetPool
from orchestrator.recording import AnswerRecord
from orchestrator.replica_api import ReplicaInfo
from orchestrator.replica_link import LinkLostError
from orchestrator.requests import CheckedRequest, Offer, check_answers, check_request, request_id_of
from orchestrator.sequence import Sequence
from orchestrator.session_handle import Deadline, SessionHandle
from orchestrator.target_session import TargetPatience, TargetSession, not_reached
from orchestrator.text_stream import TextStream
from orchestrator.tracing import NoTracer, RequestSpan, Tracer
from tandem.defaults import MAX_SESSIONS, NUM_DRAFT_TOKENS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.prompt_lookup import PromptLookup
from tandem.serving.errors import ServiceError, status_of
from tandem.serving.logs import logging_about, trace_id_of
from tandem.target.v1.target_pb2 import VerifyItem, VerifyResult
from tandem.types import Load, SessionId
from tandem.validation import MAX_REQUEST_ID_CHARS, InvalidArgumentError
from tandem.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.orchestrator.v1.OrchestratorService"
UNLIMITED_CONTEXT = 2**31 - 1  # of a target that names no limit


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """What the operator chose."""

    num_draft_tokens: int = NUM_DRAFT_TOKENS  # of a round, unless the request says otherwise
    draft_timeout_s: float | None = None  # longest wait of a round for drafts; None: as measured
    fallback: PromptLookup | None = None  # makes drafts while the draft service makes none
    max_requests: int = MAX_SESSIONS  # running; a request takes a place for each of its answers
    target_patience: TargetPatience = field(default_factory=TargetPatience)
    trusts_drafts: bool = True  # False: no policy whose answers depend on what the draft services say
    backs_off: bool = False  # fewer drafts where they would slow a target that many share


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves applications over a pool of target replicas and, if there is one, one of draft replicas."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        targets: TargetPool,
        drafts: DraftPool | None,
        settings: OrchestratorSettings,
        tracer: Tracer | None = None,
    ) -> None:
        """`tracer`: None traces nothing."""
        self._vocabulary = vocabulary
        self._targets = targets
        self._drafts = drafts
        self._settings = settings
        self._admission = Admission(settings.max_requests)
        self._acceptance = AcceptanceKnown()
        self._tracer: Tracer = tracer or NoTracer()
        self.metrics = OrchestratorMetrics(targets, drafts, lambda: self._admission.num_running)

    async def Generate(  # noqa: N802 - the proto's name
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Started, then of each answer a chunk a round and complete; errors are statuses."""
        arrived_at = time.monotonic()
        request_id = request_id_of(request)[:MAX_REQUEST_ID_CHARS]
        span = self._tracer.start(traceparent_of(context), request_id)
        logging_about(request_id=request_id, trace_id=trace_id_of(span.traceparent))
        deadline = Deadline(time_to_answer(context))
        async with aclosing(self._generate(request, span, deadline, arrived_at)) as events:
            with self._counted(context, span):
                async for event in events:
                    yield event

    async def _generate(
        self, request: pb.GenerateRequest, span: RequestSpan, deadline: Deadline, arrived_at: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """A request's messages."""
        sample_indices = check_answers(request, self._settings.max_requests)
        with self._admission.places(len(sample_indices)):
            if deadline.is_over:
                raise ServiceError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline had passed on arrival"
                )
            offer = await self._offer(deadline)
            checked = await asyncio.to_thread(check_request, request, offer)
            sequences = [self._sequence(checked, index, offer, arrived_at) for index in sample_indices]
            yield messages.started(checked, offer.model)
            answers = [self._answer(sequence, checked, offer, deadline, span) for sequence in sequences]
            async with aclosing(interleaved(answers)) as events:
                async for event in events:
                    yield event

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:  # noqa: N802, ARG002
        """What the replicas said at the last connect, and their loads now."""
        pools: list[TargetPool | DraftPool] = [pool for pool in (self._targets, self._drafts) if pool is not None]
        links = [link for pool in pools for link in pool.links]
        loads = await asyncio.gather(*(link.ask_load() for link in links))
        return pb.GetInfoResponse(
            num_running_requests=self._admission.num_running,
            replicas=[messages.replica(link, load) for link, load in zip(links, loads, strict=True)],
        )

    @contextlib.contextmanager
    def _counted(self, context: Context, span: RequestSpan) -> Iterator[None]:
        """Count the request by the status it ends with, and end its span."""
        status = grpc.StatusCode.OK
        try:
            yield
        except BaseException as error:
            status = status_of(error, context)
            raise
        finally:
            self.metrics.count_request(status)
            span.end(status)

    async def _offer(self, deadline: Deadline) -> Offer:
        """What every target can serve now. Without one to ask, ServiceError UNAVAILABLE or DEADLINE_EXCEEDED."""
        try:
            await self._targets.wait_for(deadline.remaining_s(self._settings.target_patience.reconnect_s))
        except LinkLostError as error:
            raise not_reached(error, deadline) from error
        models = [info.model for info in self._targets.infos]
        drafts = self._drafts.infos if self._drafts is not None else ()
        return Offer(
            vocabulary=self._vocabulary,
            model=models[0],
            vocab_size=min(model.vocab_size for model in models) or self._vocabulary.vocab_size,
            max_context=min(model.max_context or UNLIMITED_CONTEXT for model in models),
            num_draft_tokens=self._settings.num_draft_tokens,
            max_draft_tokens=min(model.max_draft_tokens for model in models),
            draft_transports=frozenset.intersection(*(info.transports for info in drafts))
            if drafts
            else frozenset(),
            trusts_drafts=self._settings.trusts_drafts or self._drafts is None,
        )

    def _sequence(self, checked: CheckedRequest, sample_index: int, offer: Offer, started_at: float) -> Sequence:
        text = TextStream(self._vocabulary, checked.stops, checked.include_stop)
        sequence = Sequence(
            replace(checked.spec, sample_index=sample_index),
            text,
            num_draft_tokens=checked.num_draft_tokens if self._drafts is not None else 0,
            vocab_size=offer.vocab_size,
            started_at=started_at,
        )
        try:
            sequence.resume(checked.resumed.get(sample_index, ()))
        except ValueError as error:
            raise InvalidArgumentError(f"resume of sample index {sample_index}", str(error)) from error
        return sequence

    async def _answer(
        self, sequence: Sequence, checked: CheckedRequest, offer: Offer, deadline: Deadline, span: RequestSpan
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One answer's messages: a chunk a round, then complete."""
        session_id = SessionId(secrets.randbits(63))
        logging_about(session_id=session_id)
        _log.debug("begins answer %d", sequence.sample_index)
        sessions = self._sessions(sequence, session_id, checked, offer, deadline, span.traceparent)
        record = AnswerRecord(sequence, self.metrics, span)
        try:
            async with aclosing(speculative_loop.generate(sequence, *sessions)) as rounds:
                async for output in rounds:
                    record.round(output)
                    self._acceptance.count(output.num_draft_tokens, output.num_accepted)
                    yield messages.chunk(output, sequence.sample_index, self._vocabulary)
        finally:
            record.end()
        record.complete()
        yield messages.complete(sequence)

    def _sessions(
        self,
        sequence: Sequence,
        session_id: SessionId,
        checked: CheckedRequest,
        offer: Offer,
        deadline: Deadline,
        traceparent: str,
    ) -> tuple[DraftSession | NoDrafts, TargetSession]:
        """One answer's two sessions; they share the id."""
        is_speculating = self._drafts is not None and checked.num_draft_tokens > 0
        draft_info = self._next_draft_info() if is_speculating else None
        relay = self._relay(draft_info)
        target_handle = SessionHandle(self._targets, session_id, deadline, traceparent)
        target = TargetSession(target_handle, self._settings.target_patience, offer.model, relay)
        if self._drafts is None or not is_speculating:
            return NoDrafts(), target
        layers = draft_info.hidden_layers if draft_info is not None else ()
        handle = SessionHandle(self._drafts, session_id, deadline, traceparent)
        handle.fits = lambda link: link.info is not None and link.info.hidden_layers == layers
        drafts = DraftSession(
            handle,
            offer.vocab_size,
            timeout_s=self._settings.draft_timeout_s,
            relay=relay,
            fallback=self._settings.fallback,
            length=self._length(sequence, checked, target_handle),
        )
        return drafts, target

    def _length(
        self, sequence: Sequence, checked: CheckedRequest, target: SessionHandle[VerifyItem, VerifyResult]
    ) -> DraftLength | None:
        """None where the number of drafts is the request's choice, or could change its answer."""
        if not (self._settings.backs_off and checked.may_draft_less):
            return None
        return DraftLength(
            self._acceptance, sequence.stats, lambda: target.link.load if target.link is not None else Load()
        )

    def _next_draft_info(self) -> ReplicaInfo | None:
        """Of the draft replica that a session would be opened on, or of the kind that there was."""
        assert self._drafts is not None
        link = self._drafts.choose()
        return link.info if link is not None else next(iter(self._drafts.infos), None)

    def _relay(self, draft: ReplicaInfo | None) -> HiddenRelay | None:
        """For the hidden states that the draft service needs, if it needs any and every target has them.

        Where one has them not, because it came back as another, the draft service misses them and rounds go without.
        """
        if draft is None or not draft.hidden_layers:
            return None
        for target in self._targets.infos:
            problem = hidden_states_problem(draft, target)
            if problem:
                _log.warning("answers go without drafts: %s", problem)
                return None
        return HiddenRelay(draft.hidden_layers)
