"""What an application imports.

    with SyncTandemClient("127.0.0.1:50050") as client:
        print(client.complete("Once upon a time", max_tokens=64, seed=1).text)

    async with TandemClient("127.0.0.1:50050") as client:
        stream = client.generate("Once upon a time", temperature=0.8)
        async for chunk in stream:
            print(chunk.text, end="")
        print(stream.result.speculation.acceptance_rate)
        for answer in await client.complete_many("Once upon a time", n=3):
            print(answer.sample_index, answer.text)

Leaving the loop early, or cancelling the task that runs it, cancels the request on the server.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tandem import codec
from tandem.client_answers import Answer
from tandem.client_errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    UnavailableError,
    UnsupportedError,
    from_rpc_error,
)
from tandem.client_generation import Generation, SyncGeneration
from tandem.client_request import GenerateOptions, Prompt, build_request, refuse_several
from tandem.client_result import Chunk, GenerationResult, Speculation
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import MAX_APPLICATION_MESSAGE_BYTES, channel_options, parse_address
from tandem.types import Load, ModelInfo

__all__ = [
    "Answer",
    "Chunk",
    "DeadlineExceededError",
    "GenerateOptions",
    "Generation",
    "GenerationResult",
    "InvalidRequestError",
    "OverloadedError",
    "Prompt",
    "ServerInfo",
    "Speculation",
    "SyncGeneration",
    "SyncTandemClient",
    "TandemClient",
    "TandemError",
    "UnavailableError",
    "UnsupportedError",
]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and how busy it is."""

    target: ModelInfo
    target_load: Load
    draft: ModelInfo | None  # None without a draft service
    draft_load: Load | None
    proposer: str
    num_running_requests: int  # each answer of a request counts
    is_target_connected: bool  # False: what is said of it is old
    is_draft_connected: bool


class _ClientBase:
    """The address and options both clients share."""

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT; AddressError otherwise. Nothing is connected yet."""
        parse_address(address)
        self.address = address
        self._options = channel_options(MAX_APPLICATION_MESSAGE_BYTES)

    def _as_error(self, timeout_s: float | None) -> Callable[[Any], TandemError]:
        """What makes a typed error of what gRPC raises about a call with this timeout."""
        return partial(from_rpc_error, address=self.address, timeout_s=timeout_s)


class TandemClient(_ClientBase):
    """Calls an orchestrator from asyncio. May be made before the event loop runs; use it on one loop at a time."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the channel's
        self._calls: set[Any] = set()  # that have not ended; closing the channel would leave their readers waiting

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """A stream of chunks for a text, token ids, or chat messages ({"role", "content"}).

        With n > 1 the answers' chunks come interleaved, each with its sample index. InvalidRequestError for what
        the wire cannot carry; the iteration raises TandemError for the rest, and what has come stays readable.
        """
        request = build_request(prompt, **options)
        timeout = options.get("timeout")
        return Generation(
            lambda: self._start(request, timeout), codec.sample_indices(request), self._as_error(timeout)
        )

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """The whole answer at once. InvalidRequestError for n > 1, TandemError when it fails."""
        refuse_several(options)
        (result,) = await self.complete_many(prompt, **options)
        return result

    async def complete_many(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[GenerationResult]:
        """All n answers at once, by sample index. TandemError when one fails."""
        generation = self.generate(prompt, **options)
        async with aclosing(aiter(generation)) as chunks:
            async for _ in chunks:
                pass
        return generation.results

    async def info(self, timeout: float | None = 10.0) -> ServerInfo:
        """What is served, and how busy it is. TandemError when the call fails."""
        try:
            call: Any = self._stub().GetInfo(pb.GetInfoRequest(), timeout=timeout)
            return _server_info(await call)
        except grpc.aio.AioRpcError as error:
            raise self._as_error(timeout)(error) from error

    async def close(self) -> None:
        """Cancel what runs, and disconnect."""
        for call in list(self._calls):
            call.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, request: pb.GenerateRequest, timeout: float | None) -> Any:
        """The running call."""
        call: Any = self._stub().Generate(request, timeout=timeout)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _stub(self) -> "orchestrator_pb2_grpc.OrchestratorServiceStub":
        """On the running event loop's channel; RuntimeError while it belongs to another loop that lives."""
        loop = asyncio.get_running_loop()
        if self._channel is not None and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("this TandemClient is used on another event loop; make one client a loop")
            self._channel = None
        if self._channel is None:
            self._loop = loop
            self._channel = grpc.aio.insecure_channel(self.address, options=self._options)
        return orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)


class SyncTandemClient(_ClientBase):
    """Calls an orchestrator without asyncio. Thread-safe."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._channel = grpc.insecure_channel(address, options=self._options)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncGeneration:
        """As `TandemClient.generate`."""
        request = build_request(prompt, **options)
        timeout = options.get("timeout")
        return SyncGeneration(
            lambda: self._stub.Generate(request, timeout=timeout),
            codec.sample_indices(request),
            self._as_error(timeout),
        )

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """As `TandemClient.complete`."""
        refuse_several(options)
        (result,) = self.complete_many(prompt, **options)
        return result

    def complete_many(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[GenerationResult]:
        """As `TandemClient.complete_many`."""
        generation = self.generate(prompt, **options)
        for _ in generation:
            pass
        return generation.results

    def info(self, timeout: float | None = 10.0) -> ServerInfo:
        """As `TandemClient.info`."""
        try:
            return _server_info(self._stub.GetInfo(pb.GetInfoRequest(), timeout=timeout))
        except grpc.RpcError as error:
            raise self._as_error(timeout)(error) from error

    def close(self) -> None:
        """Cancel what runs, and disconnect."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _server_info(answer: pb.GetInfoResponse) -> ServerInfo:
    has_draft = answer.HasField("draft")
    return ServerInfo(
        target=codec.model_info_from_proto(answer.target),
        target_load=codec.load_from_proto(answer.target_load),
        draft=codec.model_info_from_proto(answer.draft) if has_draft else None,
        draft_load=codec.load_from_proto(answer.draft_load) if has_draft else None,
        proposer=answer.proposer,
        num_running_requests=answer.num_running_requests,
        is_target_connected=answer.is_target_connected,
        is_draft_connected=answer.is_draft_connected,
    )
