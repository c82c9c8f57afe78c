"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.base import LayerKernels
from engine.kernels.cpu_reference import TorchKernels


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """The test may set torch's thread count; it is put back afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch-inv"])
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    """Every implementation of the layer kernels."""
    return TorchKernels()
