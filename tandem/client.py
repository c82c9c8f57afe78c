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

Leaving the loop early, or cancelling the task that runs it, cancels the request on the server. For TLS and tokens give
the client `credentials=Credentials(tls_ca=Path("ca.pem"), token=...)`.
"""

import asyncio
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tandem.client_answers import Answer
from tandem.client_calls import Calls
from tandem.client_errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
    from_rpc_error,
)
from tandem.client_generation import Generation, SyncGeneration
from tandem.client_info import ReplicaInfo, ServerInfo, server_info
from tandem.client_request import GenerateOptions, Prompt, build_request, refuse_several
from tandem.client_result import Chunk, GenerationResult, Speculation
from tandem.client_resume import Patience
from tandem.credentials import Credentials
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import MAX_APPLICATION_MESSAGE_BYTES, AddressError
from tandem.serving.dialer import Dialer
from tandem.serving.pem import CredentialsError

__all__ = [
    "AddressError",
    "Answer",
    "Chunk",
    "Credentials",
    "CredentialsError",
    "DeadlineExceededError",
    "GenerateOptions",
    "Generation",
    "GenerationResult",
    "InvalidRequestError",
    "OverloadedError",
    "Prompt",
    "ReplicaInfo",
    "ServerInfo",
    "Speculation",
    "SyncGeneration",
    "SyncTandemClient",
    "TandemClient",
    "TandemError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
]


class _ClientBase:
    """The addresses and options both clients share."""

    def __init__(self, address: str, resume: bool = False, credentials: Credentials | None = None) -> None:
        """Nothing is connected yet; AddressError for what is not HOST:PORT,..., CredentialsError for unusable ones.

        Args:
            address: of an orchestrator, or of several with the same models behind them, which are called in turn: the
                next one whenever one cannot be reached.
            resume: a generation whose orchestrator is lost goes on at the next one, with the same tokens (under
                policies `greedy` and `coupled`), instead of raising UnavailableError.
            credentials: for TLS, and the token that is sent with every call; clear text and no token without any.
        """
        self.addresses = tuple(dict.fromkeys(part.strip() for part in address.split(",")))
        self.dialer = Dialer(credentials, MAX_APPLICATION_MESSAGE_BYTES)
        for one in self.addresses:
            self.dialer.check(one)
        self.is_closed = False  # for good; a TandemClient connects again when it is used again
        self._number = 0  # of the address that is called
        self._patience = Patience(num_addresses=len(self.addresses)) if resume else None

    @property
    def address(self) -> str:
        """The one that is called now."""
        return self.addresses[self._number % len(self.addresses)]

    def leave(self, address: str) -> None:
        """It could not be reached: the next one is called from now on, unless it is already."""
        if self.address == address:
            self._number += 1


class TandemClient(_ClientBase):
    """Calls orchestrators from asyncio. May be made before the event loop runs; use it on one loop at a time."""

    def __init__(self, address: str, resume: bool = False, credentials: Credentials | None = None) -> None:
        super().__init__(address, resume, credentials)
        self._channels: dict[str, grpc.aio.Channel] = {}  # by address
        self._loop: asyncio.AbstractEventLoop | None = None  # the channels'
        self._calls: set[Any] = set()  # that have not ended; closing the channel would leave their readers waiting

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """A stream of chunks for a text, token ids, or chat messages ({"role", "content"}).

        With n > 1 the answers' chunks come interleaved, each with its sample index. InvalidRequestError for what
        the wire cannot carry; the iteration raises TandemError for the rest, and what has come stays readable.
        """
        request = build_request(prompt, **options)
        calls = Calls(self, self._start, options.get("timeout"))
        return Generation(calls.start, request, calls.as_error, self._patience)

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
        address = self.address
        try:
            call: Any = self._stub(address).GetInfo(
                pb.GetInfoRequest(), timeout=timeout, metadata=self.dialer.metadata
            )
            return server_info(await call)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, address, timeout, self.dialer) from error

    async def close(self) -> None:
        """Cancel what runs, and disconnect."""
        for call in list(self._calls):
            call.cancel()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, address: str, request: pb.GenerateRequest, timeout: float | None) -> Any:
        """The running call."""
        call: Any = self._stub(address).Generate(request, timeout=timeout, metadata=self.dialer.metadata)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _stub(self, address: str) -> "orchestrator_pb2_grpc.OrchestratorServiceStub":
        """On the running event loop's channel; RuntimeError while the channels belong to another loop that lives."""
        loop = asyncio.get_running_loop()
        if self._channels and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("this TandemClient is used on another event loop; make one client a loop")
            self._channels = {}
        self._loop = loop
        if address not in self._channels:
            self._channels[address] = self.dialer.open(address)
        return orchestrator_pb2_grpc.OrchestratorServiceStub(self._channels[address])


class SyncTandemClient(_ClientBase):
    """Calls orchestrators without asyncio. Thread-safe."""

    def __init__(self, address: str, resume: bool = False, credentials: Credentials | None = None) -> None:
        super().__init__(address, resume, credentials)
        self._channels = {one: self.dialer.open_blocking(one) for one in self.addresses}

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncGeneration:
        """As `TandemClient.generate`."""
        request = build_request(prompt, **options)
        calls = Calls(self, self._start, options.get("timeout"))
        return SyncGeneration(calls.start, request, calls.as_error, self._patience)

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
        address = self.address
        try:
            return server_info(
                self._stub(address).GetInfo(pb.GetInfoRequest(), timeout=timeout, metadata=self.dialer.metadata)
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error, address, timeout, self.dialer, is_closed=self.is_closed) from error

    def close(self) -> None:
        """Cancel what runs, and disconnect."""
        self.is_closed = True
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, address: str, request: pb.GenerateRequest, timeout: float | None) -> Any:
        return self._stub(address).Generate(request, timeout=timeout, metadata=self.dialer.metadata)

    def _stub(self, address: str) -> orchestrator_pb2_grpc.OrchestratorServiceStub:
        if self.is_closed:
            raise TandemError("CANCELLED", "the client is closed")
        return orchestrator_pb2_grpc.OrchestratorServiceStub(self._channels[address])
