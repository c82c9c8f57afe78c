"""Memory that was freed goes back to the system."""

import ctypes


def return_freed_memory() -> None:
    """Have the C library give back what it keeps of freed memory, where it can (glibc's malloc_trim).

    It keeps freed tensors below 32 MiB for later use. After loading, that is the file's weights, as much again as the
    engine holds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
