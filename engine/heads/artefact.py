"""A trained head in a directory: `head.json` says what it is and for which target, `head.safetensors` has its tensors.

Matrices are int8 with one scale an output row, norms float32; what the head takes from its target (the
embedding, rows of the output head) is not in it. `head.json` has the checksum of the tensors and one of the target's
embedding, so that a damaged file and another target are refused before anything is drafted.

Letters: U ids of the reduced vocabulary, E hidden size.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from engine.backends.base import EngineError
from engine.models.config import LoadedModel
from tandem.validation import MAX_HIDDEN_LAYERS, are_hidden_layers

FORMAT = 2  # 1 had heads without hints
MANIFEST, TENSORS = "head.json", "head.safetensors"
_TOKEN_IDS, _SCALE = "token_ids", ".scale"


class ArtefactError(EngineError):
    """A head that cannot be used; the message names the directory and both sides of what does not fit."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """A head's own tensors, float32, and what it was made for."""

    kind: str  # "eagle", "mtp"
    target: Mapping[str, Any]  # as `target_identity`
    layers: tuple[int, ...]  # of the target, after which it reads hidden states
    token_ids: torch.Tensor  # int64 [U], ascending: the target's ids that it drafts
    tensors: Mapping[str, torch.Tensor]
    recipe: Mapping[str, Any]  # how it was trained: for readers
    path: str = ""  # where it was read

    def size(self, name: str, dim: int) -> int:
        """Of a tensor along a dimension; 0 where there is none."""
        tensor = self.tensors.get(name)
        return tensor.shape[dim] if tensor is not None and tensor.dim() > 0 else 0

    def check(self, kind: str, target: LoadedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """ArtefactError unless it is of this kind, for this target, and has exactly tensors of these shapes."""
        if self.kind != kind:
            raise ArtefactError(f"{self.path}: a head of kind {self.kind!r}, not {kind!r}")
        here = target_identity(target)
        for field, value in here.items():
            if self.target.get(field) != value:
                raise ArtefactError(
                    f"{self.path}: made for another target: {field} {self.target.get(field)!r}, here {value!r}"
                )
        num_layers = target.config.num_layers
        if not are_hidden_layers(self.layers, num_layers):
            raise ArtefactError(
                f"{self.path}: layers {list(self.layers)} are not 1 to {MAX_HIDDEN_LAYERS} of the target's "
                f"1..{num_layers}, ascending"
            )
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if found != dict(shapes):
            name = min(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
            raise ArtefactError(
                f"{self.path}: tensor {name!r} is {found.get(name, 'missing')}, "
                f"the target needs {shapes.get(name, 'none')}"
            )
        ids = self.token_ids
        if (
            not len(ids)
            or int(ids[0]) < 0
            or int(ids[-1]) >= target.config.vocab_size
            or bool((ids.diff() <= 0).any())
        ):
            raise ArtefactError(
                f"{self.path}: its token ids are not ascending in 0..{target.config.vocab_size - 1}"
            )


def target_identity(target: LoadedModel) -> dict[str, Any]:
    """What a head's target is told by."""
    config = target.config
    embedding = target.weights["model.embed_tokens.weight"].float().contiguous().numpy()
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "embedding_sha256": hashlib.sha256(embedding.tobytes()).hexdigest(),
    }


def target_ends(
    target: LoadedModel, token_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head takes from its target: the embedding [V, E], and the output head's rows of these ids [U, E]."""
    embedding = target.weights["model.embed_tokens.weight"].to(dtype)
    head = embedding if target.config.tie_word_embeddings else target.weights["lm_head.weight"].to(dtype)
    return embedding, head[token_ids].contiguous()


def save_artefact(artefact: Artefact, directory: Path) -> None:
    """Write the directory; matrices are rounded to int8."""
    stored: dict[str, torch.Tensor] = {_TOKEN_IDS: artefact.token_ids.to(torch.int32)}
    for name, tensor in artefact.tensors.items():
        if tensor.dim() == 2 and "norm" not in name:
            stored[name], stored[name + _SCALE] = quantised(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    data = save(stored)
    manifest = {
        "format": FORMAT,
        "kind": artefact.kind,
        "sha256": hashlib.sha256(data).hexdigest(),
        "target": dict(artefact.target),
        "layers": list(artefact.layers),
        "recipe": dict(artefact.recipe),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TENSORS).write_bytes(data)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def load_artefact(directory: Path) -> Artefact:
    """Read a directory; ArtefactError, naming it, for what is missing, damaged or of another format."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        data = (directory / TENSORS).read_bytes()
    except (OSError, ValueError, RecursionError) as error:
        raise ArtefactError(f"{directory}: not a head: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found is True or found != FORMAT:
        raise ArtefactError(
            f"{directory / MANIFEST}: format {found!r}, this build reads format {FORMAT}; train the head again"
        )
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != manifest.get("sha256"):
        raise ArtefactError(
            f"{directory / TENSORS}: checksum {checksum[:16]}, {MANIFEST} says {str(manifest.get('sha256'))[:16]}: "
            "the file is damaged or another head's"
        )
    try:
        return _artefact(manifest, load(data), str(directory))
    except (TypeError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"{directory}: not a head of format {FORMAT}: {error}") from error


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [out, in] -> int8 of its shape, and float32 scales [out] to multiply it with."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127.0
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def _artefact(manifest: Mapping[str, Any], stored: Mapping[str, torch.Tensor], path: str) -> Artefact:
    """ValueError or TypeError for fields and tensors that are not what a head has."""
    for field, kind in (("kind", str), ("target", dict), ("layers", list), ("recipe", dict)):
        if field not in manifest:
            raise ValueError(f"{MANIFEST} has no {field!r}")
        if not isinstance(manifest[field], kind):
            raise TypeError(f"{MANIFEST}: {field} is {type(manifest[field]).__name__}, not {kind.__name__}")
    if not all(type(layer) is int for layer in manifest["layers"]):
        raise TypeError(f"{MANIFEST}: layers {manifest['layers']!r} are not integers")
    if _TOKEN_IDS not in stored:
        raise ValueError(f"there is no tensor {_TOKEN_IDS!r}")
    ids = stored[_TOKEN_IDS]
    if ids.dtype is not torch.int32 or ids.dim() != 1:
        raise TypeError(f"tensor {_TOKEN_IDS!r} is {ids.dtype} {tuple(ids.shape)}, not int32 in one dimension")
    return Artefact(
        kind=manifest["kind"],
        target=manifest["target"],
        layers=tuple(manifest["layers"]),
        token_ids=ids.long(),
        tensors={
            name: _restored(name, stored) for name in stored if name != _TOKEN_IDS and not name.endswith(_SCALE)
        },
        recipe=manifest["recipe"],
        path=path,
    )


def _restored(name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A float32 tensor, or what an int8 matrix stands for with its scales; all of it finite numbers."""
    tensor = stored[name]
    if tensor.dtype is torch.int8:
        scale = stored.get(name + _SCALE)
        if (
            tensor.dim() != 2
            or scale is None
            or scale.shape != tensor.shape[:1]
            or scale.dtype is not torch.float32
        ):
            found = "no scales" if scale is None else f"scales {scale.dtype} {tuple(scale.shape)}"
            raise ValueError(
                f"matrix {name!r} {tuple(tensor.shape)} has {found}, not a float32 for each of its rows"
            )
        tensor = tensor.float() * scale[:, None]
    elif tensor.dtype is not torch.float32:
        raise TypeError(f"tensor {name!r} is {tensor.dtype}; a head has float32 and, for matrices, int8")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"tensor {name!r} has numbers that are not finite")
    return tensor
