"""Speculation that would slow a shared target is held back, from requests that leave that to the server."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.backends.toy_backend import ToyEngine
from orchestrator.draft_length import AcceptanceKnown, DraftLength, best_length
from orchestrator.speculation_stats import SpeculationStats
from tandem.client import GenerationResult, Speculation
from tandem.types import Load
from tests.orchestrator.services import SETTINGS, TARGET_LOGITS, VOCAB, Stack, all_services, self_draft

OPTIONS: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "temperature": 0.8}
NUM_USERS = 64


def test_few_sessions_draft_and_many_do_not() -> None:
    survival = [0.7, 0.49, 0.34, 0.24]
    lengths = [best_length(survival, num_sessions, 11.0) for num_sessions in (1, 2, 4, 8, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (4, 0)


def test_the_length_is_the_one_with_the_most_tokens_in_a_time() -> None:
    survival = [0.6, 0.36, 0.21]
    for num_sessions in (1, 3, 9, 27):
        rates = [
            (1 + sum(survival[:length])) / (11 + num_sessions * (length + 1)) for length in range(len(survival) + 1)
        ]
        assert best_length(survival, num_sessions, 11.0) == rates.index(max(rates))


def test_rows_that_cost_nothing_are_all_drafted() -> None:
    assert best_length([0.5, 0.1, 0.01], 64, 1e6) == 3


def length_of(load: Load, known: AcceptanceKnown | None = None, stats: SpeculationStats | None = None) -> int:
    return DraftLength(known or AcceptanceKnown(), stats or SpeculationStats(), lambda: load).most(4)


def test_a_session_alone_and_a_target_that_says_nothing_hold_nothing_back() -> None:
    assert length_of(Load(step_sessions=1.0, step_overhead_rows=1.0)) == 4
    assert length_of(Load(step_sessions=64.0)) == 4
    assert length_of(Load(step_sessions=64.0, step_overhead_rows=11.0)) == 0
    assert length_of(Load(step_sessions=64.0, step_overhead_rows=float("nan"))) == 0  # of a target that is broken


def test_drafts_that_are_never_right_are_given_up_and_tried_again_one_day() -> None:
    load, known = Load(step_sessions=4.0, step_overhead_rows=11.0), AcceptanceKnown()
    assert length_of(load, known) > 0
    for _ in range(200):
        known.count(4, 0)
    assert length_of(load, known) == 0
    num_rounds = 0
    while length_of(load, known) == 0:
        known.count(0, 0)
        num_rounds += 1
        assert num_rounds < 10_000
    assert num_rounds > 100


def test_an_answer_that_is_easier_than_the_others_drafts_more() -> None:
    load, known, stats = Load(step_sessions=6.0, step_overhead_rows=11.0), AcceptanceKnown(), SpeculationStats()
    for _ in range(200):
        known.count(4, 1)
    shared = length_of(load, known)
    for _ in range(30):
        stats.count_round(4, 4)
    assert length_of(load, known, stats) > shared


def costly_engine() -> ToyEngine:
    """2 ms a step and half a millisecond a row, so that 64 sessions with 4 drafts each have steps of 162 ms."""
    return ToyEngine(
        TARGET_LOGITS, VOCAB, max_context=256, num_blocks=2048, step_delay_s=0.002, token_delay_s=0.0005
    )


async def of_many(stack: Stack, **options: Any) -> list[GenerationResult]:
    seeds = range(NUM_USERS)
    return await asyncio.gather(*(stack.client.complete("abc", seed=seed, **OPTIONS, **options) for seed in seeds))


def drafted(results: list[GenerationResult]) -> float:
    """Drafts a round."""
    figures: list[Speculation] = [result.speculation for result in results]
    return sum(one.num_draft_tokens for one in figures) / sum(one.num_rounds for one in figures)


def test_at_saturation_nothing_is_drafted_and_no_text_is_another() -> None:
    async def scenario() -> None:
        settings = replace(SETTINGS, draft_timeout_s=20.0, backs_off=True)
        async with all_services(self_draft, costly_engine(), settings) as stack:
            alone = await stack.client.complete("abc", seed=0, **OPTIONS)
            assert alone.speculation.num_draft_tokens / alone.speculation.num_rounds > 3
            plain = await of_many(stack, speculation=False)
            many = await of_many(stack)
            assert [one.token_ids for one in many] == [one.token_ids for one in plain]
            assert many[0].token_ids == alone.token_ids
            assert drafted(many) < 1
            assert sum(one.speculation.num_fallback_rounds for one in many) == 0
            named = await of_many(stack, num_draft_tokens=4)
            assert [one.token_ids for one in named] == [one.token_ids for one in plain]
            assert drafted(named) > 2  # who says how many gets them
            again = await stack.client.complete("abc", seed=0, **OPTIONS)
            assert again.speculation.num_draft_tokens / again.speculation.num_rounds > 2  # alone again

    asyncio.run(scenario())


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_an_answer_that_depends_on_its_drafts_gets_them_at_any_load(policy: str) -> None:
    async def scenario() -> None:
        settings = replace(SETTINGS, draft_timeout_s=20.0, backs_off=True)
        async with all_services(self_draft, costly_engine(), settings) as stack:
            await of_many(stack, speculation=False)
            many = await of_many(stack, verification_policy=policy)
            assert drafted(many) > 2

    asyncio.run(scenario())
