"""Real services around toy engines: the text is the target's own, whatever is drafted and whatever fails."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest

from draft_service.proposers.base import Proposer
from engine.backends.toy_backend import ToyEngine, hashed_logits
from orchestrator.server import OrchestratorSettings
from orchestrator.target_session import TargetPatience
from tandem.client import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.channels import open_channel
from tandem.types import FinishReason
from target_service.answers import StreamId
from target_service.limits import Limits
from tests.orchestrator.fakes import until
from tests.orchestrator.services import (
    Stack,
    all_services,
    ngram_draft,
    orchestrating,
    replicas,
    self_draft,
    similar_draft,
    token_lists,
    toy_engine,
    wrong_draft,
)

PROMPTS = [f"prompt {'ab' * n} number {n}" for n in range(8)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3, "seed": 11}
REJECTION: dict[str, Any] = {**COUPLED, "verification_policy": "rejection"}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def _plain(sampling: dict[str, Any]) -> list[tuple[int, ...]]:
    """Each prompt alone, without a draft service."""
    async with all_services(None) as stack:
        return [(await token_lists(stack, [prompt], max_tokens=16, **sampling))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_the_output_is_that_of_plain_decoding_for_every_draft_and_k_alone_or_batched(
    sampling: dict[str, Any],
) -> None:
    async def scenario() -> None:
        expected = await _plain(sampling)
        assert len(set(expected)) == len(PROMPTS)
        for make_proposer in (similar_draft, ngram_draft, self_draft, wrong_draft):
            async with all_services(make_proposer) as stack:
                for k in range(9) if make_proposer is similar_draft else (1, 4, 8):
                    options = {"max_tokens": 16, "num_draft_tokens": k, **sampling}
                    assert await token_lists(stack, PROMPTS, **options) == expected, (make_proposer, k)
                assert await token_lists(stack, PROMPTS, max_tokens=16, speculation=False, **sampling) == expected
                await stack.until_idle()

    run(scenario())


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_the_target_as_its_own_draft_is_accepted_in_every_round(sampling: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            for k in (1, 4, 7):
                generation = stack.client.generate(PROMPTS[0], max_tokens=23, num_draft_tokens=k, **sampling)
                chunks = [chunk async for chunk in generation]
                assert all(chunk.num_accepted == chunk.num_draft_tokens for chunk in chunks)
                assert [len(chunk.token_ids) for chunk in chunks[:-1]] == [k + 1] * (len(chunks) - 1)
                speculation = generation.result.speculation
                assert speculation.acceptance_rate == 1.0
                assert speculation.num_fallback_rounds == speculation.num_reopens == 0

    run(scenario())


def test_a_request_without_speculation_causes_no_draft_traffic() -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            assert stack.draft_link is not None
            sent: list[object] = []
            stack.draft_link.send = sent.append  # type: ignore[assignment,method-assign]
            off: list[dict[str, Any]] = [{"speculation": False}, {"num_draft_tokens": 0}]
            for options in off:
                result = await stack.client.complete("abc", max_tokens=5, **GREEDY, **options)
                assert result.speculation.num_fallback_rounds == 0
                assert result.speculation.acceptance_rate is None
            assert sent == []

    run(scenario())


def test_one_seed_gives_one_answer_and_a_drawn_seed_replays_it() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            first = await stack.client.complete("abc", max_tokens=16, ignore_eos=True)
            again = await stack.client.complete("abc", max_tokens=16, ignore_eos=True, seed=first.seed)
            other = await stack.client.complete("abc", max_tokens=16, ignore_eos=True)
            assert first.token_ids == again.token_ids != other.token_ids

    run(scenario())


def test_stop_strings_and_ids_end_the_answer_the_same_way_with_and_without_drafts() -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            full = await stack.client.complete("abc", max_tokens=24, ignore_eos=True, **GREEDY)
            for k in (0, 4, 8):
                options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "num_draft_tokens": k, **GREEDY}
                by_text = await stack.client.complete("abc", stop=full.text[9:11], **options)
                end = full.text.index(full.text[9:11])
                assert by_text.text == full.text[:end]
                assert by_text.token_ids == full.token_ids[: end + 2]
                assert by_text.matched_stop == full.text[9:11]
                by_id = await stack.client.complete("abc", stop_token_ids=[full.token_ids[6]], **options)
                assert by_id.token_ids == full.token_ids[: full.token_ids.index(full.token_ids[6]) + 1]
                assert by_id.finish_reason is FinishReason.STOP
                assert by_id.matched_stop == full.token_ids[6]
                assert by_id.speculation.acceptance_rate == (1.0 if k else None)

    run(scenario())


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_leaving_early_frees_both_services_and_no_neighbour_notices(num_chunks: int) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, toy_engine(step_delay_s=0.002)) as stack:
            alone = await token_lists(stack, PROMPTS[:2], max_tokens=20, **GREEDY)
            leaving = stack.client.generate(PROMPTS[5], max_tokens=200, ignore_eos=True, **GREEDY)
            neighbours = asyncio.create_task(token_lists(stack, PROMPTS[:2], max_tokens=20, **GREEDY))

            async def leave() -> None:
                count = 0
                async for _ in leaving:
                    count += 1
                    if count == num_chunks:
                        break

            task = asyncio.create_task(leave())
            if num_chunks == 0:
                await until(lambda: stack.target.num_sessions == 3)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await neighbours == alone
            await stack.until_idle()
            await until(lambda: stack.servicer._admission.num_running == 0)

    run(scenario())


def test_a_request_cancelled_while_it_waits_for_room_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        engine = toy_engine(step_delay_s=0.002)
        async with all_services(self_draft, engine, limits=Limits(max_sessions=1)) as stack:
            first = asyncio.create_task(stack.client.complete("abc", max_tokens=60, ignore_eos=True, **GREEDY))
            await until(lambda: stack.target.num_sessions == 1)
            second = asyncio.create_task(stack.client.complete("abd", max_tokens=60, **GREEDY))
            await until(lambda: stack.target.num_sessions == 2)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert len((await first).token_ids) == 60
            await stack.until_idle()

    run(scenario())


def test_a_draft_service_that_dies_and_comes_back_changes_no_token() -> None:
    async def scenario() -> None:
        async with all_services(self_draft, toy_engine(step_delay_s=0.001)) as stack:
            assert stack.draft is not None
            options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, **COUPLED}
            expected = await stack.client.complete("abc", speculation=False, **options)
            generation = stack.client.generate("abc", **options)
            drafted: list[int] = []
            async for chunk in generation:
                drafted.append(chunk.num_draft_tokens)
                if len(drafted) == 3:
                    await stack.draft.stop()
                if len(drafted) == 10:
                    with stack.target_held():
                        await stack.restart_draft()
            result = generation.result
            assert result.token_ids == expected.token_ids
            assert drafted[0] > 0
            assert 0 in drafted
            assert drafted[-2] > 0
            assert result.speculation.num_fallback_rounds > 0
            assert result.speculation.num_reopens >= 1
            await stack.until_idle()

    run(scenario())


def test_a_draft_service_that_never_was_costs_drafts_and_nothing_else() -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            assert stack.draft is not None
            assert stack.draft_link is not None
            expected = await stack.client.complete("abc", max_tokens=20, **COUPLED)
            await stack.draft.stop()
            await until(lambda: not stack.draft_link.is_up)  # type: ignore[union-attr]
            result = await stack.client.complete("abc", max_tokens=20, **COUPLED)
            assert result.token_ids == expected.token_ids
            assert result.speculation.acceptance_rate is None
            assert result.speculation.num_fallback_rounds > 0

    run(scenario())


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_sessions_closed_behind_the_orchestrators_back_are_opened_again_with_the_same_output(
    sampling: dict[str, Any],
) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **sampling}
            expected = await stack.client.complete("abc", **options)
            generation = stack.client.generate("abc", **options)
            count = 0
            async for _ in generation:
                count += 1
                if count in (2, 6):
                    _forget_all_sessions(stack)
            assert generation.result.token_ids == expected.token_ids
            assert generation.result.speculation.num_reopens >= 1
            await stack.until_idle()

    run(scenario())


def _forget_all_sessions(stack: Stack) -> None:
    assert stack.target.scheduler is not None
    stack.target.scheduler.table.end_stream(StreamId(1))


def test_a_target_that_restarts_is_a_pause_and_changes_no_token() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **COUPLED}
            expected = await stack.client.complete("abc", **options)
            generation = stack.client.generate("abc", **options)
            count = 0
            async for _ in generation:
                count += 1
                if count == 3:
                    await stack.target.stop()
                    await stack.target.start()
            assert generation.result.token_ids == expected.token_ids
            assert generation.result.speculation.num_reopens >= 1

    run(scenario())


def test_a_target_that_comes_back_as_another_model_never_continues_an_answer() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            generation = stack.client.generate("abc", max_tokens=60, ignore_eos=True, **GREEDY)

            async def replace_the_target_midway() -> None:
                async for _ in generation:
                    await stack.target.stop()
                    other = hashed_logits(64, seed=4)
                    stack.target.engine = ToyEngine(other, 64, max_context=256, num_blocks=512, fingerprint="other")
                    await stack.target.start()

            with pytest.raises(TandemError, match="came back with other numerics") as caught:
                await replace_the_target_midway()
            assert caught.value.code == "ABORTED"
            assert (await stack.client.complete("abc", max_tokens=3, ignore_eos=True)).num_completion_tokens == 3

    run(scenario())


def test_a_target_that_stays_away_is_unavailable_and_what_was_streamed_remains() -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(target_patience=TargetPatience(reconnect_s=0.1))
        async with all_services(similar_draft, settings=settings) as stack:
            generation = stack.client.generate("abc", max_tokens=60, ignore_eos=True, **GREEDY)

            async def stop_the_target_midway() -> None:
                async for _ in generation:
                    await stack.target.stop()

            with pytest.raises(UnavailableError, match=r"target service at 127\.0\.0\.1"):
                await stop_the_target_midway()
            assert generation.token_ids
            with pytest.raises(UnavailableError):
                await stack.client.complete("abc")
            await stack.target.start()
            await until(lambda: stack.target_link.is_up)
            expected = await stack.client.complete("abc", max_tokens=60, ignore_eos=True, **GREEDY)
            assert expected.token_ids[: len(generation.token_ids)] == generation.token_ids

    run(scenario())


@pytest.mark.parametrize("make_proposer", [None, self_draft])
def test_a_deadline_ends_the_request_and_frees_both_services(make_proposer: Callable[[], Proposer] | None) -> None:
    async def scenario() -> None:
        async with all_services(make_proposer, toy_engine(step_delay_s=0.01)) as stack:
            for _ in range(3):
                with pytest.raises(DeadlineExceededError):
                    await stack.client.complete("abc", max_tokens=200, ignore_eos=True, timeout=0.1, **GREEDY)
            await stack.until_idle()
            with pytest.raises(DeadlineExceededError):
                await stack.client.complete("abc", timeout=0.0)
            assert len((await stack.client.complete("abc", max_tokens=3, ignore_eos=True)).token_ids) == 3

    run(scenario())


def test_two_orchestrators_share_one_target_and_one_draft() -> None:
    async def scenario() -> None:
        async with (
            replicas(similar_draft) as (target, draft),
            orchestrating(target, draft) as one,
            orchestrating(target, draft) as two,
        ):
            expected = await token_lists(one, PROMPTS, max_tokens=24, **COUPLED)
            first, second = await asyncio.gather(
                token_lists(one, PROMPTS, max_tokens=24, **COUPLED),
                token_lists(two, PROMPTS, max_tokens=24, **COUPLED),
            )
            assert first == second == expected
            await one.until_idle()

    run(scenario())


def test_an_orchestrator_that_leaves_frees_its_sessions_and_not_its_neighbours() -> None:
    async def scenario() -> None:
        async with (
            replicas(similar_draft, toy_engine(step_delay_s=0.002)) as (target, draft),
            orchestrating(target, draft) as staying,
        ):
            async with orchestrating(target, draft) as leaving:
                lost = asyncio.create_task(leaving.client.complete("abc", max_tokens=200, ignore_eos=True))
                await until(lambda: target.num_sessions == 1)
                kept = asyncio.create_task(staying.client.complete("abd", max_tokens=40, ignore_eos=True))
                await until(lambda: target.num_sessions == 2)
            with pytest.raises(TandemError):
                await lost
            assert len((await kept).token_ids) == 40
            await staying.until_idle()

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "text: the prompt is empty"),
        ([], {}, "tokens: the prompt is empty"),
        ([64], {}, "token id 64"),
        ("a" * 300, {}, "context of 256"),
        ("abc", {"max_tokens": 0}, "stopping.max_tokens"),
        ("abc", {"max_tokens": 5, "min_tokens": 6}, "stopping.min_tokens"),
        ("abc", {"temperature": float("nan")}, "sampling.temperature"),
        ("abc", {"top_p": -0.1}, "sampling.top_p"),
        ("abc", {"stop": [""]}, "stopping.stop"),
        ("abc", {"num_draft_tokens": 1000}, "speculation.num_draft_tokens"),
    ],
)
def test_bad_input_is_refused_and_the_next_request_is_served(
    prompt: str | list[int], options: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        async with all_services(None) as stack:
            with pytest.raises(InvalidRequestError, match=message):
                await stack.client.complete(prompt, **options)
            assert stack.target.num_sessions == 0
            assert (await stack.client.complete("abc", max_tokens=2, ignore_eos=True)).num_completion_tokens == 2

    run(scenario())


def test_a_request_that_could_never_fit_the_pool_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with all_services(None, toy_engine(max_context=100_000)) as stack:
            with pytest.raises(OverloadedError, match="never: prompt of 3 tokens"):
                await stack.client.complete("abc", max_tokens=90_000)
            assert (await stack.client.complete("abc", max_tokens=2, ignore_eos=True)).num_completion_tokens == 2

    run(scenario())


def test_beyond_max_requests_one_is_served_and_the_others_are_told_in_every_wave() -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(max_requests=1)
        async with all_services(None, toy_engine(step_delay_s=0.002), settings) as stack:
            for _ in range(3):
                wave = [stack.client.complete("abc", max_tokens=20, ignore_eos=True) for _ in range(3)]
                results = await asyncio.gather(*wave, return_exceptions=True)
                refused = [result for result in results if isinstance(result, OverloadedError)]
                assert len(refused) == 2
                assert "0 of 1 places" in str(refused[0])

    run(scenario())


def test_an_unknown_policy_is_unimplemented_by_name() -> None:
    async def scenario() -> None:
        speculation = pb.SpeculationOptions(verification_policy=77)
        async with all_services(None) as stack, open_channel(stack.client.address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(text="abc", speculation=speculation)).read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "verification_policy 77 is not offered" in str(caught.value.details())

    run(scenario())


def test_info_tells_models_loads_and_running_requests() -> None:
    async def scenario() -> None:
        async with all_services(self_draft, toy_engine(step_delay_s=0.002)) as stack:
            running = asyncio.create_task(stack.client.complete("abc", max_tokens=60, ignore_eos=True))
            await until(lambda: stack.target_link.load.running == 1)
            info = await stack.client.info()
            assert info.num_running_requests == 1
            assert [(one.model.model_id, one.num_sessions) for one in info.targets] == [("toy", 1)]
            assert [one.proposer for one in info.drafts] == ["draft_model"]
            assert info.target_load.running == 1
            await running

    run(scenario())
