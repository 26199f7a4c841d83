"""What is timed: this package, eager PyTorch, a model's own norm, ``torch.compile`` of both, and
the inference engines that are installed (:mod:`rmsnorm.bench.engines`).

Every peer computes the same function as the candidate it is compared with: ``F.rms_norm`` for spec
``torch``, the LLaMA formula for spec ``llama``. Where the output is given, the compiled peers write
into it; eager code has no ``out=`` for a norm, so it allocates its result as it always does.

The forward and backward of all of them run through ``torch.autograd.grad``. In the ``add`` kinds
the peers add first and normalise the sum, eager and compiled; ``separate`` does so with this
package's own norm, and shows what the fusion alone is worth.
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

from rmsnorm.bench.engines import Engines
from rmsnorm.bench.grid import SPECS, SWEEP_WIDTHS, Cell, peers_of
from rmsnorm.bench.limit import Arguments, Bind, Candidate
from rmsnorm.spec import specs

EPS = 1e-6

# Below this size a fresh result costs a fraction of a microsecond, so a compiled peer that writes
# its own result stands for the one that writes into a given tensor: one compilation less. And only
# below it does the way into the kernel matter, so only there the raw operation is timed too.
_LARGE = 2**20

_Add = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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


def _add_formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _torch_formula(total, weight), total


def _add_formula_inplace(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    # x is not written over: torch's compiler for the CPU stops with a KeyError when it is asked to
    # change both (https://github.com/pytorch/pytorch/issues/196570).
    residual.add_(x)
    return _torch_formula(residual, weight), residual


_FORMULAS: dict[tuple[str, bool], Callable[..., Tensor]] = {
    ("torch", False): _torch_formula,
    ("torch", True): _torch_formula_given,
    ("llama", False): _llama_formula,
    ("llama", True): _llama_formula_given,
}


def _formula(cell: Cell, spec: str) -> Callable[..., object]:
    """What is compiled for ``cell``."""
    if cell.kind in ("add", "add_train"):
        return _add_formula_inplace if writes_over(cell) else _add_formula
    return _FORMULAS[spec, writes_over(cell)]


class Compiler:
    """``torch.compile`` of the formulas, once for each kind, shape, dtype and kind of output.

    Args:
        enabled: False leaves every compiled peer out.

    Attributes:
        failure: why the first compilation that failed did so. A machine that cannot compile fails
            at once, and is not asked again; a single formula that the compiler cannot do is absent
            alone.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.failure: str | None = None
        self._made: dict[tuple[object, ...], Callable[..., Any] | None] = {}

    def get(
        self, spec: str, cell: Cell, use: Callable[[Callable[..., Any]], object]
    ) -> Callable[..., Any] | None:
        """The compiled formula; None where it cannot be compiled.

        Args:
            spec: the convention.
            cell: the cell.
            use: calls what it is given in the way that will be timed; what the compiler leaves to
                the first calls is done then.
        """
        key = (spec, *compiled_for(cell))
        if not self.enabled:
            return None
        if key not in self._made:
            compiled: Callable[..., Any] | None
            compiled = torch.compile(_own_code(_formula(cell, spec)), dynamic=False)
            try:
                for _ in range(3):
                    use(compiled)
            except (RuntimeError, ImportError, OSError) as error:
                # A machine without a C++ compiler has eager peers only.
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                self.failure = self.failure or reason
                self.enabled = any(one is not None for one in self._made.values())
                compiled = None
            self._made[key] = compiled
        return self._made[key]

    def has(self, cell: Cell) -> bool:
        """Whether every compiled peer of ``cell`` is ready or will never be."""
        if not self.enabled:
            return True
        return all(
            (spec, *compiled_for(cell)) in self._made
            for spec in SPECS
            if "compiled" in peers_of(cell.kind, spec)
        )


def compiled_for(cell: Cell) -> tuple[object, ...]:
    """What the code of the compiled peers depends on: cells that agree in it share them.

    Example:
        >>> cell = Cell("forward", 1, 576, "float32", "rotating", "given")
        >>> compiled_for(cell) == compiled_for(Cell("forward", 1, 576, "float32"))
        True
    """
    return (cell.kind, cell.rows, cell.d, cell.dtype, writes_over(cell))


def writes_over(cell: Cell) -> bool:
    """Whether a compiled peer of ``cell`` writes into tensors that exist.

    Example:
        >>> writes_over(Cell("forward", 1, 576, "float32", "hot", "given"))
        False
    """
    return cell.output in ("given", "inplace") and cell.nbytes >= _LARGE


def _own_code(function: Callable[..., object]) -> Callable[..., object]:
    """``function`` with a code object of its own.

    The compiler caches by code object and stops compiling one after eight shapes; with one code
    object for each shape, every peer is static and its guards are the shortest possible.
    """
    plain = cast(types.FunctionType, function)
    return types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)


