"""The forward pass of the Llama family: Llama, SmolLM, Mistral, Qwen2/2.5 (biases), Qwen3 (q and k norms).

Letters: P rows of the step, R rows whose logits are wanted, E hidden size, I intermediate size, V vocabulary.
The residual stream is float32 whatever the model's dtype; weights and activations of the linears are in it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batch import MIN_ROWS, ForwardBatch
from engine.kernels.base import HeadNorms, LayerKernels, RotaryTable
from engine.kv.cache import KvCache
from engine.models.config import LoadedModel, ModelConfig, ModelFileError
from engine.models.linear import Linear, LinearType

# Rows one call of the head takes: bounds the [rows, V] logits, and what the self-test has to cover.
MAX_HEAD_ROWS = 64


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's linears (query, key and value fused; gate and up fused) and norm weights."""

    attention_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """A model ready to run: weights in the step's dtype and layout, tables of rotation angles."""

    config: ModelConfig
    dtype: torch.dtype
    embedding: torch.Tensor  # [V, E]
    layers: tuple[LlamaLayer, ...]
    final_norm: torch.Tensor  # float32 [E]
    head: Linear
    rotary: RotaryTable

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,
        kernels: LayerKernels,
        on_layer: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run every layer, writing the cache -> the residual stream, float32 [P, E], before the final norm.

        `on_layer` is shown the stream after each number of layers, 1 to all of them; it is overwritten afterwards.
        """
        config, eps = self.config, self.config.rms_norm_eps
        attend = kernels.prepare_attention(config, batch, cache, self.rotary)
        residual = F.embedding(batch.token_ids, self.embedding).float()
        delta = None
        normed = residual.new_empty(residual.shape, dtype=self.dtype)  # [P, E]
        # Rows past the tokens are never written by attention; they must be finite.
        heads = normed.new_zeros(batch.num_rows, config.num_heads * config.head_dim)
        activation = normed.new_empty(batch.num_rows, config.intermediate_size)
        for index, layer in enumerate(self.layers):
            kernels.add_rms_norm(residual, delta, layer.attention_norm, eps, normed)
            if on_layer is not None and index:
                on_layer(index, residual)
            attend(index, layer.qkv(normed), layer.head_norms, heads)
            delta = layer.attention_out(heads)
            kernels.add_rms_norm(residual, delta, layer.mlp_norm, eps, normed)
            kernels.silu_mul(layer.gate_up(normed), activation)
            delta = layer.down(activation)
        if delta is not None:
            residual.add_(delta)
        if on_layer is not None:
            on_layer(config.num_layers, residual)
        return residual

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, kernels: LayerKernels) -> Iterator[torch.Tensor]:
        """Logits of these rows of `hidden`, [at most MAX_HEAD_ROWS, V] at a time, in the model's dtype."""
        return head_logits(hidden, rows, kernels, self.final_norm, self.config.rms_norm_eps, self.head, self.dtype)


def head_logits(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    kernels: LayerKernels,
    norm: torch.Tensor,
    eps: float,
    head: Linear,
    dtype: torch.dtype,
) -> Iterator[torch.Tensor]:
    """The final norm and the head on these rows of `hidden`, at most MAX_HEAD_ROWS at a time."""
    for chunk in torch.split(rows, MAX_HEAD_ROWS) if len(rows) else ():
        num_rows = len(chunk)
        selected = hidden[F.pad(chunk, (0, max(0, MIN_ROWS - num_rows)))]
        normed = selected.to(dtype)
        kernels.add_rms_norm(selected, None, norm, eps, normed)
        yield head(normed)[:num_rows]


def build_llama(model: LoadedModel, dtype: torch.dtype, linear: LinearType, max_context: int) -> LlamaModel:
    """Convert, fuse and pack the weights; ModelFileError names a missing or misshapen tensor."""
    config, weights = model.config, _Weights(model.weights)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = weights.take("model.embed_tokens.weight", (vocab, hidden)).to(dtype)
    head = embedding if config.tie_word_embeddings else weights.take("lm_head.weight", (vocab, hidden)).to(dtype)
    return LlamaModel(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(_build_layer(config, weights, index, dtype, linear) for index in range(config.num_layers)),
        final_norm=weights.take_norm("model.norm.weight", hidden),
        head=linear(head, None),
        rotary=build_rotary(config, max_context),
    )


def build_rotary(config: ModelConfig, max_context: int) -> RotaryTable:
    """Angles position * theta^(-2 i / D) for every position below `max_context`, in float32 as in training."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    angles = torch.outer(torch.arange(max_context).float(), 1.0 / config.rope_theta**exponents)
    return RotaryTable(cos=angles.cos(), sin=angles.sin())


class _Weights:
    """Named tensors whose shapes are checked when taken."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._weights:
            raise ModelFileError(f"the model has no tensor {name!r}")
        tensor = self._weights[name]
        if tuple(tensor.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has shape {tuple(tensor.shape)}, its config says {shape}")
        return tensor

    def take_norm(self, name: str, size: int) -> torch.Tensor:
        """Float32, and a copy: a view of the file's memory would keep the whole file mapped."""
        return self.take(name, (size,)).to(torch.float32, copy=True)


def _build_layer(
    config: ModelConfig, weights: _Weights, index: int, dtype: torch.dtype, linear: LinearType
) -> LlamaLayer:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    prefix = f"model.layers.{index}"

    def fuse(part: str, sizes: dict[str, int], in_features: int, has_bias: bool = False) -> Linear:
        names = {f"{prefix}.{part}.{name}": size for name, size in sizes.items()}
        weight = torch.cat([weights.take(f"{name}.weight", (size, in_features)) for name, size in names.items()])
        bias = (
            torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in names.items()]) if has_bias else None
        )
        return linear(weight.to(dtype), None if bias is None else bias.to(dtype))

    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take_norm(f"{prefix}.{name}.weight", size)

    head_norms = None
    if config.qk_norm:
        head_norms = HeadNorms(norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim))
    qkv_sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
    return LlamaLayer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=fuse("self_attn", qkv_sizes, hidden, config.attention_bias),
        head_norms=head_norms,
        attention_out=fuse("self_attn", {"o_proj": hidden}, query_size),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=fuse("mlp", {"gate_proj": inner, "up_proj": inner}, hidden),
        down=fuse("mlp", {"down_proj": hidden}, inner),
    )
