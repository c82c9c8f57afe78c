"""Messages that nobody would send: random bytes, and random values of every field of a message, extremes first."""

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_MAX_DEPTH = 5
_MAX_REPEATED = 6
_UINT_BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64, FieldDescriptor.TYPE_FIXED64: 64}
_INT_BITS = {
    FieldDescriptor.TYPE_INT32: 32,
    FieldDescriptor.TYPE_SINT32: 32,
    FieldDescriptor.TYPE_INT64: 64,
    FieldDescriptor.TYPE_SINT64: 64,
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", " ", "a", "\x00", "a\u0301", "\U0001f525", "</s>", "<|im_start|>", "x" * 300, "\ufffd" * 20)


def random_bytes(rng: random.Random) -> bytes:
    """A few bytes; often the beginning of what could be a message."""
    return rng.randbytes(rng.choice((0, 1, 2, 5, 20, 200)))


def fill(message: Message, rng: random.Random, share: float = 0.4, depth: int = 0) -> Message:
    """Set about this share of its fields, and of its parts', to random values; itself."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() >= share or (field.message_type is not None and depth >= _MAX_DEPTH):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(message, field, rng)
        elif field.is_repeated:
            for _ in range(rng.randint(0, _MAX_REPEATED)):
                if field.message_type is not None:
                    fill(getattr(message, field.name).add(), rng, share, depth + 1)
                else:
                    getattr(message, field.name).append(_scalar(field, rng))
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            fill(part, rng, share, depth + 1)
        else:
            setattr(message, field.name, _scalar(field, rng))
    return message


def _fill_map(message: Message, field: Any, rng: random.Random) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    for _ in range(rng.randint(0, _MAX_REPEATED)):
        getattr(message, field.name)[_scalar(key, rng)] = _scalar(value, rng)


def _scalar(field: Any, rng: random.Random) -> Any:
    """A value that the field can hold."""
    kind = field.type
    if kind in _UINT_BITS:
        return _integer(rng, 0, 2 ** _UINT_BITS[kind] - 1)
    if kind in _INT_BITS:
        half = 2 ** (_INT_BITS[kind] - 1)
        return _integer(rng, -half, half - 1)
    if kind == FieldDescriptor.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 99, -1))
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS) if rng.random() < 0.7 else rng.uniform(-2.0, 2.0)
    if kind == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    assert kind == FieldDescriptor.TYPE_BYTES
    floats = [rng.choice(_FLOATS) for _ in range(rng.randint(0, 4))]
    return rng.choice((random_bytes(rng), struct.pack(f"<{len(floats)}f", *floats)))


def _integer(rng: random.Random, least: int, most: int) -> int:
    """Small, at an edge, or anything."""
    return rng.choice((0, 1, 2, 3, 5, 63, 64, least, most, min(most, 2**31), rng.randint(least, most)))