def candidates(
    cell: Cell,
    weight: nn.Parameter,
    compiler: Compiler,
    first: Arguments,
    engines: Engines | None = None,
) -> list[Candidate]:
    """Ours and every peer of a cell, the copies not included.

    Each returns its results, one tensor or several: y; y, dx, dweight; y and the sum; y, the sum,
    dx, dresidual, dweight.

    Args:
        cell: the cell.
        weight: ``(d,)``, of the cell's dtype.
        compiler: gives the compiled peers.
        first: the cell's tensors, to compile on.
        engines: gives the inference engines; None leaves them out.
    """
    if cell.kind == "call":
        return call_candidates(cell, weight)
    if cell.kind == "sweep":
        return sweep_candidates(cell)
    if not compiler.has(cell):
        first = _own_storage(first)
    make = {
        "forward": forward_candidates,
        "heads": forward_candidates,
        "train": train_candidates,
        "add": add_candidates,
        "add_train": add_train_candidates,
    }[cell.kind]
    found = make(cell, weight, compiler, first)
    return found if engines is None else [*found, *engines.candidates(cell, weight)]


def forward_candidates(
    cell: Cell, weight: nn.Parameter, compiler: Compiler, first: Arguments
) -> list[Candidate]:
    """The norm; ``first`` is ``(x, out)``, ``out`` None where the output is fresh."""
    found: list[Candidate] = []
    for spec in SPECS:
        found += _ours(cell, spec, weight)
        if spec == "torch":
            found.append(
                Candidate("eager torch", F.rms_norm, lambda x, out: (x, weight.shape, weight, EPS))
            )
        else:
            found.append(Candidate("eager llama", LlamaNorm(weight), lambda x, out: (x,)))
        bind = _bind_given(weight) if writes_over(cell) else _bind_fresh(weight)
        compiled = compiler.get(spec, cell, _call_with(*bind(*first)))
        if compiled is not None:
            found.append(Candidate(f"compiled {spec}", compiled, bind))
    return found


