"""Several answers to one request, as both clients see them: each folded by its sample index."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from tandem.client import (
    Generation,
    GenerationResult,
    InvalidRequestError,
    SyncTandemClient,
    TandemClient,
    TandemError,
    UnavailableError,
)
from tandem.common.v1 import common_pb2
from tandem.serving.errors import ServiceError
from tandem.types import TokenLogprobs
from tests.client.scripted_server import ScriptedServicer, chunk, complete, serving, started
from tests.orchestrator.fakes import until

TWO = [
    started(),
    chunk("a", 1, 2, drafted=4, accepted=1, sample_index=5),
    chunk("x", 7, drafted=4, sample_index=4, logprobs=[common_pb2.TokenLogprobs(logprob=-0.5, rank=1)]),
    chunk("b", 3, sample_index=5),
    complete(sample_index=5, num_rounds=2, num_draft_tokens=4, num_accepted=1),
    chunk("y", 8, drafted=4, sample_index=4),
    complete(sample_index=4, num_rounds=2, num_draft_tokens=8),
]
OPTIONS: dict[str, Any] = {"n": 2, "sample_index": 4}
BOTH = pytest.mark.parametrize("kind", ["async", "sync"])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def call(kind: str, method: str, address: str, **options: Any) -> Any:
    """The same call by either client; the sync one in a thread, as the server lives on this loop."""
    if kind == "async":
        async with TandemClient(address) as client:
            return await getattr(client, method)("hi", **options)

    def in_a_thread() -> Any:
        with SyncTandemClient(address) as client:
            return getattr(client, method)("hi", **options)

    return await asyncio.to_thread(in_a_thread)


@BOTH
def test_results_come_by_sample_index_each_with_its_own_text_and_figures(kind: str) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(TWO)
        async with serving(servicer) as address:
            results: list[GenerationResult] = await call(kind, "complete_many", address, **OPTIONS)
        assert [(result.sample_index, result.text, result.token_ids) for result in results] == [
            (4, "xy", (7, 8)),
            (5, "ab", (1, 2, 3)),
        ]
        assert [result.speculation.num_draft_tokens for result in results] == [8, 4]
        assert [(result.request_id, result.seed) for result in results] == [("r", 2**64 - 1)] * 2
        assert [(request.n, request.sample_index) for request in servicer.requests] == [(2, 4)]

    run(scenario())


@BOTH
def test_complete_many_of_one_is_a_list_of_one(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer([started(), chunk("a", 1), complete()])) as address:
            (result,) = await call(kind, "complete_many", address)
        assert (result.sample_index, result.text) == (0, "a")

    run(scenario())


@BOTH
@pytest.mark.parametrize("n", [0, 2, 1.5])
def test_complete_refuses_any_number_but_one_and_names_what_gives_several(kind: str, n: Any) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(TWO)
        async with serving(servicer) as address:
            with pytest.raises(InvalidRequestError, match=f"n: {n} is not 1; .* complete_many"):
                await call(kind, "complete", address, n=n)
        assert servicer.requests == []

    run(scenario())


@BOTH
def test_complete_gives_one_answer_of_several_again(kind: str) -> None:
    async def scenario() -> None:
        events = [started(), chunk("x", 7, sample_index=4), complete(sample_index=4)]
        async with serving(ScriptedServicer(events)) as address:
            result = await call(kind, "complete", address, n=1, sample_index=4)
        assert (result.sample_index, result.text) == (4, "x")

    run(scenario())


def test_chunks_say_whose_they_are_and_answers_grow_as_they_come() -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(TWO)) as address, TandemClient(address) as client:
            generation = client.generate("hi", **OPTIONS)
            assert generation.answers == ()
            seen = []
            async for part in generation:
                texts = [(answer.sample_index, answer.text, answer.result is None) for answer in generation.answers]
                seen.append((part.sample_index, texts))
            assert seen == [
                (5, [(5, "a", True)]),
                (4, [(4, "x", True), (5, "a", True)]),
                (5, [(4, "x", True), (5, "ab", True)]),
                (4, [(4, "xy", True), (5, "ab", False)]),
            ]
            assert [answer.result for answer in generation.answers] == generation.results

    run(scenario())


async def _exhaust(generation: Generation) -> None:
    async for _ in generation:
        pass


def test_after_an_error_every_answers_text_and_tokens_so_far_remain() -> None:
    async def scenario() -> None:
        error = ServiceError(grpc.StatusCode.UNAVAILABLE, "gone")
        async with serving(ScriptedServicer(TWO[:5], error)) as address, TandemClient(address) as client:
            generation = client.generate("hi", **OPTIONS)
            with pytest.raises(UnavailableError):
                await _exhaust(generation)
            unfinished, finished = generation.answers
            assert (unfinished.text, unfinished.token_ids, unfinished.result) == ("x", (7,), None)
            assert (unfinished.logprobs, finished.logprobs) == ((TokenLogprobs(-0.5, 1),), ())
            assert finished.result is not None
            assert (finished.text, finished.result.text) == ("ab", "ab")
            with pytest.raises(TandemError, match=r"^CANCELLED: .*not iterated to its end"):
                _ = generation.results

    run(scenario())


@BOTH
def test_a_stream_that_ends_without_one_of_the_answers_is_an_error(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(TWO[:6])) as address:
            with pytest.raises(TandemError, match="before the generation was complete: 1 of 2 answers"):
                await call(kind, "complete_many", address, **OPTIONS)

    run(scenario())


@BOTH
def test_an_answer_that_was_not_asked_for_is_an_error(kind: str) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(TWO, hangs=True)
        async with serving(servicer) as address:
            with pytest.raises(TandemError, match=r"sample index 5; asked were 3\.\.4"):
                await call(kind, "complete_many", address, n=2, sample_index=3)
            await until(lambda: servicer.num_open == 0)

    run(scenario())


def test_the_single_answers_properties_are_refused_when_there_are_several() -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(TWO)) as address, TandemClient(address) as client:
            generation = client.generate("hi", **OPTIONS)
            await _exhaust(generation)
            for name in ("text", "token_ids", "result"):
                with pytest.raises(RuntimeError, match="2 answers; see `answers`"):
                    getattr(generation, name)

    run(scenario())
