"""A copy by all threads that stores past the cache, compiled here.

Neither PyTorch nor, at most sizes, the C library copies so, but a kernel may store so; without it
the limit would be too easy.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

_SOURCE = Path(__file__).with_name("stream_copy.c")

Copy = Callable[[int, int, int], object]


def stream_copy(threads: int) -> Copy | None:
    """A function of the addresses to copy to and from and of the number of bytes.

    Args:
        threads: how many threads of PyTorch's own pool copy.

    Returns:
        None where there is no C compiler, no such pool, or no instruction for it.

    Example:
        >>> import torch
        >>> x, out = torch.arange(100.0), torch.zeros(100)
        >>> copy = stream_copy(2)
        >>> _ = copy and copy(out.data_ptr(), x.data_ptr(), x.nbytes)
        >>> copy is None or torch.equal(x, out)
        True
    """
    library = _library()
    if library is None:
        return None
    function = library.stream_copy
    return lambda to, source, count: function(to, source, count, threads)


@functools.cache
def _library() -> ctypes.CDLL | None:
    pool = _thread_pool()
    if pool is None:
        return None
    compiler = os.environ.get("CC", "cc").split()
    with tempfile.TemporaryDirectory() as folder:
        part, whole = f"{folder}/copy.o", f"{folder}/copy.so"
        flags = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-c"]
        try:
            for command in (
                [*compiler, *flags, str(_SOURCE), "-o", part],
                # Not with -fopenmp: a second pool of threads would fight with PyTorch's.
                [*compiler, "-shared", part, pool, "-o", whole],
            ):
                subprocess.run(command, check=True, capture_output=True)
            library = ctypes.CDLL(whole)
        except (OSError, subprocess.CalledProcessError):
            return None
    address, count = ctypes.c_void_p, ctypes.c_size_t
    library.stream_copy.argtypes = (address, address, count, ctypes.c_int)
    library.stream_copy.restype = None
    return library


def _thread_pool(maps: str = "/proc/self/maps") -> str | None:
    """The OpenMP library that PyTorch has loaded into this process."""
    import torch  # noqa: F401

    try:
        text = Path(maps).read_text()
    except OSError:
        return None
    found = re.search(r"\s(/\S*/lib(?:g|i)?omp[^/\s]*)$", text, re.MULTILINE)
    return None if found is None else found[1]
