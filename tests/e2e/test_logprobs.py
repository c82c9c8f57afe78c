"""Log-probabilities of the real model, through all three services: no draft changes a bit of them."""

from typing import Any

import pytest

from tandem.client import GenerationResult, SyncTandemClient
from tandem.types import FinishReason
from tests.e2e.deployment import Deployment
from tests.e2e.identity import load_fixture

pytestmark = pytest.mark.model

NUM_TOP = 5
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "seed": 11}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "min_p": 0.02,
    "top_p": 0.97,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_tokens": 12,
    "seed": 2024,
}


def ask(address: str, **options: Any) -> GenerationResult:
    prompt = load_fixture()[0]["prompt_ids"]
    with SyncTandemClient(address) as client:
        return client.complete(prompt, logprobs=True, top_logprobs=NUM_TOP, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("sampling", "mode"), [(GREEDY, "raw"), (SAMPLED, "processed")], ids=["greedy raw", "coupled processed"]
)
def test_logprobs_with_drafts_are_the_same_bits_as_without(
    float32: Deployment, sampling: dict[str, Any], mode: str
) -> None:
    options = {"max_tokens": 12, "logprobs_mode": mode, **sampling}
    off = ask(float32.ngram, speculation=False, **options)
    assert len(off.logprobs) == len(off.token_ids) == 12
    for address in (float32.ngram, float32.self_draft):
        on = ask(address, num_draft_tokens=4, **options)
        assert (on.token_ids, on.logprobs) == (off.token_ids, off.logprobs)
    assert on.speculation.acceptance_rate == 1.0
    for token_id, entry in zip(off.token_ids, off.logprobs, strict=True):
        assert (token_id in entry.top_token_ids) == (entry.rank <= NUM_TOP)
        assert sampling is not GREEDY or entry.rank == 1
        is_certain = len(entry.top_token_ids) == 1
        assert entry.logprob == 0.0 if is_certain else entry.logprob < 0.0


def test_every_parameter_in_one_request_gives_with_drafts_what_it_gives_without(float32: Deployment) -> None:
    plain = ask(float32.ngram, speculation=False, max_tokens=1, **GREEDY)
    likeliest, *others = plain.logprobs[0].top_token_ids
    options = {**EVERYTHING, "logit_bias": {likeliest: -100.0, others[0]: 1.5}, "max_tokens": 24}
    free = ask(float32.ngram, speculation=False, **options)
    stop = free.text[2 * len(free.text) // 3 :][:2]
    off = ask(float32.ngram, speculation=False, stop=[stop, "\nnever\n"], **options)
    assert off.finish_reason is FinishReason.STOP
    assert 12 <= len(off.token_ids) == len(off.logprobs) < 24
    assert likeliest not in off.token_ids
    for address in (float32.ngram, float32.self_draft):
        on = ask(address, num_draft_tokens=4, stop=[stop, "\nnever\n"], **options)
        assert (on.token_ids, on.text, on.logprobs) == (off.token_ids, off.text, off.logprobs)
        assert (on.finish_reason, on.matched_stop) == (FinishReason.STOP, stop)
    assert on.speculation.acceptance_rate == 1.0
