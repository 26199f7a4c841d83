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
import sys
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
Path = tuple[str, ...]

# A norm has a weight, perhaps a bias, perhaps a buffer that it ignores; BatchNorm has four.
_MOST_TENSORS = 3
_MOST_ELEMENTS = 2**22
# A weight of several dimensions that is not called normalized_shape: a square linear layer also
# maps rows to rows of the same shape, and asking it would be expensive.
_MOST_ELEMENTS_OF_A_MATRIX = 4096

# Why a module that holds others is left; every container is, so a report does not list it.
MODULES_INSIDE = "it has modules inside"

# What every module has; hooks and modes live here, and no forward computes with them.
MACHINERY = frozenset(nn.Module().__dict__) | {
    "__class__",
    "_compiled_call_impl",  # of Module.compile
    "_is_torch_compile",  # of torch.compile
    "forward",
}

_CODE = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
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
        spec: the convention; with a gate, if the module's second input is one.
        shape: the normalised dimensions.
        weight: where the weight is, or ``None``.
        bias: where the bias is, or ``None``.
        eps_path: the attributes that lead to eps, read at call time; ``None`` if it is hard-coded.
        reads: the attributes that its forward was seen to read, its own and those of what it holds.
        inside: where a weight is that multiplies the row before its mean square is taken; see
            :func:`rmsnorm.rewrite.prove.scaled`. ``spec`` has neither it nor its offset.
        inside_offset: what is added to that weight.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    weight: Slot | None
    bias: Slot | None
    eps_path: tuple[str, ...] | None
    reads: frozenset[Path] = frozenset()
    inside: Slot | None = None
    inside_offset: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether a second input multiplies the row."""
        return self.spec.gate is not None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Where its weight and its bias are, as far as it has them."""
        return tuple(s for s in (self.weight, self.inside, self.bias) if s is not None)


@dataclass(frozen=True)
class Arguments:
    """What a forward takes.

    Args:
        first: the name of its first argument, or ``None`` if that is by position only.
        second: the name of a second one that can be given by position, or ``None``.
        needs_second: whether that has no default.
    """

    first: str | None
    second: str | None
    needs_second: bool


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
        self.arguments = _arguments(base)
        # While a number is here, every call is given a second input that holds it everywhere.
        self.gate: float | None = None
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
                state[name] = copied(value, memo, depth=0)
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
        if self.gate is not None and not more:
            more = (torch.full_like(x, self.gate),)
        try:
            y = self._base.forward(self.module, x, *more)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit() in a forward is no reason to exit
            raise NotProvenError(f"its forward raises {type(error).__name__}") from error
        if type(y) is Tensor and y.dim() and y.shape == (*x.shape[:-1], 1) != x.shape:
            raise NotProvenError("it returns one number for each row, not the row")
        if type(y) is not Tensor or y.shape != x.shape or not y.is_floating_point():
            raise NotProvenError("it does not map a tensor to one of the same shape")
        return y

    def in_any_rank(self, x: Tensor, shape: tuple[int, ...], *more: Tensor) -> Tensor:
        """The same for x (..., *shape) given as it is, as one batch, or as a matrix of rows, and
        what else is given, of x's shape, alike.

        Raises:
            NotProvenError: it takes none of these.
        """
        inputs = (x, *more)
        for given in (
            inputs,
            tuple(t[None] for t in inputs),
            tuple(t.reshape(-1, *shape) for t in inputs),
        ):
            try:
                return self(*given).reshape(x.shape)
            except NotProvenError as error:
                reason = error
        raise reason

    def state(self, *, tensors: bool) -> Any:
        """All that the double holds, to be compared by :func:`same_state`.

        Args:
            tensors: with its tensors; without, it may be given others in between.
        """
        module = self.module
        held = {k: _frozen(v) for k, v in module.__dict__.items() if k not in MACHINERY}
        stores = (module._parameters, module._buffers, module._modules)
        for store in stores:
            held.update((name, _frozen(value)) for name, value in store.items())
        if not tensors:
            for slot in self.slots:
                held.pop(slot.name, None)
        return held

    def reads(self, shape: tuple[int, ...]) -> frozenset[Path]:
        """The attributes that forward reads, with one level of what the module holds.

        An object that cannot be watched counts as read in all its attributes. A module that cannot
        be watched counts as reading everything.
        """
        seen: set[Path] = set()
        module = self.module
        objects = {
            name: value
            for name, value in module.__dict__.items()
            if name not in MACHINERY and is_object(value)
        }
        watched: list[tuple[Any, type]] = []
        try:
            if not _watch(module, (), seen, watched):
                seen.update((name,) for name in module.__dict__)
            for name, value in objects.items():
                if not _watch(value, (name,), seen, watched):
                    seen.update((name, inner) for inner in vars(value))
            for dtype in (torch.float32, torch.bfloat16):
                for training in (True, False):
                    module.train(training)
                    x = torch.ones((2, 3, *shape), dtype=dtype, device=self.device)
                    try:
                        self.in_any_rank(x, shape)
                    except NotProvenError:
                        continue
        finally:
            for owner, cls in watched:
                object.__setattr__(owner, "__class__", cls)
        return frozenset(path for path in seen if not path[-1].startswith("__"))

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


