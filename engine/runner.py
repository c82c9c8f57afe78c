"""The model runner: one batch in, the wanted rows' logits or their argmax out. It knows nothing of sequences."""

import torch

from engine.backends.base import HiddenCapture
from engine.batch import ForwardBatch
from engine.kernels.base import LayerKernels
from engine.kv.cache import KvCache
from engine.models.decoder import DecoderModel
from engine.sampling.sampler import finite_argmax


class ModelRunner:
    """A model, its key-value memory and the kernels it runs on."""

    def __init__(self, model: DecoderModel, cache: KvCache, kernels: LayerKernels) -> None:
        self.model = model
        self.cache = cache
        self.kernels = kernels

    @torch.no_grad()
    def advance(self, batch: ForwardBatch, capture: HiddenCapture | None = None) -> None:
        """Write the batch's key-value rows."""
        self._hidden(batch, capture)

    @torch.no_grad()
    def logits(self, batch: ForwardBatch, capture: HiddenCapture | None = None) -> torch.Tensor:
        """Write the rows -> float32 [R, V], the caller's to change."""
        hidden = self._hidden(batch, capture)
        chunks = [chunk.float() for chunk in self.model.logits(hidden, batch.logits_rows, self.kernels)]
        if len(chunks) == 1:
            return chunks[0]
        return torch.cat(chunks) if chunks else hidden.new_empty(0, self.model.config.vocab_size)

    @torch.no_grad()
    def argmax(self, batch: ForwardBatch, capture: HiddenCapture | None = None) -> torch.Tensor:
        """Write the rows -> int64 [R], the lowest id among each row's largest logits, in their own dtype.

        -1 where the largest is not finite (argmax takes a NaN for the largest).
        """
        hidden = self._hidden(batch, capture)
        chunks = [finite_argmax(chunk) for chunk in self.model.logits(hidden, batch.logits_rows, self.kernels)]
        return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.int64)

    def _hidden(self, batch: ForwardBatch, capture: HiddenCapture | None) -> torch.Tensor:
        # In a new thread oneDNN takes all cores, whatever set_num_threads said, until torch is asked.
        torch.get_num_threads()
        if capture is None:
            return self.model.hidden(batch, self.cache, self.kernels)
        size = self.model.config.hidden_size
        # [T, L, E]
        states = torch.empty(batch.num_tokens, len(capture.layers), size, dtype=torch.float32)

        def keep(layer: int, residual: torch.Tensor) -> None:
            if layer in capture.layers:
                states[:, capture.layers.index(layer)] = residual[: batch.num_tokens]

        hidden = self.model.hidden(batch, self.cache, self.kernels, keep)
        capture.states = states
        return hidden
