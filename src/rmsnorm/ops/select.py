"""Whether a call on tensors may take the forward-only operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
_interpreter = torch._C._functorch.peek_interpreter_stack


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
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return True
    if torch.compiler.is_compiling():
        return False  # the tracer has unwrapped subclasses and transforms by itself
    if _interpreter() is not None or forward_ad._current_level >= 0:
        return True
    if (
        type(x) in _PLAIN
        and (weight is None or type(weight) in _PLAIN)
        and (bias is None or type(bias) in _PLAIN)
    ):
        return False
    # Fake tensors stand for plain ones; any other subclass is asked operation by operation.
    from torch._subclasses.fake_tensor import FakeTensor

    plain = (*_PLAIN, FakeTensor)
    return not all(t is None or type(t) in plain for t in (x, weight, bias))
