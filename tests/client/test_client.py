"""Both clients: the same results and errors, and a call that is left is a call that is cancelled."""

import asyncio
import gc
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tandem import codec
from tandem.client import (
    Chunk,
    DeadlineExceededError,
    GenerationResult,
    InvalidRequestError,
    OverloadedError,
    SyncTandemClient,
    TandemClient,
    TandemError,
    UnavailableError,
    UnsupportedError,
)
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import AddressError
from tandem.serving.errors import ServiceError
from tandem.types import DraftProbsTransport, FinishReason, TokenLogprobs, VerificationPolicy
from tests.client.scripted_server import FULL, ScriptedServicer, chunk, complete, serving, started
from tests.orchestrator.fakes import until


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def complete_with(kind: str, address: str, **options: Any) -> GenerationResult:
    """The same call by either client; the sync one in a thread, as the server lives on this loop."""
    if kind == "async":
        async with TandemClient(address) as client:
            return await client.complete("hi", **options)

    def call() -> GenerationResult:
        with SyncTandemClient(address) as client:
            return client.complete("hi", **options)

    return await asyncio.to_thread(call)


BOTH = pytest.mark.parametrize("kind", ["async", "sync"])


@BOTH
def test_a_result_holds_everything_that_was_streamed(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(FULL)) as address:
            result = await complete_with(kind, address)
        assert (result.text, result.token_ids) == ("abc", (1, 2, 3, 4))
        assert (result.request_id, result.model_id, result.seed) == ("r", "m", 2**64 - 1)
        assert result.verification_policy is VerificationPolicy.BLOCK
        assert result.draft_probs_transport is DraftProbsTransport.FULL
        assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, "end")
        assert (result.num_prompt_tokens, result.num_completion_tokens) == (3, 4)
        assert result.time_to_first_token_s == 0.0015
        assert result.speculation.acceptance_rate == pytest.approx(1 / 3)
        assert result.speculation.mean_acceptance_length == 2.0

    run(scenario())


@BOTH
def test_a_results_logprobs_are_those_of_its_chunks_in_order(kind: str) -> None:
    first, second = TokenLogprobs(-0.5, 1, (1, 3), (-0.5, -1.5)), TokenLogprobs(-2.0, 9)
    on_wire = [codec.token_logprobs_to_proto(entry) for entry in (first, second)]
    events = [started(), chunk("a", 1, logprobs=on_wire[:1]), chunk("b", 2, logprobs=on_wire[1:]), complete()]

    async def scenario() -> None:
        async with serving(ScriptedServicer(events)) as address:
            assert (await complete_with(kind, address)).logprobs == (first, second)
            async with TandemClient(address) as client:
                assert [part.logprobs async for part in client.generate("hi")] == [(first,), (second,)]
        async with serving(ScriptedServicer(FULL)) as address:
            assert (await complete_with(kind, address)).logprobs == ()

    run(scenario())


@BOTH
def test_speed_is_tokens_after_the_first_round_over_the_time_after_it(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(FULL)) as address:
            assert (await complete_with(kind, address)).tokens_per_second == 2 / 0.5
        async with serving(ScriptedServicer([*FULL[:2], complete()])) as address:
            single_round = await complete_with(kind, address)
        assert single_round.tokens_per_second is None
        assert single_round.speculation.acceptance_rate is None
        assert single_round.speculation.mean_acceptance_length is None

    run(scenario())


@BOTH
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, UnsupportedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, OverloadedError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.INTERNAL, TandemError),
    ],
)
def test_every_status_has_its_error(kind: str, status: grpc.StatusCode, error: type[TandemError]) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(FULL[:2], ServiceError(status, "why"))) as address:
            with pytest.raises(TandemError) as caught:
                await complete_with(kind, address)
        assert type(caught.value) is error
        assert (caught.value.code, caught.value.message) == (status.name, "why")

    run(scenario())


