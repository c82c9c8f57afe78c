"""What a process holds in memory, as its allocators count it.

Resident memory says little about leaks: allocators keep what was freed, by threads and by sizes, and give it back when
they like. What was given out and not freed yet is exact.
"""

import ctypes
import sys
from collections.abc import Callable

from tandem.serving.metrics import Metrics, Numbers

_MALLINFO_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


def add_memory_metrics(metrics: Metrics) -> None:
    """The first has no value without glibc 2.33 or later."""
    measure = malloc_meter()
    metrics.gauges(
        "tandem_malloc_bytes",
        "Bytes that the C library's allocator has given out, tensors included.",
        (),
        lambda: _malloc_bytes(measure),
    )
    metrics.gauge(
        "tandem_python_blocks", "Blocks of memory that Python's objects hold.", lambda: sys.getallocatedblocks()
    )


def malloc_meter() -> Callable[[], int] | None:
    """What tells the bytes given out by malloc and not freed yet; None where the C library cannot."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo

    def measure() -> int:
        info = mallinfo2()
        return int(info.uordblks + info.hblkhd)  # in heaps, and in mappings of their own

    return measure


def _malloc_bytes(measure: Callable[[], int] | None) -> Numbers:
    return [] if measure is None else [((), measure())]
