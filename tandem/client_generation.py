"""One running generation, as an application iterates it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import grpc

from tandem.client_answers import Answer, AnswersFolder
from tandem.client_errors import TandemError
from tandem.client_result import Chunk, GenerationResult


class GenerationBase:
    """What has arrived of one generation; it stays readable after an error."""

    def __init__(
        self, start: Callable[[], Any], sample_indices: range, as_error: Callable[[Any], TandemError]
    ) -> None:
        """`start` makes the call for the answers of these sample indices; `as_error`: of what gRPC raises."""
        self._start = start
        self._as_error = as_error
        self._sample_indices = sample_indices
        self._folder = AnswersFolder(sample_indices)
        self._is_used = False

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Those that have begun as they are now, by sample index."""
        return self._folder.answers

    @property
    def results(self) -> list[GenerationResult]:
        """The finished answers, by sample index; TandemError before the iteration has come to its end."""
        return self._folder.finish()

    @property
    def text(self) -> str:
        """The one answer's text so far."""
        self._check_single()
        return "".join(answer.text for answer in self.answers)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The one answer's tokens so far."""
        self._check_single()
        return tuple(token_id for answer in self.answers for token_id in answer.token_ids)

    @property
    def result(self) -> GenerationResult:
        """The one finished answer; TandemError before the iteration has come to its end."""
        self._check_single()
        return self.results[0]

    def _check_single(self) -> None:
        if len(self._sample_indices) > 1:
            raise RuntimeError(f"this generation has {len(self._sample_indices)} answers; see `answers`, `results`")

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
            raise self._as_error(error) from error
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
            raise self._as_error(error) from error
        finally:
            call.cancel()
        self._folder.finish()
