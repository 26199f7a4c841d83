"""Changing the class of a module to one that computes a :class:`~rmsnorm.rewrite.plan.Plan`.

A swapped module keeps its identity, parameters, hooks and attributes; only its class changes, to a
subclass of its own class that is made here and has its name. So ``isinstance`` holds, a deep copy
computes with its own weight, and a pickle names the original class and is swapped again on loading.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from rmsnorm.ops import rms_norm as operation
from rmsnorm.ops.direct import entry
from rmsnorm.ops.transforms import (
    in_dispatch_mode,
    in_forward_mode,
    in_func_transform,
    in_jit_trace,
    needs_composite,
    needs_gradient,
)
from rmsnorm.rewrite.plan import Plan
from rmsnorm.rewrite.probe import MACHINERY, NotProvenError, original_class
from rmsnorm.rewrite.stream import PLAN as _PLAN
from rmsnorm.rewrite.stream import SLOT, Slot, Stream

# Under torch.compile a norm of fewer elements is left to the compiler, which joins it with what
# stands beside it: an operation of its own takes longer to be called than its kernel saves.
LEAST_COMPILED = 2**16

# Where a module that is to be examined later keeps the function that does it.
_LATER = "_rmsnorm_later"


def _left_to_the_compiler(x: Any) -> bool:
    """Whether Dynamo, which traces this, is to compile the norm of ``x`` from the module's code."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return (
        not torch.compiler.is_exporting()  # whose graph is to have the operation
        and isinstance(x, torch.Tensor)
        and x.is_cpu
        and statically_known_true(x.numel() < LEAST_COMPILED)
    )


class Swapped:
    """Marks the classes of swapped modules; see :func:`_swapped_class`."""

    __slots__ = ()
    _rmsnorm_original: ClassVar[type[nn.Module]]


def plan_of(module: nn.Module) -> Plan | None:
    """The plan of a swapped module; ``None`` if it has none, or if a change has made it void."""
    plan: Plan | None = module.__dict__.get(_PLAN)
    return plan


def swap(module: nn.Module, plan: Plan) -> None:
    """Let ``module``, swapped or not, compute ``plan``.

    Raises:
        NotProvenError: its class forbids it.
    """
    try:
        object.__setattr__(module, "__class__", _swapped_class(original_class(module)))
    except TypeError as error:
        raise NotProvenError("its class cannot be subclassed in place", is_norm=True) from error
    module.__dict__.pop(_LATER, None)
    module.__dict__[_PLAN] = plan
    if plan.had_forward:
        module.__dict__.pop("forward", None)


def swap_later(module: nn.Module, examine: Callable[[nn.Module], object]) -> None:
    """Let ``module`` be examined as soon as it has its data and is put into a mode, or called.

    A model is often made without data, and filled and marked later. Until then the module's own
    code runs.

    Args:
        module: any module; one that is swapped already is left as it is.
        examine: calls :func:`swap` or :func:`restore`; pickle must find it by its name.

    Raises:
        NotProvenError: its class forbids it.
    """
    if isinstance(module, Swapped):
        return
    try:
        object.__setattr__(module, "__class__", _swapped_class(type(module)))
    except TypeError as error:
        raise NotProvenError("its class cannot be subclassed in place") from error
    module.__dict__[_LATER] = examine


def examined(module: nn.Module) -> bool:
    """Examine ``module`` if that was put off and can be done now; whether it was."""
    examine = module.__dict__.get(_LATER)
    if examine is None or (
        torch.compiler.is_compiling()
        or in_jit_trace()
        or in_func_transform()
        or in_forward_mode()
        or in_dispatch_mode()
        or any(tensor.is_meta or not tensor.numel() for tensor in module.parameters())
    ):
        return False
    if module.__dict__.pop(_LATER, None) is None:  # another thread was faster
        return False
    examine(module)
    return True


def restore(module: nn.Module) -> bool:
    """Give ``module`` its own class and forward back; whether it was swapped."""
    if not isinstance(module, Swapped):
        return False
    plan = module.__dict__.pop(_PLAN, None)
    module.__dict__.pop(_LATER, None)
    original = original_class(module)
    swapped: type[nn.Module] = type(module)
    forward = swapped.forward
    made = _classes.get(original)
    if swapped is made:
        object.__setattr__(module, "__class__", original)
    elif made is not None:
        rebase(swapped, made, original)
    # Wrappers that were put around the swapped forward keep a bound method of it.
    for name, value in list(module.__dict__.items()):
        if (
            isinstance(value, types.MethodType)
            and value.__self__ is module
            and value.__func__ is forward
        ):
            module.__dict__[name] = types.MethodType(original.forward, module)
    if plan is not None and plan.had_forward:
        module.__dict__["forward"] = types.MethodType(original.forward, module)
    return True


