"""A transformers model's linears, in place, by ones whose rows depend on themselves alone."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.batch import num_linear_rows
from engine.models.linear import Linear, LinearType


class InvariantLinear(nn.Module):
    """x [..., K] -> [..., N]: an engine's linear, which wants at least MIN_ROWS rows, as a module of a model."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows are padded with zeros, never read."""
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, num_linear_rows(num_rows) - num_rows))
        return self.linear(padded)[:num_rows].view(*x.shape[:-1], self.linear.out_features)


class LinearSwap:
    """The exchange of every `nn.Linear` and `Conv1D` below a module; `undo` puts the originals back."""

    def __init__(self, root: nn.Module, linear: LinearType) -> None:
        self.linears: list[Linear] = []
        self._originals: list[tuple[nn.Module, str, nn.Module]] = []
        for parent, name, module in list(_linears(root)):
            built = _build(module, linear)
            self.linears.append(built)
            self._originals.append((parent, name, module))
            setattr(parent, name, InvariantLinear(built))

    def undo(self) -> None:
        """The model is as it was before."""
        for parent, name, module in self._originals:
            setattr(parent, name, module)


def own_products(root: nn.Module) -> list[str]:
    """Names of the weights that the model's code multiplies by itself: all that are neither vectors nor embeddings."""
    return [
        f"{name}.{weight_name}" if name else weight_name
        for name, module in root.named_modules()
        if not isinstance(module, nn.Embedding)
        for weight_name, weight in module.named_parameters(recurse=False)
        if weight.ndim > 1
    ]


def _linears(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, attribute and module; subclasses are left alone, for they compute something else."""
    for parent in root.modules():
        for name, module in parent.named_children():
            if type(module) in (nn.Linear, Conv1D):
                yield parent, name, module


def _build(module: nn.Module, linear: LinearType) -> Linear:
    assert isinstance(module, nn.Linear | Conv1D)
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    return linear(weight.T if isinstance(module, Conv1D) else weight, bias)
