"""An answer that was cut off goes on with what its application has: the same tokens, text and figures."""

import asyncio
from typing import Any

import grpc
import pytest

from engine.backends.toy_backend import ToyEngine, hashed_logits
from orchestrator.requests import check_request
from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem import client_resume
from tandem.client import InvalidRequestError, SyncTandemClient, TandemClient, TandemError, UnavailableError
from tandem.client_request import build_request
from tandem.client_resume import Patience
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import open_channel
from tandem.serving.errors import ServiceError
from tandem.validation import InvalidArgumentError
from tests.orchestrator.fakes import until
from tests.orchestrator.services import Stack, all_services, orchestrating, replicas, similar_draft, toy_engine
from tests.orchestrator.test_requests import OFFER

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 5}
COUPLED: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.3, "min_p": 0.02, "seed": 11}
BOTH = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])


async def events(stack: Stack, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with open_channel(stack.client.address) as channel:
        call: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(request)
        return [event async for event in call]


def numerics_of(stack: Stack) -> str:
    """As `started` names them."""
    assert stack.target_link.info is not None
    return stack.target_link.info.model.numerics


def chunks(answer: list[pb.GenerateResponse]) -> tuple[tuple[int, ...], str]:
    """Tokens and text of all chunks."""
    parts = [event.chunk for event in answer if event.WhichOneof("event") == "chunk"]
    return tuple(token_id for part in parts for token_id in part.token_ids), "".join(part.text for part in parts)


@BOTH
@pytest.mark.parametrize("stop", [None, "bc"])
def test_cut_off_after_any_chunk_it_goes_on_as_if_nothing_had_happened(
    sampling: dict[str, Any], stop: str | None
) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            request = build_request("abc", max_tokens=30, ignore_eos=True, stop=stop, logprobs=True, **sampling)
            whole = await events(stack, request)
            complete = whole[-1].complete
            for num_events in range(1, len(whole) + 1):
                had_tokens, had_text = chunks(whole[:num_events])
                request.ClearField("resume")
                request.resume.add(token_ids=had_tokens)
                request.numerics = whole[0].started.numerics
                rest = await events(stack, request)
                tokens, text = chunks(rest)
                assert (had_tokens + tokens, had_text + text) == chunks(whole)
                ended = rest[-1].complete
                assert ended.finish_reason == complete.finish_reason
                assert ended.WhichOneof("matched_stop") == complete.WhichOneof("matched_stop")
                assert ended.usage.num_completion_tokens == complete.usage.num_completion_tokens
            await stack.until_free()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_each_of_several_answers_goes_on_from_its_own_place() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            request = build_request("abc", max_tokens=20, ignore_eos=True, n=3, sample_index=2, **COUPLED)
            expected = await stack.client.complete_many(
                "abc", max_tokens=20, ignore_eos=True, n=3, sample_index=2, **COUPLED
            )
            request.numerics = numerics_of(stack)
            request.resume.add(sample_index=4, token_ids=expected[2].token_ids)
            request.resume.add(sample_index=2, token_ids=expected[0].token_ids[:7])
            rest: dict[int, list[int]] = {2: [], 3: [], 4: []}
            for event in await events(stack, request):
                if event.WhichOneof("event") == "chunk":
                    rest[event.chunk.sample_index] += event.chunk.token_ids
            assert tuple(rest[2]) == expected[0].token_ids[7:]
            assert tuple(rest[3]) == expected[1].token_ids
            assert rest[4] == []

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(
    ("resume", "options", "message"),
    [
        ([pb.ResumedAnswer(token_ids=[64])], {}, r"resume\[0\].token_ids\[0\]: 64 is outside \[0, 63\]"),
        ([pb.ResumedAnswer(token_ids=[1] * 5)], {"max_tokens": 4}, "5 tokens are more than the 4 of max_tokens"),
        ([pb.ResumedAnswer(sample_index=1)], {}, "1 is not one of 0..0, each once"),
        (
            [pb.ResumedAnswer(), pb.ResumedAnswer()],
            {},
            r"resume\[1\].sample_index: 0 is not one of 0..0, each once",
        ),
        ([pb.ResumedAnswer(token_ids=[1])], {"seed": None}, "needs sampling.seed"),
        (
            [pb.ResumedAnswer(token_ids=[5, 7])],
            {"allowed_token_ids": [5, 6]},
            r"resume\[0\].token_ids\[1\]: token 7 is not one of sampling.allowed_token_ids",
        ),
        (
            [pb.ResumedAnswer(token_ids=[5, 7])],
            {"bad_token_ids": [7]},
            r"resume\[0\].token_ids\[1\]: token 7 is one of sampling.bad_token_ids",
        ),
        (
            [pb.ResumedAnswer(token_ids=[5, 7])],
            {"min_tokens": 2, "stop_token_ids": [7]},
            r"resume\[0\].token_ids\[1\]: token 7 ends an answer, and this one has at least 2 \(min_tokens\)",
        ),
    ],
)
def test_what_no_answer_can_have_is_refused(
    resume: list[pb.ResumedAnswer], options: dict[str, Any], message: str
) -> None:
    request = build_request("abc", **{"seed": 1, "max_tokens": 8, **options})
    request.resume.extend(resume)
    request.numerics = OFFER.model.numerics
    with pytest.raises(InvalidArgumentError, match=message):
        check_request(request, OFFER)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [5, 7]},
        {"min_tokens": 1, "stop_token_ids": [7]},
        {"logit_bias": {7: -100.0}},  # unlikely, and not forbidden
    ],
)
def test_what_an_answer_can_have_is_taken(options: dict[str, Any]) -> None:
    request = build_request("abc", seed=1, max_tokens=8, **options)
    request.resume.add(token_ids=[5, 7])
    request.numerics = OFFER.model.numerics
    assert check_request(request, OFFER).resumed == {0: (5, 7)}


