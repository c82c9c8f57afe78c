"""Row-invariant attention under a name that transformers' models choose it by.

Letters: n query tokens, H query heads, G query heads a key-value head (KH of them), D head size of queries and
keys, E of values, L rows of the sequence, S = L rounded up to KEY_MULTIPLE, Q = n * G rounded up to ROW_MULTIPLE.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from engine.attention import KEY_MULTIPLE, ROW_MULTIPLE, attend_rows, round_up

INVARIANT = "tandem-rows"

# What some models ask of their attention besides the scale and the mask, and `attend_rows` does not compute.
_REFUSED = ("softcap", "position_bias", "s_aux", "head_mask")


class AttentionRefusedError(Exception):
    """A model asks for more than this attention computes; the message names it."""


def register_attention() -> None:
    """Let models be given the attention INVARIANT; once is enough, more do no harm."""
    AttentionInterface.register(INVARIANT, invariant_attention)
    AttentionMaskInterface.register(INVARIANT, additive_mask)


def additive_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Of `q_length` tokens = n over `kv_length` rows = L -> float32 [1, 1, n, S]: 0 where a token looks, else -inf."""
    # [1, 1, n, L]
    looks = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        allow_is_causal_skip=False,
    )
    assert looks is not None
    looks = F.pad(looks, (0, round_up(kv_length, KEY_MULTIPLE) - kv_length))
    return torch.zeros(looks.shape).masked_fill_(~looks, float("-inf"))


def invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one sequence: query [1, H, n, D], key [1, KH, L, D], value [1, KH, L, E] -> [1, n, H, E].

    Raises AttentionRefusedError for a mask that `additive_mask` did not make and for what `attend_rows` lacks.
    """
    asked = [name for name in _REFUSED if others.get(name) is not None]
    if asked:
        raise AttentionRefusedError(f"{type(module).__name__} asks for {', '.join(asked)}")
    if attention_mask is None or attention_mask.shape[:2] != (1, 1) or query.shape[0] != 1:
        raise AttentionRefusedError(f"{type(module).__name__} attends without the causal mask of one sequence")
    (num_heads, n, head_dim), num_kv_heads = query.shape[1:], key.shape[1]
    group = num_heads // num_kv_heads
    # [H, n, D] -> [KH, n * G, D]: row i * G + g belongs to token i
    rows = query[0].view(num_kv_heads, group, n, head_dim).transpose(1, 2).reshape(num_kv_heads, -1, head_dim)
    # [Q] -> token; rows that pad to Q see what the last token sees
    tokens = torch.arange(round_up(n * group, ROW_MULTIPLE)).clamp_(max=n * group - 1) // group
    padding = (0, 0, 0, attention_mask.shape[-1] - key.shape[2])
    output = attend_rows(
        rows, F.pad(key[0], padding), F.pad(value[0], padding), attention_mask[0, 0, tokens], scaling
    )
    # [KH, n * G, E] -> [1, n, H, E]
    return output.view(num_kv_heads, n, group, -1).transpose(0, 1).reshape(1, n, num_heads, -1), None
