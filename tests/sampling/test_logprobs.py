"""Log-probabilities against a naive reference: values, ranks, lists, ties, and rows that know nothing of each other."""

import math

import numpy as np
import pytest
import torch

from engine.sampling.logprobs import token_logprobs
from engine.sampling.policies import VerifyRows, rows_of, verify
from engine.sampling.processors import process
from engine.sampling.sampler import select
from tandem.types import Proposal, TokenLogprobs
from tests.sampling.helpers import make_spec

VOCAB = 60


def naive(row: list[float], token_id: int, num_top: int) -> TokenLogprobs:
    """By its definition: an exact sum, and a sort of the whole vocabulary."""
    peak = max(row)
    total = math.fsum(math.exp(value - peak) for value in row)
    logprobs = [np.float32(value - peak - math.log(total)) for value in row]
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))
    top = [index for index in order if row[index] > -math.inf][:num_top]
    return TokenLogprobs(
        float(logprobs[token_id]),
        1 + order.index(token_id),
        tuple(top),
        tuple(float(logprobs[index]) for index in top),
    )


def rows_with_ties_and_masks(num_rows: int, seed: int) -> torch.Tensor:
    """Few distinct values, a third of them masked, float32 [N, V]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-6, 6, (num_rows, VOCAB), generator=generator).float() * 0.7
    rows[torch.rand((num_rows, VOCAB), generator=generator) < 0.3] = -math.inf
    return rows


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, VOCAB - 1, VOCAB, 3 * VOCAB])
def test_values_ranks_and_lists_are_those_of_the_naive_reference(num_top: int) -> None:
    rows = torch.cat(
        [
            torch.randn((20, VOCAB), generator=torch.Generator().manual_seed(1)) * 4,
            rows_with_ties_and_masks(20, seed=2),
        ]
    )
    for row in rows:
        possible = (row > -math.inf).nonzero()[:, 0].tolist()
        for token_id in possible[::7]:
            (ours,) = token_logprobs(row[None], [token_id], num_top)
            theirs = naive(row.tolist(), token_id, num_top)
            assert (ours.rank, ours.top_token_ids) == (theirs.rank, theirs.top_token_ids)
            np.testing.assert_allclose(
                [ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs], rtol=2e-7, atol=1e-12
            )


def test_among_equals_the_lowest_id_is_first_for_drafter_verifier_plain_decoding_and_rank_alike() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0])
    assert int(select(logits)) == 1
    spec = make_spec(temperature=0.0)
    for drafts, num_accepted in (((), 0), ((1,), 1), ((2,), 0)):
        request = VerifyRows(spec, spec.token_ids, Proposal(drafts))
        rows = logits.repeat(len(drafts) + 1, 1)
        decision = verify(process(rows, rows_of([request])), [request])[0]
        assert (decision.num_accepted, decision.next_token_id) == (num_accepted, 1)
    entries = token_logprobs(logits.repeat(4, 1), [0, 1, 2, 3], 3)
    assert [entry.rank for entry in entries] == [3, 1, 2, 4]
    assert {entry.top_token_ids for entry in entries} == {(1, 2, 0)}
    assert entries[1].logprob == entries[2].logprob


def test_a_masked_token_is_never_listed() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    (entry,) = token_logprobs(logits, [0], 4)
    assert entry.top_token_ids == (2, 0)
    assert math.fsum(map(math.exp, entry.top_logprobs)) == pytest.approx(1.0, abs=1e-7)


def test_a_row_gives_the_same_bits_alone_and_among_others_in_any_place() -> None:
    rows = torch.randn((9, 5000), generator=torch.Generator().manual_seed(3)) * 5
    token_ids = list(range(9))
    together = token_logprobs(rows, token_ids, 20)
    assert together == tuple(token_logprobs(rows[n : n + 1], [n], 20)[0] for n in range(9))
    assert together == token_logprobs(rows.flip(0), token_ids[::-1], 20)[::-1]
    strided = torch.stack([rows, rows + 1], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    assert together == token_logprobs(strided, token_ids, 20)


@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0, 90.0])
def test_a_token_that_is_not_certain_has_a_logprob_below_zero(gap: float) -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, gap, 0.0]]), [1], 0)
    assert entry.logprob == pytest.approx(-math.log1p(2 * math.exp(-gap)), rel=1e-6)
    assert entry.logprob < 0.0


def test_the_only_possible_token_has_logprob_zero_and_large_logits_do_not_overflow() -> None:
    entries = token_logprobs(torch.tensor([[-math.inf, -3e38], [3e38, -3e38]]), [1, 1], 2)
    assert entries[0] == TokenLogprobs(0.0, 1, (1,), (0.0,))
    lowest = float(np.finfo(np.float32).min)
    assert entries[1] == TokenLogprobs(lowest, 2, (0, 1), (0.0, lowest))


def test_every_row_needs_its_token() -> None:
    with pytest.raises(ValueError, match="zip"):
        token_logprobs(torch.zeros((2, 3)), [1], 0)