def rebase(derived: type, made: type, original: type) -> None:
    """Put ``original`` in the place of the swapped class under a class derived from it.

    Parametrizations make such a class for one module, as does ``fully_shard``.
    """
    for cls in derived.__mro__:
        if made in cls.__bases__ and cls is not made:
            bases = tuple(original if base is made else base for base in cls.__bases__)
            try:
                cls.__bases__ = bases
            except TypeError as error:
                raise RuntimeError(
                    f"unpatch() cannot take the swapped class from under {cls.__qualname__}, "
                    f"which was derived from it after patch(): {error}"
                ) from error


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _swapped_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``original`` whose forward is this package's where that is proven.

    ``original`` stays the first base: Python lets an instance change to a class only if both have
    the same line of first bases.
    """
    if original in _classes:
        return _classes[original]

    def changing(module: nn.Module, name: str, value: Any, *, gone: bool = False) -> None:
        plan = plan_of(module)
        if plan is not None and (
            not plan.allows(module, name, value) or (gone and name not in MACHINERY)
        ):
            module.__dict__[_PLAN] = None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            given = (*args, *kwargs.values())
            if given and _left_to_the_compiler(given[0]):
                return original.forward(self, *args, **kwargs)
        elif entry is not None:  # which the compiler cannot trace
            y = entry.proven(self, args, kwargs)
            if y is not None and y is not True:
                return y
        # A bound method that outlived unpatch() finds no plan.
        plan = getattr(self, _PLAN, None)
        if args and type(args[0]) is Stream:
            normed = args[0].take(self)
            if normed is not None:
                return normed
            args = (args[0].tensor, *args[1:])
        if plan is not None:
            x = None
            if not kwargs and len(args) == 1:
                x = args[0]
            elif not args and len(kwargs) == 1:
                x = kwargs.get(plan.argument)
            elif plan.gate_argument is not None:
                gated = plan.gated(self, args, kwargs)
                if gated is not None:
                    return gated
            if x is not None:
                slot: Slot | None = getattr(self, SLOT, None)
                if slot is not None and not torch.compiler.is_compiling():
                    normed = slot.take(self, plan, x)
                    if normed is not None:
                        return normed
                operands = plan.operands(self, x)
                if operands is not None:
                    weight, bias, eps = operands
                    # Where the kernel cannot serve, the module's own code is the faster one.
                    if (
                        x.is_cpu
                        and not needs_composite(x, weight, bias)
                        and (not needs_gradient(x, weight, bias) or plan.trains(x, weight, bias))
                    ):
                        if plan.inside is not None:
                            x, weight = plan.scaled(x, weight), None
                        return operation.forward(x, weight, bias, eps, plan.spec, plan.ndim)
        elif examined(self):
            return type(self).forward(self, *args, **kwargs)
        return original.forward(self, *args, **kwargs)

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        original.train(self, mode)
        examined(self)
        return self

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        changing(self, name, value)
        original.__setattr__(self, name, value)

    def delete_attribute(self: nn.Module, name: str) -> None:
        changing(self, name, None, gone=True)
        original.__delattr__(self, name)

    def register_parameter(self: nn.Module, name: str, param: Any) -> None:
        changing(self, name, param)
        original.register_parameter(self, name, param)

    def register_buffer(self: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
        changing(self, name, tensor)
        original.register_buffer(self, name, tensor, persistent)

    def add_module(self: nn.Module, name: str, module: Any) -> None:
        changing(self, name, module)
        original.add_module(self, name, module)

    def extra_repr(self: nn.Module) -> str:
        inner = original.extra_repr(self)
        plan = plan_of(self)
        without = "not examined yet" if _LATER in self.__dict__ else "changed since patch()"
        note = f"{without}, own code" if plan is None else str(plan)
        return f"{inner}, rmsnorm: {note}" if inner else f"rmsnorm: {note}"

    forward.__qualname__ = f"{original.__qualname__}.forward"
    forward.__doc__ = original.forward.__doc__
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
        "register_parameter": register_parameter,
        "register_buffer": register_buffer,
        "add_module": add_module,
        "__reduce_ex__": reduces_to(original, _remake),
        "_rmsnorm_original": original,
        SLOT: None,  # most have none
        "extra_repr": extra_repr,
        "train": train,
        "forward": forward,
    }
    # Made beside the original and then moved under it, so that the original's __init_subclass__,
    # which may register what it sees, does not see this class.
    metaclass: Any = type(original)
    made: type[nn.Module] = metaclass(original.__name__, (nn.Module, Swapped), namespace)
    made.__bases__ = (original, Swapped)
    _classes[original] = made
    return made


def reduces_to(original: type[nn.Module], remake: Callable[..., nn.Module]) -> Any:
    """``__reduce_ex__`` of a class derived from ``original``, which pickle cannot find by its name.

    Args:
        original: what pickle names instead.
        remake: makes an empty instance, from ``original`` and the arguments of its ``__new__``.
    """

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, max(int(protocol), 2))
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") == "__newobj__":
            cls, *arguments = reduced[1]
            if cls is type(self):
                return (remake, (original, *arguments), *reduced[2:])
        return reduced

    return reduce_ex


def _remake(original: type[nn.Module], *arguments: Any) -> nn.Module:
    """An empty swapped module, for pickle and copy, which fill it."""
    cls = _swapped_class(original)
    made: nn.Module = cls.__new__(cls, *arguments)
    return made
