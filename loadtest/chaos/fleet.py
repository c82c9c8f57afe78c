"""The replicas that chaos strikes, each behind a cable, and the files in which an orchestrator finds them."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from loadtest.chaos.cable import Cable


class Machine(Protocol):
    """What runs a replica: a process, or something like it."""

    async def start(self) -> str:
        """Start it -> its HOST:PORT once it serves."""
        ...

    async def kill(self) -> None:
        """End it without a word."""
        ...

    async def drain(self) -> None:
        """Have it end in good order, and wait for that."""
        ...

    def pause(self) -> None:
        """Have it stand still."""
        ...

    def resume(self) -> None:
        """Have it go on."""
        ...


class Member:
    """One replica. It serves when it is ready, named, not paused, and its cable passes everything on."""

    def __init__(self, role: str, number: int, machine: Machine) -> None:
        self.role = role
        self.name = f"{role} {number}"
        self.cable = Cable()
        self.is_ready = False
        self.is_named = True
        self.is_paused = False
        self.is_struck = False  # a fault is at work on it
        self._machine = machine

    def __str__(self) -> str:
        return self.name

    @property
    def is_serving(self) -> bool:
        """Whether a session can be here."""
        return self.is_ready and self.is_named and not self.is_paused and not self.cable.is_swallowing

    async def start(self) -> None:
        """Return once it serves."""
        self.cable.far_end = await self._machine.start()
        self.is_ready = True

    async def kill(self) -> None:
        """As a crash."""
        self.is_ready = False
        self.cable.far_end = None
        await self._machine.kill()

    async def drain(self) -> None:
        """As an upgrade does."""
        self.is_ready = False
        await self._machine.drain()
        self.cable.far_end = None

    async def pause(self, seconds: float) -> None:
        """As a machine that swaps, or a process under a debugger."""
        self.is_paused = True
        self._machine.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._machine.resume()
            self.is_paused = False


class Fleet:
    """All members, and one file a role that names those that are to be used."""

    def __init__(self, members: Sequence[Member], folder: Path) -> None:
        self.members = list(members)
        self._folder = folder

    def file(self, role: str) -> Path:
        """The addresses of a role, one a line."""
        return self._folder / f"{role}s"

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    async def start(self) -> None:
        """All of them."""
        for member in self.members:
            await member.cable.lay()
        await asyncio.gather(*(member.start() for member in self.members))
        self.write()

    def write(self) -> None:
        """Both files as the members are named now; readers see the old or the new, never half of one."""
        for role in {member.role for member in self.members}:
            path = self.file(role)
            partial = path.with_suffix(".partial")
            lines = [f"{member.cable.address}\n" for member in self.of(role) if member.is_named]
            partial.write_text("".join(lines), encoding="utf-8")
            partial.replace(path)

    def others_serving(self, member: Member) -> int:
        """Members of its role that serve and are not struck, itself left out."""
        return sum(
            other.is_serving and not other.is_struck for other in self.of(member.role) if other is not member
        )

    async def stop(self) -> None:
        """End all of them."""
        await asyncio.gather(*(member.kill() for member in self.members))
        for member in self.members:
            await member.cable.take_up()


async def gathered(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Wait for all; the first error is raised once all have ended."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
