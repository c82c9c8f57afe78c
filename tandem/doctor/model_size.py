"""How many weights a model has, from its files' headers."""

import json
import math
import struct
from pathlib import Path

from tandem.models.gguf_header import GgufFileError, read_gguf_header

_MAX_HEADER_BYTES = 100 << 20


class ModelSizeError(Exception):
    """The files cannot be read; the message names the one and why."""


def num_weights(path: Path) -> int:
    """Of a .gguf file, or of a directory that holds one or safetensors files."""
    if path.is_file():
        return _of_gguf(path)
    shards = sorted(path.glob("*.safetensors"))
    if shards:
        return sum(map(_of_safetensors, shards))
    files = sorted(path.glob("*.gguf"))
    if not files:
        raise ModelSizeError(f"{path} holds neither a .safetensors nor a .gguf file")
    return _of_gguf(files[0])


def _of_gguf(path: Path) -> int:
    try:
        return sum(math.prod(tensor.shape) for tensor in read_gguf_header(path).tensors.values())
    except GgufFileError as error:
        raise ModelSizeError(str(error)) from error


def _of_safetensors(path: Path) -> int:
    """The file begins with its header's length, 8 bytes little-endian, and the header: JSON, an entry a tensor."""
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {num_bytes} bytes")
            header = json.loads(file.read(num_bytes))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelSizeError(f"{path}: not a usable safetensors file: {error}") from error
