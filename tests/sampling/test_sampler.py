"""The selection rule: the lowest id among the largest, whatever the shape, the precision and the values."""

import pytest
import torch

from engine.sampling.sampler import finite_argmax, select

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("shape", [(500,), (7, 500), (2, 3, 500)])
def test_the_first_of_the_largest_is_selected(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scores = torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = (scores == scores.amax(dim=-1, keepdim=True)).to(torch.int8).cumsum(dim=-1).eq(0).sum(dim=-1)
    selected = select(scores)
    assert selected.dtype == torch.int64
    assert torch.equal(selected, expected)


@DTYPES
def test_a_row_whose_largest_is_not_finite_has_no_argmax(dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 40, dtype=dtype)
    logits[:, 9] = 1.0
    logits[1, 3], logits[2, 20] = torch.nan, torch.inf
    logits[3, 20], logits[4] = -torch.inf, -torch.inf
    assert finite_argmax(logits).tolist() == [9, -1, -1, 9, -1]