def fingerprint(module: nn.Module, *, shared: bool = False) -> tuple[Any, ...] | None:
    """Equal for two modules that compute the same with equal tensors; ``None`` if unsure.

    Args:
        module: any module.
        shared: whether modules that hold the same object, such as a config, are taken to be alike.
    """
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
        elif shared:
            parts.append((name, id(value)))
        else:
            return None
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            found = None if tensor is None else (tensor.shape, tensor.dtype, tensor.device.type)
            parts.append((name, found))
    for name, child in module._modules.items():
        inner = None if child is None else fingerprint(child, shared=shared)
        if child is not None and inner is None:
            return None
        parts.append((name, inner))
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
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a module may do anything when asked, and none may stop us
        raise NotProvenError(f"asking it raises {type(error).__name__}: {error}") from error


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """No gradient, no autocast, no warnings, and every default and random state restored."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    deterministic = _deterministic()
    # What was compiled was compiled with Dynamo loaded; loading it for the others would take long.
    compiled = "torch._dynamo" in sys.modules
    devices = [device] if device.type == "cuda" else []
    dtype = torch.get_default_dtype()
    placed = torch.get_default_device().type != "cpu"
    with (
        torch.device("cpu") if placed else nullcontext(),
        # Each probe would count towards the limit of recompilations, which a class's users share.
        torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
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
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            if _deterministic() != deterministic:
                torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _check_children(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise NotProvenError("it is a compiled script")
    for name, child in module._modules.items():
        if name == "parametrizations":
            raise NotProvenError("its weight is parametrized")
        if child is not None and not is_plain_identity(child):
            raise NotProvenError(MODULES_INSIDE)


def is_plain_identity(module: object) -> bool:
    """Whether a child passes its input on, and nobody watches it."""
    if type(module) is not nn.Identity or "forward" in module.__dict__:
        return False
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


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


def _arguments(base: type[nn.Module]) -> Arguments:
    """What the forward of a class takes.

    Raises:
        NotProvenError: it is not one tensor, or two.
    """
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
    named = first.POSITIONAL_OR_KEYWORD
    if first.kind not in (first.POSITIONAL_ONLY, named, first.VAR_POSITIONAL):
        raise NotProvenError("its forward takes nothing by position")
    required = [
        parameter
        for parameter in rest
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    second = rest[0] if rest and rest[0].kind == named else None
    for parameter in required:
        if parameter is not second:
            raise NotProvenError(f"its forward needs {parameter.name} too")
    return Arguments(
        first=first.name if first.kind == named else None,
        second=None if second is None else second.name,
        needs_second=bool(required),
    )


def _is_simple(value: object) -> bool:
    if isinstance(value, _SIMPLE):
        return True
    return isinstance(value, (tuple, list)) and all(isinstance(item, _SIMPLE) for item in value)


def is_immutable(value: object) -> bool:
    """Whether a value changes only by being replaced."""
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, (nn.Module, type))
    if isinstance(value, (*_SIMPLE, *_CODE)):
        return True
    return isinstance(value, tuple) and all(is_immutable(item) for item in value)


def is_container(value: object) -> bool:
    """Whether a value is a list, tuple, set or dict of such, or of simple values."""
    if type(value) is dict:
        return all(isinstance(k, _SIMPLE) for k in value) and is_container(list(value.values()))
    if isinstance(value, tuple) or type(value) in (list, set, frozenset):
        items: Any = value
        return all(isinstance(item, _SIMPLE) or is_container(item) for item in items)
    return False


def is_object(value: object) -> bool:
    """Whether a value is all in its attributes, such as a config."""
    if is_immutable(value) or is_container(value) or isinstance(value, (Tensor, nn.Module)):
        return False
    if type(value) is types.SimpleNamespace:
        return True
    # A larger one has slots, or is built on a type in C whose contents are no attributes.
    return hasattr(value, "__dict__") and type(value).__basicsize__ == _Plain.__basicsize__


def _frozen(value: Any, depth: int = 0) -> Any:
    """What shows later whether ``value`` was replaced, or changed in place."""
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    if _is_simple(value):
        return type(value), repr(value)
    if depth < 3 and isinstance(value, (list, tuple)):
        return value, tuple(_frozen(item, depth + 1) for item in value)
    if depth < 3 and isinstance(value, dict):
        return value, {key: _frozen(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return value, repr(sorted(map(repr, value)))
    if depth < 3 and is_object(value):
        return value, {key: _frozen(item, depth + 1) for key, item in vars(value).items()}
    return value, None


def same_state(a: Any, b: Any) -> bool:
    """Whether two results of :meth:`Probe.state` hold the same objects with equal contents."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return isinstance(a, str) and bool(a == b)


def _watch(owner: Any, prefix: Path, seen: set[Path], watched: list[tuple[Any, type]]) -> bool:
    """Record the attributes that are read from ``owner``; whether its class allows it."""
    cls: Any = type(owner)

    def read(self: Any, name: str) -> Any:
        seen.add((*prefix, name))
        return cls.__getattribute__(self, name)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__getattribute__": read,
    }
    beside = nn.Module if isinstance(owner, nn.Module) else _Plain
    try:
        # As in the swap: the class's __init_subclass__ should not see this one.
        made: Any = type(cls)(cls.__name__, (beside,), namespace)
        made.__bases__ = (cls,)
        object.__setattr__(owner, "__class__", made)
    except (TypeError, AttributeError):
        return False
    watched.append((owner, cls))
    return True


class _Plain:
    """A base that :func:`_watch` replaces."""


def copied(value: Any, memo: dict[int, Any], depth: int) -> Any:
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
        return type(value)(copied(item, memo, depth + 1) for item in value)
    if type(value) is dict:
        return {key: copied(item, memo, depth + 1) for key, item in value.items()}
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
