"""How a transformers model remembers what it has read, found out by having it read a little."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from engine.hf.caches import SequenceCaches, StateCaches
from engine.hf.causal_model import CausalModel
from engine.hf.paged_rows import LayerShape, PagedRows

# Layers that keep a key and a value of each token. A sliding window only masks most of them.
_LAYERS_OF_ROWS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
_NUM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A key and a value of each token in every layer; None for layers that keep nothing."""

    shapes: tuple[LayerShape | None, ...]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of `block_size` rows."""
        return block_size * sum(shape.row_bytes for shape in self.shapes if shape is not None)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A state into which tokens are folded, and perhaps something of each token."""

    state_bytes: int
    row_bytes: int

    def block_bytes(self, block_size: int) -> int:
        """Of rows and of one state: whoever has a block has a state, so the blocks bound the memory."""
        return self.state_bytes + block_size * self.row_bytes


def find_layout(model: CausalModel) -> RowLayout | StateLayout:
    """What the model's own cache keeps."""
    if all(type(layer) in _LAYERS_OF_ROWS for layer in _new_cache(model).layers):
        return RowLayout(tuple(_layer_shapes(_read(model, 1))))
    few, many = (_cache_bytes(_read(model, num_tokens)) for num_tokens in (_NUM_TOKENS, 2 * _NUM_TOKENS))
    row_bytes = (many - few) // _NUM_TOKENS
    return StateLayout(few - row_bytes * _NUM_TOKENS, row_bytes)


def new_caches(
    model: CausalModel, layout: RowLayout | StateLayout, num_blocks: int, block_size: int
) -> SequenceCaches:
    """Memory for so many blocks of rows; of a state, caches as sequences come, the blocks being only counted."""
    if isinstance(layout, RowLayout):
        return PagedRows(layout.shapes, num_blocks, block_size)
    return StateCaches(lambda: _new_cache(model))


def _new_cache(model: CausalModel) -> Cache:
    return DynamicCache(config=model.config)


def _read(model: CausalModel, num_tokens: int) -> Cache:
    cache = _new_cache(model)
    model.logits(np.arange(num_tokens) % model.vocab_size, cache, 1)
    return cache


def _layer_shapes(cache: Cache) -> Iterable[LayerShape | None]:
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            yield None
        else:
            yield LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def _cache_bytes(cache: Cache) -> int:
    """Of every tensor the cache's layers hold, in attributes or by number."""
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for value in vars(layer).values()
        for tensor in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tensor, torch.Tensor)
    )
