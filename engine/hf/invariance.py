"""Give a model invariant attention and linears, each only if its logits stay what they were."""

import logging
from collections.abc import Iterator

import numpy as np
import torch

from engine.hf.attention import INVARIANT, AttentionRefusedError, register_attention
from engine.hf.causal_model import CausalModel
from engine.hf.layout import RowLayout, StateLayout
from engine.hf.linears import LinearSwap, own_products
from engine.hf.self_test import check_attention, is_close
from engine.models.linear import ChunkedLinear, Linear, LinearType, PackedLinear, packed_linear_is_available
from engine.models.llama import MAX_HEAD_ROWS
from engine.self_test import check_linear

_log = logging.getLogger(__name__)

# What a model's own code raises that wants more of an attention or a linear than there is.
_UNFIT = (AttentionRefusedError, AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError)


def whole_text_logits(model: CausalModel, token_ids: list[int]) -> torch.Tensor:
    """Of every token at once, without a cache -> float32 [T, V]."""
    return model.logits(np.array(token_ids), None, len(token_ids)).float()


def make_attention_invariant(
    model: CausalModel, layout: RowLayout | StateLayout, token_ids: list[int], reference: torch.Tensor
) -> list[str]:
    """Attention by `invariant_attention` if the model can -> what is not invariant about it."""
    if isinstance(layout, StateLayout):
        return ["tokens are folded into a state"]
    register_attention()
    try:
        model.model.set_attn_implementation(INVARIANT)
        _require_same(model, token_ids, reference)
    except _UNFIT as error:
        model.model.set_attn_implementation("eager")
        return [f"attention is the model's own: {error}"]
    if model.config._attn_implementation != INVARIANT:  # it was only logged
        return ["attention is the model's own: its code lets nobody choose"]
    shapes = {shape for shape in layout.shapes if shape is not None}
    num_heads = model.config.num_attention_heads
    return [failure for shape in shapes for failure in check_attention(num_heads, shape, model.max_context)]


def make_linears_invariant(
    model: CausalModel, token_ids: list[int], reference: torch.Tensor, max_step_tokens: int
) -> tuple[str, list[str]]:
    """Linears that are row-invariant on this machine -> their kind, and what is not invariant about them."""
    failures = []
    for linear in _linear_types(model.dtype):
        swap = LinearSwap(model.model, linear)
        try:
            _require_same(model, token_ids, reference)
        except _UNFIT as error:
            swap.undo()
            return "torch", [f"linears are the model's own: {error}"]
        failures = _linear_failures(model, swap.linears, max_step_tokens)
        if not failures:
            return linear.kind, _own_products(model)
        swap.undo()
    return "torch", failures


def _linear_types(dtype: torch.dtype) -> Iterator[LinearType]:
    if packed_linear_is_available(dtype):
        yield PackedLinear
    yield ChunkedLinear


def _require_same(model: CausalModel, token_ids: list[int], reference: torch.Tensor) -> None:
    if not is_close(whole_text_logits(model, token_ids), reference, model.dtype):
        raise ValueError("the model's logits would change")


def _own_products(model: CausalModel) -> list[str]:
    names = own_products(model.model)
    return [f"{len(names)} weights are multiplied by the model's own code: {names[0]}"] if names else []


def _linear_failures(model: CausalModel, linears: list[Linear], max_step_tokens: int) -> list[str]:
    """Of each distinct size; a head is given few rows at a time."""
    sizes = {(linear.in_features, linear.out_features): linear for linear in linears}
    return [
        failure
        for linear in sizes.values()
        for failure in check_linear(
            linear, MAX_HEAD_ROWS if linear.out_features == model.vocab_size else max_step_tokens, model.dtype
        )
    ]
