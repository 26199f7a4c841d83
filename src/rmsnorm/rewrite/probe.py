"""A detached double of a module, to ask it questions without touching the module itself.

The double has the module's class and attributes, copies of its tensors, no hooks, and no way back
to the model. :mod:`rmsnorm.rewrite.identify` forms a hypothesis with it and
:mod:`rmsnorm.rewrite.prove` tests the hypothesis.
"""

from __future__ import annotations

import copy
import enum
import inspect
import random
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rmsnorm.spec import NormSpec

# Of every random probe: a module is asked the same each time, so its verdict does not change.
SEED = 20191007

Store = Literal["parameter", "buffer", "attribute"]

# A norm has a weight, perhaps a bias, perhaps a buffer that it ignores; BatchNorm has four.
_MOST_TENSORS = 3
_MOST_ELEMENTS = 2**22
# A weight of several dimensions that is not called normalized_shape: a square linear layer also
# maps rows to rows of the same shape, and asking it would be expensive.
_MOST_ELEMENTS_OF_A_MATRIX = 4096

# Why a module that holds others is left; every container is, so a report does not list it.
MODULES_INSIDE = "it has modules inside"

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class NotProvenError(Exception):
    """Why a module is not computed by this package.

    Args:
        reason: one clause, for the report.
        is_norm: it behaves like an RMSNorm as far as it could be asked.
    """

    def __init__(self, reason: str, *, is_norm: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_norm = is_norm


@dataclass(frozen=True)
class Slot:
    """Where a module keeps one tensor.

    Args:
        name: the attribute's name.
        store: a parameter, a buffer or a plain attribute.
        shape: the tensor's own shape; leading dimensions of 1 are not part of the row.
    """

    name: str
    store: Store
    shape: tuple[int, ...]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape without leading dimensions of 1, at least one dimension."""
        shape = self.shape
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        return shape


@dataclass(frozen=True)
class Hypothesis:
    """What a module seems to compute.

    Args:
        spec: the convention.
        shape: the normalised dimensions.
        weight: where the weight is, or ``None``.
        bias: where the bias is, or ``None``.
        eps_path: the attributes that lead to eps, read at call time; ``None`` if it is hard-coded.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    weight: Slot | None
    bias: Slot | None
    eps_path: tuple[str, ...] | None


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` as it was before :func:`rmsnorm.patch`."""
    return getattr(type(module), "_rmsnorm_original", type(module))


class Probe:
    """The double of one module.

    Args:
        module: any module.
        device: where to probe a module that has no tensor; the CPU by default.

    Raises:
        NotProvenError: it cannot be an RMSNorm, or it cannot be copied. This is cheap to find out.

    Example:
        >>> probe = Probe(nn.RMSNorm(2, eps=0.0))
        >>> probe(torch.tensor([[3.0, 4.0]])).shape
        torch.Size([1, 2])
    """

    def __init__(self, module: nn.Module, device: torch.device | None = None) -> None:
        base = original_class(module)
        _check_children(module)
        self.slots, others = _own_tensors(module)
        self.argument, self.has_more_arguments = _argument(base)
        self._base = base
        self.tensors: dict[str, Tensor] = {}
        self.device = torch.device("cpu") if device is None or device.type == "meta" else device
        for index, slot in enumerate(self.slots):
            tensor = _get(module, slot)
            if index == 0:
                self.device = tensor.device
            self.tensors[slot.name] = tensor.detach().clone()
        self.module = self._double(module, others)

    def _double(self, module: nn.Module, others: Mapping[str, Tensor]) -> nn.Module:
        clone: nn.Module = object.__new__(self._base)
        fresh = nn.Module().__dict__
        state = clone.__dict__
        state.update(fresh)
        memo: dict[int, Any] = {id(module): clone}
        for name, value in module.__dict__.items():
            if name in fresh or name == "forward" or name.startswith("_rmsnorm_"):
                continue
            if not isinstance(value, Tensor):
                state[name] = _copied(value, memo, depth=0)
        state["training"] = module.training
        for name in module._parameters:
            state["_parameters"][name] = None
        for name in module._buffers:
            state["_buffers"][name] = None
        for name in module._modules:
            state["_modules"][name] = nn.Identity()
        for name, tensor in others.items():
            store = state["_buffers"] if name in module._buffers else state
            store[name] = tensor.detach().clone()
        self.module = clone
        self.put(self.tensors)
        return clone

    def put(self, tensors: Mapping[str, Tensor], *, requires_grad: bool = False) -> None:
        """Give the double these tensors, by attribute name."""
        for slot in self.slots:
            if slot.name not in tensors:
                continue
            tensor = tensors[slot.name]
            if slot.store == "parameter":
                parameter = nn.Parameter(tensor, requires_grad=requires_grad)
                self.module._parameters[slot.name] = parameter
            elif slot.store == "buffer":
                self.module._buffers[slot.name] = tensor
            else:
                self.module.__dict__[slot.name] = tensor

    def held(self, slot: Slot) -> Tensor:
        """The tensor that the double has in ``slot``."""
        return _get(self.module, slot)

    def __call__(self, x: Tensor, *more: Tensor) -> Tensor:
        """The module's own forward, without hooks.

        Raises:
            NotProvenError: it raises, or does not return one tensor of x's shape.
        """
        try:
            y = self._base.forward(self.module, x, *more)
        except Exception as error:
            raise NotProvenError(f"its forward raises {type(error).__name__}") from error
        if type(y) is not Tensor or y.shape != x.shape or not y.is_floating_point():
            raise NotProvenError("it does not map a tensor to one of the same shape")
        return y

    def in_any_rank(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The same for x (..., *shape) given as it is, as one batch, or as a matrix of rows.

        Raises:
            NotProvenError: it takes none of these.
        """
        for given in (x, x[None], x.reshape(-1, *shape)):
            try:
                return self(given).reshape(x.shape)
            except NotProvenError as error:
                reason = error
        raise reason

    def simple_attributes(self) -> dict[str, Any]:
        """The attributes that are plain values; see :func:`simple_attributes`."""
        return simple_attributes(self.module)


def simple_attributes(module: nn.Module) -> dict[str, Any]:
    """The instance attributes that are numbers, strings, dtypes, or tuples and lists of them.

    Example:
        >>> simple_attributes(nn.RMSNorm(2, eps=0.5))
        {'normalized_shape': (2,), 'eps': 0.5, 'elementwise_affine': True}
    """
    return {
        name: value
        for name, value in module.__dict__.items()
        if name != "training" and not name.startswith("_") and _is_simple(value)
    }


def fingerprint(module: nn.Module) -> tuple[Any, ...] | None:
    """Equal for two modules that compute the same with equal tensors; ``None`` if unsure."""
    base = original_class(module)
    parts: list[Any] = [base, base.forward, module.training]
    plain = nn.Module().__dict__
    for name, value in module.__dict__.items():
        if name in plain or name.startswith("_rmsnorm_") or name == "forward":
            continue
        if isinstance(value, Tensor):
            parts.append((name, "attribute", value.shape, value.dtype, value.device.type))
        elif _is_simple(value):
            parts.append((name, type(value), repr(value)))
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            parts.append((name, value))
        else:
            return None
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            found = None if tensor is None else (tensor.shape, tensor.dtype, tensor.device.type)
            parts.append((name, found))
    if module._modules:
        return None
    return tuple(parts)


def holds_own_forward(module: nn.Module) -> bool:
    """Whether the instance has its class's own forward as an attribute, as kernelize leaves it.

    Raises:
        NotProvenError: it has another one, which somebody wants to be called.
    """
    forward = module.__dict__.get("forward")
    if forward is None or hasattr(type(module), "_rmsnorm_original"):
        return False  # what is put around a swapped forward calls it
    if (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    ):
        return True
    raise NotProvenError("its forward is overridden on the instance")


@contextmanager
def probing(module: nn.Module, device: torch.device | None = None) -> Iterator[Probe]:
    """A probe of ``module``, in :func:`quiet`; whatever goes wrong with it is a NotProvenError.

    Args:
        module: any module.
        device: where to probe a module that has no tensor.
    """
    try:
        holds_own_forward(module)
        probe = Probe(module, device)
        with quiet(probe.device):
            yield probe
    except NotProvenError:
        raise
    except Exception as error:  # a module may do anything when it is asked, and none may stop us
        raise NotProvenError(f"asking it raises {type(error).__name__}: {error}") from error


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """No gradient, no autocast, no warnings, and every default and random state restored."""
    python_state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    dtype = torch.get_default_dtype()
    placed = torch.get_default_device().type != "cpu"
    with (
        torch.device("cpu") if placed else nullcontext(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False)
        if torch.amp.is_autocast_available(device.type)
        else nullcontext(),
    ):
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(python_state)


def _check_children(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise NotProvenError("it is a compiled script")
    for name, child in module._modules.items():
        if name == "parametrizations":
            raise NotProvenError("its weight is parametrized")
        if child is not None and type(child) is not nn.Identity:
            raise NotProvenError(MODULES_INSIDE)


def _own_tensors(module: nn.Module) -> tuple[list[Slot], dict[str, Tensor]]:
    """Floating-point tensors, parameters first, and the other tensors by name."""
    slots: list[Slot] = []
    others: dict[str, Tensor] = {}
    attributes = {k: v for k, v in module.__dict__.items() if isinstance(v, Tensor)}
    stores: tuple[tuple[Store, Mapping[str, Tensor | None]], ...] = (
        ("parameter", module._parameters),
        ("buffer", module._buffers),
        ("attribute", attributes),
    )
    shapes = {
        tuple(v) for v in module.__dict__.values() if isinstance(v, (tuple, list)) and _is_simple(v)
    }
    for store, tensors in stores:
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if type(tensor) not in (Tensor, nn.Parameter):
                raise NotProvenError(f"its {name} is a {type(tensor).__name__}")
            if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
                raise NotProvenError(f"its {name} is not a plain tensor of floats")
            if tensor.numel() > _MOST_ELEMENTS:
                raise NotProvenError(f"its {name} is too large for a norm")
            if not tensor.is_floating_point():
                if tensor.is_meta:
                    raise NotProvenError("no data")
                others[name] = tensor
                continue
            slot = Slot(name, store, tuple(tensor.shape))
            if (
                len(slot.row_shape) > 1
                and tensor.numel() > _MOST_ELEMENTS_OF_A_MATRIX
                and slot.row_shape not in shapes
            ):
                raise NotProvenError(f"its {name} has {len(slot.row_shape)} dimensions")
            slots.append(slot)
    parameters = {slot.row_shape for slot in slots if slot.store == "parameter"}
    if len(parameters) > 1 and any(len(shape) > 1 for shape in parameters):
        raise NotProvenError("its parameters have different shapes")
    if len(slots) > _MOST_TENSORS:
        raise NotProvenError(f"it has {len(slots)} tensors")
    # Only now: a linear layer without data is still a linear layer.
    for slot in slots:
        tensor = _get(module, slot)
        if tensor.is_meta or (tensor.numel() == 0 and slot.store == "parameter"):
            raise NotProvenError("no data")
        if tensor.device != _get(module, slots[0]).device:
            raise NotProvenError("its tensors are on different devices")
    return slots, others


def _get(module: nn.Module, slot: Slot) -> Tensor:
    found: Any
    if slot.store == "parameter":
        found = module._parameters[slot.name]
    elif slot.store == "buffer":
        found = module._buffers[slot.name]
    else:
        found = module.__dict__[slot.name]
    assert isinstance(found, Tensor)
    return found


def _argument(base: type[nn.Module]) -> tuple[str | None, bool]:
    """The name of forward's one required argument, and whether it takes more."""
    forward: Callable[..., Any] = base.forward
    if forward is nn.Module.forward:
        raise NotProvenError("it has no forward")
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        raise NotProvenError("its forward has no signature") from None
    if not parameters:
        raise NotProvenError("its forward takes nothing")
    first, rest = parameters[0], parameters[1:]
    positional = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.VAR_POSITIONAL)
    if first.kind not in positional:
        raise NotProvenError("its forward takes nothing by position")
    for parameter in rest:
        starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not starred:
            raise NotProvenError(f"its forward needs {parameter.name} too")
    name = first.name if first.kind == first.POSITIONAL_OR_KEYWORD else None
    return name, any(p.kind == p.POSITIONAL_OR_KEYWORD for p in rest)


def _is_simple(value: object) -> bool:
    if isinstance(value, _SIMPLE):
        return True
    return isinstance(value, (tuple, list)) and all(isinstance(item, _SIMPLE) for item in value)


def _copied(value: Any, memo: dict[int, Any], depth: int) -> Any:
    """A copy of an attribute that shares nothing with the model."""
    if id(value) in memo:
        return memo[id(value)]
    if _is_simple(value):
        return list(value) if type(value) is list else value
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)):
        return value
    if isinstance(value, Tensor):
        if value.numel() > _MOST_ELEMENTS or value.is_meta:
            raise NotProvenError("it holds a large tensor")
        return value.detach().clone()
    if isinstance(value, nn.Module) or depth > 3:
        raise NotProvenError("it holds another module")
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copied(item, memo, depth + 1) for item in value)
    if type(value) is dict:
        return {key: _copied(item, memo, depth + 1) for key, item in value.items()}
    for inner in getattr(value, "__dict__", {}).values():
        if isinstance(inner, (nn.Module, Tensor)):
            raise NotProvenError("it holds another module")
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise NotProvenError(f"its attribute of type {type(value).__name__} has no copy") from error


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without its module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
