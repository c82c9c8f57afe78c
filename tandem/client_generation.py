"""One running generation, as an application iterates it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import grpc

from tandem.client_errors import TandemError, from_rpc_error
from tandem.client_result import Chunk, GenerationResult, ResultFolder


class GenerationBase:
    """What has arrived of one generation; it stays readable after an error."""

    def __init__(self, start: Callable[[], Any]) -> None:
        """`start` makes the call."""
        self._start = start
        self._folder = ResultFolder()
        self._is_used = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._folder.texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._folder.token_ids)

    @property
    def result(self) -> GenerationResult:
        """The finished generation; TandemError before the iteration has come to its end."""
        return self._folder.finish()

    def _use(self) -> None:
        if self._is_used:
            raise RuntimeError("a generation can be iterated once; call generate() again")
        self._is_used = True


class Generation(GenerationBase):
    """One request: `async for chunk in generation`. It is sent when the iteration begins."""

    def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        self._use()
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        call = self._start()
        try:
            async for event in call:
                chunk = self._folder.fold(event)
                if chunk is not None:
                    yield chunk
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TandemError("CANCELLED", "the client was closed during the call") from None
        finally:
            call.cancel()
        self._folder.finish()


class SyncGeneration(GenerationBase):
    """One request: `for chunk in generation`. It is sent when the iteration begins."""

    def __iter__(self) -> Generator[Chunk, None, None]:
        self._use()
        return self._chunks()

    def _chunks(self) -> Generator[Chunk, None, None]:
        call = self._start()
        try:
            for event in call:
                chunk = self._folder.fold(event)
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        self._folder.finish()
