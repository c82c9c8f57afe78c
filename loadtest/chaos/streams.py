"""Streams that must not notice: each generates one recorded request after the other and compares every token."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.recorded import Recorded
from tandem.client import GenerateOptions, TandemClient, TandemError

_MAX_PROBLEMS = 20


@dataclass
class Tally:
    """What the streams have seen."""

    num_greedy: int = 0
    num_sampled: int = 0
    num_tokens: int = 0
    num_reopens: int = 0
    num_fallback_rounds: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    longest_s: float = 0.0  # of one answer
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)  # the first ones

    @property
    def num_answers(self) -> int:
        return self.num_greedy + self.num_sampled

    def fail(self, problem: str) -> None:
        """Something that must never be."""
        self.num_problems += 1
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


async def run_streams(
    address: str,
    recorded: Sequence[Recorded],
    num_streams: int,
    seed: int,
    is_over: Callable[[], bool],
    stall_s: float,
) -> Tally:
    """Until it is over and every answer that has begun is complete; one that takes `stall_s` is a problem."""
    tally = Tally()
    async with TandemClient(address) as client:
        await asyncio.gather(
            *(
                _stream(client, recorded, random.Random(f"{seed}/{number}"), is_over, stall_s, tally)
                for number in range(num_streams)
            )
        )
    return tally


async def _stream(
    client: TandemClient,
    recorded: Sequence[Recorded],
    rng: random.Random,
    is_over: Callable[[], bool],
    stall_s: float,
    tally: Tally,
) -> None:
    while not is_over():
        await _answer(client, rng.choice(recorded), stall_s, tally)


async def _answer(client: TandemClient, request: Recorded, stall_s: float, tally: Tally) -> None:
    started = time.monotonic()
    try:
        result = await client.complete(request.prompt, **GenerateOptions(**{**request.options, "timeout": stall_s}))
    except TandemError as error:
        tally.fail(f"{request}: {error}")
        await asyncio.sleep(0.1)
        return
    tally.longest_s = max(tally.longest_s, time.monotonic() - started)
    if (result.token_ids, result.text) != (request.token_ids, request.text):
        tally.fail(f"{request}: other tokens or text than undisturbed: {result.token_ids} for {request.token_ids}")
    if request.is_greedy:
        tally.num_greedy += 1
    else:
        tally.num_sampled += 1
    figures = result.speculation
    tally.num_tokens += len(result.token_ids)
    tally.num_reopens += figures.num_reopens
    tally.num_fallback_rounds += figures.num_fallback_rounds
    tally.num_drafts += figures.num_draft_tokens
    tally.num_accepted += figures.num_accepted
