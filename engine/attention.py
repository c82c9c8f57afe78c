"""Row-invariant attention in plain torch: scores over padded contexts, P @ V over fixed key-value chunks.

A matrix product may split its inner dimension by size, so a row's order of summation would depend on how far
the context happens to be padded. Here every inner product has a fixed length: the head for the scores, at most
`value_chunk` for P @ V, whose chunks are added in order; and the query rows are a multiple of `ROW_MULTIPLE`.
Then a row's result depends on its own query and context alone, bit by bit.

Letters: n query tokens, H query heads, G query heads a key-value head (KH of them), D head size,
C context, S = C rounded up to KEY_MULTIPLE, Q = n * G rounded up to ROW_MULTIPLE.
"""

import torch
import torch.nn.functional as F

KEY_MULTIPLE = 64
ROW_MULTIPLE = 4


def value_chunk(dtype: torch.dtype) -> int:
    """Key-value rows one P @ V product takes: the most that the matrix libraries add up in one piece."""
    return 128 if dtype == torch.float32 else 1024


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not less than value."""
    return -(-value // multiple) * multiple


def causal_mask(num_tokens: int, context_len: int, group: int) -> torch.Tensor:
    """Additive float32 [Q, S] for the last `num_tokens` tokens of a context: 0 up to their position, -inf after it.

    Row i * group + g belongs to token i; rows that pad to Q see what the last token sees.
    """
    positions = torch.arange(context_len - num_tokens, context_len).repeat_interleave(group)
    positions = F.pad(positions, (0, -positions.shape[0] % ROW_MULTIPLE), value=context_len - 1)
    keys = torch.arange(round_up(context_len, KEY_MULTIPLE))
    return torch.zeros(len(positions), len(keys)).masked_fill_(keys > positions[:, None], float("-inf"))


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence: queries [n, H, D], keys and values [KH, S, D], mask [Q, S] -> [n, H, D]."""
    n, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    # [n, H, D] -> [KH, n * G, D]: the rows that share keys, token by token
    rows = queries.view(n, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    output = attend_rows(rows, keys, values, mask)
    # [KH, n * G, D] -> [n, H, D]
    return output.reshape(num_kv_heads, n, -1, head_dim).transpose(0, 1).reshape(n, num_heads, head_dim)


def attend_rows(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Softmax(rows @ keys * scale + mask) @ values; `scale` None is 1 / sqrt(D).

    rows [heads, n * G, D], keys and values [heads, S, D] of one dtype, mask [Q, S] -> [heads, n * G, D].
    Keys and values past the context are masked but must be finite; values may have a size of their own.
    """
    num_rows = rows.shape[1]
    scale = rows.shape[2] ** -0.5 if scale is None else scale
    rows = F.pad(rows, (0, 0, 0, mask.shape[0] - num_rows))
    # [heads, Q, S]
    if rows.dtype == torch.float32:
        scores = torch.baddbmm(mask, rows, keys.mT, alpha=scale)
    else:
        scores = torch.bmm(rows, keys.mT).float().mul_(scale).add_(mask)
    probs = torch.softmax(scores, dim=-1).to(values.dtype)
    chunk = value_chunk(values.dtype)
    output = torch.bmm(probs[..., :chunk], values[:, :chunk])
    for start in range(chunk, values.shape[1], chunk):
        output = output + torch.bmm(probs[..., start : start + chunk], values[:, start : start + chunk])
    return output[:, :num_rows]