def test_an_answer_is_not_resumed_without_the_name_of_what_computed_it_nor_where_something_else_computes() -> None:
    request = build_request("abc", seed=1, max_tokens=8)
    request.resume.add(token_ids=[7])
    with pytest.raises(InvalidArgumentError, match="resume: needs numerics, as `started` named them"):
        check_request(request, OFFER)
    request.numerics = "toy (another)"
    with pytest.raises(
        ServiceError, match=r"'toy \(another\)' is asked for, .* compute 'toy \(no fingerprint\)'"
    ) as caught:
        check_request(request, OFFER)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_client_does_not_go_on_with_a_target_that_computes_otherwise() -> None:
    """All targets were away, and what came back under the same address is another model."""

    async def scenario() -> None:
        settings = OrchestratorSettings(draft_timeout_s=5.0, target_patience=TargetPatience(reconnect_s=0.2))
        async with (
            replicas(similar_draft, toy_engine(step_delay_s=0.005)) as (target, draft),
            orchestrating(target, draft, settings) as stack,
            TandemClient(stack.client.address, resume=True) as client,
        ):
            generation = client.generate("abc", max_tokens=60, ignore_eos=True, **GREEDY)

            async def swap() -> None:
                await target.stop()
                await until(lambda: generation.num_resumes > 0)
                target.engine = ToyEngine(hashed_logits(64, seed=4), 64, num_blocks=512, fingerprint="other")
                await target.start()

            async def read() -> None:
                swapping = None
                try:
                    async for _ in generation:
                        swapping = swapping or asyncio.create_task(swap())
                finally:
                    assert swapping is not None
                    await swapping

            with pytest.raises(
                TandemError, match=r"'toy \(toy\)' is asked for, .* compute 'toy \(other\)'"
            ) as caught:
                await read()
            assert caught.value.code == "FAILED_PRECONDITION"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_tokens_after_the_end_of_an_answer_are_refused() -> None:
    async def scenario() -> None:
        async with all_services(None) as stack:
            request = build_request("abc", max_tokens=9, stop_token_ids=[7], **GREEDY)
            request.resume.add(token_ids=[7, 8])
            request.numerics = numerics_of(stack)
            with pytest.raises(Exception, match="token 8 comes after the end of the answer") as caught:
                await events(stack, request)
            assert caught.value.code().name == "INVALID_ARGUMENT"  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_goes_on_at_the_next_orchestrator_by_itself() -> None:
    async def scenario() -> None:
        async with (
            replicas(similar_draft, toy_engine(step_delay_s=0.001)) as (target, draft),
            orchestrating(target, draft) as one,
            orchestrating(target, draft) as two,
            TandemClient(f"{one.client.address},{two.client.address}", resume=True) as client,
        ):
            options: dict[str, Any] = {
                "max_tokens": 60,
                "ignore_eos": True,
                "logprobs": True,
                **COUPLED,
                "seed": None,
            }
            generation = client.generate("abc", **options)
            count = 0
            async for _ in generation:
                count += 1
                if count == 3:
                    await one.server.stop(0)
            result = generation.result
            assert generation.num_resumes == 1
            expected = await two.client.complete("abc", **{**options, "seed": result.seed})
            assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
            assert result.logprobs == expected.logprobs
            assert result.request_id
            assert result.tokens_per_second is not None
            assert client.address == two.client.address  # which is called from now on
            await two.until_idle()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_blocking_client_goes_on_too() -> None:
    async def scenario() -> None:
        async with (
            replicas(similar_draft, toy_engine(step_delay_s=0.001)) as (target, draft),
            orchestrating(target, draft) as one,
            orchestrating(target, draft) as two,
        ):
            options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **COUPLED}
            loop = asyncio.get_running_loop()

            def generate() -> tuple[tuple[int, ...], int]:
                with SyncTandemClient(f"{one.client.address},{two.client.address}", resume=True) as client:
                    generation = client.generate("abc", **options)
                    for count, _ in enumerate(generation):
                        if count == 3:
                            asyncio.run_coroutine_threadsafe(one.server.stop(0), loop).result()
                    return generation.result.token_ids, generation.num_resumes

            expected = await two.client.complete("abc", **options)
            assert await asyncio.to_thread(generate) == (expected.token_ids, 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_being_asked_to_a_client_leaves_going_on_to_the_application() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=0.001)) as stack:
            generation = stack.client.generate("abc", max_tokens=60, ignore_eos=True, **GREEDY)

            async def cut_off() -> None:
                async for _ in generation:
                    await stack.server.stop(0)

            with pytest.raises(UnavailableError):
                await cut_off()
            assert generation.token_ids
            assert generation.num_resumes == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_gives_up_when_nobody_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_resume, "LONGEST_WAIT_S", 0.001)

    async def scenario() -> None:
        async with TandemClient("127.0.0.1:1,127.0.0.1:2", resume=True) as client:
            generation = client.generate("abc")
            with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:[12]"):
                await anext(aiter(generation))
            assert generation.num_resumes == Patience().num_tries - 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_is_wrong_with_a_request_is_no_reason_to_go_on() -> None:
    async def scenario() -> None:
        async with all_services(None) as stack, TandemClient(stack.client.address, resume=True) as client:
            generation = client.generate("abc", max_tokens=10**6)
            with pytest.raises(InvalidRequestError):
                await anext(aiter(generation))
            assert generation.num_resumes == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))
