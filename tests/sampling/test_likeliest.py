"""The first tokens of a row are those of a stable sort of all."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.likeliest import by_logit, likeliest


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 700),
    count=st.integers(0, 800),
    shape_seed=st.integers(0, 2**32 - 1),
    digits=st.sampled_from([-1, 0, 5]),
    share_masked=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_the_first_of_a_row_are_those_of_a_stable_sort_without_masked_tokens(
    size: int, count: int, shape_seed: int, digits: int, share_masked: float
) -> None:
    generator = np.random.default_rng(shape_seed)
    logits = np.round(generator.standard_normal(size) * 4, digits).astype(np.float32)
    logits[generator.random(size) < share_masked] = -np.inf
    in_order = np.argsort(-logits, kind="stable")
    expected = in_order[logits[in_order] > -np.inf][:count]
    assert likeliest(torch.from_numpy(logits), count).tolist() == expected.tolist()


@pytest.mark.parametrize("count", [1, 50, 5000])
def test_a_large_vocabulary_is_no_different(count: int) -> None:
    logits = np.random.default_rng(1).standard_normal(50_021).astype(np.float32).round(2)
    assert (
        likeliest(torch.from_numpy(logits), count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()
    )


def test_order_is_that_of_the_numbers_and_ids_decide_among_equals() -> None:
    tiny = torch.finfo(torch.float32).tiny
    logits = torch.tensor([-1.0, -0.0, 0.0, tiny, -tiny, 3e38, -3e38, 0.0, -0.0, -torch.inf])
    assert by_logit(logits, torch.arange(9, -1, -1)).tolist() == [5, 3, 1, 2, 7, 8, 4, 0, 6, 9]


def test_the_lowest_finite_logit_is_not_taken_for_a_masked_one() -> None:
    lowest = torch.finfo(torch.float32).min
    assert likeliest(torch.tensor([lowest, -torch.inf, lowest]), 2).tolist() == [0, 2]
