"""What is timed: this package, eager PyTorch, a model's own norm, and ``torch.compile`` of both.

Every peer computes the same function as the candidate it is compared with: ``F.rms_norm`` for spec
``torch``, the LLaMA formula for spec ``llama``. Where the output is given, the compiled peers write
into it; eager code has no ``out=`` for a norm, so it allocates its result as it always does.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm.bench.grid import SPECS, Cell
from rmsnorm.bench.limit import Arguments, Candidate
from rmsnorm.spec import specs

EPS = 1e-6

# Below this size a fresh result costs a fraction of a microsecond, so a compiled peer that writes
# its own result stands for the one that writes into a given tensor: one compilation less. And only
# below it does the way into the kernel matter, so only there the raw operation is timed too.
_LARGE = 2**20


class LlamaNorm(nn.Module):
    """The eager norm of the LLaMA family, from its formula.

    ``y = weight * (x * rsqrt(mean(x**2) + eps)).to(x.dtype)``, the mean square in float32 (Touvron
    et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2, as the
    released checkpoints round it).

    Args:
        weight: ``(d,)``.

    Example:
        >>> norm = LlamaNorm(nn.Parameter(torch.ones(2)), eps=0.0)
        >>> [round(y, 4) for y in norm(torch.tensor([3.0, 4.0])).tolist()]
        [0.8485, 1.1314]
    """

    def __init__(self, weight: nn.Parameter, eps: float = EPS) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``(..., d)``."""
        # Not a call of _llama_formula, which is the same: this peer is the module that models have,
        # with its weight and eps looked up in the module and no call more than theirs.
        hidden = x.to(torch.float32)
        rstd = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (hidden * rstd).to(x.dtype)


def _torch_formula(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _llama_formula(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x.to(torch.float32)
    rstd = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (hidden * rstd).to(x.dtype)


def _torch_formula_given(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return out.copy_(_torch_formula(x, weight))


def _llama_formula_given(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return out.copy_(_llama_formula(x, weight))


_FORMULAS: dict[tuple[str, bool], Callable[..., Tensor]] = {
    ("torch", False): _torch_formula,
    ("torch", True): _torch_formula_given,
    ("llama", False): _llama_formula,
    ("llama", True): _llama_formula_given,
}


class Compiler:
    """``torch.compile`` of the formulas, once for each shape, dtype and kind of output.

    Args:
        enabled: False leaves every compiled peer out.

    Attributes:
        failure: why compilation is not available, once that is known.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.failure: str | None = None
        self._made: dict[tuple[str, int, int, str, bool], Callable[..., object]] = {}

    def get(self, spec: str, cell: Cell, arguments: Arguments) -> Callable[..., object] | None:
        """The compiled formula, warmed on ``arguments``; None where it cannot be compiled."""
        given = writes_given(cell)
        key = (spec, cell.rows, cell.d, cell.dtype, given)
        if key not in self._made:
            if not self.enabled or self.failure is not None:
                return None
            compiled = torch.compile(_own_code(_FORMULAS[spec, given]), dynamic=False)
            try:
                for _ in range(3):
                    compiled(*arguments)
            except (RuntimeError, ImportError, OSError) as error:
                # A machine without a C++ compiler has eager peers only.
                self.failure = str(error).strip().partition("\n")[0] or type(error).__name__
                return None
            self._made[key] = compiled
        return self._made[key]

    def has(self, cell: Cell) -> bool:
        """Whether every compiled peer of ``cell`` is ready or will never be."""
        if not self.enabled or self.failure is not None:
            return True
        given = writes_given(cell)
        return all((spec, cell.rows, cell.d, cell.dtype, given) in self._made for spec in SPECS)


def writes_given(cell: Cell) -> bool:
    """Whether a compiled peer of ``cell`` writes into the given output.

    Example:
        >>> writes_given(Cell("forward", 1, 576, "float32", "hot", "given"))
        False
    """
    return cell.output == "given" and cell.nbytes >= _LARGE


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` with a code object of its own.

    The compiler caches by code object and stops compiling one after eight shapes; with one code
    object for each shape, every peer is static and its guards are the shortest possible.
    """
    plain = cast(types.FunctionType, function)
    return types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)


def forward_candidates(
    cell: Cell, weight: nn.Parameter, compiler: Compiler, first: Arguments
) -> list[Candidate]:
    """Ours and every peer of a forward cell.

    Args:
        cell: the cell.
        weight: ``(d,)``, of the cell's dtype.
        compiler: gives the compiled peers.
        first: ``(x, out)`` to compile on; ``out`` is None where the output is fresh.
    """
    found: list[Candidate] = []
    for spec in SPECS:
        found += _ours(cell, spec, weight)
        if spec == "torch":
            found.append(
                Candidate("eager torch", F.rms_norm, lambda x, out: (x, weight.shape, weight, EPS))
            )
        else:
            found.append(Candidate("eager llama", LlamaNorm(weight), lambda x, out: (x,)))
        given = writes_given(cell)
        bind = _bind_given(weight) if given else _bind_fresh(weight)
        compiled = compiler.get(spec, cell, bind(first[0], first[1]))
        if compiled is not None:
            found.append(Candidate(f"compiled {spec}", compiled, bind))
    return found


def call_candidates(cell: Cell, weight: nn.Parameter) -> list[Candidate]:
    """One call through ``torch.ops``, and ``torch.add`` of the same row."""
    add = Candidate("add", torch.add, lambda x, out: (x, x))
    return [add, *(one for one in _ours(cell, "torch", weight) if one.name == "op torch")]


def _bind_fresh(weight: Tensor) -> Callable[[Tensor, Tensor | None], Arguments]:
    return lambda x, out: (x, weight)


def _bind_given(weight: Tensor) -> Callable[[Tensor, Tensor | None], Arguments]:
    return lambda x, out: (x, weight, out)


def _ours(cell: Cell, spec: str, weight: nn.Parameter) -> list[Candidate]:
    from rmsnorm import rms_norm

    # torch.ops.rmsnorm is filled when this module is imported; the public name waits for first use.
    importlib.import_module("rmsnorm.ops.rms_norm")
    norm = cast(Callable[..., object], rms_norm)
    rule = specs[spec]
    text = rule.encode()
    packet: Any = getattr(torch.ops.rmsnorm, "rms_norm", None)
    if cell.output == "given":

        def public(x: Tensor, out: Tensor) -> object:
            return norm(x, weight, EPS, spec=rule, out=out)

        def operation(x: Tensor, out: Tensor) -> object:
            return packet.out(x, weight, None, EPS, text, 1, out=out)

        found = [Candidate(f"ours {spec}", public, lambda x, out: (x, out))]
        if cell.nbytes < _LARGE and packet is not None and "out" in packet.overloads():
            found.append(Candidate(f"op {spec}", operation, lambda x, out: (x, out)))
        return found
    found = [
        Candidate(
            f"ours {spec}",
            functools.partial(norm, spec=rule),
            lambda x, out: (x, weight, EPS),
        )
    ]
    if cell.nbytes < _LARGE and packet is not None:
        found.append(
            Candidate(f"op {spec}", packet, lambda x, out: (x, weight, None, EPS, text, 1))
        )
    return found
