"""How this process is set up while something is timed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from rmsnorm.libc import c_function

# <malloc.h> of glibc, and what its own thresholds are once it has seen large blocks come and go.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MMAP_MAX = 32 << 20, 64 << 20, 65536


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Within it Python's garbage collector waits."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Within it the C library keeps every block that is freed, so that no page is new twice.

    Else larger tensors are given back to the system, and the first touch of their pages takes
    longer than a norm; how often depends on what else lies on the heap.
    """
    mallopt, trim = c_function("mallopt"), c_function("malloc_trim")
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        mallopt(_M_MMAP_MAX, _MMAP_MAX)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        if trim is not None:
            trim(0)
