"""Trained drafts from their directories: started by their options, over the target that they were made for."""

from pathlib import Path

import pytest
import torch

from draft_service.limits import DraftLimits
from draft_service.proposers import trained
from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.kind import ProposerError, ProposerSettings
from draft_service.proposers.registry import load_proposer
from engine.backends.settings import EngineSettings
from engine.backends.torch_backend import TorchEngine
from engine.heads.artefact import Artefact, load_artefact, save_artefact
from engine.heads.shallow import build_shallow
from engine.kernels.cpu_reference import TorchKernels
from engine.models.linear import PackedLinear
from tandem.types import Proposal
from tests.draft.support import make_spec
from tests.engine.engines import logits
from tests.every_proposer import own_options
from tests.fixtures.tiny_models import tiny_model, write_byte_tokenizer, write_hf_directory
from tests.heads import random_eagle, random_mtp, random_shallow

TARGET = tiny_model("llama")
MAKERS = {"eagle": random_eagle, "mtp": random_mtp, "draft_model": random_shallow}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_hf_directory(tmp_path_factory.mktemp("target"), TARGET)
    write_byte_tokenizer(directory, TARGET.config.vocab_size)
    return directory


def settings(target: Path, head: Path, *arguments: str) -> ProposerSettings:
    engine = EngineSettings(model=str(target), max_step_tokens=64, kv_memory_bytes=1 << 20)
    options = own_options("--head", str(head), *arguments).options
    return ProposerSettings(DraftLimits(max_batch=8), engine, options)


def saved(kind: str, directory: Path) -> Path:
    artefact: Artefact = MAKERS[kind](TARGET)
    save_artefact(artefact, directory / "trained")
    return directory / "trained"


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_it_is_loaded_by_name_and_says_what_it_is(kind: str, target: Path, tmp_path: Path) -> None:
    proposer = load_proposer(kind, settings(target, saved(kind, tmp_path)))
    capabilities = proposer.capabilities
    assert (capabilities.name, capabilities.model.model_id) == (kind, "trained")
    assert capabilities.model.vocab_size == 160
    assert len(capabilities.model.vocab_hash) == 64
    need = capabilities.hidden_states
    assert (need is None) == (kind == "draft_model")
    assert need is None or need.layers == MAKERS[kind](TARGET).layers


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_another_kind_and_a_damaged_file_are_refused_at_the_start(kind: str, target: Path, tmp_path: Path) -> None:
    other = "mtp" if kind != "mtp" else "eagle"
    with pytest.raises(Exception, match="a head of kind"):
        load_proposer(kind, settings(target, saved(other, tmp_path)))
    (tmp_path / "trained" / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(Exception, match=r"checksum .* is damaged or another head's"):
        load_proposer(kind, settings(target, tmp_path / "trained"))


def test_a_head_is_found_by_its_bundled_name_and_what_is_none_is_refused_with_those_there_are(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("mtp", tmp_path)
    monkeypatch.setattr(trained, "BUNDLED", tmp_path)
    assert load_proposer("mtp", settings(target, Path("trained"))).capabilities.model.model_id == "trained"
    message = r"--head 'other': neither a directory nor one of those that come with tandem \(trained\)"
    with pytest.raises(ProposerError, match=message):
        load_proposer("mtp", settings(target, Path("other")))


def test_a_target_that_is_not_there_and_a_confidence_that_cannot_be_are_refused(
    tmp_path: Path, target: Path
) -> None:
    head = saved("eagle", tmp_path)
    with pytest.raises(ProposerError, match="proposer 'eagle': model '/nowhere'"):
        load_proposer("eagle", settings(Path("/nowhere"), head))
    with pytest.raises(ProposerError, match=r"--min-confidence 1 is outside \[0, 1\)"):
        load_proposer("eagle", settings(target, head, "--min-confidence", "1"))


def test_a_shallow_draft_model_drafts_the_argmax_of_its_own_layers(target: Path, tmp_path: Path) -> None:
    proposer = load_proposer("draft_model", settings(target, saved("draft_model", tmp_path)))
    tokens = (5, 6, 7, 8)
    (proposal,) = proposer.propose([ProposeInput(SessionKey(1), make_spec(tokens[:2]), tokens, 3)])
    built = build_shallow(load_artefact(tmp_path / "trained"), TARGET, torch.float32, PackedLinear, 64)
    engine = TorchEngine(built.model, TorchKernels(), num_blocks=16, block_size=4)
    expected, fed = [], list(tokens)
    for _ in range(3):
        row = logits(engine, engine.create(), fed)[-1]
        assert row.shape == (100,)
        expected.append(int(built.token_ids[int(row.argmax())]))
        fed.append(expected[-1])
    assert proposal == Proposal(tuple(expected))
