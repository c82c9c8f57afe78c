"""Peers that take nothing of what waits for them: what their calls hold is freed, so that they hold nothing up.

Flow control makes a write wait until the reader has room, for ever if it reads no more. Such a write can neither be
cancelled, which would lose memory in grpc.aio, nor can a status pass it; so it is left alone, what the call holds is
freed beside it, and the status follows should the reader come back.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

STALL_S = 30.0


class StalledError(Exception):
    """The peer had taken nothing for too long; what its call held has been freed."""


class PatientWriter:
    """Writes one call's messages, one at a time; frees what the call holds when one of them has waited too long."""

    def __init__(
        self, write: Callable[[Any], Awaitable[None]], stall_s: float, free: Callable[[], Awaitable[None]]
    ) -> None:
        """`free` is awaited beside the write that waits; no message may come afterwards."""
        self._write = write
        self._stall_s = stall_s
        self._free = free
        self._freeing: asyncio.Future[None] | None = None

    async def write(self, message: Any) -> None:
        """Return once the peer has room for more; StalledError when that came too late."""
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._give_up)
        try:
            await self._write(message)
        finally:
            timer.cancel()
            if self._freeing is not None:
                await self._freeing
        if self._freeing is not None:
            raise StalledError

    def _give_up(self) -> None:
        self._freeing = asyncio.ensure_future(self._free())
