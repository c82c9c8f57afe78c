"""Load a model from whatever a path holds."""

from pathlib import Path

from engine.models.config import LoadedModel, ModelFileError
from engine.models.gguf_file import load_gguf
from engine.models.hf_directory import load_hf_directory


def load_model(path: Path) -> LoadedModel:
    """The model at `path`: a `.gguf` file, a directory with one `.gguf` file, or a Hugging Face directory.

    Weights are in the file's precision; quantised ones become float32. Raises `ModelFileError` naming the path
    and what is missing, damaged or unsupported.
    """
    if path.is_file():
        return load_gguf(path)
    if not path.is_dir():
        raise ModelFileError(f"{path} does not exist")
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise ModelFileError(f"{path} holds {len(gguf_files)} .gguf files; name one of them")
    return load_gguf(gguf_files[0]) if gguf_files else load_hf_directory(path)
