"""Compiled kernels, each beside its reference."""

from engine.kernels.base import LayerKernels
from engine.kernels.cpu_reference import TorchKernels


def choose_kernels() -> LayerKernels:
    """The best kernels this machine has."""
    return TorchKernels()
