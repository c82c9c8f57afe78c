"""The noise streams of tandem/rng.py in Triton, for logits on a GPU: noise is made where it is added, never stored.

Bits and uniforms are equal to the reference's; so is the noise, as in noise_torch.py. Run in Triton's interpreter
(TRITON_INTERPRET=1) and compiled for NVIDIA targets, so far on no GPU. Importing this needs Triton.

Letters: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.sampling.gumbel import NoiseKey

BLOCK = 1024  # tokens at a time
_NEVER = tl.constexpr(float("-inf"))
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def token_bits(
    seed: tl.tensor,
    word: tl.tensor,
    position: tl.tensor,
    sample_index: tl.tensor,
    first_token: tl.tensor,
    NUM_TOKENS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The noise bits of tokens first_token.. -> uint32 [NUM_TOKENS]; both are multiples of 4."""
    blocks = (first_token // 4 + tl.arange(0, NUM_TOKENS // 4)).to(tl.uint32)
    word = tl.to_tensor(word).to(tl.uint32)  # a stream without a round is a constant
    x0, x1, x2, x3 = tl.philox(seed, blocks, position.to(tl.uint32), sample_index.to(tl.uint32), word)
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(NUM_TOKENS)


@triton.jit
def uniform_from_bits(bits: tl.tensor) -> tl.tensor:
    """((bits >> 9) + 0.5) * 2^-23 -> float64, never 0 and never 1."""
    return ((bits >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel_from_bits(bits: tl.tensor) -> tl.tensor:
    """-log(-log u) in float64, rounded to float32."""
    return (-tl.log(-tl.log(uniform_from_bits(bits)))).to(tl.float32)


@triton.jit
def row_argmax(
    row: tl.tensor,  # float32 or float64 [V]
    seed: tl.tensor,
    word: tl.tensor,
    position: tl.tensor,
    sample_index: tl.tensor,
    vocab_size: tl.tensor,
    NUM_TOKENS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """argmax(row + noise), the sum in the row's own type; the lowest id among equals, 0 where all are -inf."""
    best, best_token = tl.full((), _NEVER, row.dtype.element_ty), tl.full((), 0, tl.int32)
    for first in range(0, vocab_size, NUM_TOKENS):
        tokens = first + tl.arange(0, NUM_TOKENS)
        noise = gumbel_from_bits(token_bits(seed, word, position, sample_index, first, NUM_TOKENS))
        scores = tl.load(row + tokens, mask=tokens < vocab_size, other=_NEVER) + noise
        highest = tl.max(scores, 0)
        token = tl.min(tl.where(scores == highest, tokens, _NO_TOKEN), 0)
        best, best_token = tl.maximum(best, highest), tl.where(highest > best, token, best_token)
    return best_token


@triton.jit
def _gumbel_argmax_kernel(
    values: tl.tensor,  # [R, V]
    keys: tl.tensor,  # int64 [R, 4]: seed, word, position, sample index
    tokens: tl.tensor,  # int64 [R]
    vocab_size: tl.tensor,
    NUM_TOKENS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    seed, word = tl.load(keys + row * 4), tl.load(keys + row * 4 + 1)
    position, sample_index = tl.load(keys + row * 4 + 2), tl.load(keys + row * 4 + 3)
    token = row_argmax(values + row * vocab_size, seed, word, position, sample_index, vocab_size, NUM_TOKENS)
    tl.store(tokens + row, token.to(tl.int64))


def gumbel_argmax_rows(values: torch.Tensor, keys: Sequence[NoiseKey]) -> torch.Tensor:
    """`gumbel_argmax` of each row of float32 or float64 [R, V] with its own key -> int64 [R], on the device.

    The sum is in the values' own type; ties go to the lowest id.
    """
    num_rows, vocab_size = values.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    if num_rows:
        table = key_table(keys, values.device)
        launch = _gumbel_argmax_kernel[(num_rows,)]
        launch(values.contiguous(), table, tokens, vocab_size, BLOCK, enable_fp_fusion=False)
    return tokens


def key_table(keys: Sequence[NoiseKey], device: torch.device) -> torch.Tensor:
    """seed, word, position and sample index of each key -> int64 [R, 4]."""
    rows = [[signed(key.seed), key.word, key.position, key.sample_index] for key in keys]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def signed(seed: int) -> int:
    """The int64 with a seed's 64 bits."""
    return (seed & 2**64 - 1 ^ 2**63) - 2**63
