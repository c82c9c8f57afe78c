"""What an option's value must be before it can become a field of a message.

Every function takes the name to blame and the value, gives what the field takes, and raises InvalidArgumentError naming
both, and the limit, for a value of another type or beyond what the wire carries. What a server can refuse it refuses.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from operator import index
from typing import Any, TypeVar

import numpy as np

from tandem.validation import InvalidArgumentError, check_range

EnumT = TypeVar("EnumT", bound=StrEnum)

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_TIMEOUT_S = 1e6  # gRPC's clock has an end


def uint32(field: str, value: Any) -> int:
    """A count or a token id."""
    return _integer(field, value, 0, 2**32 - 1)


def uint64(field: str, value: Any) -> int:
    """A seed."""
    return _integer(field, value, 0, 2**64 - 1)


def int32(field: str, value: Any) -> int:
    """A number that may be negative."""
    return _integer(field, value, -(2**31), 2**31 - 1)


def float32(field: str, value: Any) -> float:
    """A number; infinite ones and NaN travel, to be refused with the limit of their field."""
    if isinstance(value, bool | str | bytes):
        raise InvalidArgumentError(field, f"{value!r} is not a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(field, f"{value!r} is not a number") from error
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if math.isfinite(number):
        check_range(field, number, -_MAX_FLOAT32, _MAX_FLOAT32)
    return number


def boolean(field: str, value: Any) -> bool:
    """True or False, and nothing that is merely taken for one of them."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgumentError(field, f"{value!r} is neither True nor False")
    return bool(value)


def text(field: str, value: Any) -> str:
    """Text that has a UTF-8 form."""
    if not isinstance(value, str):
        raise InvalidArgumentError(field, f"{value!r} is not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"character {error.start}, {value[error.start]!r}, has no UTF-8 form"
        raise InvalidArgumentError(field, problem) from error
    return value


def texts(field: str, value: Any) -> list[str]:
    """One text, or several."""
    if isinstance(value, str):
        return [text(field, value)]
    return [text(f"{field}[{number}]", item) for number, item in enumerate(_items(field, value, "texts"))]


def token_ids(field: str, value: Any) -> list[int]:
    """A list, tuple, set, array ... of them."""
    return [uint32(f"{field}[{number}]", item) for number, item in enumerate(_items(field, value, "token ids"))]


def biases(field: str, value: Any) -> dict[int, float]:
    """Token id -> number."""
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(field, f"{value!r} is not a mapping from token ids to numbers")
    return {uint32(field, token_id): float32(f"{field}[{token_id}]", bias) for token_id, bias in value.items()}


def member_of(kind: type[EnumT], to_number: Callable[[EnumT], int]) -> Callable[[str, Any], int]:
    """For an option that is one of a few names: the function from name to the field's number."""

    def convert(field: str, value: Any) -> int:
        if not isinstance(value, str) or value not in set(kind):
            raise InvalidArgumentError(field, f"{value!r} is not offered; there are: {', '.join(kind)}")
        return to_number(kind(value))

    return convert


def timeout(value: Any) -> float | None:
    """Seconds for a whole call, 0 when none are left of a budget; None is no limit."""
    if value is None:
        return None
    seconds = float32("timeout", value)
    check_range("timeout", seconds, 0.0, _MAX_TIMEOUT_S)
    return seconds


def _integer(field: str, value: Any, low: int, high: int) -> int:
    try:
        number = index(value)
    except TypeError as error:
        raise InvalidArgumentError(field, f"{value!r} is not an integer") from error
    if isinstance(value, bool):
        raise InvalidArgumentError(field, f"{value!r} is not an integer")
    check_range(field, number, low, high)
    return number


def _items(field: str, value: Any, what: str) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidArgumentError(field, f"{value!r} is not a list of {what}")
    return value
