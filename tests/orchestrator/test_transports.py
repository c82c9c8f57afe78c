"""How q travels through real services: what is asked for is what is used, it is exact, and padding never matters."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from draft_service.limits import DraftLimits
from draft_service.proposers.base import Proposer
from draft_service.proposers.draft_model import DraftModelProposer
from engine.backends.toy_backend import LogitsOf, ToyEngine, hashed_logits
from tandem.client import GenerationResult, InvalidRequestError
from tandem.types import DraftProbsTransport, VerificationPolicy
from tandem.vocabulary import Vocabulary
from tests.orchestrator.services import Stack, all_services, ngram_draft, similar_draft
from tests.sampling.helpers import worst_deviation

VOCAB = 300  # more than `sparse` sends
VOCABULARY = Vocabulary.toy(VOCAB)
PROMPT = [1, 2, 3]
P = hashed_logits(VOCAB, seed=5, scale=1.5)
Q = hashed_logits(VOCAB, seed=5, scale=1.5, blend=0.5)
NUM_ANSWERS = 500


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def padded(logits_of: LogitsOf, num_ids: int, value: float) -> LogitsOf:
    """The logits with an output head of `num_ids` rows, those past the vocabulary's at a fixed value."""

    def longer(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return np.pad(logits_of(token_ids), (0, num_ids - VOCAB), constant_values=value).astype(np.float32)

    return longer


def draft(num_ids: int = VOCAB) -> Proposer:
    """Q, whose padding would win every draw if it took part."""
    engine = ToyEngine(padded(Q, num_ids, 50.0), num_ids, num_blocks=2048)
    return DraftModelProposer(engine, "draft", VOCABULARY.id_bytes_hash, num_token_ids=VOCAB)


def target(num_ids: int = VOCAB) -> ToyEngine:
    """P, whose padding is never sampled."""
    return ToyEngine(padded(P, num_ids, -50.0), num_ids, num_blocks=2048)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


# The target's likeliest first tokens, each a group of its own; a group for the rest.
LIKELIEST = np.argsort(P(PROMPT))[:-5:-1].tolist()


def group(first: int, second: int) -> tuple[int, int]:
    return LIKELIEST.index(first) if first in LIKELIEST else len(LIKELIEST), second % 2


def expected_pairs() -> npt.NDArray[np.float64]:
    """The target's distribution of the first two tokens' groups."""
    joint = np.zeros((len(LIKELIEST) + 1, 2))
    for first, chance in enumerate(softmax(P(PROMPT))):
        for second, chance_then in enumerate(softmax(P([*PROMPT, first]))):
            joint[group(first, second)] += chance * chance_then
    return joint


async def observed_pairs(stack: Stack, transport: DraftProbsTransport, policy: VerificationPolicy) -> Any:
    """How often the first two tokens of an answer a seed are of each pair of groups."""
    counts = np.zeros((len(LIKELIEST) + 1, 2), dtype=np.int64)
    places = asyncio.Semaphore(64)
    num_rejected = 0

    async def answer(seed: int) -> None:
        nonlocal num_rejected
        async with places:
            result = await stack.client.complete(
                PROMPT,
                seed=seed,
                max_tokens=3,
                num_draft_tokens=2,
                ignore_eos=True,
                verification_policy=policy,
                draft_probs_transport=transport,
            )
        assert (result.verification_policy, result.draft_probs_transport) == (policy, transport)
        assert result.speculation.num_fallback_rounds == 0
        counts[group(*result.token_ids[:2])] += 1
        num_rejected += result.speculation.num_draft_tokens - result.speculation.num_accepted

    await asyncio.gather(*(answer(seed) for seed in range(NUM_ANSWERS)))
    assert num_rejected > NUM_ANSWERS / 4  # the recovered tokens are put to the test too
    return counts


@pytest.mark.parametrize("transport", [DraftProbsTransport.SPARSE, DraftProbsTransport.FULL])
@pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])
def test_what_comes_out_is_distributed_as_the_target(
    policy: VerificationPolicy, transport: DraftProbsTransport
) -> None:
    async def scenario() -> None:
        async with all_services(draft, target(), vocabulary=VOCABULARY) as stack:
            counts = await observed_pairs(stack, transport, policy)
        assert worst_deviation(counts, expected_pairs()) < 5

    run(scenario())


