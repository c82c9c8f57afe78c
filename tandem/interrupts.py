"""Signals that end a command, heard once and where it is safe: children are stopped in order, whatever was going on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Holds:
    """Of this process: it has one set of signal handlers, and they run on its main thread."""

    num = 0
    is_pending = False  # an interrupt came meanwhile
    is_heard = False  # one was raised: from then on the command is stopping


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
    """The first one now, or when nobody holds it back any more."""
    if _Holds.is_heard:
        return
    _Holds.is_pending = _Holds.num > 0
    if not _Holds.is_pending:
        _Holds.is_heard = True
        raise KeyboardInterrupt


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Inside, the first Ctrl-C, SIGTERM or closed terminal raises KeyboardInterrupt.

    A later one is ignored, to the end of the process: the command is stopping what it has started, of which nothing may
    be left behind, and its exit code is known. Under nohup a closed terminal is nothing, as ever.
    """
    _Holds.is_pending = _Holds.is_heard = False
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in _NUMBERS if number != signal.SIGHUP or not is_nohup]
    previous = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, signal.SIG_IGN if _Holds.is_heard else handler)


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
            _Holds.is_heard = True
            raise KeyboardInterrupt


def end_at_interrupt() -> None:
    """From now on Ctrl-C ends the process at once with one line, for a program that has begun nothing yet.

    KeyboardInterrupt would not do while modules are imported: its traceback is of no use, and some modules make
    another error of it. Where Ctrl-C is ignored, as in a shell's background job, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