def train_candidates(
    cell: Cell, weight: nn.Parameter, compiler: Compiler, first: Arguments
) -> list[Candidate]:
    """The norm and its backward; ``first`` is ``(x, dy)``."""
    from rmsnorm import rms_norm

    def bind(x: Tensor, dy: Tensor) -> Arguments:
        return x.detach().requires_grad_(), dy

    def step(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        def forward_backward(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            y = norm(x)
            return (y, *torch.autograd.grad(y, (x, weight), dy))

        return forward_backward

    arguments = bind(*first)
    # No norm: the least that PyTorch does for the same gradients, as a scale for ours.
    found = [Candidate("product", step(lambda x: x * weight), bind)]
    for spec in SPECS:
        ours = functools.partial(rms_norm, weight=weight, eps=EPS, spec=specs[spec])
        found.append(Candidate(f"ours {spec}", step(ours), bind))
        found.append(Candidate(f"eager {spec}", step(_eager(spec, weight)), bind))
        compiled = compiler.get(
            spec, cell, lambda call: step(functools.partial(call, weight=weight))(*arguments)
        )
        if compiled is not None:
            norm = functools.partial(compiled, weight=weight)
            found.append(Candidate(f"compiled {spec}", step(norm), bind))
    return found


def add_candidates(
    cell: Cell, weight: nn.Parameter, compiler: Compiler, first: Arguments
) -> list[Candidate]:
    """The addition and the norm of the sum; ``first`` is ``(x, residual)``.

    In place, x becomes y and the residual the sum, as far as the peer can: eager and compiled norms
    allocate y.
    """
    from rmsnorm import rms_norm

    inplace = cell.output == "inplace"
    found: list[Candidate] = []
    for spec in SPECS:
        rule = specs[spec]
        ours = _add_ours(weight, spec, inplace)
        norm = functools.partial(rms_norm, weight=weight, eps=EPS, spec=rule)
        separate = _add_then_over(norm) if inplace else _add_then(norm)
        eager = _eager(spec, weight)
        add_eager = _sum_over_then(eager) if inplace else _add_then(eager)
        found += [
            Candidate(f"ours {spec}", ours, _bind_both),
            Candidate(f"separate {spec}", separate, _bind_both),
            Candidate(f"eager {spec}", add_eager, _bind_both),
        ]
        if "compiled" in peers_of(cell.kind, spec):
            compiled = compiler.get(spec, cell, _call_with(*first, weight))
            if compiled is not None:
                found.append(Candidate(f"compiled {spec}", compiled, _bind_weight(weight)))
    return found


def add_train_candidates(
    cell: Cell, weight: nn.Parameter, compiler: Compiler, first: Arguments
) -> list[Candidate]:
    """The same and its backward; ``first`` is ``(x, residual, dy, dresidual)``, the last one the
    gradient of the sum."""
    from rmsnorm import rms_norm

    def bind(x: Tensor, residual: Tensor, dy: Tensor, dresidual: Tensor) -> Arguments:
        leaves = (x.detach().requires_grad_(), residual.detach().requires_grad_())
        return (*leaves, dy, dresidual)

    def step(add: _Add) -> Callable[..., tuple[Tensor, ...]]:
        def forward_backward(
            x: Tensor, residual: Tensor, dy: Tensor, dresidual: Tensor
        ) -> tuple[Tensor, ...]:
            results = add(x, residual)
            gradients = torch.autograd.grad(results, (x, residual, weight), (dy, dresidual))
            return (*results, *gradients)

        return forward_backward

    arguments = bind(*first)
    found: list[Candidate] = []
    for spec in SPECS:
        norm = functools.partial(rms_norm, weight=weight, eps=EPS, spec=specs[spec])
        found += [
            Candidate(f"ours {spec}", step(_add_ours(weight, spec, inplace=False)), bind),
            Candidate(f"separate {spec}", step(_add_then(norm)), bind),
            Candidate(f"eager {spec}", step(_add_then(_eager(spec, weight))), bind),
        ]
        if "compiled" in peers_of(cell.kind, spec):
            compiled = compiler.get(
                spec, cell, lambda call: step(functools.partial(call, weight=weight))(*arguments)
            )
            if compiled is not None:
                add = functools.partial(compiled, weight=weight)
                found.append(Candidate(f"compiled {spec}", step(add), bind))
    return found


def call_candidates(cell: Cell, weight: nn.Parameter) -> list[Candidate]:
    """One call of the function, of the module and through ``torch.ops``, and ``torch.add`` of the
    same row; beside them what PyTorch takes for a module that does nothing, and for two operations
    of its own through ``torch.ops``."""
    from rmsnorm import RMSNorm, rms_norm

    module = RMSNorm(cell.d, EPS)
    module.weight = weight
    add = Candidate("add", torch.add, lambda x, out: (x, x))
    function = Candidate("ours torch", rms_norm, lambda x, out: (x, weight, EPS))
    return [
        add,
        function,
        Candidate("module torch", module, lambda x, out: (x,)),
        *(one for one in _ours(cell, "torch", weight) if one.name == "op torch"),
        Candidate("identity", nn.Identity(), lambda x, out: (x,)),
        Candidate("clone", torch.ops.aten.clone, lambda x, out: (x,)),
        Candidate("addcmul", torch.ops.aten.addcmul, lambda x, out: (x, x, weight)),
    ]


def sweep_candidates(cell: Cell) -> list[Candidate]:
    """The norm of the same bytes in rows of each width."""
    from rmsnorm import rms_norm

    def make(d: int) -> Candidate:
        weight = nn.Parameter(torch.ones(d, dtype=getattr(torch, cell.dtype)))

        def norm(x: Tensor, out: Tensor) -> object:
            return rms_norm(x, weight, EPS, out=out)

        return Candidate(f"ours d={d}", norm, lambda x, out: (x.view(-1, d), out.view(-1, d)))

    return [make(d) for d in SWEEP_WIDTHS]


def _bind_fresh(weight: Tensor) -> Bind:
    return lambda x, out: (x, weight)


def _bind_given(weight: Tensor) -> Bind:
    return lambda x, out: (x, weight, out)


def _bind_both(x: Tensor, residual: Tensor) -> Arguments:
    return x, residual


def _bind_weight(weight: Tensor) -> Bind:
    return lambda x, residual: (x, residual, weight)


def _own_storage(tensors: Arguments) -> Arguments:
    """Copies whose memory is no larger than they are.

    The compiler's cache on disk tells views of small and of large memory apart, the code does not.
    """
    with torch.inference_mode(False):
        return tuple(
            None
            if tensor is None
            else torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
            for tensor in tensors
        )


def _call_with(*arguments: object) -> Callable[[Callable[..., Any]], object]:
    return lambda call: call(*arguments)


def _eager(spec: str, weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
    if spec == "torch":
        return lambda x: F.rms_norm(x, weight.shape, weight, EPS)
    return LlamaNorm(weight)


def _add_ours(weight: nn.Parameter, spec: str, inplace: bool) -> _Add:
    from rmsnorm import add_rms_norm

    return functools.partial(
        add_rms_norm, weight=weight, eps=EPS, spec=specs[spec], inplace=inplace
    )


def _add_then(norm: Callable[[Tensor], Tensor]) -> _Add:
    def add(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.add(residual, x)
        return norm(total), total

    return add


def _add_then_over(norm: Callable[..., Tensor]) -> _Add:
    def add(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        torch.add(residual, x, out=residual)
        return norm(residual, out=x), residual

    return add


def _sum_over_then(norm: Callable[[Tensor], Tensor]) -> _Add:
    def add(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        torch.add(residual, x, out=residual)
        return norm(residual), residual

    return add


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
