"""What the target's tests share: specs, plain decoding, a table with an engine, and a client of a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import grpc
import torch

from engine.backends.toy_backend import LogitsOf, ToyEngine, hashed_logits
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem import codec
from tandem.serving.compute import ComputeThread
from tandem.serving.items import Closed, Opened
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.types import (
    HiddenStates,
    Proposal,
    SamplingParams,
    SessionSpec,
    Stamp,
    Verdict,
    VerificationPolicy,
)
from target_service.answers import Answer, StreamId
from target_service.limits import Limits
from target_service.replays import HiddenReplay
from target_service.scheduler import Scheduler
from target_service.server import TargetServicer, model_info
from target_service.step import StepFailedError, StepPlan
from target_service.table import SessionTable
from target_service.verifier import Verifier
from tests import items
from tests.hidden import LAYERS
from tests.items import stamp
from tests.sampling.helpers import sample

VOCAB = 32
LOGITS = hashed_logits(VOCAB, seed=5)
GREEDY = SamplingParams(temperature=0.0, seed=1)
STREAM = StreamId(1)
DraftsOf = Callable[[Sequence[int], int], Proposal | Sequence[int]]  # of the committed tokens, at most so many


def spec(
    prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 20, sampling: SamplingParams = GREEDY, **changes: object
) -> SessionSpec:
    """A session's spec; greedy unless told otherwise."""
    policy = VerificationPolicy.GREEDY if sampling.is_greedy else VerificationPolicy.COUPLED
    base = SessionSpec(tuple(prompt), len(prompt), sampling, max_tokens, verification_policy=policy)
    return replace(base, **changes)  # type: ignore[arg-type]


def toy(
    logits_of: LogitsOf = LOGITS,
    num_blocks: int = 256,
    block_size: int = 4,
    max_context: int = 512,
    *,
    prefix_cache: bool = False,
) -> ToyEngine:
    return ToyEngine(
        logits_of,
        VOCAB,
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=max_context,
        prefix_cache=prefix_cache,
    )


def plain_decode(session: SessionSpec, logits_of: LogitsOf = LOGITS, most: int | None = None) -> list[int]:
    """Token by token from the logits function, with no engine, no rounds and no drafts."""
    tokens = list(session.token_ids)
    while len(tokens) < session.max_len and (most is None or len(tokens) < len(session.token_ids) + most):
        row = Row(session, tuple(tokens))
        (token_id,) = sample(process(torch.from_numpy(logits_of(tokens)).clone()[None], [row]), [row])
        tokens.append(token_id)
        if token_id in session.ending_token_ids:
            break
    return tokens[len(session.token_ids) :]


