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
    from rmsnorm import hf as hf
    from rmsnorm.modules import GatedRMSNorm, RMSNorm
    from rmsnorm.ops.extension import cpu_isa
    from rmsnorm.ops.route import add_rms_norm, gated_rms_norm, rms_norm
    from rmsnorm.optim import no_decay
    from rmsnorm.rewrite.identify import identify
    from rmsnorm.rewrite.patch import patch, unpatch
    from rmsnorm.rewrite.report import PatchReport
    from rmsnorm.spec import NormSpec, specs

__version__ = "0.1.0"

__all__ = [
    "GatedRMSNorm",
    "NormSpec",
    "PatchReport",
    "RMSNorm",
    "__version__",
    "add_rms_norm",
    "cpu_isa",
    "gated_rms_norm",
    "identify",
    "no_decay",
    "patch",
    "rms_norm",
    "specs",
    "unpatch",
]

_HOME = {
    "GatedRMSNorm": "rmsnorm.modules",
    "NormSpec": "rmsnorm.spec",
    "PatchReport": "rmsnorm.rewrite.report",
    "RMSNorm": "rmsnorm.modules",
    "add_rms_norm": "rmsnorm.ops.route",
    "cpu_isa": "rmsnorm.ops.extension",
    "gated_rms_norm": "rmsnorm.ops.route",
    "identify": "rmsnorm.rewrite.identify",
    "no_decay": "rmsnorm.optim",
    "patch": "rmsnorm.rewrite.patch",
    "rms_norm": "rmsnorm.ops.route",
    "specs": "rmsnorm.spec",
    "unpatch": "rmsnorm.rewrite.patch",
}


def __getattr__(name: str) -> Any:
    if name == "hf":
        return importlib.import_module("rmsnorm.hf")
    if name not in _HOME:
        raise AttributeError(f"module 'rmsnorm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if sys.modules.get("torch") is not None:
    # Who has torch loaded may go straight to torch.ops.rmsnorm.
    importlib.import_module("rmsnorm.ops.route").operations()
