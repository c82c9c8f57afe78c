"""Real services around toy engines, in one process: what the end-to-end tests run against."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from draft_service.limits import DraftLimits
from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.ngram import NgramProposer
from draft_service.server import DraftServicer
from draft_service.service import DraftService
from engine.backends.base import SpeculativeEngine
from engine.backends.toy_backend import LogitsOf, ToyEngine, hashed_logits
from orchestrator.addresses import find_addresses
from orchestrator.breaker import Backoff
from orchestrator.pools import DraftPool, PoolTimes, TargetPool, draft_dialer, draft_pool, target_pool
from orchestrator.replica_link import DraftLink, TargetLink
from orchestrator.server import OrchestratorServicer, OrchestratorSettings
from orchestrator.tracing import Tracer
from tandem.client import TandemClient
from tandem.draft.v1 import draft_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.prompt_lookup import PromptLookup
from tandem.serving.channels import server_options
from tandem.serving.compute import ComputeThread
from tandem.serving.errors import LifecycleInterceptor
from tandem.serving.stalls import STALL_S
from tandem.target.v1 import target_pb2_grpc
from tandem.vocabulary import Vocabulary
from target_service.limits import Limits
from target_service.scheduler import Scheduler
from target_service.server import TargetServicer, model_info
from target_service.step import StepPlan, StepResult
from tests.orchestrator.fakes import until

VOCAB = 64
VOCABULARY = Vocabulary.toy(VOCAB)
TARGET_LOGITS = hashed_logits(VOCAB, seed=3)
QUICK = PoolTimes(backoff=Backoff(0.01, 0.05))
SETTINGS = OrchestratorSettings(draft_timeout_s=5.0)


def toy_engine(logits_of: LogitsOf = TARGET_LOGITS, step_delay_s: float = 0.0, max_context: int = 256) -> ToyEngine:
    return ToyEngine(logits_of, VOCAB, max_context=max_context, num_blocks=512, step_delay_s=step_delay_s)


def self_draft() -> Proposer:
    """The target's own logits."""
    return DraftModelProposer(toy_engine(), "toy", VOCABULARY.id_bytes_hash)


def wrong_draft() -> Proposer:
    """Logits that have nothing to do with the target's."""
    return DraftModelProposer(toy_engine(hashed_logits(VOCAB, seed=99)), "wrong", VOCABULARY.id_bytes_hash)


def similar_draft() -> Proposer:
    """Logits that agree with the target's now and then."""
    return DraftModelProposer(
        toy_engine(hashed_logits(VOCAB, seed=3, blend=0.3)), "similar", VOCABULARY.id_bytes_hash
    )


def ngram_draft() -> Proposer:
    return NgramProposer(PromptLookup(5, 1))


def start_server(
    address: str, register: Callable[[grpc.aio.Server], None], stall_s: float = STALL_S
) -> tuple[grpc.aio.Server, str]:
    """A server, not started, and the address it is bound to."""
    server = grpc.aio.server(interceptors=[LifecycleInterceptor(stall_s)], options=server_options(1 << 25))
    register(server)
    port = server.add_insecure_port(address)
    return server, f"127.0.0.1:{port}"


class TargetReplica:
    """A target service that can be stopped and started again on its port."""

    stall_s = STALL_S

    def __init__(
        self, engine: SpeculativeEngine, limits: Limits | None = None, vocabulary: Vocabulary = VOCABULARY
    ) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        self.address = "127.0.0.1:0"
        self.vocabulary = vocabulary  # the tokenizer's: without what pads the engine's output
        self.scheduler: Scheduler | None = None

    async def start(self) -> None:
        scheduler = self.scheduler = Scheduler(self.engine, self.limits, ComputeThread("target-compute"))
        vocab_hash = self.vocabulary.id_bytes_hash
        info = model_info(self.engine.capabilities, "toy", vocab_hash, self.limits.max_draft_tokens)
        servicer = TargetServicer(scheduler, info)
        self._server, self.address = start_server(
            self.address,
            lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server),
            self.stall_s,
        )
        await self._server.start()
        self._steps = asyncio.create_task(scheduler.run())

    async def stop(self) -> None:
        """At once, as a crash would look from outside."""
        if self.scheduler is None:
            return
        await self._server.stop(0)
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)
        self.scheduler.close()
        self.scheduler = None

    @property
    def num_sessions(self) -> int:
        assert self.scheduler is not None
        return len(self.scheduler.table)

    @property
    def used_blocks(self) -> int:
        return self.engine.kv_usage().used_blocks


class DraftReplica:
    """A draft service that can be stopped and started again on its port."""

    stall_s = STALL_S

    def __init__(self, make_proposer: Callable[[], Proposer], limits: DraftLimits | None = None) -> None:
        self._make_proposer = make_proposer
        self._limits = limits or DraftLimits()
        self.address = "127.0.0.1:0"
        self.service: DraftService | None = None

    async def start(self) -> None:
        service = self.service = DraftService(self._make_proposer(), self._limits, ComputeThread("draft-compute"))
        servicer = DraftServicer(service)
        self._server, self.address = start_server(
            self.address,
            lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server),
            self.stall_s,
        )
        await self._server.start()

    async def stop(self) -> None:
        """At once, as a crash would look from outside."""
        if self.service is None:
            return
        await self._server.stop(0)
        await self.service.batcher.aclose()
        self.service = None

    @property
    def num_sessions(self) -> int:
        assert self.service is not None
        return self.service.num_sessions

    @property
    def used_blocks(self) -> int:
        assert self.service is not None
        return self.service.load.used_blocks


