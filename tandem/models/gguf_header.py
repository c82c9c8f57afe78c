"""The header of a GGUF file: its metadata and where each tensor lies; no weights, no torch.

Layout (little-endian, version 2 and 3): magic, version, tensor count, metadata count; the metadata pairs; a
record per tensor (name, dimensions with the fastest first, type, offset); padding; the tensors' bytes.
Source: the GGUF specification in the ggml project's documentation.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class GgufFileError(Exception):
    """Not a readable GGUF file; the message names the path and what is wrong."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's record: `shape` is row-major (slowest dimension first), `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_code: int  # ggml's tensor type number
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of the file at `path`; raise `GgufFileError` when it is missing, cut short or not GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except (struct.error, IndexError) as error:
        raise GgufFileError(f"{path}: the file ends inside its header; it is cut short or damaged") from error
    except OSError as error:
        raise GgufFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # includes text that is not UTF-8, and mapping an empty file
        raise GgufFileError(f"{path}: not a usable GGUF file: {error}") from error


class _Cursor:
    """Reads values one after the other from the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def header(self) -> GgufHeader:
        magic = self._take(4)
        if magic != _MAGIC:
            raise ValueError(f"it starts with {magic!r} instead of {_MAGIC!r}")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, supported are {_VERSIONS}")
        num_tensors, num_pairs = self._scalar("<Q"), self._scalar("<Q")
        metadata = dict(self._pair() for _ in range(num_pairs))
        records = [self._record() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        data_start = -(-self._position // alignment) * alignment
        tensors = {
            name: GgufTensor(name, shape, type_code, data_start + offset)
            for name, shape, type_code, offset in records
        }
        return GgufHeader(metadata, tensors)

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._scalar("<I"))

    def _record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("<I")
        fastest_first = [int(self._scalar("<Q")) for _ in range(num_dimensions)]
        return name, tuple(reversed(fastest_first)), self._scalar("<I"), self._scalar("<Q")

    def _value(self, type_code: int) -> Any:
        if type_code == _STRING:
            return self._string()
        if type_code == _ARRAY:
            return self._array()
        if type_code not in _SCALARS:
            raise ValueError(f"metadata of unknown type {type_code}")
        return self._scalar(_SCALARS[type_code])

    def _array(self) -> list[Any]:
        item_type, length = self._scalar("<I"), self._scalar("<Q")
        if item_type not in _SCALARS:
            return [self._value(item_type) for _ in range(length)]
        letter = _SCALARS[item_type][1]
        size = struct.calcsize(f"<{letter}") * length
        return list(struct.unpack(f"<{length}{letter}", self._take(size)))

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode("utf-8")

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            raise IndexError(end)
        taken = self._data[self._position : end]
        self._position = end
        return taken
