"""Several answers to one request, through real services: what ends one ends all, and limits count each."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem import codec
from tandem.client import (
    DeadlineExceededError,
    Generation,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.client_request import build_request
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import Verdict
from target_service.limits import Limits
from tests.orchestrator.fakes import until
from tests.orchestrator.services import VOCAB, all_services, similar_draft, toy_engine, wrong_draft

PROMPT = "prompt abab number 2"
COUPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
ENDLESS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, **COUPLED}  # some 200 rounds; tests end it midway


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def _leave_after(generation: Generation, num_chunks: int) -> None:
    async with aclosing(aiter(generation)) as chunks:
        for _ in range(num_chunks):
            await anext(chunks)


@pytest.mark.parametrize("num_chunks", [1, 9])
def test_leaving_midway_frees_all_answers_on_both_services_long_before_their_end(num_chunks: int) -> None:
    async def scenario() -> None:
        engine = toy_engine(step_delay_s=0.005)
        async with all_services(wrong_draft, engine) as stack:
            await _leave_after(stack.client.generate(PROMPT, n=4, **ENDLESS), num_chunks)
            await stack.until_free()
            assert len(engine.calls) < 100  # of some 200
            assert (await stack.client.complete("abc", max_tokens=3, ignore_eos=True)).num_completion_tokens == 3

    run(scenario())


def test_cancelling_before_the_first_token_frees_all_answers() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=0.02)) as stack:
            task = asyncio.create_task(stack.client.complete_many(PROMPT, n=4, **ENDLESS))
            await until(lambda: stack.target.num_sessions == 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stack.until_free()

    run(scenario())


def test_a_deadline_ends_all_answers_and_frees_both_services() -> None:
    async def scenario() -> None:
        engine = toy_engine(step_delay_s=0.01)
        async with all_services(wrong_draft, engine) as stack:
            with pytest.raises(DeadlineExceededError):
                await stack.client.complete_many(PROMPT, n=4, timeout=0.2, **ENDLESS)
            await stack.until_free()
            assert len(engine.calls) < 150  # of some 200

    run(scenario())


def test_one_verdict_that_cannot_be_fails_the_call_and_what_came_before_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_verdicts = 0
    decode = codec.verdict_from_proto

    def spoiled(message: Any) -> Verdict:
        nonlocal num_verdicts
        num_verdicts += 1
        verdict = decode(message)
        return replace(verdict, token_ids=(VOCAB,)) if num_verdicts == 20 else verdict

    async def scenario() -> None:
        engine = toy_engine()
        async with all_services(wrong_draft, engine) as stack:
            expected = await stack.client.complete_many(PROMPT, n=3, speculation=False, **ENDLESS)
            num_calls, engine.step_delay_s = len(engine.calls), 0.005
            monkeypatch.setattr(codec, "verdict_from_proto", spoiled)
            generation = stack.client.generate(PROMPT, n=3, **ENDLESS)
            with pytest.raises(TandemError, match="internal error") as caught:
                await _leave_after(generation, 10_000)
            assert caught.value.code == "INTERNAL"
            await stack.until_free()
            assert len(engine.calls) - num_calls < 100  # of some 200
            assert [answer.sample_index for answer in generation.answers] == [0, 1, 2]
            for answer, one in zip(generation.answers, expected, strict=True):
                assert answer.token_ids
                assert answer.token_ids == one.token_ids[: len(answer.token_ids)]
                assert one.text.startswith(answer.text)
                assert answer.result is None

    run(scenario())


def test_a_target_without_room_for_one_of_the_answers_refuses_the_call_and_keeps_none() -> None:
    async def scenario() -> None:
        limits = Limits(max_sessions=2, max_waiting_sessions=1)
        async with all_services(similar_draft, toy_engine(step_delay_s=0.002), limits=limits) as stack:
            with pytest.raises(OverloadedError, match="target service"):
                await stack.client.complete_many(PROMPT, n=4, **ENDLESS)
            await stack.until_free()
            results = await stack.client.complete_many(PROMPT, n=3, max_tokens=5, ignore_eos=True)
            assert [result.num_completion_tokens for result in results] == [5, 5, 5]

    run(scenario())


def test_a_target_that_stays_away_is_unavailable_for_all_and_what_was_streamed_remains() -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(target_patience=TargetPatience(reconnect_s=0.1))
        async with all_services(similar_draft, settings=settings) as stack:
            options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **COUPLED}
            expected = await stack.client.complete_many(PROMPT, n=2, **options)
            generation = stack.client.generate(PROMPT, n=2, **options)

            async def stop_the_target_midway() -> None:
                async for _ in generation:
                    if len(generation.answers) == 2:
                        await stack.target.stop()

            with pytest.raises(UnavailableError):
                await stop_the_target_midway()
            assert len(generation.answers) == 2
            for answer, one in zip(generation.answers, expected, strict=True):
                assert 0 < len(answer.token_ids) < 60
                assert answer.token_ids == one.token_ids[: len(answer.token_ids)]
            await until(lambda: stack.servicer._admission.num_running == 0)

    run(scenario())


def test_every_answer_takes_a_place_and_a_request_waits_for_none() -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(max_requests=4)
        async with all_services(None, toy_engine(step_delay_s=0.005), settings) as stack:
            running = asyncio.create_task(stack.client.complete_many(PROMPT, n=3, max_tokens=100, ignore_eos=True))
            await until(lambda: stack.target.num_sessions == 3)
            assert (await stack.client.info()).num_running_requests == 3
            with pytest.raises(OverloadedError, match=r"1 of 4 places .* 2 are needed"):
                await stack.client.complete_many("abc", n=2, max_tokens=2)
            assert len(await stack.client.complete_many("abc", n=1, max_tokens=2)) == 1
            await running
            assert len(await stack.client.complete_many("abc", n=4, max_tokens=2)) == 4

    run(scenario())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 16}, r"n: 16 answers are more than the 8 of max_requests"),
        ({"n": 17}, r"n: 17 is outside \[1, 16\]"),
        ({"n": 0}, r"n: 0 is outside \[1, 16\]"),
        ({"n": 2, "sample_index": 2**32 - 1}, r"sample_index: 4294967295 \+ n 2 .* limit of 4294967296"),
    ],
)
def test_what_could_never_be_served_is_refused_by_field_and_limit(options: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with all_services(None, settings=OrchestratorSettings(max_requests=8)) as stack:
            with pytest.raises(InvalidRequestError, match=message):
                await stack.client.complete_many(PROMPT, **options)
            assert stack.target.num_sessions == 0
            assert len(await stack.client.complete_many(PROMPT, n=8, max_tokens=2)) == 8
            last = await stack.client.complete(PROMPT, sample_index=2**32 - 1, max_tokens=2)
            assert last.sample_index == 2**32 - 1

    run(scenario())


class _Caller:
    """As much of a call's context as `Generate` asks for."""

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