@BOTH
def test_a_call_that_nobody_cancelled_was_dropped_by_a_server_that_shuts_down(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer([], ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED"))) as address:
            with pytest.raises(UnavailableError, match=rf"{address} dropped the call \(gRPC: CANCELLED\)"):
                await complete_with(kind, address)

    run(scenario())


def test_calls_that_a_server_has_not_taken_when_it_stops_listening_go_on_at_the_next() -> None:
    async def scenario() -> None:
        server = grpc.aio.server()
        orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(ScriptedServicer(FULL), server)
        stopping = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with serving(ScriptedServicer(FULL)) as address:
            generations = []

            def call() -> str:
                with SyncTandemClient(f"{stopping},{address}", resume=True) as client:
                    generation = client.generate("hi")
                    generations.append(generation)
                    return "".join(part.text for part in generation)

            with ThreadPoolExecutor() as threads:
                calls = [asyncio.get_running_loop().run_in_executor(threads, call) for _ in range(4)]
                time.sleep(1.0)  # noqa: ASYNC251 - as a busy loop, which has one call taken and lets the others wait
                await server.stop(10.0)
                assert await asyncio.gather(*calls) == ["abc"] * 4
        assert sum(generation.num_resumes > 0 for generation in generations) > 0

    run(scenario())


@BOTH
def test_a_request_that_no_message_holds_is_refused_with_both_sizes(kind: str) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(FULL)
        async with serving(servicer) as address:
            with pytest.raises(
                InvalidRequestError, match=r"the request's 5\d{6} bytes are more than .* 4194304 bytes"
            ):
                await complete_with(kind, address, stop="x" * 5_000_000)
        assert servicer.requests == []

    run(scenario())


@BOTH
def test_a_server_that_is_not_there_is_unavailable(kind: str) -> None:
    async def scenario() -> None:
        with pytest.raises(UnavailableError, match=r"no Tandem service answers at 127\.0\.0\.1:1: .*refused"):
            await complete_with(kind, "127.0.0.1:1", timeout=20)

    run(scenario())


@BOTH
def test_the_timeout_is_the_calls_deadline(kind: str) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(FULL[:1], hangs=True)
        async with serving(servicer) as address:
            with pytest.raises(DeadlineExceededError) as caught:
                await complete_with(kind, address, timeout=0.1)
            assert caught.value.message == f"{address} had not answered in full when the timeout of 0.1 s passed"
            await until(lambda: servicer.num_open == 0)
        (remaining,) = servicer.times_remaining
        assert remaining is not None
        assert remaining < 1.0

    run(scenario())


@BOTH
def test_a_stream_that_ends_without_complete_is_an_error(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(FULL[:3])) as address:
            with pytest.raises(TandemError, match="before the generation was complete"):
                await complete_with(kind, address)

    run(scenario())


def test_what_was_streamed_before_an_error_remains() -> None:
    async def scenario() -> None:
        error = ServiceError(grpc.StatusCode.UNAVAILABLE, "gone")
        async with serving(ScriptedServicer(FULL[:3], error)) as address, TandemClient(address) as client:
            generation = client.generate("hi")
            with pytest.raises(UnavailableError):
                async for _ in generation:
                    pass
            assert (generation.text, generation.token_ids) == ("abc", (1, 2, 3, 4))
            with pytest.raises(TandemError):
                _ = generation.result

    run(scenario())


def test_leaving_an_async_loop_cancels_the_call() -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(FULL[:2], hangs=True)
        async with serving(servicer) as address, TandemClient(address) as client:
            for _ in range(3):
                async for chunk in client.generate("hi"):
                    assert chunk == Chunk("a", (1, 2), 4, 1, 0)
                    break
                gc.collect()
                await until(lambda: servicer.num_open == 0)

    run(scenario())


def test_cancelling_the_task_cancels_the_call() -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer([started()], hangs=True)
        async with serving(servicer) as address, TandemClient(address) as client:
            task = asyncio.create_task(client.complete("hi"))
            await until(lambda: servicer.num_open == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: servicer.num_open == 0)

    run(scenario())


def test_leaving_a_sync_loop_cancels_the_call() -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(FULL[:2], hangs=True)
        async with serving(servicer) as address:

            def leave() -> None:
                with SyncTandemClient(address) as client:
                    generation = client.generate("hi")
                    for chunk in generation:
                        assert chunk.token_ids == (1, 2)
                        break

            await asyncio.to_thread(leave)
            await until(lambda: servicer.num_open == 0)

    run(scenario())


def test_closing_the_client_ends_its_calls_with_an_error() -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer([started()], hangs=True)
        async with serving(servicer) as address:
            client = TandemClient(address)
            task = asyncio.create_task(client.complete("hi"))
            await until(lambda: servicer.num_open == 1)
            await client.close()
            with pytest.raises(TandemError, match="CANCELLED"):
                await task

    run(scenario())


def test_closing_the_blocking_client_ends_its_calls_with_the_same_error() -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer([started()], hangs=True)
        async with serving(servicer) as address:
            client = SyncTandemClient(address, resume=True)
            call = asyncio.create_task(asyncio.to_thread(client.complete, "hi"))
            await until(lambda: servicer.num_open == 1)
            client.close()
            with pytest.raises(TandemError, match="CANCELLED: the client was closed during the call"):
                await call
            with pytest.raises(TandemError, match="CANCELLED: the client is closed"):
                client.info()

    run(scenario())


def test_a_client_may_be_made_before_the_loop_and_used_on_one_loop_after_another() -> None:
    client: TandemClient | None = None

    async def scenario() -> None:
        nonlocal client
        async with serving(ScriptedServicer(FULL)) as address:
            if client is None:
                client = TandemClient(address)
            client.addresses = (address,)
            assert (await client.complete("hi")).text == "abc"

    before = TandemClient("127.0.0.1:1")
    run(scenario())
    run(scenario())

    async def unavailable() -> None:
        with pytest.raises(UnavailableError):
            await before.complete("hi", timeout=20)
        await before.close()

    run(unavailable())


def test_a_client_is_refused_on_a_second_loop_while_the_first_runs() -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(FULL)) as address, TandemClient(address) as client:
            await client.complete("hi")

            def elsewhere() -> None:
                with pytest.raises(RuntimeError, match="another event loop"):
                    asyncio.run(client.complete("hi"))

            await asyncio.to_thread(elsewhere)

    run(scenario())


def test_a_generation_is_iterated_once() -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer(FULL)) as address, TandemClient(address) as client:
            generation = client.generate("hi")
            assert "".join([chunk.text async for chunk in generation]) == "abc"
            with pytest.raises(RuntimeError, match="once"):
                aiter(generation)

    run(scenario())


@BOTH
def test_info_tells_what_is_served(kind: str) -> None:
    async def scenario() -> None:
        async with serving(ScriptedServicer([])) as address:
            if kind == "async":
                async with TandemClient(address) as client:
                    info = await client.info()
            else:
                with SyncTandemClient(address) as sync_client:
                    info = await asyncio.to_thread(sync_client.info)
        assert [(one.address, one.model.model_id) for one in info.targets] == [("h:1", "m")]
        assert info.num_running_requests == 2
        assert info.drafts == ()

    run(scenario())


def test_an_address_that_is_none_is_refused_when_the_client_is_made() -> None:
    for make in (TandemClient, SyncTandemClient):
        with pytest.raises(AddressError):
            make("nowhere")
