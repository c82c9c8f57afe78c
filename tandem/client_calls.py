"""The calls of one generation: each to the address in turn, all within one timeout."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from tandem.client_errors import TandemError, UnavailableError, from_rpc_error
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.dialer import Dialer


class Addresses(Protocol):
    """Which orchestrator is called."""

    @property
    def address(self) -> str:
        """The one that is called now."""
        ...

    @property
    def dialer(self) -> Dialer:
        """How it is called."""
        ...

    @property
    def is_closed(self) -> bool:
        """No more calls: those that ran are cancelled."""
        ...

    def leave(self, address: str) -> None:
        """It could not be reached."""
        ...


class Calls:
    """The calls of one generation, one after the other, within one timeout."""

    def __init__(
        self,
        addresses: Addresses,
        start: Callable[[str, pb.GenerateRequest, float | None], Any],
        timeout_s: float | None,
    ) -> None:
        """`start`: (address, request, seconds left or None) -> the running call; `timeout_s`: since the first."""
        self._addresses = addresses
        self._start = start
        self._timeout_s = timeout_s
        self._address = addresses.address
        self._end_s: float | None = None

    def start(self, request: pb.GenerateRequest) -> Any:
        """Call whichever address is in turn."""
        self._address = self._addresses.address
        if self._timeout_s is None:
            return self._start(self._address, request, None)
        if self._end_s is None:
            self._end_s = time.monotonic() + self._timeout_s
        return self._start(self._address, request, max(0.0, self._end_s - time.monotonic()))

    def as_error(self, error: Any) -> TandemError:
        """The typed error of what gRPC raised about the last call."""
        addresses = self._addresses
        known = from_rpc_error(
            error, self._address, self._timeout_s, addresses.dialer, is_closed=addresses.is_closed
        )
        if isinstance(known, UnavailableError):
            addresses.leave(self._address)
        return known
