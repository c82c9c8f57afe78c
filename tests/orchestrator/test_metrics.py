"""What the three services export is what happened: the sums of what the answers themselves carried."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import Any

import pytest

from draft_service.limits import DraftLimits
from orchestrator.recording import AnswerRecord
from orchestrator.server import OrchestratorSettings
from orchestrator.tracing import NoTracer
from tandem.client import GenerationResult, TandemError
from target_service.limits import Limits
from tests.orchestrator.fakes import make_sequence, until
from tests.orchestrator.pooled import pooled
from tests.orchestrator.services import (
    Stack,
    all_services,
    self_draft,
    similar_draft,
    toy_engine,
)
from tests.scraped import Scraped

PREFIX = "tandem_spec_decode_num_"
PER_POS = {"num_draft_tokens_per_pos": "draft_tokens_per_pos", "num_accepted_per_pos": "accepted_tokens_per_pos"}
REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 9 + 5 * number, "num_draft_tokens": number % 5, "seed": number, "ignore_eos": True} | sampling
    for number, sampling in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 0.9},
            {"temperature": 0.9, "verification_policy": "rejection"},
            {"temperature": 0.0, "stop": ["b"], "ignore_eos": False},
            {"temperature": 0.8, "verification_policy": "block"},
            {"temperature": 0.0, "n": 3},
        ]
    )
]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def answers(stack: Stack) -> list[GenerationResult]:
    """Of all requests at a time."""
    several = await asyncio.gather(*(stack.client.complete_many("abcab", **options) for options in REQUESTS))
    return [result for results in several for result in results]


def orchestrator(stack: Stack) -> Scraped:
    return Scraped.of(stack.servicer.metrics.all)


def target(stack: Stack) -> Scraped:
    assert stack.target.scheduler is not None
    return Scraped.of(stack.target.scheduler.metrics.all)


def draft(stack: Stack) -> Scraped:
    assert stack.draft is not None
    assert stack.draft.service is not None
    return Scraped.of(stack.draft.service.metrics.all)


def total(results: Sequence[GenerationResult], of: Callable[[GenerationResult], float]) -> float:
    return sum(map(of, results))


@pytest.mark.parametrize("make_proposer", [similar_draft, self_draft])
def test_acceptance_by_the_counters_is_that_of_the_answers(make_proposer: Any) -> None:
    async def scenario() -> None:
        async with all_services(make_proposer) as stack:
            results = await answers(stack)
            scraped = orchestrator(stack)
            drafted = total(results, lambda one: one.speculation.num_draft_tokens)
            accepted = total(results, lambda one: one.speculation.num_accepted)
            rounds = total(results, lambda one: one.speculation.num_rounds)
            assert (accepted == drafted) == (make_proposer is self_draft)
            assert accepted > 0
            assert scraped[f"{PREFIX}accepted_tokens_total"] / scraped[f"{PREFIX}draft_tokens_total"] == (
                accepted / drafted
            )
            length = 1 + scraped[f"{PREFIX}accepted_tokens_total"] / scraped["tandem_rounds_total"]
            assert length == 1 + accepted / rounds
            assert 0 < scraped[f"{PREFIX}drafts_total"] < rounds  # some rounds had no use for drafts
            for field, name in PER_POS.items():
                columns = zip_longest(*(getattr(one.speculation, field) for one in results), fillvalue=0)
                expected = {str(position): sum(column) for position, column in enumerate(columns)}
                counted = scraped.by(f"{PREFIX}{name}_total", "position")
                assert counted == {position: number for position, number in expected.items() if number}

    run(scenario())


def test_the_target_decided_and_the_draft_service_made_what_applications_saw() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            options = {"max_tokens": 21, "ignore_eos": True, "temperature": 0.9}
            await asyncio.gather(*(stack.client.complete("abc", seed=seed, **options) for seed in range(5)))
            seen, decided, made = orchestrator(stack), target(stack), draft(stack)
            for name in ("drafts_total", "draft_tokens_total"):
                assert seen[PREFIX + name] == decided[PREFIX + name] == made[PREFIX + name] > 0
            assert seen["tandem_rounds_total"] == decided["tandem_rounds_total"]
            assert seen[f"{PREFIX}accepted_tokens_total"] == decided[f"{PREFIX}accepted_tokens_total"] > 0
            for name in ("draft_tokens", "accepted_tokens"):
                name = f"{PREFIX}{name}_per_pos_total"
                assert seen.by(name, "position") == decided.by(name, "position")

    run(scenario())


def test_phases_tokens_and_latencies_are_those_of_the_answers() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            results = await answers(stack)
            scraped, decided, made = orchestrator(stack), target(stack), draft(stack)
            figures = [one.speculation for one in results]
            sums, counts = (scraped.by(f"tandem_round_phase_seconds_{what}", "phase") for what in ("sum", "count"))
            assert sums == pytest.approx(
                {
                    "draft_rpc": sum(one.draft_wait_s for one in figures),
                    "draft_compute": sum(one.draft_timing.compute_us for one in figures) / 1e6,
                    "verify_rpc": sum(one.verify_wait_s for one in figures),
                    "verify_compute": sum(one.verify_timing.compute_us for one in figures) / 1e6,
                    "queue": sum(one.draft_timing.queue_us + one.verify_timing.queue_us for one in figures) / 1e6,
                },
                abs=2e-6 * len(results),  # an answer's waits are whole microseconds
            )
            rounds = sum(one.num_rounds for one in figures)
            assert counts["verify_rpc"] == counts["verify_compute"] == counts["queue"] == rounds
            assert counts["draft_compute"] <= counts["draft_rpc"] < rounds
            for phase, there in (("verify_compute", decided), ("draft_compute", made)):
                assert there.value("tandem_round_phase_seconds_sum", phase=phase) == pytest.approx(sums[phase])
            num_tokens = total(results, lambda one: len(one.token_ids))
            assert scraped["tandem_generated_tokens_total"] == num_tokens
            assert scraped["tandem_time_to_first_token_seconds_count"] == len(results)
            assert scraped["tandem_inter_token_latency_seconds_count"] == num_tokens - len(results)
            assert scraped["tandem_inter_token_latency_seconds_sum"] == pytest.approx(
                total(results, lambda one: one.generation_s), abs=1e-6 * len(results)
            )
            assert scraped["tandem_prompt_tokens_total"] == total(results, lambda one: one.num_prompt_tokens)
            assert scraped.by("tandem_answers_total", "finish_reason") == {
                reason: sum(one.finish_reason.value == reason for one in results) for reason in ("stop", "length")
            }

    run(scenario())


def test_steps_and_memory_of_the_target_are_counted() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            steps = stack.record_steps()
            await answers(stack)
            assert target(stack)["tandem_requests_waiting"] == 0
            widths = [step.batch_rows for step in steps if step.batch_rows]
            scraped = target(stack)
            assert scraped["tandem_step_rows_sum"] == sum(widths)
            assert scraped["tandem_step_rows_count"] == scraped["tandem_step_requests_count"] == len(widths)
            assert scraped["tandem_step_seconds_sum"] == pytest.approx(
                sum(step.compute_us for step in steps if step.batch_rows) / 1e6
            )
            await stack.until_idle()
            assert target(stack)["tandem_kv_usage_ratio"] == 0
            assert sum(target(stack).by("tandem_kv_blocks", "state").values()) == 512

    run(scenario())


def test_what_runs_is_seen_while_it_runs() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, engine=toy_engine(step_delay_s=0.002)) as stack:
            generation = stack.client.generate("abc", max_tokens=100, ignore_eos=True, temperature=0.0, n=2)
            async with aclosing(aiter(generation)) as chunks:
                async for _ in chunks:
                    if len(generation.answers) == 2:
                        break
                assert orchestrator(stack)["tandem_requests_running"] == 2
                assert target(stack)["tandem_requests_running"] == draft(stack)["tandem_requests_running"] == 2
                assert 0 < target(stack)["tandem_kv_usage_ratio"] < 1
            await stack.until_free()
            assert orchestrator(stack)["tandem_requests_running"] == 0
            await until(lambda: orchestrator(stack).value("tandem_requests_total", status="CANCELLED") == 1)

    run(scenario())


def test_requests_are_counted_by_the_status_they_ended_with() -> None:
    async def scenario() -> None:
        settings = OrchestratorSettings(max_requests=2)
        async with all_services(None, settings=settings, limits=Limits(max_draft_tokens=4)) as stack:
            refused: list[dict[str, Any]] = [
                {"temperature": -1.0},  # INVALID_ARGUMENT
                {"n": 3},  # as well
                {"num_draft_tokens": 5},  # as well
            ]
            codes = []
            for options in refused:
                with pytest.raises(TandemError) as caught:
                    await stack.client.complete_many("abc", **options)
                codes.append(caught.value.code)
            await stack.client.complete("abc", max_tokens=2)
            with stack.target_held():
                running = asyncio.create_task(stack.client.complete_many("abc", n=2, max_tokens=2))
                await until(lambda: stack.servicer._admission.num_running == 2)
                with pytest.raises(TandemError) as caught:
                    await stack.client.complete("abc", max_tokens=2)
                codes.append(caught.value.code)
            await running
            counted = orchestrator(stack).by("tandem_requests_total", "status")
            assert counted["INVALID_ARGUMENT"] == codes.count("INVALID_ARGUMENT") == 3
            assert counted["RESOURCE_EXHAUSTED"] == codes.count("RESOURCE_EXHAUSTED") == 1
            assert counted["OK"] == 2

    run(scenario())


def test_fallbacks_reopens_replicas_and_breakers_are_seen() -> None:
    async def scenario() -> None:
        async with pooled(2, 1, make_engine=lambda: toy_engine(step_delay_s=0.002)) as cluster:

            def scraped() -> Scraped:
                return Scraped.of(cluster.servicer.metrics.all)

            assert scraped().by("tandem_replicas_up", "role") == {"target": 2, "draft": 1}
            assert set(scraped().by("tandem_replica_breaker_open", "address").values()) == {0}
            generation = cluster.client.generate("abc", max_tokens=60, ignore_eos=True, temperature=0.0)
            count = 0
            async for _ in generation:
                count += 1
                if count == 3:
                    await cluster.drafts[0].stop()
                    await cluster.target_with_sessions().stop()
            figures = generation.result.speculation
            now = scraped()
            assert now["tandem_fallback_rounds_total"] == figures.num_fallback_rounds > 0
            assert now["tandem_reopens_total"] == figures.num_reopens > 0
            assert now.by("tandem_replicas_up", "role") == {"target": 1, "draft": 0}
            assert now.by("tandem_replicas", "role") == {"target": 2, "draft": 1}
            link = cluster.target_pool.links[0]
            link.breaker.failed()
            assert scraped().value("tandem_replica_breaker_open", role="target", address=link.address) == 1

    run(scenario())


def test_what_went_wrong_in_a_round_that_was_never_committed_counts_too() -> None:
    async def scenario() -> None:
        async with all_services(None) as stack:
            sequence = make_sequence()
            record = AnswerRecord(sequence, stack.servicer.metrics, NoTracer().start("", ""))
            sequence.stats.num_fallback_rounds, sequence.stats.num_reopens = 1, 2
            record.end()
            scraped = orchestrator(stack)
            assert (scraped["tandem_fallback_rounds_total"], scraped["tandem_reopens_total"]) == (1, 2)
            assert scraped["tandem_rounds_total"] == 0

    run(scenario())


def test_items_that_a_replica_refuses_are_counted_by_code() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft, draft_limits=DraftLimits(max_sessions=1)) as stack:
            options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
            await asyncio.gather(*(stack.client.complete("abc", **options) for _ in range(3)))
            assert draft(stack).value("tandem_item_errors_total", code="NO_CAPACITY") > 0
            assert target(stack).by("tandem_item_errors_total", "code") == {}

    run(scenario())
