"""The ragged batch of one step, built whole before the forward starts.

Letters: N sequences in the step, T new tokens of the step, P = num_linear_rows(T) rows that go through the linears,
R rows whose logits are wanted, B most blocks of any sequence of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# oneDNN's packed linear adds up a lone row in another order than two or more, and two are slower than four.
MIN_ROWS = 4
# For every number of rows it has met oneDNN keeps generated code, some 2 MiB for the demo model, half of it for ever.
# So above this many rows only each 8th number is used, above twice as many each 16th, and so on.
MAX_EXACT_ROWS = 64


def num_linear_rows(num_rows: int) -> int:
    """Rows that go through the linears where `num_rows` are wanted: at least MIN_ROWS, and less than 1/8 more."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 4) if num_rows > MAX_EXACT_ROWS else 1
    return max(MIN_ROWS, -(-num_rows // step) * step)


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part: its new tokens, its rows before them, and the blocks that hold rows and new tokens."""

    token_ids: npt.NDArray[np.int64]  # [n], n >= 1
    num_cached_tokens: int
    block_ids: Sequence[int]
    num_logits_rows: int
    states: torch.Tensor | None = None  # float32 [n, W], what a head reads beside each token


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all sequences behind one another, no padding between them."""

    token_ids: torch.Tensor  # int64 [P]; rows T..P-1 repeat the last token and are never read
    positions: torch.Tensor  # int32 [T], index in the sequence
    sequence_rows: torch.Tensor  # int32 [T] -> row of block_tables
    slot_mapping: torch.Tensor  # int32 [T] -> block * block_size + offset where the token's key and value go
    block_tables: torch.Tensor  # int32 [N, B], unused entries 0
    cu_seqlens_q: tuple[int, ...]  # [N+1]: sequence n owns tokens cu_seqlens_q[n]..cu_seqlens_q[n+1]
    context_lens: tuple[int, ...]  # [N]: rows of the sequence after this step
    logits_rows: torch.Tensor  # int64 [R] -> token
    states: torch.Tensor | None = None  # float32 [P, W] of a head, rows T..P-1 as those of token_ids

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.cu_seqlens_q[-1]

    @property
    def num_rows(self) -> int:
        """P, the rows of every activation."""
        return self.token_ids.shape[0]


def build_forward_batch(items: Sequence[BatchItem], block_size: int) -> ForwardBatch:
    """All index arrays of a step from its items, in order (at least one)."""
    lengths = [len(item.token_ids) for item in items]
    cu_seqlens_q = np.concatenate(([0], np.cumsum(lengths)))
    num_tokens = int(cu_seqlens_q[-1])
    context_lens = [item.num_cached_tokens + length for item, length in zip(items, lengths, strict=True)]

    block_tables = np.zeros((len(items), max(len(item.block_ids) for item in items)), dtype=np.int32)
    for row, item in enumerate(items):
        block_tables[row, : len(item.block_ids)] = item.block_ids

    token_ids = np.concatenate([item.token_ids for item in items])
    sequence_rows = np.repeat(np.arange(len(items), dtype=np.int32), lengths)
    # first[n]: position of sequence n's token if it stood at index 0 of the batch
    first = np.asarray(context_lens) - cu_seqlens_q[1:]
    positions = (np.arange(num_tokens) + first[sequence_rows]).astype(np.int32)
    slots = block_tables[sequence_rows, positions // block_size] * block_size + positions % block_size
    num_padding = num_linear_rows(num_tokens) - num_tokens
    wanted = [np.arange(end - item.num_logits_rows, end) for item, end in zip(items, cu_seqlens_q[1:], strict=True)]
    return ForwardBatch(
        token_ids=torch.from_numpy(np.pad(token_ids, (0, num_padding), mode="edge")),
        positions=torch.from_numpy(positions),
        sequence_rows=torch.from_numpy(sequence_rows),
        slot_mapping=torch.from_numpy(slots.astype(np.int32)),
        block_tables=torch.from_numpy(block_tables),
        cu_seqlens_q=tuple(int(i) for i in cu_seqlens_q),
        context_lens=tuple(context_lens),
        logits_rows=torch.from_numpy(np.concatenate(wanted).astype(np.int64)),
        states=_states(items, num_padding),
    )


def _states(items: Sequence[BatchItem], num_padding: int) -> torch.Tensor | None:
    """Those of all items and of the padding; None where they have none."""
    states = [item.states for item in items if item.states is not None]
    if not states:
        return None
    assert len(states) == len(items)
    return torch.cat([*states, states[-1][-1:].expand(num_padding, -1)])