def test_answers_stand_still_while_nobody_reads_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    num_verdicts = 0
    decode = codec.verdict_from_proto

    def counted(message: Any) -> Verdict:
        nonlocal num_verdicts
        num_verdicts += 1
        return decode(message)

    async def until_still() -> None:
        seen, num_equal = -1, 0
        while num_equal < 50:
            num_equal = num_equal + 1 if seen == num_verdicts else 0
            seen = num_verdicts
            await asyncio.sleep(0.002)

    async def scenario() -> None:
        async with all_services(wrong_draft) as stack:
            options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **COUPLED}
            expected = await stack.client.complete_many(PROMPT, n=3, **options)
            monkeypatch.setattr(codec, "verdict_from_proto", counted)
            request = build_request(PROMPT, n=3, **options)
            stream: AsyncGenerator[pb.GenerateResponse, None] = stack.servicer.Generate(request, _Caller())  # type: ignore[assignment,arg-type]
            async with aclosing(stream):
                assert (await anext(stream)).WhichOneof("event") == "started"
                tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
                for num_read in range(1, 8):
                    chunk = (await anext(stream)).chunk
                    tokens[chunk.sample_index] += chunk.token_ids
                    if num_read in (1, 7):
                        await until_still()
                        assert num_verdicts <= num_read + 2 * 3
                async for event in stream:
                    tokens[event.chunk.sample_index] += event.chunk.token_ids
            assert [tuple(tokens[result.sample_index]) for result in expected] == [
                result.token_ids for result in expected
            ]

    run(scenario())
