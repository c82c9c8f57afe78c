"""A request has one answer, under `greedy` and `coupled`, however it is run; tests/e2e has it on the real model."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.identity import models
from tests.identity.conditions import CONDITIONS, OFF, Condition, Ran, Request, run
from tests.identity.models import Model

GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.3,
    "seed": 11,
    "logprobs": True,
    "top_logprobs": 2,
}
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED}
PROMPTS = ("prompt", "ab" * 20 + "c", "a longer prompt " * 5, "once upon a time there was " * 4)


def requests(sampling: str) -> list[Request]:
    return [Request(prompt, {"max_tokens": 24, "ignore_eos": True, **SAMPLINGS[sampling]}) for prompt in PROMPTS]


@functools.cache
def model_of(make_model: Callable[[], Model]) -> Model:
    return make_model()


@functools.cache
def plain(make_model: Callable[[], Model], sampling: str) -> Ran:
    """Each request alone, with speculation off."""
    return asyncio.run(run(model_of(make_model), OFF, requests(sampling)))


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("make_model", [models.toy, models.tiny])
def test_no_condition_changes_a_token(make_model: Callable[[], Model], sampling: str, condition: Condition) -> None:
    expected = plain(make_model, sampling)
    assert OFF.happened(expected)
    assert len(set(expected.token_ids)) == len(PROMPTS)
    ran = asyncio.run(asyncio.wait_for(run(model_of(make_model), condition, requests(sampling)), 60))
    assert ran.token_ids == expected.token_ids
    assert ran.logprobs == expected.logprobs
    assert [result.text for result in ran.results] == [result.text for result in expected.results]
    assert condition.happened(ran)
