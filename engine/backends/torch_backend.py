"""The native engine: Llama-family models on torch, paged key-value memory, ragged batches, invariant rows."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from engine.backends.base import (
    EngineCapabilities,
    HiddenCapture,
    SequenceInput,
    check_capture,
)
from engine.backends.paged import PagedEngine, check_advance
from engine.batch import BatchItem, ForwardBatch, build_forward_batch
from engine.kernels.base import LayerKernels
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KvCache
from engine.kv.sequences import KvSequences
from engine.models.decoder import DecoderModel
from engine.runner import ModelRunner

T = TypeVar("T")


class TorchEngine(PagedEngine):
    """`SpeculativeEngine` over a built model. `load_torch_engine` in engine/backends/torch_loading.py makes one."""

    def __init__(
        self,
        model: DecoderModel,
        kernels: LayerKernels,
        *,
        num_blocks: int,
        block_size: int = 16,
        deterministic: bool = False,
        numerics_fingerprint: str = "",
        prefix_cache: bool = False,
    ) -> None:
        self._runner = ModelRunner(model, KvCache(model.config, model.dtype, num_blocks, block_size), kernels)
        capabilities = EngineCapabilities(
            backend="torch",
            vocab_size=model.config.vocab_size,
            max_context=model.rotary.cos.shape[0],
            dtype=str(model.dtype).removeprefix("torch."),
            device="cpu",
            can_truncate=True,
            deterministic=deterministic,
            numerics_fingerprint=numerics_fingerprint,
            has_prefix_cache=prefix_cache,
            num_layers=model.config.num_layers,
            hidden_size=model.config.hidden_size,
        )
        pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        super().__init__(capabilities, KvSequences(capabilities, pool, self._runner.cache.copy_blocks))

    @property
    def model(self) -> DecoderModel:
        """The built model the engine runs."""
        return self._runner.model

    def advance(self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None) -> None:
        """See `SpeculativeEngine`."""
        check_advance(inputs)
        if inputs:
            self._step(inputs, self._runner.advance, capture)

    def forward_per_position_logits(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        if not inputs:
            return torch.empty(0, self._capabilities.vocab_size)
        return self._step(inputs, self._runner.logits, capture)

    def forward_per_position_argmax(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        if not inputs:
            return torch.empty(0, dtype=torch.int64)
        return self._step(inputs, self._runner.argmax, capture)

    def _step(
        self,
        inputs: Sequence[SequenceInput],
        forward: Callable[[ForwardBatch, HiddenCapture | None], T],
        capture: HiddenCapture | None,
    ) -> T:
        """One forward of the whole batch."""
        check_capture(self._capabilities, capture)

        def run(items: list[BatchItem]) -> T:
            return forward(build_forward_batch(items, self._runner.cache.block_size), capture)

        return self._sequences.step(inputs, run)
