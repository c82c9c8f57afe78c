"""Random heads for tiny targets, and what they must compute, written down as plainly as it goes."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from draft_service.proposers.base import HiddenStatesNeed, ProposeInput, SessionKey
from draft_service.proposers.eagle import EagleProposer
from draft_service.proposers.head_base import Head
from draft_service.proposers.model_base import ModelIdentity
from draft_service.proposers.mtp import MtpProposer
from engine.backends.torch_backend import TorchEngine
from engine.heads.artefact import Artefact, target_identity
from engine.heads.eagle import build_eagle, eagle_shapes
from engine.heads.mtp import build_mtp, mtp_shapes
from engine.heads.shallow import shallow_shapes
from engine.kernels.cpu_reference import TorchKernels
from engine.models.config import LoadedModel, ModelConfig
from engine.models.linear import PackedLinear
from engine.models.llama import build_rotary
from tandem.ngram_index import MAX_NGRAM_SIZE, Recurrence
from tandem.types import HiddenStates, ModelInfo
from tests.draft.support import make_spec

LAYERS = (1, 2)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Norms around 1, matrices around 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else noise / shape[-1] ** 0.5
    return tensors


def random_eagle(target: LoadedModel, num_ids: int = 100, seed: int = 0) -> Artefact:
    """A head that drafts every ids but the first few of the target's."""
    vocab_size = target.config.vocab_size
    return Artefact(
        kind="eagle",
        target=target_identity(target),
        layers=LAYERS,
        token_ids=torch.arange(vocab_size - num_ids, vocab_size),
        tensors=random_tensors(eagle_shapes(target.config, len(LAYERS), 48), seed),
        recipe={"seed": seed},
        path="random",
    )


def random_mtp(target: LoadedModel, num_ids: int = 100, num_steps: int = 3, seed: int = 0) -> Artefact:
    """As `random_eagle`, from the target's last layer."""
    return Artefact(
        kind="mtp",
        target=target_identity(target),
        layers=(target.config.num_layers,),
        token_ids=torch.arange(target.config.vocab_size - num_ids, target.config.vocab_size),
        tensors=random_tensors(mtp_shapes(target.config, 48, num_steps), seed),
        recipe={"seed": seed},
        path="random",
    )


