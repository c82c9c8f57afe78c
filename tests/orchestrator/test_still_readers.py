"""Applications that read slowly, or no more: their answers wait, then end; nobody else's does."""

import asyncio
from typing import Any

import grpc
import pytest

from tandem.client_request import build_request
from tandem.draft.v1 import draft_pb2, draft_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.items import close_item, open_item, stamp
from tests.orchestrator.fakes import until
from tests.orchestrator.services import (
    DraftReplica,
    Stack,
    TargetReplica,
    ngram_draft,
    orchestrating,
    replicas,
    similar_draft,
    toy_engine,
)
from tests.serving.test_stalls import NARROW, read_all
from tests.target.harness import spec

OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0.9}


def narrow_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=NARROW)


async def others_are_answered(stack: Stack, expected: dict[int, tuple[int, ...]]) -> None:
    results = await asyncio.gather(
        *(stack.client.complete("abc", max_tokens=60, seed=seed, **OPTIONS) for seed in expected)
    )
    assert {result.seed: result.token_ids for result in results} == expected


@pytest.mark.parametrize("num_answers", [1, 3])
def test_an_answer_that_nobody_reads_ends_and_the_others_go_on(num_answers: int) -> None:
    async def scenario() -> None:
        async with (
            replicas(similar_draft) as (target, draft),
            orchestrating(target, draft, stall_s=1.0) as stack,
            narrow_channel(stack.client.address) as channel,
        ):
            assert draft is not None
            expected = {
                seed: (await stack.client.complete("abc", max_tokens=60, seed=seed, **OPTIONS)).token_ids
                for seed in range(4)
            }
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            request = build_request("abc", max_tokens=240, n=num_answers, seed=1, logprobs=True, **OPTIONS)
            still: Any = stub.Generate(request)
            await still.read()
            await until(lambda: target.num_sessions == draft.num_sessions == num_answers)
            steps = stack.record_steps()
            await others_are_answered(stack, expected)
            await stack.until_free()
            assert (
                sum(len(step.outcomes) for step in steps) < num_answers * 120 + 4 * 60
            )  # no answer went to its end
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(still)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert "took nothing of what waited for it for 1 s" in str(caught.value.details())
            await others_are_answered(stack, expected)
            await stack.until_free()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_answer_that_is_read_slowly_is_whole() -> None:
    async def scenario() -> None:
        async with (
            replicas(similar_draft) as (target, draft),
            orchestrating(target, draft, stall_s=1.0) as stack,
            narrow_channel(stack.client.address) as channel,
        ):
            expected = await stack.client.complete("abc", max_tokens=100, seed=1, **OPTIONS)
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            slow: Any = stub.Generate(build_request("abc", max_tokens=100, seed=1, logprobs=True, **OPTIONS))
            tokens: list[int] = []
            while (event := await slow.read()) is not grpc.aio.EOF:
                tokens += event.chunk.token_ids
                await asyncio.sleep(0.03)
            assert (await slow.code(), tuple(tokens)) == (grpc.StatusCode.OK, expected.token_ids)
            await stack.until_free()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_orchestrator_that_takes_no_answers_loses_its_stream_and_its_neighbour_keeps_its_own(role: str) -> None:
    async def scenario() -> None:
        replica: Any
        if role == "target":
            replica, kind, request = TargetReplica(toy_engine()), target_pb2.VerifyItem, target_pb2.VerifyRequest
        else:
            replica, kind, request = DraftReplica(ngram_draft), draft_pb2.ProposeItem, draft_pb2.ProposeRequest  # type: ignore[assignment]
        replica.stall_s = 0.5
        await replica.start()
        async with narrow_channel(replica.address) as deaf, narrow_channel(replica.address) as reading:

            def open_stream(channel: grpc.aio.Channel) -> Any:
                if role == "target":
                    return target_pb2_grpc.TargetServiceStub(channel).Verify()
                return draft_pb2_grpc.DraftServiceStub(channel).Propose()

            neighbour, call = open_stream(reading), open_stream(deaf)
            await neighbour.write(request(items=[open_item(kind, spec())]))
            await neighbour.read()
            await call.write(request(items=[open_item(kind, spec())]))
            await until(lambda: replica.num_sessions == 2)
            closes = [close_item(kind, stamp((), session=2))] * 1000
            writing = asyncio.create_task(call.write(request(items=closes)))
            await until(lambda: replica.num_sessions == 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            await asyncio.gather(writing, return_exceptions=True)
            await neighbour.write(request(items=[close_item(kind, stamp(spec().token_ids, 1))]))
            while not (response := await neighbour.read()).results:
                pass
            assert response.results[0].WhichOneof("outcome") == "closed"
            await until(lambda: replica.num_sessions == 0)
        await replica.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
