"""Everything that may differ between two runs of one request and must not show in its answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from draft_service.proposers.base import Proposer
from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem.client import GenerationResult
from tandem.types import TokenLogprobs
from target_service.limits import Limits
from target_service.step import StepResult
from tests import every_proposer
from tests.identity.mixed import MEMBERS
from tests.identity.models import Model
from tests.identity.proposers import MAX_VARYING, Varying, random_drafts
from tests.orchestrator.services import Stack, orchestrating, replicas
from tests.orchestrator.weather import Echo, Storm, Weather, behind_weather


@dataclass(frozen=True)
class Request:
    """A prompt, and what is common to all conditions."""

    prompt: str | Sequence[int]
    options: dict[str, Any]


@dataclass
class Ran:
    """One condition's answers, and what shows that the condition was there."""

    results: list[GenerationResult]
    steps: list[StepResult]  # of the target
    num_stale: int  # items the target dropped
    num_threads: int  # of the target's compute thread
    proposer: Proposer | None
    weather: Weather | None

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [result.token_ids for result in self.results]

    @property
    def logprobs(self) -> list[tuple[TokenLogprobs, ...]]:
        """Of what asked for them: the bits of the target's logits, not only which was the largest."""
        return [result.logprobs for result in self.results]

    @property
    def num_drafted(self) -> int:
        return sum(result.speculation.num_draft_tokens for result in self.results)

    @property
    def num_accepted(self) -> int:
        return sum(result.speculation.num_accepted for result in self.results)

    @property
    def most_tokens(self) -> int:
        """Of one step."""
        return max(step.batch_rows for step in self.steps)

    @property
    def most_rounds(self) -> int:
        """Decided by one step."""
        return max(sum(outcome.decided is not None for outcome in step.outcomes) for step in self.steps)


@dataclass(frozen=True)
class Condition:
    """One way to run requests; `happened` is the proof that they were run that way."""

    name: str
    happened: Callable[[Ran], bool]
    make_proposer: Callable[[Model], Proposer] | None = lambda model: model.similar_draft()
    num_draft_tokens: int = 4
    limits: Limits = field(default_factory=Limits)
    make_weather: Callable[[], Weather] | None = None  # on both links of the orchestrator
    has_neighbours: bool = False  # 15 other requests in the batch
    num_threads: int = 1


OFF = Condition("speculation off", lambda ran: ran.num_drafted == 0, None)


def _drafts_are_kept_and_refused(ran: Ran) -> bool:
    return 0 < ran.num_accepted < ran.num_drafted


def _registered(name: str, model: Model) -> Proposer:
    return every_proposer.make_registered(name, model.similar_draft)


def _in_steps_of(max_step_tokens: int, more_than: int) -> Condition:
    return Condition(
        f"steps of at most {max_step_tokens} tokens",
        lambda ran: more_than < ran.most_tokens <= max_step_tokens,
        limits=Limits(max_draft_tokens=8, max_step_tokens=max_step_tokens),
    )


CONDITIONS = (
    Condition("off, all at once", lambda ran: ran.num_drafted == 0 and ran.most_rounds > 1, None),
    *(
        Condition(f"proposer {name}", lambda ran: ran.num_drafted > 0, partial(_registered, name))
        for name in every_proposer.NAMES
    ),
    Condition("self-draft", lambda ran: ran.num_accepted == ran.num_drafted > 0, lambda model: model.self_draft()),
    Condition("similar draft", _drafts_are_kept_and_refused),
    Condition(
        "random drafts",
        lambda ran: ran.num_accepted < ran.num_drafted / 4,
        lambda model: random_drafts(model.vocabulary.vocab_size),
        num_draft_tokens=8,
    ),
    Condition(
        "k of 0..8 changing every round",
        lambda ran: isinstance(ran.proposer, Varying) and ran.proposer.widths == set(range(MAX_VARYING + 1)),
        lambda model: Varying(model.similar_draft()),
        num_draft_tokens=MAX_VARYING,
    ),
    Condition("15 mixed neighbours", lambda ran: ran.most_rounds > 8, has_neighbours=True),
    _in_steps_of(16, more_than=0),
    _in_steps_of(64, more_than=16),
    _in_steps_of(512, more_than=64),
    Condition("two threads", lambda ran: ran.num_threads == 2, num_threads=2),
    Condition(
        "two threads, steps of at most 16 tokens, 15 mixed neighbours",
        lambda ran: ran.num_threads == 2 and ran.most_tokens <= 16,
        limits=Limits(max_draft_tokens=8, max_step_tokens=16),
        has_neighbours=True,
        num_threads=2,
    ),
    Condition("every item and answer twice", lambda ran: ran.num_stale > 0, make_weather=Echo),
    Condition(
        "items and answers lost, doubled, late",
        lambda ran: isinstance(ran.weather, Storm) and ran.weather.num_lost > 0,
        make_weather=lambda: Storm(seed=1, severity=0.05),
    ),
)


async def run(model: Model, condition: Condition, requests: Sequence[Request]) -> Ran:
    """All requests at once, or one after the other where there is no draft; both services are empty afterwards."""
    with _threads(condition.num_threads):
        proposer = condition.make_proposer(model) if condition.make_proposer is not None else None
        weather = condition.make_weather() if condition.make_weather is not None else None
        async with _running(model, condition, proposer, weather) as stack:
            steps = stack.record_steps()
            results = await _answers(stack, model, condition, requests)
            scheduler = stack.target.scheduler
            assert scheduler is not None
            num_threads = await scheduler._compute.run(torch.get_num_threads)
            return Ran(results, steps, scheduler.table.load().stale_items, num_threads, proposer, weather)


async def _answers(
    stack: Stack, model: Model, condition: Condition, requests: Sequence[Request]
) -> list[GenerationResult]:
    async def one(request: Request) -> GenerationResult:
        return await stack.client.complete(
            request.prompt, num_draft_tokens=condition.num_draft_tokens, **request.options
        )

    if condition is OFF:
        return [await one(request) for request in requests]
    neighbours: list[Request] = []
    if condition.has_neighbours:
        without = await one(requests[0])
        neighbours = _neighbours(requests[0], without, model.vocabulary.vocab_size)
    results = await asyncio.gather(*map(one, [*neighbours, *requests]))
    return results[len(neighbours) :]


def _neighbours(request: Request, without: GenerationResult, vocab_size: int) -> list[Request]:
    return [
        Request(request.prompt, {**request.options, **member.options_of(without, vocab_size)})
        for member in MEMBERS[1:]
    ]


@asynccontextmanager
async def _running(
    model: Model, condition: Condition, proposer: Proposer | None, weather: Weather | None
) -> AsyncIterator[Stack]:
    settings = OrchestratorSettings(draft_timeout_s=60.0)  # a busy machine is not a failed draft
    if isinstance(weather, Storm):
        patience = TargetPatience(answer_s=model.patience_s)
        settings = OrchestratorSettings(draft_timeout_s=model.patience_s / 3, target_patience=patience)
    async with AsyncExitStack() as exits:
        make_proposer = None if proposer is None else lambda: proposer
        target, draft = await exits.enter_async_context(
            replicas(make_proposer, model.engine(), condition.limits, model.vocabulary)
        )
        for replica in (target, draft):
            if weather is not None and replica is not None:
                await exits.enter_async_context(behind_weather(replica, weather))
        async with orchestrating(target, draft, settings) as stack:
            yield stack
        await stack.until_idle()  # the orchestrator has gone: not even a close that was lost leaves anything behind


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Compute threads that start inside use so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
