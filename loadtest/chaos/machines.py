"""Replicas as real processes."""

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tandem.processes import ServiceProcess, start_service, wait_ready

_READY_WITHIN_S = 120.0


class ProcessMachine:
    """A service, started anew whenever it has ended; always at a port of its own choice."""

    def __init__(self, service: str, arguments: Sequence[str], folder: Path, grace_s: float) -> None:
        self._service = service
        self._arguments = [*arguments, "--address", "127.0.0.1:0", "--grace", str(grace_s), "--log-level", "ERROR"]
        self._folder = folder
        self._grace_s = grace_s
        self._numbers = itertools.count()
        self._running: ServiceProcess | None = None
        self.exit_codes: list[int] = []  # of those that were asked to end

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.process.pid

    async def start(self) -> str:
        ready_file = self._folder / f"{self._service}-{id(self)}-{next(self._numbers)}.ready"
        self._running = await asyncio.to_thread(start_service, self._service, self._arguments, ready_file)
        await asyncio.to_thread(wait_ready, [self._running], _READY_WITHIN_S)
        return self._running.address

    async def kill(self) -> None:
        if self._running is not None:
            self._running.process.kill()
            await self._ended(self._running)

    async def drain(self) -> None:
        assert self._running is not None
        self._running.process.send_signal(signal.SIGTERM)
        self.exit_codes.append(await self._ended(self._running))

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def _ended(self, running: ServiceProcess) -> int:
        code = await asyncio.to_thread(running.process.wait)
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.ready_file.unlink(missing_ok=True)
        return code
