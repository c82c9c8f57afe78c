"""The head of proposer `eagle`: one decoder layer over the target's hidden states and its own.

The target's states after some layers become one fused state a token: the last one, and what a matrix makes of the
others, normed each for itself since their sizes differ a hundredfold. With the embedding of the token after it, and a
hint (hints.py), the layer turns it into the state that stands for the token after that, whose logits are drafts.
Further drafts go on from the layer's own states (EAGLE-3, arXiv 2503.01840). Token and hint reach the layer's second
half too, beside the attention, whose values may be narrow. Logits are of a reduced vocabulary: the ids that the head
drafts.

Letters: P rows of the step, L layers of the target whose states are read, E hidden size, I inner size, V vocabulary, U
ids of the reduced one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.backends.base import EngineError
from engine.batch import MIN_ROWS, ForwardBatch
from engine.heads.artefact import Artefact, target_ends
from engine.heads.hints import Hints, hint_shapes
from engine.kernels.base import LayerKernels, RotaryTable
from engine.kv.cache import KvCache
from engine.models.config import LoadedModel, ModelConfig
from engine.models.linear import Linear, LinearType
from engine.models.llama import build_rotary, head_logits

KIND = "eagle"


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Ready to run. A row reads a token; the fused or own state before it and a hint from `ForwardBatch.states`."""

    config: ModelConfig  # the target's, with one layer and the inner size
    dtype: torch.dtype
    layers: tuple[int, ...]  # [L] of the target
    token_ids: torch.Tensor  # int64 [U], ascending: the target's ids of the logits
    embedding: torch.Tensor  # [V, E], the target's
    states_norm: torch.Tensor  # float32 [L - 1, E]
    fuse_states: Linear | None  # [P, (L - 1) E] -> [P, E]; None where only the last layer's are read
    hints: Hints
    token_norm: torch.Tensor
    state_norm: torch.Tensor
    qkv: Linear  # [P, 3 E]: token, state, hint
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear  # [P, 3 E] -> [P, 2 I]
    down: Linear
    final_norm: torch.Tensor
    head: Linear  # [P, E] -> [P, U], rows of the target's
    rotary: RotaryTable

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [rows, L, E] -> float32 [rows, E]."""
        last = states[:, -1].float()
        if self.fuse_states is None:
            return last
        num_rows, eps = states.shape[0], self.config.rms_norm_eps
        others = states[:, :-1].float()
        others = others * torch.rsqrt(others.pow(2).mean(dim=-1, keepdim=True) + eps) * self.states_norm
        padded = F.pad(others.flatten(1).to(self.dtype), (0, 0, 0, max(0, MIN_ROWS - num_rows)))
        fused: torch.Tensor = last + self.fuse_states(padded)[:num_rows]
        return fused

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
        states, hints, added = torch.split(batch.states, config.hidden_size, dim=-1)
        residual, hints = states.clone(), hints.to(self.dtype)
        tokens = F.embedding(batch.token_ids, self.embedding).float()
        token_normed, normed = (residual.new_empty(residual.shape, dtype=self.dtype) for _ in range(2))
        kernels.add_rms_norm(tokens, None, self.token_norm, eps, token_normed)
        kernels.add_rms_norm(residual, None, self.state_norm, eps, normed)
        # Rows past the tokens are never written by attention; they must be finite.
        heads = token_normed.new_zeros(batch.num_rows, config.num_heads * config.head_dim)
        attend(0, self.qkv(torch.cat([token_normed, normed, hints], dim=-1)), None, heads)
        kernels.add_rms_norm(residual, self.attention_out(heads), self.mlp_norm, eps, normed)
        activation = normed.new_empty(batch.num_rows, config.intermediate_size)
        kernels.silu_mul(self.gate_up(torch.cat([token_normed, normed, hints], dim=-1)), activation)
        residual.add_(self.down(activation)).add_(added)
        if on_layer is not None:
            on_layer(1, residual)
        return residual

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, kernels: LayerKernels) -> Iterator[torch.Tensor]:
        """See `DecoderModel`: of the reduced vocabulary [rows, U]."""
        eps = self.config.rms_norm_eps
        return head_logits(hidden, rows, kernels, self.final_norm, eps, self.head, self.dtype)


def eagle_shapes(config: ModelConfig, num_layers: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The trained tensors of a head that reads so many of the target's layers, [out, in]."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    norms = ("token_norm", "state_norm", "mlp_norm", "final_norm")
    shapes = {
        "qkv": (query + 2 * config.num_kv_heads * config.head_dim, 3 * hidden),
        "attention_out": (hidden, query),
        "gate_up": (2 * inner, 3 * hidden),
        "down": (hidden, inner),
        **dict.fromkeys(norms, (hidden,)),
        **hint_shapes(hidden),
    }
    if num_layers > 1:
        shapes |= {"states_norm": (num_layers - 1, hidden), "fuse": (hidden, (num_layers - 1) * hidden)}
    return shapes


def build_eagle(
    artefact: Artefact, target: LoadedModel, dtype: torch.dtype, linear: LinearType, max_context: int
) -> EagleHead:
    """The head over its target; ArtefactError for another kind, another target, or tensors of other shapes."""
    tensors = artefact.tensors
    inner = artefact.size("down", -1)
    artefact.check(KIND, target, eagle_shapes(target.config, len(artefact.layers), inner))
    config = replace(
        target.config,
        num_layers=1,
        intermediate_size=inner,
        attention_bias=False,
        qk_norm=False,
        max_context=max_context,
    )
    embedding, output = target_ends(target, artefact.token_ids, dtype)

    def packed(name: str) -> Linear:
        return linear(tensors[name].to(dtype), None)

    return EagleHead(
        config=config,
        dtype=dtype,
        layers=artefact.layers,
        token_ids=artefact.token_ids,
        embedding=embedding,
        states_norm=tensors.get("states_norm", torch.empty(0, config.hidden_size)),
        fuse_states=packed("fuse") if "fuse" in tensors else None,
        hints=Hints.of(tensors, embedding, config.rms_norm_eps),
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
