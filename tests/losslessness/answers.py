"""Requests of a cell, and their answers in order, many at a time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.client import GenerateOptions, GenerationResult, TandemClient
from tandem.types import SamplingParams, SessionSpec


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and everything that decides its answer, the seed included."""

    prompt_ids: tuple[int, ...]
    options: GenerateOptions

    def spec(self, eos_token_ids: Sequence[int]) -> SessionSpec:
        """The session as the options say, made without the services' own parsing."""
        options: dict[str, Any] = {**self.options}
        sampling = {name: options[name] for name in SamplingParams.__slots__ if name in options}
        return SessionSpec(
            token_ids=self.prompt_ids,
            prompt_len=len(self.prompt_ids),
            sampling=SamplingParams(**sampling),
            max_tokens=options["max_tokens"],
            min_tokens=options.get("min_tokens", 0),
            eos_token_ids=frozenset() if options.get("ignore_eos") else frozenset(eos_token_ids),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the services made of a request."""

    request: Request
    result: GenerationResult


async def collect(
    client: TandemClient, make_request: Callable[[int], Request], num_tokens: int, concurrency: int
) -> list[Answer]:
    """Answers to request 0, 1, 2 ... until together they hold `num_tokens` tokens.

    Which answers that are does not depend on which of them are finished first. TandemError when a request fails.
    """
    collection = _Collection(num_tokens, make_request(0).options["max_tokens"] or 1)

    async def work() -> None:
        while collection.needs_another:
            number = collection.begin()
            request = make_request(number)
            result = await client.complete(request.prompt_ids, **request.options)
            collection.end(number, Answer(request, result))

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return collection.taken


class _Collection:
    """Answers as they come, and those that are taken in order."""

    def __init__(self, num_tokens: int, longest: int) -> None:
        self.taken: list[Answer] = []
        self._longest = longest  # tokens an answer may have: the guess before any has ended
        self._num_wanted = num_tokens
        self._num_taken = 0
        self._waiting: dict[int, Answer] = {}
        self._num_begun = 0
        self._num_ended = 0
        self._num_ended_tokens = 0

    @property
    def needs_another(self) -> bool:
        """Whether those that run may not suffice; where that was guessed wrong, the last to end goes on."""
        if self._num_taken >= self._num_wanted:
            return False
        length = self._num_ended_tokens / self._num_ended if self._num_ended else self._longest
        return self._num_begun == self._num_ended or length * self._num_begun < self._num_wanted

    def begin(self) -> int:
        """The number of the next request."""
        self._num_begun += 1
        return self._num_begun - 1

    def end(self, number: int, answer: Answer) -> None:
        """Take all answers that are there without a gap, until they hold enough."""
        self._num_ended += 1
        self._num_ended_tokens += len(answer.result.token_ids)
        self._waiting[number] = answer
        while self._num_taken < self._num_wanted and len(self.taken) in self._waiting:
            self.taken.append(self._waiting.pop(len(self.taken)))
            self._num_taken += len(self.taken[-1].result.token_ids)
