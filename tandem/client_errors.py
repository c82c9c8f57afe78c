"""What a client raises: one class a cause an application can act on."""

import re
from typing import Any

import grpc

from tandem.serving.dialer import Dialer, NoConnection
from tandem.serving.retry import retry_after_s


class TandemError(Exception):
    """A call that failed. `code` is the gRPC status by name, for example "UNAVAILABLE"."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s  # when the same call may succeed, if the server has said so


class InvalidRequestError(TandemError):
    """The request cannot be served as it is; the message names the field and the limit."""


class UnsupportedError(TandemError):
    """The request asks for something by name that is not offered."""


class UnauthenticatedError(TandemError):
    """The service wants a token and got none that it knows, or one that has expired; the message says which."""


class OverloadedError(TandemError):
    """There is no room now; try again later."""


class UnavailableError(TandemError):
    """The service, or the model behind it, cannot be reached; tokens that were streamed remain valid."""

    is_lasting = False  # until somebody changes certificates or options: the same call would fail again


class DeadlineExceededError(TandemError):
    """The timeout passed; tokens that were streamed remain valid."""


_CLASSES: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
}


_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")  # gRPC's own words


def closed_error() -> TandemError:
    """Of a call that was not over when its client was closed."""
    return TandemError("CANCELLED", "the client was closed during the call")


def from_rpc_error(
    error: Any, address: str, timeout_s: float | None, dialer: Dialer, *, is_closed: bool = False
) -> TandemError:
    """The typed error for a grpc.RpcError (a finished call as well) of a call to `address` with this timeout.

    `is_closed`: the client is closed, which cancels its calls.
    """
    code: grpc.StatusCode = error.code()
    no_connection = _no_connection(error, address, dialer)
    details = _in_words(error, address, timeout_s, no_connection)
    if code is grpc.StatusCode.CANCELLED:
        if is_closed:
            return closed_error()
        # A server that stops listening says it of calls that it has not taken yet:
        # https://github.com/grpc/grpc/issues/41785
        code = grpc.StatusCode.UNAVAILABLE
        details = f"{address} dropped the call (gRPC: {details}), as a service does that is shutting down"
    if code is grpc.StatusCode.UNIMPLEMENTED and details.startswith("Method not found"):  # gRPC's own words
        details = f"the service at {address} is not an orchestrator; is it the target's or the draft's port?"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(details)):
        return InvalidRequestError(
            code.name, f"the request's {sizes[1]} bytes are more than the limit of {sizes[2]} bytes of a message"
        )
    known = _CLASSES.get(code, TandemError)(code.name, details, retry_after_s(error))
    if isinstance(known, UnavailableError):
        known.is_lasting = no_connection is not None and no_connection.is_lasting
    return known


def describe_rpc_error(error: Any, address: str, timeout_s: float | None, dialer: Dialer) -> str:
    """What a service said about a failed call; where gRPC itself speaks, who was called and how long was waited."""
    return _in_words(error, address, timeout_s, _no_connection(error, address, dialer))


def _no_connection(error: Any, address: str, dialer: Dialer) -> NoConnection | None:
    return dialer.why_not_connected(address, str(error.details() or ""))


def _in_words(error: Any, address: str, timeout_s: float | None, no_connection: NoConnection | None) -> str:
    details = str(error.details() or "no details")
    if no_connection is not None:
        return f"no Tandem service answers at {address}: {no_connection.cause}"
    if timeout_s is not None and "Deadline Exceeded" in details:  # gRPC's own words
        return f"{address} had not answered in full when the timeout of {timeout_s:g} s passed"
    return details