def searched_recurrence(tokens: Sequence[int]) -> Recurrence:
    """What followed the last tokens at the right-most place where most of them stood before, by looking everywhere."""
    for size in range(min(MAX_NGRAM_SIZE, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[-size:]):
                return Recurrence(tokens[end], size)
    return Recurrence()


def naive_hint(
    tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, tokens: Sequence[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hint [E] after these tokens, and what is added to the result [E]."""
    found = searched_recurrence(tokens)
    token = F.rms_norm(embedding[found.token_id], embedding.shape[1:], tensors["hints.norm"], eps)
    if found.size == 0:
        token = torch.zeros_like(token)
    return token + tensors["hints.size"][found.size], token * tensors["hints.gain"][found.size]


def naive_mtp(
    artefact: Artefact, target: LoadedModel, tokens: Sequence[int], state: torch.Tensor, num_drafts: int
) -> list[int]:
    """Greedy drafts after tokens, from the target's last state [E] of the row before the last of them."""
    tensors, eps = artefact.tensors, target.config.rms_norm_eps
    embedding = target.weights["model.embed_tokens.weight"]
    head = embedding if target.config.tie_word_embeddings else target.weights["lm_head.weight"]
    fed = list(tokens)
    for number in range(num_drafts):
        step = min(number, len(tensors["final_norms"]) - 1)
        token = F.rms_norm(embedding[fed[-1]], (len(state),), tensors["token_norms"][step], eps)
        hint, added = naive_hint(tensors, embedding, fed, eps)
        both = torch.cat([token, F.rms_norm(state, (len(state),), tensors["state_norms"][step], eps), hint])
        gate, up = (tensors["gate_up"] @ both).chunk(2)
        state = state + tensors["down"] @ (F.silu(gate) * up) + added
        logits = head[artefact.token_ids] @ F.rms_norm(state, (len(state),), tensors["final_norms"][step], eps)
        fed.append(int(artefact.token_ids[int(logits.argmax())]))
    return fed[len(tokens) :]


def random_shallow(target: LoadedModel, num_ids: int = 100, seed: int = 0) -> Artefact:
    """A draft model of two layers of the target's shape."""
    return Artefact(
        kind="shallow",
        target=target_identity(target),
        layers=LAYERS,
        token_ids=torch.arange(target.config.vocab_size - num_ids, target.config.vocab_size),
        tensors=random_tensors(shallow_shapes(target.config, len(LAYERS)), seed),
        recipe={"seed": seed},
        path="random",
    )


def stand_in(model: ModelInfo) -> LoadedModel:
    """What a head needs to know of a target of these sizes; its embedding is random."""
    config = ModelConfig(
        family="llama",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=2 * model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.hidden_size // 8,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_context=1024,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(model.vocab_size, model.hidden_size, generator=generator)
    return LoadedModel(config, {"model.embed_tokens.weight": embedding})


def untrained_eagle(model: ModelInfo) -> EagleProposer:
    """For a target of these sizes: wrong nearly always, which must cost nothing but time."""
    target = stand_in(model)
    head = build_eagle(random_eagle(target, model.vocab_size), target, torch.float32, PackedLinear, 1024)
    return EagleProposer(_engine(head), head, _identity("eagle", head, model))


def untrained_mtp(model: ModelInfo) -> MtpProposer:
    """As `untrained_eagle`."""
    target = stand_in(model)
    head = build_mtp(random_mtp(target, model.vocab_size), target, torch.float32, PackedLinear, 1024)
    return MtpProposer(_engine(head), head, _identity("mtp", head, model))


def _engine(head: Head) -> TorchEngine:
    return TorchEngine(head, TorchKernels(), num_blocks=2048, block_size=4)


def _identity(name: str, head: Head, model: ModelInfo) -> ModelIdentity:
    need = HiddenStatesNeed(head.layers, head.config.hidden_size)
    return ModelIdentity(name, "untrained", model.vocab_hash, need)


class NaiveEagle:
    """The head by its definition: every row from the start, no cache. Float32."""

    def __init__(self, artefact: Artefact, target: LoadedModel) -> None:
        self._tensors = artefact.tensors
        self._config: ModelConfig = target.config
        self._embedding = target.weights["model.embed_tokens.weight"]
        head = self._embedding if target.config.tie_word_embeddings else target.weights["lm_head.weight"]
        self._head = head[artefact.token_ids]
        self._ids = artefact.token_ids.tolist()
        self._rotary = build_rotary(target.config, 512)

    def greedy(self, tokens: Sequence[int], states: torch.Tensor, num_drafts: int) -> list[int]:
        """Drafts after `tokens`; `states` [rows, L, E] of the target, one row fewer than tokens."""
        others = [
            F.rms_norm(states[:, layer], states.shape[-1:], weights, self._config.rms_norm_eps)
            for layer, weights in enumerate(self._tensors["states_norm"])
        ]
        fused = states[:, -1] + torch.cat(others, dim=-1) @ self._tensors["fuse"].T
        fed = list(tokens)
        drafts: list[int] = []
        for _ in range(num_drafts):
            own = self._layer(fed, fused)[-1:]
            logits = self._norm(own, "final_norm") @ self._head.T
            drafts.append(self._ids[int(logits.argmax())])
            fed.append(drafts[-1])
            fused = torch.cat([fused, own])
        return drafts

    def _layer(self, fed: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """Rows [n - 1, E] of these n tokens but the first, and the states before them."""
        config, num_rows = self._config, len(fed) - 1
        token = self._norm(F.embedding(torch.tensor(fed[1:]), self._embedding), "token_norm")
        hints = [
            naive_hint(self._tensors, self._embedding, fed[: end + 1], config.rms_norm_eps)
            for end in range(1, len(fed))
        ]
        hint, added = (torch.stack(parts) for parts in zip(*hints, strict=True))
        both = torch.cat([token, self._norm(states, "state_norm"), hint], dim=-1)
        heads = (both @ self._tensors["qkv"].T).view(num_rows, -1, config.head_dim).transpose(0, 1)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(heads, sizes)
        groups = config.num_heads // config.num_kv_heads
        key, value = self._rotated(key).repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        attended = F.scaled_dot_product_attention(self._rotated(query), key, value, is_causal=True)
        out = states + attended.transpose(0, 1).flatten(1) @ self._tensors["attention_out"].T
        read = torch.cat([token, self._norm(out, "mlp_norm"), hint], dim=-1)
        gate, up = (read @ self._tensors["gate_up"].T).chunk(2, dim=-1)
        return out + (F.silu(gate) * up) @ self._tensors["down"].T + added

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[name], self._config.rms_norm_eps)

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        num_rows = heads.shape[1]
        cos, sin = self._rotary.cos[:num_rows], self._rotary.sin[:num_rows]
        low, high = heads.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class StatesOf:
    """A made-up sequence and a target's states of it, so many layers of them."""

    def __init__(self, seed: int, num_layers: int, size: int = 64, vocab_size: int = 160) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn(256, num_layers, size, generator=generator).bfloat16()
        self.tokens = torch.randint(vocab_size, (256,), generator=generator).tolist()

    def rows(self, first: int, end: int) -> tuple[HiddenStates, ...]:
        """In chunks of three."""
        return tuple(
            HiddenStates(
                at, min(3, end - at), self.states[at : min(at + 3, end)].view(torch.int16).numpy().tobytes()
            )
            for at in range(first, end, 3)
        )

    def input(self, key: int, length: int, first_row: int = 0, num_drafts: int = 3) -> ProposeInput:
        spec = make_spec(self.tokens[:2], max_tokens=200)
        rows = self.rows(first_row, length - 1)
        return ProposeInput(SessionKey(key), spec, tuple(self.tokens[:length]), num_drafts, rows)
