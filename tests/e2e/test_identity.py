"""On the real model, through all three services: no draft, precision or batch changes a token.

Short forms; `make identity` runs them in full and writes docs/reports/identity.md.
"""

import pytest

from tests.e2e import identity
from tests.e2e.deployment import Deployment
from tests.identity.conditions import CONDITIONS

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_GREEDY_TOKENS = 8, 48
NUM_SEEDS, NUM_SAMPLED_TOKENS = 4, 32
CONDITION_NAMES = {
    "random drafts",
    "k of 0..8 changing every round",
    "steps of at most 16 tokens",
    "every item and answer twice",
    "two threads, steps of at most 16 tokens, 15 mixed neighbours",
}


@pytest.mark.parametrize("mode", identity.GREEDY_MODES, ids=lambda mode: mode.name)
def test_greedy_identity_in_float32_equals_transformers(float32: Deployment, mode: identity.Mode) -> None:
    requests = identity.greedy_requests(NUM_PROMPTS, NUM_GREEDY_TOKENS)
    recorded = [tuple(case["token_ids"][:NUM_GREEDY_TOKENS]) for case in identity.load_fixture()[:NUM_PROMPTS]]
    result = identity.run_mode(mode, float32, requests)
    assert result.token_ids == recorded
    assert result.happened


def test_greedy_identity_in_bfloat16_on_off_and_batched(bfloat16: Deployment) -> None:
    requests = identity.greedy_requests(NUM_PROMPTS, NUM_GREEDY_TOKENS)
    off, *others = (identity.run_mode(mode, bfloat16, requests) for mode in identity.BF16_MODES)
    for other in others:
        assert other.token_ids == off.token_ids, other.name
        assert other.happened, other.name


def test_same_seed_gives_the_same_tokens_whatever_drafts(float32: Deployment) -> None:
    requests = identity.sampled_requests(NUM_SEEDS, NUM_SAMPLED_TOKENS)
    off, *others = (identity.run_mode(mode, float32, requests) for mode in identity.SAMPLED_MODES)
    assert len(set(off.token_ids)) == NUM_SEEDS
    for other in others:
        assert other.token_ids == off.token_ids, other.name
        assert other.happened, other.name


def test_no_condition_changes_a_token() -> None:
    conditions = [condition for condition in CONDITIONS if condition.name in CONDITION_NAMES]
    assert len(conditions) == len(CONDITION_NAMES)
    requests = identity.mixed_requests(2, 12)
    off, *others = identity.run_conditions(conditions, requests)
    assert len(set(off.token_ids)) == len(requests)
    for other in others:
        assert other.token_ids == off.token_ids, other.name
        assert other.logprobs == off.logprobs, other.name
        assert other.happened, other.name