@dataclass
class Stack:
    """The three services, and a client."""

    client: TandemClient
    target: TargetReplica
    draft: DraftReplica | None
    servicer: OrchestratorServicer
    target_link: TargetLink
    draft_link: DraftLink | None
    server: grpc.aio.Server  # the orchestrator's

    def record_steps(self) -> list[StepResult]:
        """Every step that the target computes from now on."""
        scheduler = self.target.scheduler
        assert scheduler is not None
        steps: list[StepResult] = []
        compute = scheduler._verifier.step

        def step(plan: StepPlan) -> StepResult:
            result = compute(plan)
            steps.append(result)
            return result

        scheduler._verifier.step = step  # type: ignore[method-assign]
        return steps

    @contextmanager
    def target_held(self) -> Iterator[None]:
        """No step of the target is computed meanwhile, so that no answer can end before what is done here is done."""
        scheduler = self.target.scheduler
        assert scheduler is not None
        released, compute = threading.Event(), scheduler._verifier.step

        def step(plan: StepPlan) -> StepResult:
            released.wait()
            return compute(plan)

        scheduler._verifier.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            scheduler._verifier.step = compute  # type: ignore[method-assign]
            released.set()

    async def restart_draft(self) -> None:
        """The draft service ends and comes back; returns when the orchestrator is connected to the new one."""
        draft, link = self.draft, self.draft_link
        assert draft is not None
        assert link is not None
        generation = link.generation
        await draft.stop()
        await draft.start()
        await until(lambda: link.generation > generation)

    async def until_idle(self) -> None:
        """Until neither service holds a session or a block."""
        await until(lambda: self.target.num_sessions == 0 and self.target.used_blocks == 0)
        if self.draft is not None and self.draft.service is not None:
            draft = self.draft
            await until(lambda: draft.num_sessions == 0 and draft.used_blocks == 0)

    async def until_free(self) -> None:
        """Until they are idle, and the orchestrator's places are free."""
        await self.until_idle()
        await until(lambda: self.servicer._admission.num_running == 0)


@asynccontextmanager
async def orchestrating(
    target: TargetReplica,
    draft: DraftReplica | None,
    settings: OrchestratorSettings | None = None,
    tracer: Tracer | None = None,
    stall_s: float = STALL_S,
) -> AsyncIterator[Stack]:
    """An orchestrator in front of running replicas, and a client of it."""
    vocabulary = target.vocabulary
    targets = target_pool(find_addresses(target.address), vocabulary, "toy", QUICK)
    dialer = draft_dialer(trusts=(settings or SETTINGS).trusts_drafts)
    drafts = (
        None
        if draft is None
        else draft_pool(find_addresses(draft.address), vocabulary, "toy", targets, QUICK, dialer)
    )
    pools: list[TargetPool | DraftPool] = [pool for pool in (targets, drafts) if pool is not None]
    for pool in pools:
        await pool.start()
        await pool.wait_checked(10)
    servicer = OrchestratorServicer(vocabulary, targets, drafts, settings or SETTINGS, tracer)
    server, address = start_server(
        "127.0.0.1:0",
        lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server),
        stall_s,
    )
    await server.start()
    try:
        async with TandemClient(address) as client:
            draft_link = None if drafts is None else drafts.links[0]
            yield Stack(client, target, draft, servicer, targets.links[0], draft_link, server)
    finally:
        await server.stop(0)
        for pool in pools:
            await pool.close()


@asynccontextmanager
async def replicas(
    make_proposer: Callable[[], Proposer] | None,
    engine: SpeculativeEngine | None = None,
    limits: Limits | None = None,
    vocabulary: Vocabulary = VOCABULARY,
    draft_limits: DraftLimits | None = None,
) -> AsyncIterator[tuple[TargetReplica, DraftReplica | None]]:
    """Running replicas, stopped at the end."""
    async with AsyncExitStack() as stack:
        target = TargetReplica(engine or toy_engine(), limits, vocabulary)
        await target.start()
        stack.push_async_callback(target.stop)
        draft = None
        if make_proposer is not None:
            draft = DraftReplica(make_proposer, draft_limits)
            await draft.start()
            stack.push_async_callback(draft.stop)
        yield target, draft


@asynccontextmanager
async def all_services(
    make_proposer: Callable[[], Proposer] | None,
    engine: SpeculativeEngine | None = None,
    settings: OrchestratorSettings | None = None,
    limits: Limits | None = None,
    vocabulary: Vocabulary = VOCABULARY,
    draft_limits: DraftLimits | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Stack]:
    """Target, draft (unless None) and orchestrator, with a client."""
    async with (
        replicas(make_proposer, engine, limits, vocabulary, draft_limits) as (target, draft),
        orchestrating(target, draft, settings, tracer) as stack,
    ):
        yield stack


async def token_lists(stack: Stack, prompts: Sequence[str], **options: object) -> list[tuple[int, ...]]:
    """All prompts at a time -> their answers' tokens."""
    results = await asyncio.gather(*(stack.client.complete(prompt, **options) for prompt in prompts))  # type: ignore[arg-type]
    return [result.token_ids for result in results]
