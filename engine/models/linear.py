"""Linear layers whose rows do not depend on how many rows there are, nor on their place among them."""

import logging
from typing import Protocol

import torch
import torch.nn.functional as F

_log = logging.getLogger(__name__)

CHUNK_ROWS = 16


class Linear(Protocol):
    """x [P, K] with P >= 4 -> [P, N], in the weight's dtype."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PackedLinear:
    """oneDNN with the weight packed once: invariant from two rows on, and 1.5 to 6 times faster than F.linear."""

    kind = "onednn-packed"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._linear(x, self._weight, self._bias, "none", [], "")
        return result


class ChunkedLinear:
    """F.linear over exactly `CHUNK_ROWS` rows at a time, the last chunk padded with zeros."""

    kind = "torch-chunk16"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % CHUNK_ROWS))
        chunks = [F.linear(chunk, self._weight, self._bias) for chunk in torch.split(padded, CHUNK_ROWS)]
        return torch.cat(chunks)[: x.shape[0]]


LinearType = type[PackedLinear] | type[ChunkedLinear]


def packed_linear_is_available(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN packs weights of this dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        PackedLinear(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(4, 16, dtype=dtype))
    except RuntimeError as error:
        _log.warning("oneDNN cannot pack %s weights here: %s", dtype, error)
        return False
    return True
