"""The noise streams of tandem/rng.py in torch, for logits that live on another device than the CPU.

Whole vocabularies, several rows at once. Torch has no unsigned 32-bit arithmetic, so a word is an int64 in
0..2^32-1. Needs float64 on the device. Bits and uniforms are equal to the reference's on any device; so is the
noise wherever a float64 logarithm errs by at most one unit in the last place, but for one uniform of 2^23
(engine/kernels/noise.py). Run on the CPU only, so far on no GPU.

Letters: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

from engine.sampling.gumbel import NoiseKey

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Ten rounds of Philox4x32 -> int64 [..., 4]; the counter's words and the key's halves broadcast.

    A product of two words overflows an int64 into its sign, and keeps its 64 bits all the same.
    """
    x0, x1, x2, x3 = counter
    for _ in range(10):
        product_0, product_1 = x0 * _MULTIPLIER_0, x2 * _MULTIPLIER_1
        x0, x2 = ((product_1 >> 32) & _MASK32) ^ x1 ^ low, ((product_0 >> 32) & _MASK32) ^ x3 ^ high
        x1, x3 = product_1 & _MASK32, product_0 & _MASK32
        low, high = (low + _WEYL_0) & _MASK32, (high + _WEYL_1) & _MASK32
    # By now every word has met the others, and has the shape of all.
    return torch.stack((x0, x1, x2, x3), dim=-1)


def vocabulary_bits(keys: Sequence[NoiseKey], vocab_size: int, device: torch.device) -> torch.Tensor:
    """The noise bits of every token at each key -> int64 [R, V]."""

    def column(values: Sequence[int]) -> torch.Tensor:
        # [R, 1]
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    blocks = torch.arange((vocab_size + 3) // 4, device=device)
    positions = column([key.position for key in keys])
    sample_indices, words = column([key.sample_index for key in keys]), column([key.word for key in keys])
    low, high = column([key.seed & _MASK32 for key in keys]), column([key.seed >> 32 & _MASK32 for key in keys])
    # [R, V / 4, 4]
    bits = philox4x32((blocks, positions, sample_indices, words), low, high)
    return bits.flatten(1)[:, :vocab_size]


def uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """((bits >> 9) + 0.5) * 2^-23 -> float64, never 0 and never 1."""
    return ((bits >> 9).double() + 0.5) * 2.0**-23


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log u) in float64, rounded to float32."""
    return uniform_from_bits(bits).log_().neg_().log_().neg_().float()


def gumbel_argmax_rows(values: torch.Tensor, keys: Sequence[NoiseKey]) -> torch.Tensor:
    """`gumbel_argmax` of each row of float32 or float64 [R, V] with its own key -> int64 [R], on the device.

    The sum is in the values' own type; ties go to the lowest id (torch.argmax gives the first).
    """
    noise = gumbel_from_bits(vocabulary_bits(keys, values.shape[1], values.device))
    return (values + noise).argmax(dim=-1)
