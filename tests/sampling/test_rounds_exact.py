"""Whole rounds of the real code over every outcome of its noise: two in a row emit what plain decoding would."""

from typing import Any

import pytest

from tandem.types import DraftProbsTransport, VerificationPolicy
from tests.sampling.helpers import make_spec
from tests.sampling.rounds import Rounds
from tests.sampling.tables import random_logits

SPARSE, FULL, ONE_HOT = DraftProbsTransport.SPARSE, DraftProbsTransport.FULL, DraftProbsTransport.ONE_HOT
POLICIES = pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])


def deviation(
    policy: VerificationPolicy,
    num_drafts: tuple[int, ...],
    transport: DraftProbsTransport = SPARSE,
    *,
    seed: int = 9,
    vocab_size: int = 4,
    zeros: float = 0.2,
    **fields: Any,
) -> float:
    """Total variation between rounds and plain decoding for a random pair of models."""
    target, draft = random_logits(seed, vocab_size, zeros), random_logits(seed + 1000, vocab_size, zeros)
    return Rounds(make_spec(policy, transport, **fields), target, draft, num_drafts).deviation()


@POLICIES
@pytest.mark.parametrize("transport", [SPARSE, FULL, ONE_HOT])
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "seed"),
    [(4, (2, 1), 2), (4, (1, 2), 3), (4, (4,), 4), (5, (1, 1), 5), (5, (3,), 6), (6, (2,), 7)],
)
def test_rounds_emit_plain_decodings_distribution(
    policy: VerificationPolicy,
    transport: DraftProbsTransport,
    vocab_size: int,
    num_drafts: tuple[int, ...],
    seed: int,
) -> None:
    assert deviation(policy, num_drafts, transport, seed=seed, vocab_size=vocab_size) < 1e-9


@POLICIES
@pytest.mark.parametrize("num_drafts", [(2, 2), (3, 1)])
def test_longer_pairs_of_rounds_do_so_too(policy: VerificationPolicy, num_drafts: tuple[int, ...]) -> None:
    assert deviation(policy, num_drafts, zeros=0.4) < 1e-9


PROCESSORS: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0, "presence_penalty": 0.5},
    {"repetition_penalty": 1.7, "prompt": (1, 2, 1)},
    {"top_k": 2, "temperature": 0.8},
    {"top_p": 0.75},
    {"min_p": 0.5, "temperature": 1.5},
    {"logit_bias": {0: -100.0, 1: 1.0}},
    {"bad_token_ids": (1,)},
    {"allowed_token_ids": (0, 2)},
    {"min_tokens": 2, "eos": frozenset({0})},
    {"sample_index": 3, "seed": 2**63},
]


@POLICIES
@pytest.mark.parametrize("fields", PROCESSORS, ids=lambda fields: "-".join(fields))
def test_every_processor_acts_on_draft_rows_as_on_plain_ones(
    policy: VerificationPolicy, fields: dict[str, Any]
) -> None:
    assert deviation(policy, (2,), zeros=0.0, **fields) < 1e-9
