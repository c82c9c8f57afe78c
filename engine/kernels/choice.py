"""Which layer kernels run a model on this machine; the choice has a name and is logged."""

import logging
from pathlib import Path

from engine.kernels.base import LayerKernels
from engine.kernels.build import KernelBuildError
from engine.kernels.cpu import CompiledKernels, unsupported_reason
from engine.kernels.cpu_reference import TorchKernels
from engine.models.config import ModelConfig

_log = logging.getLogger(__name__)


def choose_kernels(config: ModelConfig, cache_dir: Path | None = None) -> LayerKernels:
    """The compiled kernels where they can be built and know the model's sizes, else the torch ones."""
    reason = unsupported_reason(config)
    if reason is None:
        try:
            return CompiledKernels(cache_dir)
        except KernelBuildError as error:
            reason = str(error)
    kernels = TorchKernels()
    _log.warning("falling back to kernels %r, which are slower: %s", kernels.name, reason)
    return kernels
