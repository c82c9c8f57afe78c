"""What a client raises: one class a cause an application can act on."""

import re
from typing import Any

import grpc

from tandem.serving.dialer import Dialer
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


def from_rpc_error(error: Any, address: str, timeout_s: float | None, dialer: Dialer) -> TandemError:
    """The typed error for a grpc.RpcError (a finished call as well) of a call to `address` with this timeout."""
    code: grpc.StatusCode = error.code()
    details = describe_rpc_error(error, address, timeout_s, dialer)
    if code is grpc.StatusCode.UNIMPLEMENTED and details.startswith("Method not found"):  # gRPC's own words
        details = f"the service at {address} is not an orchestrator; is it the target's or the draft's port?"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(details)):
        return InvalidRequestError(
            code.name, f"the request's {sizes[1]} bytes are more than the limit of {sizes[2]} bytes of a message"
        )
    return _CLASSES.get(code, TandemError)(code.name, details, retry_after_s(error))


def describe_rpc_error(error: Any, address: str, timeout_s: float | None, dialer: Dialer) -> str:
    """What a service said about a failed call; where gRPC itself speaks, who was called and how long was waited."""
    details = str(error.details() or "no details")
    cause = dialer.why_not_connected(details)
    if cause is not None:
        return f"no Tandem service answers at {address}: {cause}"
    if timeout_s is not None and "Deadline Exceeded" in details:  # gRPC's own words
        return f"{address} had not answered in full when the timeout of {timeout_s:g} s passed"
    return details
