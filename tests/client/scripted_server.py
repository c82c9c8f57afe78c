"""An orchestrator that plays a script: what the clients' tests call."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.errors import LifecycleInterceptor
from tandem.serving.health import Health
from tandem.serving.server_tls import ServerTls


def started() -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id="r",
            num_prompt_tokens=3,
            seed=2**64 - 1,
            verification_policy=common_pb2.VERIFICATION_POLICY_BLOCK,
            model_id="m",
            draft_probs_transport=common_pb2.DRAFT_PROBS_TRANSPORT_FULL,
        )
    )


def chunk(
    text: str,
    *token_ids: int,
    drafted: int = 0,
    accepted: int = 0,
    sample_index: int = 0,
    logprobs: Sequence[common_pb2.TokenLogprobs] = (),
) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        chunk=pb.GenerateChunk(
            text=text,
            token_ids=token_ids,
            num_draft_tokens=drafted,
            num_accepted=accepted,
            sample_index=sample_index,
            logprobs=logprobs,
        )
    )


def complete(generation_us: int = 0, sample_index: int = 0, **speculation: Any) -> pb.GenerateResponse:
    usage = pb.Usage(
        num_prompt_tokens=3, num_completion_tokens=4, time_to_first_token_us=1500, generation_us=generation_us
    )
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            finish_reason=common_pb2.FINISH_REASON_STOP,
            matched_stop_string="end",
            usage=usage,
            speculation=pb.SpeculationStats(**speculation),
            sample_index=sample_index,
        )
    )


FULL = [
    started(),
    chunk("a", 1, 2, drafted=4, accepted=1),
    chunk("bc", 3, 4, drafted=2, accepted=1),
    complete(500_000, num_rounds=2, num_draft_tokens=6, num_accepted=2),
]


class ScriptedServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Sends the events, then raises `error` if there is one, or hangs."""

    def __init__(
        self, events: list[pb.GenerateResponse], error: Exception | None = None, hangs: bool = False
    ) -> None:
        self.events = events
        self.error = error
        self.hangs = hangs
        self.requests: list[pb.GenerateRequest] = []
        self.times_remaining: list[float | None] = []
        self.num_open = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.times_remaining.append(context.time_remaining())
        self.num_open += 1
        try:
            for event in self.events:
                yield event
            if self.error is not None:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1

    async def GetInfo(self, request: Any, context: Any) -> pb.GetInfoResponse:
        if self.error is not None:
            raise self.error
        target = pb.Replica(
            role="target", address="h:1", is_connected=True, model=common_pb2.ModelInfo(model_id="m")
        )
        return pb.GetInfoResponse(replicas=[target], num_running_requests=2)


@asynccontextmanager
async def serving(
    servicer: ScriptedServicer,
    tls: ServerTls | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[str]:
    """The address of a running server."""
    server = grpc.aio.server(interceptors=[LifecycleInterceptor(), *interceptors])
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server)
    health = Health("")
    health.set(is_serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", tls.credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
