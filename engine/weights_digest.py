"""Whether two engines have the same weights, and do the same with them, in a word."""

import hashlib
import zlib
from collections.abc import Iterable

import torch


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]], config: str = "") -> str:
    """SHA-256 (hex) over the config, and name, dtype, shape and CRC-32 of every tensor, in the order of their names.

    Give it the weights as they are computed with: then it does not depend on files, their order or their precision.
    Every byte is read. A CRC is enough, since nobody makes weights to deceive this, and takes 0.6 s for each GB where
    SHA-256 of all bytes takes 1.6 s and the rest of a start 8 s.
    """
    lines = sorted(
        f"{name} {weight.dtype} {list(weight.shape)} {zlib.crc32(_bytes_of(weight))}\n" for name, weight in weights
    )
    return hashlib.sha256("".join([*lines, config]).encode()).hexdigest()


def _bytes_of(weight: torch.Tensor) -> memoryview:
    return weight.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
