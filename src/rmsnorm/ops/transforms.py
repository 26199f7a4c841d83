"""What surrounds a call besides its values: derivatives, transforms, modes, wrapped tensors.

PyTorch has no public way to ask for most of it. The private names that this package relies on are
here, one function each, and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _get_tracing_state,
    _InferenceMode,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _set_grad_enabled,
)
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (Tensor, torch.nn.Parameter)

_T = TypeVar("_T")


def needs_composite(*tensors: Tensor | None) -> bool:
    """Whether neither a custom operation nor an ``autograd.Function`` over it can serve the call.

    That is forward mode, a ``torch.func`` transform, ``torch.jit.trace``, or a tensor subclass with
    its own idea of an operation. Two of them the operations have rules for: ``vmap`` alone, with
    nothing to differentiate, and distributed tensors.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> needs_composite(x, None)
        False
        >>> with torch.autograd.forward_ad.dual_level():
        ...     needs_composite(x)
        True
    """
    # Asked at every call, so in_jit_trace, in_forward_mode and in_func_transform are written out.
    if _get_tracing_state() is not None or forward_ad._current_level >= 0:
        return True  # a jit trace is checked, and used, with and without gradients
    if torch.compiler.is_compiling():  # subclasses are unwrapped by now
        depth, only_vmap = _traced_func_transforms()
        return depth != 0 and (not only_vmap or torch.is_grad_enabled())
    if peek_interpreter_stack() is not None:
        return not _in_vmap_only() or needs_gradient(*map(_innermost, tensors))
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return not all(t is None or _is_served(t) for t in tensors)
    return False


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether reverse mode will ask for the gradient of one of ``tensors``.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> needs_gradient(x, None), needs_gradient(x.detach(), None)
        (True, False)
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _is_served(tensor: Tensor) -> bool:
    # Fake tensors stand for plain ones; any other subclass is asked operation by operation.
    from torch._subclasses.fake_tensor import FakeTensor

    if type(tensor) in PLAIN or type(tensor) is FakeTensor:
        return True
    return is_distributed(tensor)


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``; if so, the operations have rules for it from now on."""
    # There can be none before its module is imported, which takes long.
    home = sys.modules.get("torch.distributed.tensor")
    if home is None or not isinstance(tensor, home.DTensor):
        return False
    from rmsnorm.ops import sharding

    sharding.register()
    return True


def _in_vmap_only() -> bool:
    """Whether every ``torch.func`` transform around the call is a ``vmap``."""
    stack = get_interpreter_stack() or ()
    return all(interpreter.key() == TransformType.Vmap for interpreter in stack)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_func_transforms() -> tuple[int, bool]:
    """How many transforms there are, and whether all are ``vmap``, while ``torch.compile`` traces.

    It cannot look into the private functions; but it guards on what they report.
    """
    return len(get_interpreter_stack() or ()), _in_vmap_only()


def _innermost(tensor: Tensor | None) -> Tensor | None:
    """The tensor under the layers of ``vmap``, which alone knows whether it requires a gradient."""
    while tensor is not None and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def refuse_forward_mode(name: str) -> None:
    """Refuse forward mode in an operation, whose result would silently have no tangent.

    Which argument has one cannot be told: ``torch.func.jvp`` takes the tangents off before an
    operation sees its arguments.

    Args:
        name: the public function, which has a forward mode.

    Raises:
        RuntimeError: inside ``torch.func.jvp`` or ``forward_ad.dual_level()``.
    """
    if in_forward_mode():
        raise RuntimeError(
            f"torch.ops.rmsnorm.{name} has no forward mode; rmsnorm.{name} does: call that"
        )


def was_forward_mode_refused(error: BaseException) -> bool:
    """Whether an operation raised ``error`` because of forward mode.

    A level of forward mode is open to the whole process, so another thread may have opened one
    after :func:`needs_composite` looked.
    """
    return isinstance(error, RuntimeError) and "has no forward mode" in str(error)


def in_func_transform() -> bool:
    """Inside ``torch.func``'s vmap, grad or jvp: a tensor may stand for many, or carry more."""
    return peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Inside ``forward_ad.dual_level()``: a tensor may carry a tangent, which nothing shows."""
    return forward_ad._current_level >= 0


def in_dispatch_mode() -> bool:
    """Inside a ``TorchDispatchMode``, which sees every operation and may compute no values."""
    return _len_torch_dispatch_stack() != 0


def in_jit_trace() -> bool:
    """Inside ``torch.jit.trace``: a branch on a value would be recorded as if always taken."""
    return _get_tracing_state() is not None


def in_autocast() -> bool:
    """Inside autocast, on any device: operations may change their dtypes."""
    return _is_any_autocast_enabled()


def is_ordinary(x: Any) -> bool:
    """Whether ``x`` is a tensor that holds values, not one that distributes or wraps others."""
    return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)


def has_memory(x: Tensor) -> bool:
    """Whether ``x`` has an address: it is no fake, meta, wrapped or traced tensor."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and not x.is_meta
        and not is_functorch_wrapped_tensor(x)
    )


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for plain tensors outside of ``torch.func``.

    It leaves out what ``Function.apply`` does beforehand, which takes longer than a short norm: to
    look for a ``setup_context``, for transforms, and for tensors that outlived theirs.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def with_versions(function: Callable[..., _T], *args: Any) -> _T:
    """``function(*args)`` without gradients, its new tensors counting how often they are changed.

    Those of inference mode do not, and nothing would show that one was changed in place.
    """
    if not torch.is_inference_mode_enabled():
        return function(*args)
    with _InferenceMode(False):
        _set_grad_enabled(False)  # the mode gives back what it found
        return function(*args)


def is_plain_call() -> bool:
    """Whether a module is called for values and first derivatives, and no hooks see all calls."""
    return (
        _get_tracing_state() is None
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not _has_any_global_hook()
    )