@pytest.mark.parametrize(
    ("draft_ids", "target_ids"), [(VOCAB + 28, VOCAB), (VOCAB, VOCAB + 28), (VOCAB + 5, VOCAB + 9)]
)
def test_whole_distributions_meet_across_output_heads_that_differ_by_padding(
    draft_ids: int, target_ids: int
) -> None:
    async def answer(draft_ids: int, target_ids: int) -> tuple[int, ...]:
        async with all_services(lambda: draft(draft_ids), target(target_ids), vocabulary=VOCABULARY) as stack:
            result = await stack.client.complete(
                PROMPT,
                seed=3,
                max_tokens=60,
                ignore_eos=True,
                verification_policy="block",
                draft_probs_transport="full",
            )
        assert result.draft_probs_transport is DraftProbsTransport.FULL
        assert result.speculation.num_fallback_rounds == 0
        assert 0 < result.speculation.num_accepted < result.speculation.num_draft_tokens
        return result.token_ids

    async def scenario() -> None:
        assert await answer(draft_ids, target_ids) == await answer(VOCAB, VOCAB)

    run(scenario())


def test_what_the_draft_service_cannot_send_becomes_one_hot_and_the_answer_says_so() -> None:
    async def scenario() -> None:
        async with all_services(ngram_draft) as stack:
            for transport in (None, "sparse", "full"):
                result = await stack.client.complete(
                    "abcabcab", max_tokens=20, verification_policy="rejection", draft_probs_transport=transport
                )
                assert result.draft_probs_transport is DraftProbsTransport.ONE_HOT
                assert result.speculation.num_draft_tokens > 0
                assert result.speculation.num_fallback_rounds == 0

    run(scenario())


@pytest.mark.parametrize(
    ("options", "transport"),
    [
        ({"temperature": 0}, DraftProbsTransport.ONE_HOT),
        ({}, DraftProbsTransport.COUPLED),
        ({"draft_probs_transport": "one_hot"}, DraftProbsTransport.ONE_HOT),
        ({"verification_policy": "block"}, DraftProbsTransport.SPARSE),
        ({"verification_policy": "rejection", "draft_probs_transport": "one_hot"}, DraftProbsTransport.ONE_HOT),
        ({"verification_policy": "rejection", "draft_probs_transport": "full"}, DraftProbsTransport.FULL),
    ],
)
def test_the_answer_says_which_transport_was_chosen(
    options: dict[str, Any], transport: DraftProbsTransport
) -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            result = await stack.client.complete("abc", max_tokens=20, ignore_eos=True, **options)
        assert result.draft_probs_transport is transport
        assert result.speculation.num_accepted > 0
        assert result.speculation.num_fallback_rounds == 0

    run(scenario())


def test_a_transport_that_the_policy_cannot_use_is_refused_naming_both() -> None:
    async def scenario() -> None:
        async with all_services(similar_draft) as stack:
            with pytest.raises(
                InvalidRequestError, match="'coupled' cannot be used under verification policy 'block'"
            ):
                await stack.client.complete("abc", verification_policy="block", draft_probs_transport="coupled")
            assert stack.target.num_sessions == 0

    run(scenario())


async def with_room_for(num_draft_probs_bytes: int, **options: Any) -> GenerationResult:
    """An answer with whole distributions, from a draft service whose proposals hold so many bytes of them."""
    limits = DraftLimits(max_draft_probs_bytes=num_draft_probs_bytes)
    async with all_services(draft, target(), vocabulary=VOCABULARY, draft_limits=limits) as stack:
        asked: dict[str, Any] = {"verification_policy": "rejection", "draft_probs_transport": "full", **options}
        return await stack.client.complete(PROMPT, seed=3, max_tokens=12, ignore_eos=True, **asked)


def test_a_draft_service_with_room_for_two_distributions_drafts_two_tokens_a_round() -> None:
    async def scenario() -> None:
        result = await with_room_for(2 * 4 * VOCAB, num_draft_tokens=5)
        assert len(result.speculation.num_draft_tokens_per_pos) == 2
        assert result.speculation.num_fallback_rounds == 0

    run(scenario())


def test_a_draft_service_with_room_for_none_is_asked_once_and_the_answer_is_plain_decodings() -> None:
    async def scenario() -> None:
        result = await with_room_for(4 * VOCAB - 1)
        plain = await with_room_for(4 * VOCAB - 1, speculation=False)
        assert result.token_ids == plain.token_ids
        assert result.speculation.num_draft_tokens == result.speculation.num_reopens == 0
        assert result.speculation.num_fallback_rounds == 11

    run(scenario())
