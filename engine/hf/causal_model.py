"""A transformers model as the engine runs it: token ids and a cache in, logits of the last rows out."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class CausalModel:
    """`model` is in evaluation mode, on the CPU; `max_context` is the most tokens of a sequence."""

    model: PreTrainedModel
    vocab_size: int
    max_context: int
    dtype: torch.dtype

    @property
    def config(self) -> PreTrainedConfig:
        """Of the decoder, where a model has several."""
        config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        return config

    @torch.no_grad()
    def logits(self, token_ids: npt.NDArray[np.int64], cache: Cache | None, num_rows: int) -> torch.Tensor:
        """Append token ids [n] to the cache's rows, or run them alone -> [num_rows, V], in the model's dtype."""
        # In a new thread oneDNN takes all cores, whatever set_num_threads said, until torch is asked.
        torch.get_num_threads()
        output = self.model(
            input_ids=torch.from_numpy(token_ids)[None],
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=max(1, num_rows),  # 0 would be all
        )
        logits: torch.Tensor = output.logits[0]  # [at least num_rows, V]
        return logits[logits.shape[0] - num_rows :]
