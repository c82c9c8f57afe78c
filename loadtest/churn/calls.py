"""One call of a recorded request, with what is to become of it and what did."""

import asyncio
import math
import random
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum

from loadtest.recorded import Recorded
from tandem.client import Chunk, DeadlineExceededError, GenerateOptions, GenerationResult, TandemClient, TandemError


class Plan(StrEnum):
    """What the client means to do."""

    FINISH = "finish"
    CANCEL = "cancel"  # after some chunks
    HANG_UP = "hang up"  # after some time, whatever has come: also while the request waits for its place
    DEADLINE = "deadline"  # leave the end to the service


class Ending(StrEnum):
    """What became of a call."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE = "deadline passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Fate:
    """A plan with its limit; a call may finish before it is reached."""

    plan: Plan
    num_chunks: int | None = None  # of CANCEL
    limit_s: float | None = None  # of HANG_UP and DEADLINE

    @property
    def timeout_s(self) -> float | None:
        """The call's deadline."""
        return self.limit_s if self.plan is Plan.DEADLINE else None

    @property
    def patience_s(self) -> float | None:
        """How long the client stays."""
        return self.limit_s if self.plan is Plan.HANG_UP else None


_WEIGHTS = {Plan.FINISH: 8, Plan.CANCEL: 4, Plan.HANG_UP: 3, Plan.DEADLINE: 5}
_MAX_CHUNKS = 12
_SHORTEST_S, _LONGEST_S = 0.02, 20.0  # from before the first chunk to longer than any request lasts


def draw_fate(rng: random.Random, weights: Mapping[Plan, int] = _WEIGHTS) -> Fate:
    """A random fate; times are uniform in their logarithm, so that short ones are as frequent as long ones."""
    (plan,) = rng.choices(list(weights), list(weights.values()))
    match plan:
        case Plan.CANCEL:
            return Fate(plan, num_chunks=rng.randint(1, _MAX_CHUNKS))
        case Plan.HANG_UP | Plan.DEADLINE:
            return Fate(plan, limit_s=math.exp(rng.uniform(math.log(_SHORTEST_S), math.log(_LONGEST_S))))
        case _:
            return Fate(plan)


@dataclass(slots=True)
class Call:
    """One call; the fields after the fate are what has come of it so far."""

    number: int
    recorded: Recorded
    fate: Fate
    ending: Ending | None = None  # None while it runs
    error: str = ""  # of a call that failed
    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_chunks: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_fallback_rounds: int = 0  # of a finished call, as the next
    num_reopens: int = 0

    def __str__(self) -> str:
        return f"request {self.number} ({self.fate.plan}, {self.num_chunks} chunks came): {self.recorded}"

    async def run(self, client: TandemClient) -> None:
        """Send the request and meet its fate; raises nothing but cancellation of the task."""
        generation = client.generate(self.recorded.prompt, **self.options())
        try:
            async with asyncio.timeout(self.fate.patience_s), aclosing(aiter(generation)) as chunks:
                async for chunk in chunks:
                    if self.has_enough(chunk):
                        self.ending = Ending.CANCELLED
                        return
            self.finish(generation.result)
        except TimeoutError:
            self.ending = Ending.CANCELLED
        except TandemError as error:
            self.fail(error)
        finally:
            self.text, self.token_ids = generation.text, generation.token_ids

    def options(self) -> GenerateOptions:
        """The recorded request's, with this call's deadline."""
        return GenerateOptions(**{**self.recorded.options, "timeout": self.fate.timeout_s})

    def has_enough(self, chunk: Chunk) -> bool:
        """Count a chunk; whether it is the last one that the client means to read."""
        self.num_chunks += 1
        self.num_draft_tokens += chunk.num_draft_tokens
        self.num_accepted += chunk.num_accepted
        return self.num_chunks == self.fate.num_chunks

    def finish(self, result: GenerationResult) -> None:
        """The answer has come to its end."""
        self.ending = Ending.FINISHED
        self.num_fallback_rounds = result.speculation.num_fallback_rounds
        self.num_reopens = result.speculation.num_reopens

    def fail(self, error: TandemError) -> None:
        """The answer has ended with an error."""
        self.ending = Ending.DEADLINE if isinstance(error, DeadlineExceededError) else Ending.FAILED
        self.error = str(error)


def problem_of(call: Call) -> str | None:
    """What is wrong with a call that has ended; None when it gave what it should."""
    recorded = call.recorded
    same = (call.token_ids, call.text) == (recorded.token_ids, recorded.text)
    begins = recorded.token_ids[: len(call.token_ids)] == call.token_ids and recorded.text.startswith(call.text)
    match call.ending:
        case Ending.FINISHED if not same:
            wrong = "finished with another answer than alone"
        case Ending.CANCELLED | Ending.DEADLINE if not begins:
            wrong = f"{call.ending} with what is no beginning of the answer alone"
        case Ending.DEADLINE if call.fate.plan is not Plan.DEADLINE:
            return f"{call}\n  met a deadline that it did not have: {call.error}"
        case Ending.FAILED:
            return f"{call}\n  failed: {call.error}"
        case _:
            return None
    return (
        f"{call}\n  {wrong}\n  came  {call.text!r} {list(call.token_ids)}"
        f"\n  alone {recorded.text!r} {list(recorded.token_ids)}"
    )
