"""The proven computation of one module: what a call of it becomes, and which calls it covers."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.ops.rms_norm import has_kernels, kernels_differentiate
from rmsnorm.ops.transforms import in_autocast, in_jit_trace, is_ordinary
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
from rmsnorm.rewrite.prove import Pair
from rmsnorm.rewrite.report import spec_name
from rmsnorm.spec import NormSpec

_UNKNOWN = -1


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
    slots = {slot.name for slot in (found.weight, found.bias) if slot is not None}
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
        pairs: the proven pairs of dtypes.
        training: those of them in which the gradients are proven too.
        device: the type of device on which they were proven.
        argument: the name of forward's argument.
        bit_identical: whether all pairs gave the module's own bits.
        guards: what is compared at each call, or ``None`` if nothing need be.
        reshapes: a weight or bias has leading dimensions of 1.
        had_forward: the instance had its class's own forward as an attribute.
    """

    spec: NormSpec
    eps: float | None
    eps_path: tuple[str, ...] | None
    shape: tuple[int, ...] | None
    ndim: int
    weight: Slot | None
    bias: Slot | None
    pairs: frozenset[Pair]
    training: frozenset[Pair]
    device: str
    argument: str | None
    bit_identical: bool
    guards: Guards | None = None
    reshapes: bool = False
    had_forward: bool = False

    def eps_of(self, module: nn.Module) -> Any:
        """The eps that ``module`` uses now."""
        if self.eps_path is None:
            return self.eps
        value: Any = module
        for name in self.eps_path:
            value = getattr(value, name)
        return value

    def operands(self, module: nn.Module, x: Tensor) -> tuple[Any, ...] | None:
        """(weight, bias, eps) of a call that is proven, or ``None``.

        Runs at every call, so the usual case asks each tensor as little as possible.
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
        if (x.dtype, None if beside is None else beside.dtype) not in self.pairs:
            return None
        if not (x.is_cpu if self.device == "cpu" else x.device.type == self.device):
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
        # A graph that torch.jit records should run, or be converted, without this package.
        if in_autocast() or in_jit_trace():
            return None
        if self.guards is not None and not self.guards.hold(module):
            return None
        eps = self.eps if self.eps_path is None else self.eps_of(module)
        if type(eps) is float:
            if not eps >= 0.0:
                return None
        elif type(eps) is int and eps >= 0:
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

    def trains(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether this package may compute the gradients of a call with these operands."""
        beside = bias if weight is None else weight
        pair = (x.dtype, None if beside is None else beside.dtype)
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
        text = f"{spec_name(self.spec)} in {_pairs_text(self.pairs)}"
        return text if self.training or not has_kernels else f"{text}, own gradients"

    @staticmethod
    def _fits(slot: Slot, tensor: Any, x: Tensor, weight: Tensor | None) -> bool:
        """Whether a weight or bias is as it was when the module was proven."""
        if type(tensor) is not nn.Parameter and not is_ordinary(tensor):
            return False
        if tensor.shape != slot.shape or tensor.is_cpu is not x.is_cpu:
            return False
        return tensor is weight or weight is None or tensor.dtype == weight.dtype


def _pairs_text(pairs: frozenset[Pair]) -> str:
    """The dtypes of rows, and those of their weights where not all of these were proven."""
    alike = sorted(dtype_name(x) for x, weight in pairs if weight in (x, None))
    mixed = sorted(
        f"{dtype_name(x)} with {dtype_name(weight)} weight"
        for x, weight in pairs
        if weight is not None and weight != x
    )
    every = len(alike) ** 2 == len(pairs)
    return ", ".join(alike if every else alike + mixed)
