"""What an engine takes in memory: key-value rows as its config says, and nothing of the file it was built from."""

import dataclasses

import pytest
import torch

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
