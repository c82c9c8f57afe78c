"""Signals that end a command, heard where it is safe: children are stopped in order, whatever was going on."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Holds:
    """Of this process: it has one set of signal handlers, and they run on its main thread."""

    num = 0
    is_pending = False  # an interrupt came meanwhile


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
    """Now, or when nobody holds it back any more."""
    _Holds.is_pending = _Holds.num > 0
    if not _Holds.is_pending:
        raise KeyboardInterrupt


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal raise KeyboardInterrupt like Ctrl-C."""
    previous = [signal.signal(number, _interrupt) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in zip(_NUMBERS, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Inside `termination_as_interrupt`: an interrupt that comes in here is raised at the end.

    For what must not be left half-way. A mask of signals would not do: another thread would be given the signal, and
    Python raises on the main one all the same.
    """
    _Holds.num += 1
    try:
        yield
    finally:
        _Holds.num -= 1
        if _Holds.is_pending and _Holds.num == 0:
            _Holds.is_pending = False
            raise KeyboardInterrupt
