"""What an engine takes in memory: rows as its config says, nothing of its file, linears for few numbers of rows."""

import dataclasses

import numpy as np
import pytest
import torch

from engine.batch import MAX_EXACT_ROWS, MIN_ROWS, BatchItem, build_forward_batch, num_linear_rows
from engine.kv.cache import KvCache
from engine.models.linear import PackedLinear
from engine.models.llama import build_llama
from tests.engine.engines import DTYPES
from tests.engine.tiny_models import FAMILIES
from tests.fixtures.tiny_models import random_model


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=[*DTYPES])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_key_value_memory_is_what_the_config_says_a_token_takes(family: str, dtype: torch.dtype) -> None:
    config = FAMILIES[family]
    memory = KvCache(config, dtype, num_blocks=3, block_size=5).memory
    assert memory.nbytes == 3 * 5 * config.kv_bytes_per_token(dtype.itemsize)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_norms_share_no_memory_with_the_file_so_that_it_need_not_stay_mapped(family: str) -> None:
    loaded = random_model(FAMILIES[family])
    of_file = {weight.untyped_storage().data_ptr() for weight in loaded.weights.values()}
    built = build_llama(loaded, torch.float32, PackedLinear, 16)
    norms = [built.final_norm]
    for layer in built.layers:
        norms += [layer.attention_norm, layer.mlp_norm]
        if layer.head_norms is not None:
            norms += [getattr(layer.head_norms, field.name) for field in dataclasses.fields(layer.head_norms)]
    assert of_file.isdisjoint(norm.untyped_storage().data_ptr() for norm in norms)


def test_steps_put_few_different_numbers_of_rows_through_the_linears() -> None:
    taken = {num_rows: num_linear_rows(num_rows) for num_rows in range(1, 513)}
    assert len(set(taken.values())) < 90
    for num_rows, num_taken in taken.items():
        assert max(num_rows, MIN_ROWS) <= num_taken < max(num_rows * 9 / 8, MIN_ROWS + 1)
        assert num_linear_rows(num_taken) == num_taken
        assert num_taken == max(num_rows, MIN_ROWS) or num_rows > MAX_EXACT_ROWS


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 129])
def test_a_step_has_the_rows_of_its_linears_and_no_more_tokens(num_tokens: int) -> None:
    items = [BatchItem(np.arange(num_tokens), 0, range(num_tokens), 1)]
    batch = build_forward_batch(items, block_size=1)
    assert batch.num_tokens == num_tokens
    assert batch.num_rows == num_linear_rows(num_tokens)
    assert batch.token_ids[:num_tokens].tolist() == list(range(num_tokens))
