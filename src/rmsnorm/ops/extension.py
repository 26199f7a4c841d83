"""Loads the native CPU kernels, once."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parent.parent / "_kernels.so"
_AUTOGRAD = _LIBRARY.with_name("_autograd.so")


def load() -> bool:
    """Load the kernels on the first call; whether there are any.

    ``RMSNORM_DISABLE_EXT=1`` goes without them. Where they were not built, the package runs on
    plain torch operations and says so once.

    Raises:
        ImportError: ``RMSNORM_ISA`` names an instruction set that this machine lacks, or the
            library is there but cannot be loaded.
    """
    return _kernels() is not None


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    if os.environ.get("RMSNORM_DISABLE_EXT", "") not in ("", "0"):
        return None
    if not _LIBRARY.exists():
        warnings.warn(
            "rmsnorm was installed without its CPU kernels, so it runs on plain torch operations: "
            "the same results, slower. Install a C++20 compiler and, in the folder of "
            "its source, run `pip install --no-build-isolation .` to have them.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    import torch  # noqa: F401  (the library needs torch's symbols)

    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"the rmsnorm kernels in {_LIBRARY.name} cannot be loaded with this torch: {error}; "
            "reinstall rmsnorm, or set RMSNORM_DISABLE_EXT=1 to run without them"
        ) from error
    library.rmsnorm_cpu_isa.restype = ctypes.c_char_p
    library.rmsnorm_isa_error.restype = ctypes.c_char_p
    library.rmsnorm_direct.restype = ctypes.c_void_p
    if library.rmsnorm_cpu_isa() is None:
        raise ImportError(library.rmsnorm_isa_error().decode())
    return library


def direct_table() -> int:
    """The address of what the direct call needs of the kernels; 0 without them."""
    library = _kernels()
    return 0 if library is None else library.rmsnorm_direct() or 0


@functools.cache
def autograd_table() -> int:
    """The address of what records direct calls for autograd; 0 if there is none.

    ``RMSNORM_DISABLE_AUTOGRAD=1`` goes without it, and so does any other torch than the version
    that it was built with: an ``autograd.Function`` does the same, more slowly. To be called first
    in a thread where no mode is on, as :mod:`rmsnorm.ops.direct` does: it looks at a new tensor.
    """
    table = direct_table()
    if not table or os.environ.get("RMSNORM_DISABLE_AUTOGRAD", "") not in ("", "0"):
        return 0
    import torch

    try:
        find = ctypes.CDLL(str(_AUTOGRAD)).rmsnorm_autograd
    except (OSError, AttributeError):  # not built, or this torch lacks a name that it needs
        return 0
    find.restype = ctypes.c_void_p
    find.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    return find(table, torch.__version__.split("+")[0].encode()) or 0


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels use: ``"avx512"``, ``"avx2"``, ``"neon"`` or
    ``"scalar"``; ``None`` without the kernels.

    The environment variable ``RMSNORM_ISA`` overrides the choice and is read once.

    Raises:
        ImportError: ``RMSNORM_ISA`` names an instruction set that this machine lacks.

    Example:
        >>> cpu_isa() in ("avx512", "avx2", "neon", "scalar", None)
        True
    """
    library = _kernels()
    if library is None:
        return None
    name: bytes = library.rmsnorm_cpu_isa()
    return name.decode()
