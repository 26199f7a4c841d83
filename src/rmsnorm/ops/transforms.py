"""What surrounds a call besides its values: derivatives, transforms, modes, wrapped tensors.

PyTorch has no public way to ask for most of it. The private names that this package relies on are
here, one function each, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (Tensor, torch.nn.Parameter)


def needs_composite(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Whether something will ask for more than the values of the result.

    That is a derivative (backward or forward mode), a ``torch.func`` transform, or a tensor
    subclass with its own idea of an operation. A custom operation would give forward mode zeros
    without an error, and vmap a loop.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> needs_composite(x, None), needs_composite(x.detach(), None)
        (True, False)
    """
    if in_jit_trace():
        return True  # the trace is checked, and used, with and without gradients
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return True
    if torch.compiler.is_compiling():
        return _traced_in_func_transform() or in_forward_mode()  # subclasses are unwrapped by now
    if in_func_transform() or in_forward_mode():
        return True
    if (
        type(x) in PLAIN
        and (weight is None or type(weight) in PLAIN)
        and (bias is None or type(bias) in PLAIN)
    ):
        return False
    # Fake tensors stand for plain ones; any other subclass is asked operation by operation.
    from torch._subclasses.fake_tensor import FakeTensor

    plain = (*PLAIN, FakeTensor)
    return not all(t is None or type(t) in plain for t in (x, weight, bias))


def in_func_transform() -> bool:
    """Inside ``torch.func``'s vmap, grad or jvp: a tensor may stand for many, or carry more."""
    return peek_interpreter_stack() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_in_func_transform() -> bool:
    """The same while ``torch.compile`` traces, which cannot look into the private function."""
    return in_func_transform()


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
