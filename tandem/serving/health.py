"""The standard health service (grpc.health.v1).

Of our own, because that of grpcio-health-checking 1.81 forgets all who watch a name as soon as one of them leaves, and
lets them keep a server that stops from ending until its grace has passed.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse as State


class Health(health_pb2_grpc.HealthServicer):
    """Tells whoever asks, and whoever watches at every change, whether names are SERVING."""

    def __init__(self, *names: str) -> None:
        """`names`: NOT_SERVING until they are set; others are unknown."""
        self._names = frozenset(names)
        self._is_serving = False
        self._is_draining = False
        self._has_ended = False
        self._changed = asyncio.Event()  # a new one after each change

    def set(self, *, is_serving: bool) -> None:
        """All names; without effect once draining."""
        if not self._is_draining:
            self._is_serving = is_serving
            self._tell()

    def drain(self) -> None:
        """NOT_SERVING from now on."""
        self.set(is_serving=False)
        self._is_draining = True

    def end(self) -> None:
        """End every watch, with UNAVAILABLE."""
        self._has_ended = True
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _state(self, name: str) -> health_pb2.HealthCheckResponse:
        if name not in self._names:
            return State(status=State.SERVICE_UNKNOWN)
        return State(status=State.SERVING if self._is_serving else State.NOT_SERVING)

    async def Check(  # noqa: N802 - the proto's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a name that there is not."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:200]!r} here")
        return self._state(request.service)

    async def Watch(  # noqa: N802 - the proto's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now and after each change, SERVICE_UNKNOWN for a name that there is not."""
        told = None
        while True:
            changed, state = self._changed, self._state(request.service)
            if state != told:
                told = state
                yield state
            if self._has_ended:
                break
            await changed.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
