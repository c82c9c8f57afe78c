"""What a client raises: one class a cause an application can act on."""

from typing import Any

import grpc


class TandemError(Exception):
    """A call that failed. `code` is the gRPC status by name, for example "UNAVAILABLE"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class InvalidRequestError(TandemError):
    """The request cannot be served as it is; the message names the field and the limit."""


class UnsupportedError(TandemError):
    """The request asks for something by name that is not offered."""


class OverloadedError(TandemError):
    """There is no room now; try again later."""


class UnavailableError(TandemError):
    """The service, or the model behind it, cannot be reached; tokens that were streamed remain valid."""


class DeadlineExceededError(TandemError):
    """The timeout passed; tokens that were streamed remain valid."""


_CLASSES: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
}


def from_rpc_error(error: Any) -> TandemError:
    """The typed error for a grpc.RpcError, which is a finished call as well."""
    code: grpc.StatusCode = error.code()
    details = error.details() or "no details"
    if code is grpc.StatusCode.UNIMPLEMENTED and details.startswith("Method not found"):  # gRPC's own words
        details = "this service is not an orchestrator; is it the target's or the draft's port?"
    return _CLASSES.get(code, TandemError)(code.name, details)
