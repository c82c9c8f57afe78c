"""The head of proposer `eagle`: one decoder layer over the target's hidden states and its own.

The target's states after some layers become one fused state a token; with the embedding of the token after it, the
layer turns it into the state that stands for the token after that, whose logits are drafts. Further drafts go on from
the layer's own states (EAGLE-3, arXiv 2503.01840). Logits are of a reduced vocabulary: the ids that the head drafts.

Letters: P rows of the step, L layers of the target whose states are read, E hidden size, V vocabulary, U ids of the
reduced one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.backends.base import EngineError
from engine.batch import MIN_ROWS, ForwardBatch
from engine.heads.artefact import Artefact, target_ends
from engine.kernels.base import LayerKernels, RotaryTable
from engine.kv.cache import KvCache
from engine.models.config import LoadedModel, ModelConfig
from engine.models.linear import Linear, LinearType
from engine.models.llama import build_rotary, head_logits

KIND = "eagle"


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Ready to run. A row reads a token and, from `ForwardBatch.states`, the fused or own state before it."""

    config: ModelConfig  # the target's, with one layer
    dtype: torch.dtype
    layers: tuple[int, ...]  # [L] of the target
    token_ids: torch.Tensor  # int64 [U], ascending: the target's ids of the logits
    embedding: torch.Tensor  # [V, E], the target's
    fuse_states: Linear  # [P, L * E] -> [P, E]
    token_norm: torch.Tensor
    state_norm: torch.Tensor
    qkv: Linear  # [P, 2 E]: token, then state
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    final_norm: torch.Tensor
    head: Linear  # [P, E] -> [P, U], rows of the target's
    rotary: RotaryTable

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [rows, L, E] -> what the head reads, float32 [rows, E]."""
        num_rows = states.shape[0]
        padded = F.pad(states.flatten(1).to(self.dtype), (0, 0, 0, max(0, MIN_ROWS - num_rows)))
        return self.fuse_states(padded)[:num_rows].float()

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,
        kernels: LayerKernels,
        on_layer: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """See `DecoderModel`. EngineError for a batch without states."""
        if batch.states is None:
            raise EngineError("a head reads states beside tokens; the step has none")
        config, eps = self.config, self.config.rms_norm_eps
        attend = kernels.prepare_attention(config, batch, cache, self.rotary)
        residual = batch.states.clone()
        tokens = F.embedding(batch.token_ids, self.embedding).float()
        token_normed, state_normed = (residual.new_empty(residual.shape, dtype=self.dtype) for _ in range(2))
        kernels.add_rms_norm(tokens, None, self.token_norm, eps, token_normed)
        kernels.add_rms_norm(residual, None, self.state_norm, eps, state_normed)
        # Rows past the tokens are never written by attention; they must be finite.
        heads = token_normed.new_zeros(batch.num_rows, config.num_heads * config.head_dim)
        attend(0, self.qkv(torch.cat([token_normed, state_normed], dim=-1)), None, heads)
        normed = state_normed
        kernels.add_rms_norm(residual, self.attention_out(heads), self.mlp_norm, eps, normed)
        activation = normed.new_empty(batch.num_rows, config.intermediate_size)
        kernels.silu_mul(self.gate_up(normed), activation)
        residual.add_(self.down(activation))
        if on_layer is not None:
            on_layer(1, residual)
        return residual

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, kernels: LayerKernels) -> Iterator[torch.Tensor]:
        """See `DecoderModel`: of the reduced vocabulary [rows, U]."""
        eps = self.config.rms_norm_eps
        return head_logits(hidden, rows, kernels, self.final_norm, eps, self.head, self.dtype)


def eagle_shapes(config: ModelConfig, num_layers: int) -> dict[str, tuple[int, ...]]:
    """The trained tensors of a head that reads so many of the target's layers, [out, in]."""
    hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    norms = ("token_norm", "state_norm", "mlp_norm", "final_norm")
    return {
        "fuse": (hidden, num_layers * hidden),
        "qkv": (query + 2 * config.num_kv_heads * config.head_dim, 2 * hidden),
        "attention_out": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        **dict.fromkeys(norms, (hidden,)),
    }


def build_eagle(
    artefact: Artefact, target: LoadedModel, dtype: torch.dtype, linear: LinearType, max_context: int
) -> EagleHead:
    """The head over its target; ArtefactError for another kind, another target, or tensors of other shapes."""
    artefact.check(KIND, target, eagle_shapes(target.config, len(artefact.layers)))
    config = replace(target.config, num_layers=1, attention_bias=False, qk_norm=False, max_context=max_context)
    embedding, output = target_ends(target, artefact.token_ids, dtype)
    tensors = artefact.tensors

    def packed(name: str) -> Linear:
        return linear(tensors[name].to(dtype), None)

    return EagleHead(
        config=config,
        dtype=dtype,
        layers=artefact.layers,
        token_ids=artefact.token_ids,
        embedding=embedding,
        fuse_states=packed("fuse"),
        token_norm=tensors["token_norm"],
        state_norm=tensors["state_norm"],
        qkv=packed("qkv"),
        attention_out=packed("attention_out"),
        mlp_norm=tensors["mlp_norm"],
        gate_up=packed("gate_up"),
        down=packed("down"),
        final_norm=tensors["final_norm"],
        head=linear(output, None),
        rotary=build_rotary(config, max_context),
    )
