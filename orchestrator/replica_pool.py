"""All replicas of one kind: a link to each, made and given up as addresses come and go, and the choice among them."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Generic

from orchestrator.addresses import Find
from orchestrator.replica_api import ItemT, ReplicaInfo, ResultT
from orchestrator.replica_link import LinkLostError, ReplicaLink
from tandem.serving.channels import AddressError
from tandem.types import Load

_log = logging.getLogger(__name__)

MAX_REPLICAS = 256  # of a pool; each has a connection
FIND_S = 5.0  # between two looks for addresses
_EMPTYING_S = 60.0  # a link that is no longer named may keep sessions so long


class ReplicaPool(Generic[ItemT, ResultT]):
    """Use on one event loop, between `start` and `close`."""

    def __init__(
        self,
        role: str,
        find: Find,
        make_link: Callable[[str], ReplicaLink[ItemT, ResultT]],
        find_s: float = FIND_S,
    ) -> None:
        """`make_link`: the link to an address, not started. `find_s`: seconds between two looks for addresses."""
        self.role = role
        self._find = find
        self._make_link: Callable[[str], ReplicaLink[ItemT, ResultT]] = make_link
        self._find_s = find_s
        self._links: dict[str, ReplicaLink[ItemT, ResultT]] = {}  # by address
        self._leaving: set[ReplicaLink[ItemT, ResultT]] = set()  # not named any more
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._problem = "no address is known yet"
        self._task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return " and ".join(map(str, self.links)) or f"{self.role} services"

    @property
    def links(self) -> tuple[ReplicaLink[ItemT, ResultT], ...]:
        """To every replica that is named now."""
        return tuple(self._links.values())

    @property
    def infos(self) -> tuple[ReplicaInfo, ...]:
        """Of the replicas that are up; while none is, of those that have been."""
        known = [(link.is_up, link.info) for link in self.links if link.info is not None]
        return tuple(info for is_up, info in known if is_up) or tuple(info for _, info in known)

    def infos_but(self, address: str) -> tuple[ReplicaInfo, ...]:
        """Of the replicas at other addresses that are up."""
        return tuple(
            link.info for link in self.links if link.is_up and link.info is not None and link.address != address
        )

    @property
    def load(self) -> Load:
        """Of all replicas that are up, together."""
        return Load.together(link.load for link in self.links if link.is_up)

    async def start(self) -> None:
        """Look for addresses, connect in the background, and go on looking."""
        await self._look()
        self._task = asyncio.create_task(self._keep_looking(), name=f"addresses of {self.role} services")

    async def wait_checked(self, timeout_s: float) -> None:
        """Return once one replica is connected; HandshakeError if all are refused, LinkLostError after the timeout."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not self.links:  # a name may have no address before its first replica is ready
            await self._wait_for_change(deadline_s)
        links, timeout_s = self.links, deadline_s - asyncio.get_running_loop().time()
        waits = {asyncio.create_task(link.wait_checked(timeout_s)) for link in links}
        try:
            for ended in asyncio.as_completed(waits):
                try:
                    return await ended
                except Exception as error:  # noqa: BLE001 - the last one's is raised
                    last = error
            raise last
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def choose(
        self, fits: Callable[[ReplicaLink[ItemT, ResultT]], bool] = lambda _: True
    ) -> ReplicaLink[ItemT, ResultT] | None:
        """Where a new session goes: the less busy of two random replicas; None when there is none that fits.

        Replicas that have just failed sessions are for when there is no other.
        """
        able = [link for link in self.links if link.is_up and not link.is_leaving and fits(link)]
        able = [link for link in able if not link.breaker.is_open] or able
        if not able:
            return None
        return min(random.sample(able, min(2, len(able))), key=lambda link: link.busyness)

    async def wait_for(
        self, timeout_s: float, fits: Callable[[ReplicaLink[ItemT, ResultT]], bool] = lambda _: True
    ) -> ReplicaLink[ItemT, ResultT]:
        """`choose` as soon as it finds one; LinkLostError after the timeout."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while (link := self.choose(fits)) is None:
            await self._wait_for_change(deadline_s)
        return link

    def why_none(self) -> str:
        """Why no session can be opened here, replica by replica."""
        if not self._links:
            return f"there is no {self.role} service: {self._problem}"
        return "; ".join(link.why_not() for link in self.links)

    async def close(self) -> None:
        """End every stream, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in {*self.links, *self._leaving}))
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._find_s)
            await self._look()

    async def _look(self) -> None:
        """Links to new addresses are begun, those to addresses that are gone get no more sessions and end."""
        try:
            addresses = await self._find()
        except (OSError, AddressError) as error:
            self._cannot_look(f"addresses cannot be found: {error}")
            return
        if len(addresses) > MAX_REPLICAS:
            self._cannot_look(
                f"{len(addresses)} addresses are named, at most {MAX_REPLICAS} are used; those of before stay"
            )
            return
        self._problem = "none is named"
        for address in [known for known in self._links if known not in addresses]:
            self._give_up(self._links.pop(address))
        for address in addresses:
            if address not in self._links:
                link = self._links[address] = self._make_link(address)
                link.on_change = self._notify
                link.start()
                self._notify()

    def _cannot_look(self, problem: str) -> None:
        """Said once, until it changes."""
        if problem != self._problem:
            _log.warning("%s services: %s", self.role, problem)
        self._problem = problem

    def _give_up(self, link: ReplicaLink[ItemT, ResultT]) -> None:
        link.is_retired = True
        self._leaving.add(link)
        task = asyncio.create_task(self._close_when_empty(link), name=f"last sessions of the {link}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        _log.info("%s is no longer named; its sessions move", link)

    async def _close_when_empty(self, link: ReplicaLink[ItemT, ResultT]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EMPTYING_S):
                while link.is_up and link.num_sessions:
                    await self._changed.wait()
        await link.close()
        self._leaving.discard(link)

    async def _wait_for_change(self, deadline_s: float) -> None:
        """Until there may be another choice; LinkLostError after the deadline of the loop's clock."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._changed.wait()
        except TimeoutError:
            raise LinkLostError(self.why_none()) from None

    def _notify(self) -> None:
        """Whoever waits looks again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
