"""The C library that this process runs on."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable


def c_function(name: str) -> Callable[..., int] | None:
    """A function of the C library, where that is Linux's and has it; else ``None``.

    Example:
        >>> c_function("no_such_function") is None
        True
    """
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
