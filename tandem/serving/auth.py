"""Who calls: an interceptor that lets in calls with a known token, whose name is in what is logged of them."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from tandem.serving.errors import HEALTH_METHODS, ended
from tandem.serving.logs import logging_about
from tandem.serving.tokens import TokensFile, UnknownTokenError

_log = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_HEADER, _SCHEME = "authorization", "bearer"
_HOW = "this service wants a bearer token: metadata `authorization: Bearer TOKEN`, --token-file or TANDEM_TOKEN"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known token as UNAUTHENTICATED; health is open to all. Put it inside the lifecycle's."""

    def __init__(self, tokens: TokensFile) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[_Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(HEALTH_METHODS):
            return handler
        try:
            name = self._tokens.name_of(_presented(handler_call_details.invocation_metadata or ()))
        except UnknownTokenError as error:
            return _refusing(handler, method, str(error))
        logging_about(caller=name)
        return handler


def _presented(metadata: Iterable[Any]) -> str:
    """The token; UnknownTokenError for none, for what is none, and for several."""
    values = [value for key, value in metadata if key == _HEADER]
    if not values:
        raise UnknownTokenError(f"no token was given; {_HOW}")
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != _SCHEME or not token.strip():
        raise UnknownTokenError(f"the authorization metadata is not one bearer token; {_HOW}")
    return token.strip()


def _refusing(handler: Any, method: str, why: str) -> _Handler:
    """A handler of the same kind that refuses the call."""

    async def refuse(context: Any) -> None:
        status = grpc.StatusCode.UNAUTHENTICATED
        _log.warning("refused %s of %s: %s", method, context.peer(), why, extra=ended(method, status))
        await context.abort(
            status, why
        )  # raises what the lifecycle's interceptor leaves alone: this is the one line

    async def unary(request: Any, context: Any) -> Any:  # noqa: ARG001 - a handler's
        await refuse(context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG001 - a handler's
        await refuse(context)
        yield

    codecs = (handler.request_deserializer, handler.response_serializer)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(stream, *codecs)
    return grpc.unary_unary_rpc_method_handler(unary, *codecs)
