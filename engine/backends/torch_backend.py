"""The native engine: Llama-family models on torch, paged key-value memory, ragged batches, invariant rows."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from engine.backends.base import (
    EngineCapabilities,
    EngineError,
    HiddenCapture,
    KvUsage,
    SequenceId,
    SequenceInput,
    check_capture,
)
from engine.batch import BatchItem, ForwardBatch, build_forward_batch
from engine.kernels.base import LayerKernels
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KvCache
from engine.kv.sequences import KvSequences
from engine.models.decoder import DecoderModel
from engine.runner import ModelRunner

T = TypeVar("T")


class TorchEngine:
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
        self._capabilities = EngineCapabilities(
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
        self._sequences = KvSequences(self._capabilities, pool, self._runner.cache.copy_blocks)

    @property
    def capabilities(self) -> EngineCapabilities:
        """See `SpeculativeEngine`."""
        return self._capabilities

    @property
    def model(self) -> DecoderModel:
        """The built model the engine runs."""
        return self._runner.model

    def create(self, token_ids: Sequence[int] = ()) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._sequences.create(token_ids)

    def num_cached_tokens(self, sequence_id: SequenceId) -> int:
        """See `SpeculativeEngine`."""
        return self._sequences.table(sequence_id).num_tokens

    def advance(self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None) -> None:
        """See `SpeculativeEngine`."""
        for item in inputs:
            if item.num_logits_rows:
                raise EngineError(
                    f"sequence {item.sequence_id}: advance computes no logits, num_logits_rows must be 0, "
                    f"got {item.num_logits_rows}"
                )
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

    def truncate(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """See `SpeculativeEngine`."""
        self._sequences.truncate(sequence_id, num_tokens)

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """See `SpeculativeEngine`."""
        return self._sequences.fork(sequence_id)

    def release(self, sequence_id: SequenceId) -> None:
        """See `SpeculativeEngine`."""
        self._sequences.release(sequence_id)

    def kv_usage(self) -> KvUsage:
        """See `SpeculativeEngine`."""
        return self._sequences.usage()

    def num_blocks_for(self, inputs: Sequence[SequenceInput]) -> int:
        """See `SpeculativeEngine`."""
        return self._sequences.num_blocks_for(inputs)

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
