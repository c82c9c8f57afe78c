"""One running generation, as an application iterates it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from typing import Any

import grpc

from tandem import codec
from tandem.client_answers import Answer, AnswersFolder
from tandem.client_errors import TandemError, closed_error
from tandem.client_result import Chunk, GenerationResult
from tandem.client_resume import Patience, Resumption
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

Start = Callable[[pb.GenerateRequest], Any]  # makes the call


class GenerationBase:
    """What has arrived of one generation; it stays readable after an error."""

    def __init__(
        self,
        start: Start,
        request: pb.GenerateRequest,
        as_error: Callable[[Any], TandemError],
        patience: Patience | None = None,
    ) -> None:
        """`as_error`: of what gRPC raises; `patience`: to go on with another call when one is lost."""
        self._start = start
        self._as_error = as_error
        self._sample_indices = codec.sample_indices(request)
        self._folder = AnswersFolder(self._sample_indices)
        self._resumption = Resumption(request, self._folder, patience)
        self._is_used = False
        self._has_ended = False

    @property
    def num_resumes(self) -> int:
        """Calls after the first, those that reached nobody included."""
        return self._resumption.num_resumes

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Those that have begun as they are now, by sample index."""
        return self._folder.answers

    @property
    def results(self) -> list[GenerationResult]:
        """The finished answers, by sample index; TandemError before the iteration has come to its end."""
        if not self._has_ended:
            raise TandemError(
                "CANCELLED",
                "this generation was not iterated to its end; `answers`, `text` and `token_ids` have what has come",
            )
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

    def _wait_after(self, error: Any) -> float:
        """Seconds until the next call; raises what gRPC has raised, as a TandemError, when there is none."""
        known = self._as_error(error)
        wait_s = self._resumption.wait_s(known)
        if wait_s is None:
            raise known from error
        return wait_s


class Generation(GenerationBase):
    """One request: `async for chunk in generation`. It is sent when the iteration begins."""

    def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        self._use()
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        while True:
            call = self._start(self._resumption.request)
            try:
                # Closed, as gRPC's iterator and its call hold each other, and the request, until garbage is collected.
                async with aclosing(aiter(call)) as events:
                    async for event in events:
                        chunk = self._folder.fold(event)
                        if chunk is not None:
                            yield chunk
                break
            except grpc.aio.AioRpcError as error:
                wait_s = self._wait_after(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise closed_error() from None
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)
        self._has_ended = True
        self._folder.finish()


class SyncGeneration(GenerationBase):
    """One request: `for chunk in generation`. It is sent when the iteration begins."""

    def __iter__(self) -> Generator[Chunk, None, None]:
        self._use()
        return self._chunks()

    def _chunks(self) -> Generator[Chunk, None, None]:
        while True:
            call = self._start(self._resumption.request)
            try:
                for event in call:
                    chunk = self._folder.fold(event)
                    if chunk is not None:
                        yield chunk
                break
            except grpc.RpcError as error:
                wait_s = self._wait_after(error)
            finally:
                call.cancel()
            time.sleep(wait_s)
        self._has_ended = True
        self._folder.finish()
