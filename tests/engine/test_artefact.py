"""A head's directory: what is written is read again, and what is damaged or for another target is refused by name."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.heads.artefact import MANIFEST, TENSORS, Artefact, ArtefactError, load_artefact, save_artefact
from engine.heads.eagle import KIND, build_eagle, eagle_shapes
from engine.models.linear import PackedLinear
from tests.fixtures.tiny_models import tiny_model
from tests.heads import random_eagle

TARGET = tiny_model("llama")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_artefact(random_eagle(TARGET), tmp_path / "head")
    return tmp_path / "head"


def check(artefact: Artefact, target: str = "llama") -> None:
    model = tiny_model(target)
    artefact.check(KIND, model, eagle_shapes(model.config, len(artefact.layers), artefact.size("down", -1)))


def test_it_is_read_as_it_was_written_but_for_the_rounding_of_its_matrices(saved: Path) -> None:
    before, after = random_eagle(TARGET), load_artefact(saved)
    assert replace(after, tensors={}, token_ids=before.token_ids, path="random") == replace(before, tensors={})
    assert torch.equal(after.token_ids, before.token_ids)
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        limit = tensor.abs().amax(dim=-1, keepdim=True) / 127 / 2 * 1.001 if tensor.dim() == 2 else 0.0
        assert bool(((after.tensors[name] - tensor).abs() <= limit).all())
    check(after)
    build_eagle(after, TARGET, torch.float32, PackedLinear, 64)


def test_it_is_small(saved: Path) -> None:
    num_numbers = sum(tensor.numel() for tensor in random_eagle(TARGET).tensors.values())
    assert (saved / TENSORS).stat().st_size < 1.2 * num_numbers


@pytest.mark.parametrize("how", ["flipped", "truncated", "another"])
def test_damaged_tensors_are_refused_by_their_checksum(saved: Path, how: str) -> None:
    path = saved / TENSORS
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[-1] ^= 1
    elif how == "truncated":
        del data[-100:]
    else:
        save_artefact(random_eagle(TARGET, seed=9), saved.parent / "other")
        data = bytearray((saved.parent / "other" / TENSORS).read_bytes())
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match=f"{TENSORS}: checksum .* the file is damaged or another head's"):
        load_artefact(saved)


def test_what_is_no_head_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="nowhere: not a head"):
        load_artefact(tmp_path / "nowhere")
    manifest = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(ArtefactError, match="format 1, this build reads format 2; train the head again"):
        load_artefact(saved)
    (saved / MANIFEST).write_text("[]")
    with pytest.raises(ArtefactError, match="format None"):
        load_artefact(saved)
    (saved / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ArtefactError, match="not a head"):
        load_artefact(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": True}, "format True"),
        ({"layers": None}, "layers is NoneType, not list"),
        ({"layers": "12"}, "layers is str, not list"),
        ({"layers": [1.0, 2]}, r"layers \[1.0, 2\] are not integers"),
        ({"layers": [[1]]}, "are not integers"),
        ({"layers": [True]}, "are not integers"),
        ({"target": [1]}, "target is list, not dict"),
        ({"kind": 3}, "kind is int, not str"),
        ({"recipe": ""}, "recipe is str, not dict"),
    ],
)
def test_a_manifest_with_other_values_is_refused_by_field(
    saved: Path, changes: dict[str, object], message: str
) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps({**manifest, **changes}))
    with pytest.raises(ArtefactError, match=message):
        load_artefact(saved)
    for field in changes:
        del manifest[field]
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match=r"has no|format None"):
        load_artefact(saved)


def rewrite(saved: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Other tensors, with a checksum that fits."""
    tensors = load_file(saved / TENSORS)
    change(tensors)
    save_file(tensors, saved / TENSORS)
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["sha256"] = hashlib.sha256((saved / TENSORS).read_bytes()).hexdigest()
    (saved / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("state_norm", lambda one: one.half(), "'state_norm' is torch.float16"),
        ("state_norm", lambda one: one * float("nan"), "'state_norm' has numbers that are not finite"),
        ("down.scale", lambda one: one * float("inf"), "'down' has numbers that are not finite"),
        ("down.scale", lambda one: one[1:].clone(), "matrix 'down' .* has scales torch.float32"),
        ("down.scale", lambda one: one.sum(), "matrix 'down' .* has scales torch.float32 \\(\\)"),
        ("down.scale", lambda one: one.double(), "matrix 'down' .* has scales torch.float64"),
        ("down", lambda one: one.t().contiguous(), "matrix 'down' .* has scales|tensor 'down' is"),
        ("down", lambda one: one.to(torch.uint8), "'down' is torch.uint8"),
        ("down", lambda one: one.flatten(), "matrix 'down'"),
        ("down", lambda _: torch.tensor(1.0), "tensor 'down' is \\(\\), the target needs"),
        ("token_ids", lambda one: one.double(), "'token_ids' is torch.float64"),
        ("token_ids", lambda one: one[0].clone(), "'token_ids' is torch.int32 \\(\\)"),
        ("token_ids", None, "there is no tensor 'token_ids'"),
        ("down.scale", None, "matrix 'down' .* has no scales"),
    ],
)
def test_tensors_that_are_not_a_heads_are_refused_by_name(
    saved: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, message: str
) -> None:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name])

    rewrite(saved, apply)
    with pytest.raises(ArtefactError, match=message):
        check(load_artefact(saved))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mtp"}, "a head of kind 'mtp', not 'eagle'"),
        ({"layers": (1, 3)}, r"layers \[1, 3\] are not 1 to 8 of the target's 1..2, ascending"),
        ({"layers": (2, 1)}, r"layers \[2, 1\] are not 1 to 8"),
        ({"layers": (0, 2)}, r"layers \[0, 2\] are not 1 to 8"),
        ({"layers": ()}, r"layers \[\] are not 1 to 8"),
        ({"layers": (1,)}, r"tensor 'fuse' is \(64, 64\), the target needs none"),
        ({"token_ids": torch.tensor([3, 3])}, r"not ascending in 0..159"),
        ({"token_ids": torch.tensor([3, 160])}, r"not ascending in 0..159"),
        ({"token_ids": torch.tensor([], dtype=torch.int64)}, r"not ascending in 0..159"),
    ],
)
def test_what_does_not_fit_is_refused_naming_both_sides(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArtefactError, match=message):
        check(replace(random_eagle(TARGET), **changes))  # type: ignore[arg-type]


def test_another_target_is_refused_naming_what_differs() -> None:
    artefact = random_eagle(TARGET)
    other = tiny_model("llama", seed=1)
    with pytest.raises(ArtefactError, match="made for another target: embedding_sha256"):
        artefact.check(KIND, other, eagle_shapes(other.config, 2, 64))
    wider = replace(TARGET, config=replace(TARGET.config, vocab_size=161))
    with pytest.raises(ArtefactError, match="another target: vocab_size 160, here 161"):
        artefact.check(KIND, wider, {})
