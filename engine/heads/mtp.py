"""The head of proposer `mtp`: a recurrent network that goes on from the target's last hidden state, token by token.

Every step has the same matrices and layer norms of its own: state' = state + down(silu(gate) * up) of the step's norms
of token and state and of a hint (hints.py), and the head's logits for the next draft come from the step's norm of
state'. Steps past the last that was trained use its norms. There is no attention: nothing is ever written to key-value
memory.

Letters: P rows of the step, E hidden size, I inner size, V vocabulary, U ids of the reduced one, S steps with norms.
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
from engine.models.llama import MAX_HEAD_ROWS, build_rotary

KIND = "mtp"


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Ready to run. A row reads a token, and a state with a hint; its position is the number of its step."""

    config: ModelConfig  # the target's, with one layer and the inner size
    dtype: torch.dtype
    layers: tuple[int, ...]  # of the target: its last
    token_ids: torch.Tensor  # int64 [U], ascending: the target's ids of the logits
    embedding: torch.Tensor  # [V, E], the target's
    token_norms: torch.Tensor  # float32 [S, E]
    state_norms: torch.Tensor  # float32 [S, E]
    final_norms: torch.Tensor  # float32 [S, E]
    hints: Hints
    gate_up: Linear  # [P, 3 E]: token, state, hint -> [P, 2 I]
    down: Linear
    head: Linear  # [P, E] -> [P, U], rows of the target's
    rotary: RotaryTable  # of no use to it; its length is the longest sequence

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [rows, 1, E] -> float32 [rows, E]."""
        return states[:, -1].float()

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,  # noqa: ARG002 - it writes nothing
        kernels: LayerKernels,
        on_layer: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """See `DecoderModel`; normed already, since every step has a norm of its own."""
        if batch.states is None:
            raise EngineError("a head reads states beside tokens; the step has none")
        num_padding, last = batch.num_rows - batch.num_tokens, len(self.final_norms) - 1
        steps = F.pad(batch.positions.long(), (0, num_padding)).clamp_max(last)
        tokens = self._normed(F.embedding(batch.token_ids, self.embedding).float(), self.token_norms[steps])
        states, hints, added = torch.split(batch.states, self.config.hidden_size, dim=-1)
        normed = self._normed(states, self.state_norms[steps])
        inner = states.new_empty(batch.num_rows, self.config.intermediate_size, dtype=self.dtype)
        kernels.silu_mul(self.gate_up(torch.cat([tokens, normed, hints.to(self.dtype)], dim=-1)), inner)
        residual = states + self.down(inner).float() + added
        if on_layer is not None:
            on_layer(1, residual)
        return self._normed(residual, self.final_norms[steps]).float()

    def logits(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        kernels: LayerKernels,  # noqa: ARG002 - the norm is done
    ) -> Iterator[torch.Tensor]:
        """See `DecoderModel`: of the reduced vocabulary [rows, U]."""
        for chunk in torch.split(rows, MAX_HEAD_ROWS) if len(rows) else ():
            selected = hidden[F.pad(chunk, (0, max(0, MIN_ROWS - len(chunk))))]
            yield self.head(selected.to(self.dtype))[: len(chunk)]

    def _normed(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """RMS norm of float32 rows [P, E] with a weight a row, in the head's dtype."""
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)
        return (x * scale * weights).to(self.dtype)


def mtp_shapes(config: ModelConfig, inner: int, num_steps: int) -> dict[str, tuple[int, ...]]:
    """The trained tensors of a head, [out, in]."""
    hidden = config.hidden_size
    norms = ("token_norms", "state_norms", "final_norms")
    return {
        "gate_up": (2 * inner, 3 * hidden),
        "down": (hidden, inner),
        **dict.fromkeys(norms, (num_steps, hidden)),
        **hint_shapes(hidden),
    }


def build_mtp(
    artefact: Artefact, target: LoadedModel, dtype: torch.dtype, linear: LinearType, max_context: int
) -> MtpHead:
    """The head over its target; ArtefactError for another kind, another target, or tensors of other shapes."""
    tensors = artefact.tensors
    inner, num_steps = artefact.size("down", -1), artefact.size("final_norms", 0)
    artefact.check(KIND, target, mtp_shapes(target.config, inner, num_steps))
    config = replace(target.config, num_layers=1, intermediate_size=inner)
    embedding, head = target_ends(target, artefact.token_ids, dtype)
    return MtpHead(
        config=config,
        dtype=dtype,
        layers=artefact.layers,
        token_ids=artefact.token_ids,
        embedding=embedding,
        token_norms=tensors["token_norms"],
        state_norms=tensors["state_norms"],
        final_norms=tensors["final_norms"],
        hints=Hints.of(tensors, embedding, config.rms_norm_eps),
        gate_up=linear(tensors["gate_up"].to(dtype), None),
        down=linear(tensors["down"].to(dtype), None),
        head=linear(head, None),
        rotary=build_rotary(config, max_context),
    )
