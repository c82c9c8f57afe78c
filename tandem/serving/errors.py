"""The outermost interceptor: closes streams in their own task and turns every error into a status."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tandem.serving.retry import retry_metadata
from tandem.serving.stalls import STALL_S, PatientWriter, StalledError
from tandem.validation import InvalidArgumentError

_log = logging.getLogger(__name__)

# The stubs know these types as generic, the library does not.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


HEALTH_METHODS = "/grpc.health."  # they are answered as they are, to everybody
MAX_DETAILS_CHARS = 1000  # details travel as metadata, which clients limit to a few kilobytes


class ServiceError(Exception):
    """A failure with a status the caller should see; the message is sent as it is."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when the same call may succeed, if that can be told; travels as google.rpc.RetryInfo."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


def status_of(error: BaseException, context: _Context) -> grpc.StatusCode:
    """What a call whose handler raised this ends with; ask in the call's own task.

    A cancellation that nobody asked that task for is a bug; who else than the client asks says why in the context.
    """
    if isinstance(error, InvalidArgumentError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, ServiceError):
        return error.code
    task = asyncio.current_task()
    is_asked_for = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
    if not (is_asked_for or isinstance(error, GeneratorExit)):
        return grpc.StatusCode.INTERNAL
    if context.code():
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.DEADLINE_EXCEEDED if context.time_remaining() == 0 else grpc.StatusCode.CANCELLED


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Bytes that came in place of a request: a deserializer that raises ends the call with a status of grpc's own."""

    message: str  # the request's name
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes cannot be read as a {self.message}"


class LifecycleInterceptor(grpc.aio.ServerInterceptor):
    """Runs every handler so that its `finally` blocks run in the call's task and its errors get a status.

    A streaming handler is an async generator; left to grpc.aio, one that is suspended in a `yield` when its
    client goes is closed late and in another task. One whose client takes nothing is closed as well, and its call ends
    with ABORTED: nothing is wrong with the request, but the same call would go no further.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        """`stall_s`: how long a message may wait for a client that takes nothing."""
        self._stall_s = stall_s
        self._running: dict[asyncio.Task[Any], _Context] = {}

    def cut_off(self, why: str) -> None:
        """End every call that runs with UNAVAILABLE, so that its client can go on elsewhere."""
        for task, context in self._running.items():
            context.set_code(grpc.StatusCode.UNAVAILABLE)
            context.set_details(why)
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[_Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_METHODS):
            return handler  # type: ignore[no-any-return]
        codecs = {
            "request_deserializer": _forgiving(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        method = handler_call_details.method
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(
                    lambda requests, context: handler.stream_stream(_all_read(requests), context), method
                ),
                **codecs,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._streaming(handler.unary_stream, method), **codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), **codecs)

    def _streaming(self, handler: Callable[[Any, _Context], AsyncIterator[Any]], method: str) -> Any:
        stalled = f"the client took nothing of what waited for it for {self._stall_s:g} s"

        async def run(request: Any, context: _Context) -> None:
            async def write_all() -> None:
                async with aclosing(handler(_read(request), context)) as messages:  # type: ignore[type-var]

                    async def free() -> None:
                        _log.info("%s: %s", method, stalled)
                        await messages.aclose()  # type: ignore[attr-defined]  # suspended where it yielded

                    writer = PatientWriter(context.write, self._stall_s, free)
                    try:
                        async for message in messages:
                            await writer.write(message)
                    except StalledError:
                        raise ServiceError(grpc.StatusCode.ABORTED, stalled) from None

            await self._guarded(write_all(), context, method)

        return run

    def _unary(self, handler: Callable[[Any, _Context], Awaitable[Any]], method: str) -> Any:
        async def run(request: Any, context: _Context) -> Any:
            async def answer() -> Any:
                return await handler(_read(request), context)

            return await self._guarded(answer(), context, method)

        return run

    async def _guarded(self, work: Awaitable[Any], context: _Context, method: str) -> Any:
        """Await `work`; end the call with the status its error stands for, and one line in the log."""
        try:
            return await self._may_be_cut_off(work, context)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:  # a write to a client that is gone
            _log.info("the client went away", extra=ended(method, grpc.StatusCode.CANCELLED))
        except asyncio.CancelledError as error:
            status = status_of(error, context)
            if status is grpc.StatusCode.INTERNAL:
                await _abort(context, method, status, "internal error", error)
                return None
            if status is grpc.StatusCode.UNAVAILABLE:
                await _abort(context, method, status, str(context.details()), error)
                return None
            _log.info("ended by the client", extra=ended(method, status))
            raise  # grpc must see the cancellation
        except (InvalidArgumentError, ServiceError) as error:
            await _abort(context, method, status_of(error, context), str(error), error)
        except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must not leak its text nor stop the server
            await _abort(context, method, grpc.StatusCode.INTERNAL, "internal error", error)

    async def _may_be_cut_off(self, work: Awaitable[Any], context: _Context) -> Any:
        """Await `work`, which `cut_off` may cancel."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = context
        try:
            return await work
        finally:
            del self._running[task]


def _forgiving(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What the bytes are, or that they are nothing."""
    name = getattr(deserialize, "__self__", object).__name__

    def run(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecodable(name, len(data))

    return run


def _read(request: Any) -> Any:
    """The request; InvalidArgumentError for what is none."""
    if isinstance(request, _Undecodable):
        raise InvalidArgumentError("request", str(request))
    return request


async def _all_read(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Every request of a stream, as `_read`."""
    async for request in requests:
        yield _read(request)


async def _abort(context: _Context, method: str, code: grpc.StatusCode, details: str, error: BaseException) -> None:
    """End the call with a status. A client that has gone, as at its deadline, is no error of the server."""
    is_bug = code is grpc.StatusCode.INTERNAL
    retry_after_s = error.retry_after_s if isinstance(error, ServiceError) else None
    details = _shortened(details)
    level, message = (logging.ERROR if is_bug else logging.INFO), "%s"
    try:
        await context.abort(code, details, retry_metadata(code, details, retry_after_s))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        level, message = logging.INFO, "the client went away before it could be told: %s"
    finally:  # the client may have the status, and its connection be closed, before this task goes on
        _log.log(
            level, message, details, exc_info=error if level == logging.ERROR else None, extra=ended(method, code)
        )


def ended(method: str, code: grpc.StatusCode) -> dict[str, str]:
    """What the line about a call's end says besides its request."""
    return {"method": method, "status": code.name}


def _shortened(details: str) -> str:
    """What a message quotes may be as long as a request."""
    return details if len(details) <= MAX_DETAILS_CHARS else details[:MAX_DETAILS_CHARS] + " ..."
