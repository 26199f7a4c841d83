"""The proven computation of one module: what a call of it becomes, and which calls it covers."""

from __future__ import annotations

import copy
import functools
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rmsnorm.ops import gated_rms_norm as gated_operation
from rmsnorm.ops.direct import dtype_bits
from rmsnorm.ops.rms_norm import has_kernels, kernels_differentiate
from rmsnorm.ops.transforms import (
    in_autocast,
    in_jit_trace,
    is_ordinary,
    needs_composite,
    needs_gradient,
)
from rmsnorm.rewrite.probe import (
    MACHINERY,
    Hypothesis,
    NotProvenError,
    Path,
    Slot,
    dtype_name,
    is_container,
    is_immutable,
    is_object,
    is_plain_identity,
)
from rmsnorm.rewrite.prove import Dtypes, scaled
from rmsnorm.rewrite.report import spec_name
from rmsnorm.spec import NormSpec

_UNKNOWN = -1
# The operation refuses an eps that float32 does not have; a module may compute with it.
_LARGEST_EPS = torch.finfo(torch.float32).max


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to, which those of inference mode do not count."""
    return _UNKNOWN if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Guards:
    """What a module may change without an attribute being set, and how it was when proven.

    Args:
        values: lists and dicts, and attributes of what the module holds, by path.
        tensors: those that are neither weight nor bias: name, tensor, version, contents.
        children: names of :class:`torch.nn.Identity` modules.
    """

    values: tuple[tuple[Path, Any], ...]
    tensors: tuple[tuple[str, Tensor, int, Tensor], ...] = field(compare=False)
    children: tuple[str, ...]

    def hold(self, module: nn.Module) -> bool:
        """Whether all is as it was; for the compiler, which keeps the answer, it never is."""
        if torch.compiler.is_compiling():
            return False
        for path, before in self.values:
            value: Any = module
            for name in path:
                value = getattr(value, name, None)
            if type(value) is not type(before) or value != before:
                return False
        for name, tensor, version, contents in self.tensors:
            now = getattr(module, name, None)
            if now is tensor and _version(tensor) == version != _UNKNOWN:
                continue
            if type(now) is not type(tensor) or not is_ordinary(now):
                return False
            if now.dtype != contents.dtype or now.device != contents.device:
                return False
            if not torch.equal(now, contents):
                return False
        return all(is_plain_identity(module._modules.get(name)) for name in self.children)


def guards_of(module: nn.Module, found: Hypothesis) -> Guards | None:
    """What must be compared at each call; ``None`` for a module that holds simple values only.

    Raises:
        NotProvenError: forward reads something that may change unseen.
    """
    slots = {slot.name for slot in found.slots}
    values: list[tuple[Path, Any]] = []
    for path in sorted(found.reads):
        if path[0] in MACHINERY or path[0] in slots or path == found.eps_path:
            continue
        owner: Any = module
        for name in path[:-1]:
            owner = getattr(owner, name, None)
        name = path[-1]
        value = getattr(owner, name, None)
        if isinstance(value, (Tensor, nn.Module)) and len(path) == 1:
            continue  # compared below, or proven not to matter
        if isinstance(value, types.MethodType):
            if value.__self__ is module or isinstance(value.__self__, type):
                continue
        elif is_immutable(value) or is_container(value):
            # Setting an attribute of the module itself is seen; of another object, it is not.
            if len(path) > 1 or not is_immutable(value):
                values.append((path, copy.deepcopy(value)))
            continue
        elif is_object(value) and len(path) == 1 and name in module.__dict__:
            continue  # what is read from it has paths of its own
        raise NotProvenError(f"it reads {'.'.join(path)}, which may change unseen", is_norm=True)
    tensors = []
    named = {k: v for k, v in module.__dict__.items() if isinstance(v, Tensor)}
    for store in (module._parameters, module._buffers, named):
        for name, tensor in store.items():
            # A float tensor beside weight and bias was proven not to matter.
            if tensor is not None and not tensor.is_floating_point():
                tensors.append((name, tensor, _version(tensor), tensor.detach().clone()))
    children = tuple(name for name, child in module._modules.items() if child is not None)
    if not (values or tensors or children):
        return None
    return Guards(tuple(values), tuple(tensors), children)


class Direct(NamedTuple):
    """What C++ compares a call with, and computes it from (``entry.proven``), in the order in which
    it expects that.

    Args:
        weight_name: of the module's weight, or ``None`` if it has none.
        eps_name: the attribute that holds eps, or ``None`` if it is hard-coded.
        eps: the hard-coded one.
        spec: the convention.
        width: of a row, or 0 for any.
        dtypes: the proven ones, as :func:`~rmsnorm.ops.direct.dtype_bits` has them.
        trained: those whose gradients are proven too.
    """

    weight_name: str | None
    eps_name: str | None
    eps: float
    spec: NormSpec
    width: int
    dtypes: int
    trained: int


@dataclass(frozen=True)
class Plan:
    """What a swapped module knows about itself; everything else is read from it at each call.

    Args:
        spec: the convention, its eps ``None``: what is passed beside it decides.
        eps: the hard-coded eps, or the one at the time of the proof.
        eps_path: the attributes that lead to eps, or ``None`` if it is hard-coded.
        shape: the normalised dimensions, or ``None`` for rows of any width.
        ndim: how many they are.
        weight: where the weight is.
        bias: where the bias is.
        pairs: the proven dtypes of row and weight, and of the gate if there is one.
        training: those of them in which the gradients are proven too.
        device: the type of device on which they were proven.
        argument: the name of forward's argument.
        bit_identical: whether all pairs gave the module's own bits.
        guards: what is compared at each call, or ``None`` if nothing need be.
        reshapes: a weight or bias has leading dimensions of 1.
        had_forward: the instance had its class's own forward as an attribute.
        gate_argument: the name of forward's second argument, if that is a gate.
        inside: ``None``, or what is added to the weight if that multiplies the row before its mean
            square is taken; the spec then knows of no weight.
    """

    spec: NormSpec
    eps: float | None
    eps_path: tuple[str, ...] | None
    shape: tuple[int, ...] | None
    ndim: int
    weight: Slot | None
    bias: Slot | None
    pairs: frozenset[Dtypes]
    training: frozenset[Dtypes]
    device: str
    argument: str | None
    bit_identical: bool
    guards: Guards | None = None
    reshapes: bool = False
    had_forward: bool = False
    gate_argument: str | None = None
    inside: float | None = None

    @functools.cached_property
    def joins(self) -> bool:
        """Whether a call is one of a row and at most a weight, with nothing else to compare: so
        an addition before it may be computed with it, and C++ may compare it with the proof."""
        return (
            self.device == "cpu"
            and self.bias is None
            and self.gate_argument is None
            and self.inside is None
            and self.guards is None
            and not self.reshapes
        )

    @functools.cached_property
    def direct(self) -> Direct | None:
        """How C++ compares a call with the proof; ``None`` where more must be compared than it
        can."""
        eps_path = self.eps_path or ()
        if not self.joins or self.ndim != 1 or type(self.eps) is not float or len(eps_path) > 1:
            return None
        weight = None if self.weight is None else self.weight.name
        width = 0 if self.shape is None else self.shape[0]
        eps_name = eps_path[0] if eps_path else None
        dtypes = dtype_bits(self.pairs), dtype_bits(self.training)
        return Direct(weight, eps_name, self.eps, self.spec, width, *dtypes)

    def eps_of(self, module: nn.Module) -> Any:
        """The eps that ``module`` uses now."""
        if self.eps_path is None:
            return self.eps
        value: Any = module
        for name in self.eps_path:
            value = getattr(value, name)
        return value

    def gated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call with these arguments gives if it is one of a row and its gate that is proven,
        or ``None``."""
        given = dict(zip((self.argument, self.gate_argument), args, strict=False))
        given.update(kwargs)
        if len(args) > 2 or len(given) != 2 or len(given) != len(args) + len(kwargs):
            return None
        x, gate = given.get(self.argument), given.get(self.gate_argument)
        if not isinstance(x, Tensor) or not isinstance(gate, Tensor) or not is_ordinary(gate):
            return None
        if gate.shape != x.shape or gate.is_cpu is not x.is_cpu:
            return None
        operands = self.operands(module, x, (gate.dtype,))
        if operands is None or not x.is_cpu:
            return None
        weight, _, eps = operands
        if needs_composite(x, gate, weight):
            return None
        if needs_gradient(x, gate, weight) and not self.trains(x, weight, None, (gate.dtype,)):
            return None
        return gated_operation.forward(x, gate, weight, eps, self.spec)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """The row times its weight, where that is inside the mean square."""
        assert self.inside is not None
        return scaled(x, weight, self.inside)

    def operands(
        self, module: nn.Module, x: Tensor, gate: tuple[torch.dtype, ...] = ()
    ) -> tuple[Any, ...] | None:
        """(weight, bias, eps) of a call that is proven, or ``None``.

        Runs at every call, so the usual case asks each tensor as little as possible.

        Args:
            module: the swapped module.
            x: the row.
            gate: the dtype of its gate, if it is given one.
        """
        weight: Tensor | None = None
        bias: Tensor | None = None
        if self.weight is not None:
            weight = module._parameters.get(self.weight.name)
            if weight is None:  # a buffer, an attribute, or a parameter that somebody wraps
                weight = getattr(module, self.weight.name, None)
        if self.bias is not None:
            bias = getattr(module, self.bias.name, None)
        if type(x) is not Tensor and not is_ordinary(x):
            return None
        beside = bias if weight is None else weight
        if (x.dtype, None if beside is None else beside.dtype, *gate) not in self.pairs:
            return None
        if not (x.is_cpu if self.device == "cpu" else x.device.type == self.device):
            return None
        # A graph that torch.jit records should run, or be converted, without this package. Asked
        # before sizes are compared, of which it would warn.
        if in_autocast() or in_jit_trace():
            return None
        shape = x.shape
        if self.ndim > 1:
            if shape[-self.ndim :] != self.shape:
                return None
        elif not shape or (self.shape is not None and shape[-1] != self.shape[0]):
            return None
        if self.weight is not None and not self._fits(self.weight, weight, x, weight):
            return None
        if self.bias is not None and not self._fits(self.bias, bias, x, weight):
            return None
        if self.guards is not None and not self.guards.hold(module):
            return None
        eps = self.eps if self.eps_path is None else self.eps_of(module)
        if type(eps) is float or type(eps) is int:
            if not 0 <= eps <= _LARGEST_EPS:
                return None
            eps = float(eps)
        elif eps is not None or self.eps is not None:
            return None
        if self.reshapes:
            # Broadcasting would add dimensions to a shorter x.
            if any(s is not None and len(shape) < len(s.shape) for s in (self.weight, self.bias)):
                return None
            if self.weight is not None and weight is not None:
                weight = weight.reshape(self.weight.row_shape)
            if self.bias is not None and bias is not None:
                bias = bias.reshape(self.bias.row_shape)
        return weight, bias, eps

    def trains(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: tuple[torch.dtype, ...] = (),
    ) -> bool:
        """Whether this package may compute the gradients of a call with these operands."""
        beside = bias if weight is None else weight
        pair = (x.dtype, None if beside is None else beside.dtype, *gate)
        return pair in self.training and kernels_differentiate(x)

    def allows(self, module: nn.Module, name: str, value: Any) -> bool:
        """Whether the proof holds for ``module`` after its attribute ``name`` is set to ``value``.

        Call it before. Any name may matter to a forward that has a default for it, so only what is
        read at each call, what every module has, and equal values are allowed.
        """
        if name in MACHINERY or self.eps_path == (name,):
            return True
        if any(slot is not None and slot.name == name for slot in (self.weight, self.bias)):
            return True
        if isinstance(value, types.MethodType) and value.__self__ is module:
            # Wrappers keep the forward that they replace.
            return name not in module.__dict__ and value.__func__ is type(module).forward
        if name not in module.__dict__ or not is_immutable(value):
            return False
        before = module.__dict__[name]
        # repr parts (1,) from (1.0,) and 0.0 from -0.0.
        return before is value or (type(before) is type(value) and repr(before) == repr(value))

    def __str__(self) -> str:
        name = spec_name(self.spec)
        if self.inside is not None:
            name = f"{name} of the weighted row"
        text = f"{name} in {_pairs_text(self.pairs)}"
        return text if self.training or not has_kernels else f"{text}, own gradients"

    @staticmethod
    def _fits(slot: Slot, tensor: Any, x: Tensor, weight: Tensor | None) -> bool:
        """Whether a weight or bias is as it was when the module was proven."""
        if type(tensor) is not nn.Parameter and not is_ordinary(tensor):
            return False
        if tensor.shape != slot.shape or tensor.is_cpu is not x.is_cpu:
            return False
        return tensor is weight or weight is None or tensor.dtype == weight.dtype


def _pairs_text(pairs: frozenset[Dtypes]) -> str:
    """The dtypes of rows, and those of what is beside them where not all of these were proven."""
    alike = [pair for pair in pairs if all(dtype in (pair[0], None) for dtype in pair[1:])]
    without_gate = {pair[:2] for pair in pairs}
    every = without_gate == {(a[0], b[1]) for a in alike for b in alike}
    mixed = [] if every else [_mixed_text(pair) for pair in pairs if pair not in alike]
    rows = [dtype_name(pair[0]) for pair in alike if pair[0] is not None]
    return ", ".join(sorted(rows) + sorted(mixed))


def _mixed_text(pair: Dtypes) -> str:
    x, *beside = (None if dtype is None else dtype_name(dtype) for dtype in pair)
    named = zip(beside, ("weight", "gate"), strict=False)
    return f"{x} with " + " and ".join(f"{dtype} {what}" for dtype, what in named if dtype)
