"""Several replicas of each service around toy engines, in one process, that come and go."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from draft_service.proposers.base import Proposer
from engine.backends.base import SpeculativeEngine
from orchestrator.pools import DraftPool, TargetPool, draft_pool, target_pool
from orchestrator.server import OrchestratorServicer, OrchestratorSettings
from tandem.client import TandemClient
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_service.limits import Limits
from tests.orchestrator.fakes import until
from tests.orchestrator.services import (
    QUICK,
    SETTINGS,
    VOCABULARY,
    DraftReplica,
    TargetReplica,
    similar_draft,
    start_server,
    toy_engine,
)


def num_up(pool: TargetPool | DraftPool) -> int:
    """Replicas with a stream now."""
    return sum(link.is_up for link in pool.links)


@dataclass
class Pooled:
    """One orchestrator in front of replicas, and a client of it."""

    client: TandemClient
    address: str  # the orchestrator's
    servicer: OrchestratorServicer
    targets: list[TargetReplica]
    drafts: list[DraftReplica]
    target_pool: TargetPool
    draft_pool: DraftPool
    named: dict[str, list[str]] = field(default_factory=dict)  # by role: the addresses that are found

    def target_with_sessions(self) -> TargetReplica:
        """The one target that has any."""
        (busy,) = [one for one in self.targets if one.scheduler is not None and one.num_sessions]
        return busy

    async def until_idle(self) -> None:
        """Until no replica that runs holds a session or a block."""
        for target in self.targets:
            if target.scheduler is not None:
                await until(lambda t=target: t.num_sessions == 0 and t.used_blocks == 0)  # type: ignore[misc]
        for draft in self.drafts:
            if draft.service is not None:
                await until(lambda d=draft: d.num_sessions == 0 and d.used_blocks == 0)  # type: ignore[misc]
        await until(lambda: all(link.num_sessions == 0 for link in self.target_pool.links))
        await until(lambda: all(link.num_sessions == 0 for link in self.draft_pool.links))


@asynccontextmanager
async def pooled(
    num_targets: int = 2,
    num_drafts: int = 2,
    *,
    make_engine: Callable[[], SpeculativeEngine] = toy_engine,
    make_proposer: Callable[[], Proposer] = similar_draft,
    settings: OrchestratorSettings = SETTINGS,
    limits: Limits | None = None,
) -> AsyncIterator[Pooled]:
    """All of them running."""
    async with AsyncExitStack() as stack:
        targets = [TargetReplica(make_engine(), limits) for _ in range(num_targets)]
        drafts = [DraftReplica(make_proposer) for _ in range(num_drafts)]
        for replica in (*targets, *drafts):
            await replica.start()
            stack.push_async_callback(replica.stop)
        named = {
            "target": [target.address for target in targets],
            "draft": [draft.address for draft in drafts],
        }

        async def find(role: str) -> tuple[str, ...]:
            return tuple(named[role])

        times = replace(QUICK, find_s=0.02)
        target_links = target_pool(lambda: find("target"), VOCABULARY, "toy", times)
        draft_links = draft_pool(lambda: find("draft"), VOCABULARY, "toy", target_links, times)
        for pool in (target_links, draft_links):
            await pool.start()
            stack.push_async_callback(pool.close)
        await until(lambda: num_up(target_links) == num_targets and num_up(draft_links) == num_drafts)
        servicer = OrchestratorServicer(VOCABULARY, target_links, draft_links, settings)
        server, address = start_server(
            "127.0.0.1:0",
            lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server),
        )
        await server.start()
        stack.push_async_callback(server.stop, 0)
        client = await stack.enter_async_context(TandemClient(address))
        yield Pooled(client, address, servicer, targets, drafts, target_links, draft_links, named)
