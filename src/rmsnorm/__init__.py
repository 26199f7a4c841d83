"""RMSNorm, exact and at memory speed.

The names below load on first use, so ``import rmsnorm`` is fast, and a list of floats can be
normalised where torch is not installed::

    >>> from rmsnorm import rms_norm
    >>> rms_norm([3.0, 4.0], [1.0, 1.0])  # doctest: +ELLIPSIS
    [0.848528..., 1.131370...]
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm.modules import RMSNorm
    from rmsnorm.ops.extension import cpu_isa
    from rmsnorm.ops.route import rms_norm
    from rmsnorm.rewrite.identify import identify
    from rmsnorm.rewrite.patch import patch, unpatch
    from rmsnorm.rewrite.report import PatchReport
    from rmsnorm.spec import NormSpec, specs

__version__ = "0.1.0"

__all__ = [
    "NormSpec",
    "PatchReport",
    "RMSNorm",
    "__version__",
    "cpu_isa",
    "identify",
    "patch",
    "rms_norm",
    "specs",
    "unpatch",
]

_HOME = {
    "NormSpec": "rmsnorm.spec",
    "PatchReport": "rmsnorm.rewrite.report",
    "RMSNorm": "rmsnorm.modules",
    "cpu_isa": "rmsnorm.ops.extension",
    "identify": "rmsnorm.rewrite.identify",
    "patch": "rmsnorm.rewrite.patch",
    "rms_norm": "rmsnorm.ops.route",
    "specs": "rmsnorm.spec",
    "unpatch": "rmsnorm.rewrite.patch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rmsnorm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if sys.modules.get("torch") is not None:
    # Who has torch loaded may go straight to torch.ops.rmsnorm.
    importlib.import_module("rmsnorm.ops.rms_norm")
