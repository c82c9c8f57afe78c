"""A small draft model as a trained artefact: a few layers, begun as some of the target's, between the target's ends.

Embedding and output head are the target's, the latter for a reduced vocabulary, so the file holds the layers alone.
Letters: E hidden size, V vocabulary, U ids of the reduced one.
"""

from dataclasses import dataclass, replace

import torch

from engine.heads.artefact import Artefact, target_ends
from engine.models.config import LoadedModel, ModelConfig
from engine.models.linear import LinearType
from engine.models.llama import LlamaLayer, LlamaModel, build_rotary

KIND = "shallow"
_NORMS = ("attention_norm", "mlp_norm")


@dataclass(frozen=True, slots=True)
class ShallowModel:
    """Ready to run: a `LlamaModel` whose logits are of these ids of the target."""

    model: LlamaModel
    token_ids: torch.Tensor  # int64 [U], ascending


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, [out, in]."""
    hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return {
        "qkv": (query + 2 * config.num_kv_heads * config.head_dim, hidden),
        "attention_out": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        **dict.fromkeys(_NORMS, (hidden,)),
    }


def shallow_shapes(config: ModelConfig, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Every trained tensor of so many layers; `layers` of the artefact are the target's that they began as."""
    layers = {
        f"layers.{index}.{name}": shape
        for index in range(num_layers)
        for name, shape in layer_shapes(config).items()
    }
    return {**layers, "final_norm": (config.hidden_size,)}


def build_shallow(
    artefact: Artefact, target: LoadedModel, dtype: torch.dtype, linear: LinearType, max_context: int
) -> ShallowModel:
    """The model over its target's ends; ArtefactError for another kind, another target, or tensors of other shapes."""
    num_layers = len(artefact.layers)
    artefact.check(KIND, target, shallow_shapes(target.config, num_layers))
    config = replace(target.config, num_layers=num_layers, attention_bias=False, qk_norm=False)
    embedding, head = target_ends(target, artefact.token_ids, dtype)
    tensors = artefact.tensors

    def layer(index: int) -> LlamaLayer:
        of = {name: tensors[f"layers.{index}.{name}"] for name in layer_shapes(config)}
        return LlamaLayer(
            attention_norm=of["attention_norm"],
            qkv=linear(of["qkv"].to(dtype), None),
            head_norms=None,
            attention_out=linear(of["attention_out"].to(dtype), None),
            mlp_norm=of["mlp_norm"],
            gate_up=linear(of["gate_up"].to(dtype), None),
            down=linear(of["down"].to(dtype), None),
        )

    model = LlamaModel(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layer(index) for index in range(num_layers)),
        final_norm=tensors["final_norm"],
        head=linear(head, None),
        rotary=build_rotary(config, max_context),
    )
    return ShallowModel(model, artefact.token_ids)
