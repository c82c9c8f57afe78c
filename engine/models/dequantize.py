"""GGUF tensor bytes to torch tensors.

The two block formats of the demo model are decoded here with whole-tensor torch operations, bit-identical to
the `gguf` package and several times faster; that package decodes the rest.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_HALF_BLOCK = 16  # values a Q4_1 block holds in each nibble


def tensor_num_bytes(type_code: int, shape: tuple[int, ...]) -> int:
    """Bytes a tensor takes in the file; raises `ValueError` for an unknown type or rows of broken blocks."""
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_code)]
    if not shape or shape[-1] % block_values:
        raise ValueError(f"shape {list(shape)} is no multiple of its block of {block_values} values")
    return math.prod(shape) // block_values * block_bytes


def to_torch(data: npt.NDArray[np.uint8], type_code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor in `data` (flat bytes): F32, F16 and BF16 as they are, quantised types as float32.

    Plain types share memory with `data`. Raises `ValueError` or `NotImplementedError` for a type without a decoder.
    """
    kind = GGMLQuantizationType(type_code)
    if kind in _PLAIN:
        return torch.from_numpy(data).view(_PLAIN[kind]).view(shape)
    if kind is GGMLQuantizationType.Q4_1:
        return _q4_1(torch.from_numpy(data).view(-1, 4 + _HALF_BLOCK)).view(shape)
    if kind is GGMLQuantizationType.Q8_0:
        return _q8_0(torch.from_numpy(data).view(-1, 2 + 32)).view(shape)
    rows = data.reshape(*shape[:-1], -1)  # the package wants bytes in the tensor's own rows
    return torch.from_numpy(gguf_dequantize(rows, kind)).view(shape)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """[B, 20] bytes -> [B, 32]: scale and minimum (float16), then 16 bytes of low and high nibbles."""
    scale_and_minimum = blocks[:, :4].contiguous().view(torch.float16).float()  # [B, 2]
    scale, minimum = scale_and_minimum[:, :1], scale_and_minimum[:, 1:]
    nibbles = blocks[:, 4:]  # [B, 16]
    values = torch.empty(len(blocks), 2 * _HALF_BLOCK)
    values[:, :_HALF_BLOCK] = nibbles & 0x0F
    values[:, _HALF_BLOCK:] = nibbles >> 4
    return values.mul_(scale).add_(minimum)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """[B, 34] bytes -> [B, 32]: scale (float16), then 32 signed bytes."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()  # [B, 1]
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)
