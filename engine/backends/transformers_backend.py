"""The engine over transformers: any causal language model of that package, sequence after sequence.

Its rows lie in the same blocks as the native engine's, so that what `kv_usage` says is what they take.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import Cache

from engine.backends.base import (
    EngineCapabilities,
    HiddenCapture,
    SequenceId,
    SequenceInput,
    UnsupportedEngineError,
    check_capture,
)
from engine.backends.paged import PagedEngine, check_advance
from engine.batch import BatchItem
from engine.hf.caches import SequenceCaches
from engine.hf.causal_model import CausalModel
from engine.kv.block_pool import BlockPool
from engine.kv.sequences import KvSequences
from engine.sampling.sampler import finite_argmax


class TransformersEngine(PagedEngine):
    """`SpeculativeEngine` over a loaded model; engine/backends/transformers_loading.py makes one."""

    def __init__(
        self,
        model: CausalModel,
        caches: SequenceCaches,
        pool: BlockPool,
        *,
        deterministic: bool = False,
        numerics_fingerprint: str = "",
    ) -> None:
        self._model = model
        self._caches = caches
        capabilities = EngineCapabilities(
            backend="transformers",
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            dtype=str(model.dtype).removeprefix("torch."),
            device="cpu",
            can_truncate=caches.can_truncate,
            deterministic=deterministic,
            numerics_fingerprint=numerics_fingerprint,
            has_prefix_cache=pool.is_caching,
        )
        super().__init__(capabilities, KvSequences(capabilities, pool, caches.copy_blocks))

    def advance(self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None) -> None:
        """See `SpeculativeEngine`."""
        check_advance(inputs)
        self._step(inputs, torch.Tensor.float, capture)

    def forward_per_position_logits(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        rows = self._step(inputs, torch.Tensor.float, capture)
        if len(rows) == 1:
            return rows[0]
        return torch.cat(rows) if rows else torch.empty(0, self._capabilities.vocab_size)

    def forward_per_position_argmax(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        """See `SpeculativeEngine`."""
        rows = self._step(inputs, finite_argmax, capture)
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

    def fork(self, sequence_id: SequenceId) -> SequenceId:
        """See `SpeculativeEngine`; UnsupportedEngineError for a model that folds its rows into a state."""
        if not self._capabilities.can_truncate:
            raise UnsupportedEngineError(
                f"backend 'transformers' cannot fork: sequence {sequence_id}'s state cannot be shared"
            )
        return super().fork(sequence_id)

    def release(self, sequence_id: SequenceId) -> None:
        """See `SpeculativeEngine`."""
        self._caches.forget(sequence_id)
        super().release(sequence_id)

    def _step(
        self,
        inputs: Sequence[SequenceInput],
        select: Callable[[torch.Tensor], torch.Tensor],
        capture: HiddenCapture | None,
    ) -> list[torch.Tensor]:
        """`select` of each input's wanted logits, in order; no inputs are no forward."""
        check_capture(self._capabilities, capture)
        return self._sequences.step(inputs, partial(self._forward, inputs, select)) if inputs else []

    def _forward(
        self,
        inputs: Sequence[SequenceInput],
        select: Callable[[torch.Tensor], torch.Tensor],
        items: list[BatchItem],
    ) -> list[torch.Tensor]:
        """One forward a sequence: a batch of them would pad, and a padded row has other sizes around it."""
        ids = [item.sequence_id for item in inputs]
        caches = [self._caches.open(sequence_id, item) for sequence_id, item in zip(ids, items, strict=True)]
        results = [select(self._logits(item, cache)) for item, cache in zip(items, caches, strict=True)]
        for sequence_id, cache in zip(ids, caches, strict=True):
            self._caches.keep(sequence_id, cache)
        return results

    def _logits(self, item: BatchItem, cache: Cache) -> torch.Tensor:
        """Read the item's tokens -> its wanted rows [R, V]."""
        if self._caches.can_truncate or item.num_cached_tokens == 0:
            return self._model.logits(item.token_ids, cache, item.num_logits_rows)
        # Several tokens at once would be folded into an empty state: some models go on from theirs only by one.
        first_row = len(item.token_ids) - item.num_logits_rows
        rows = [
            self._model.logits(item.token_ids[i : i + 1], cache, int(i >= first_row))
            for i in range(len(item.token_ids))
        ]
        return torch.cat(rows)