class Bench:
    """Table, verifier and toy engine in one thread, stepped by hand; `answers` are what was delivered."""

    def __init__(self, engine: ToyEngine | None = None, limits: Limits | None = None) -> None:
        self.engine = engine or toy()
        self.answers: list[tuple[StreamId, Answer]] = []
        self.table = SessionTable(
            self.engine.capabilities,
            self.engine.kv_usage(),
            limits or Limits(),
            lambda stream_id, answer: self.answers.append((stream_id, answer)),
        )
        self.verifier = Verifier(self.engine)
        self.now_s = 0.0

    def open(
        self,
        session: SessionSpec,
        session_id: int = 1,
        epoch: int = 1,
        stream: StreamId = STREAM,
        deadline_s: float | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> object:
        """Open -> what it was answered at once, if anything."""
        mark = stamp(session.token_ids, 0, session_id, epoch)
        return self._answered(
            stream, mark, lambda: self.table.open(stream, mark, session, self.now_s, deadline_s, hidden_layers)
        )

    def replay(
        self, token_ids: Sequence[int], session_id: int, first_row: int = 0, layers: tuple[int, ...] = LAYERS
    ) -> object:
        """A replay of hidden states -> what it was answered at once, if anything."""
        mark, wanted = stamp(token_ids, 0, session_id), HiddenReplay(tuple(token_ids), layers, first_row)
        return self._answered(STREAM, mark, lambda: self.table.replay(STREAM, mark, wanted, self.now_s))

    def hidden_states(self, session_id: int = 1) -> list[HiddenStates]:
        """What has been sent of the session's."""
        return [
            answer.outcome
            for _, answer in self.answers
            if isinstance(answer.outcome, HiddenStates) and answer.stamp.session_id == session_id
        ]

    def submit(
        self, mark: Stamp, drafts: Sequence[int] = (), stream: StreamId = STREAM, deadline_s: float | None = None
    ) -> object:
        """A verify item -> what it was answered at once, if anything."""
        self.now_s += 0.001
        proposal = Proposal(tuple(drafts))
        return self._answered(
            stream, mark, lambda: self.table.verify(stream, mark, proposal, self.now_s, deadline_s)
        )

    def close(self, mark: Stamp, stream: StreamId = STREAM) -> object:
        """A close -> its answer when it has one at once; else the next step brings it."""
        return self._answered(stream, mark, lambda: self.table.close(stream, mark))

    def step(self) -> int:
        """One step -> how many sessions took part; 0 when there was nothing to do."""
        plan = self.table.plan_step(self.now_s)
        if plan is None:
            return 0
        self.compute(plan)
        return len(plan.items)

    def compute(self, plan: StepPlan) -> None:
        """The step, to its end or to its failure."""
        try:
            result = self.verifier.step(plan)
        except StepFailedError as error:
            self.table.fail(self.engine.kv_usage(), error.preempted)
        else:
            self.table.commit(result)

    def settle(self) -> list[Answer]:
        """Steps until nothing is left -> the answers they gave."""
        before = len(self.answers)
        while (plan := self.table.plan_step(self.now_s)) is not None:
            self.compute(plan)
        return [answer for _, answer in self.answers[before:]]

    def round(self, tokens: list[int], round_number: int, drafts: Sequence[int] = (), **names: int) -> Verdict:
        """A whole round for a session at `tokens`, which is extended by the verdict's."""
        assert self.submit(stamp(tokens, round_number, **names), drafts) is None
        (answer,) = [answer for answer in self.settle() if not isinstance(answer.outcome, HiddenStates)]
        assert isinstance(answer.outcome, Verdict), answer.outcome
        tokens.extend(answer.outcome.token_ids)
        return answer.outcome

    def used_blocks(self) -> int:
        return self.engine.kv_usage().used_blocks

    def _answered(self, stream: StreamId, mark: Stamp, act: Callable[[], None]) -> object:
        before = len(self.answers)
        with self.table.answering(stream, mark):
            act()
        return self.answers[before][1].outcome if len(self.answers) > before else None


@dataclass
class Client:
    """One stream to a real server; `answer` awaits the answer to a stamp."""

    call: "grpc.aio.StreamStreamCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse]"
    responses: list[target_pb2.VerifyResponse]
    waiting: dict[Stamp, "asyncio.Future[object]"]
    writing: asyncio.Lock  # a call takes one write at a time

    async def send(self, *items: target_pb2.VerifyItem) -> list["asyncio.Future[object]"]:
        """Items in one message -> a future for each."""
        futures = []
        for item in items:
            future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            self.waiting[codec.stamp_from_proto(item.stamp)] = future
            futures.append(future)
        async with self.writing:
            await self.call.write(target_pb2.VerifyRequest(items=items))
        return futures

    async def ask(self, *items: target_pb2.VerifyItem) -> list[object]:
        """Items in one message -> their outcomes, in order."""
        return await asyncio.wait_for(asyncio.gather(*await self.send(*items)), 20)

    async def read(self) -> None:
        """Resolve futures until the stream ends."""
        async for response in self.call:
            self.responses.append(response)
            for result in response.results:
                self.waiting.pop(codec.stamp_from_proto(result.stamp)).set_result(_outcome(result))


def _outcome(result: target_pb2.VerifyResult) -> object:
    kind = result.WhichOneof("outcome")
    if kind == "verdict":
        return codec.verdict_from_proto(result.verdict)
    if kind == "error":
        return codec.error_from_proto(result.error)
    return Opened() if kind == "opened" else Closed()


open_item = partial(items.open_item, target_pb2.VerifyItem)
close_item = partial(items.close_item, target_pb2.VerifyItem)


def verify_item(
    mark: Stamp, proposal: Proposal | Sequence[int] = (), deadline_ms: int = 0
) -> target_pb2.VerifyItem:
    if not isinstance(proposal, Proposal):
        proposal = Proposal(tuple(proposal))
    step = target_pb2.VerifyStep(proposal=codec.proposal_to_proto(proposal))
    return target_pb2.VerifyItem(stamp=codec.stamp_to_proto(mark), verify=step, deadline_ms=deadline_ms)


@dataclass
class Service:
    """A server on a free port of the loopback, and its insides to look at."""

    scheduler: Scheduler
    channel: grpc.aio.Channel

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A stream that is cancelled at the end."""
        call = target_pb2_grpc.TargetServiceStub(self.channel).Verify()
        client = Client(call, [], {}, asyncio.Lock())
        reader = asyncio.create_task(client.read())
        try:
            yield client
        finally:
            call.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reader

    async def until_idle(self) -> None:
        """Until no session is left and the engine holds no block."""

        async def poll() -> None:
            while len(self.scheduler.table) or self.scheduler.table.load().used_blocks:
                await asyncio.sleep(0.005)

        await asyncio.wait_for(poll(), 20)


@asynccontextmanager
async def serving(engine: ToyEngine, limits: Limits | None = None) -> AsyncIterator[Service]:
    """A real gRPC server around the engine."""
    limits = limits or Limits()
    scheduler = Scheduler(engine, limits, ComputeThread("target-compute"))
    info = model_info(engine.capabilities, "toy", "hash", limits.max_draft_tokens)
    servicer = TargetServicer(scheduler, info)
    loop = asyncio.create_task(scheduler.run())
    try:
        async with items.channel_to(
            lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        ) as channel:
            yield Service(scheduler, channel)
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        scheduler.close()


_session_ids = count(1000)


async def generate(
    client: Client, session: SessionSpec, drafts_of: DraftsOf, most_drafts: int = 4
) -> tuple[list[int], list[Verdict]]:
    """Open, verify rounds with `drafts_of(tokens, k)` until the generation ends, close."""
    session_id = next(_session_ids)
    assert await client.ask(open_item(session, session_id)) == [Opened()]
    tokens, verdicts = list(session.token_ids), []
    for round_number in count(1):
        mark = stamp(tokens, round_number, session_id)
        (verdict,) = await client.ask(verify_item(mark, drafts_of(tokens, most_drafts)))
        assert isinstance(verdict, Verdict), verdict
        tokens.extend(verdict.token_ids)
        verdicts.append(verdict)
        if verdict.finish_reason is not None:
            break
    await client.ask(close_item(stamp(tokens, 0, session_id)))
    return tokens[len(session.token_ids) :], verdicts
