"""Decides, in one place, what computes a call of :func:`rms_norm`.

* lists and floats: :mod:`rmsnorm.reference`, without torch;
* NumPy arrays: wrapped, not copied, and computed as tensors;
* tensors that need a derivative or carry a transform (see :mod:`rmsnorm.ops.transforms`):
  :mod:`rmsnorm.ops.composite`;
* everything else: the operation ``torch.ops.rmsnorm.rms_norm``, whose kernel the device chooses.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from rmsnorm.spec import NormSpec, as_spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    normalized_shape: int | Sequence[int] | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any] | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    normalized_shape: int | Sequence[int] | None = None,
    bias: np.ndarray[Any, Any] | None = None,
    out: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]: ...
@overload
def rms_norm(
    x: Sequence[Any],
    weight: Sequence[float] | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    normalized_shape: int | Sequence[int] | None = None,
    bias: Sequence[float] | None = None,
    out: None = None,
) -> list[Any]: ...


def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    normalized_shape: int | Sequence[int] | None = None,
    bias: Any = None,
    out: Any = None,
) -> Any:
    """RMSNorm of every row of ``x`` (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)::

        y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        x: (..., d), or (..., *normalized_shape): a floating-point tensor of any rank and strides, a
            NumPy array, or (nested) lists of floats, for which torch need not be installed.
        weight: (d,) or (*normalized_shape), of any floating dtype, or ``None``.
        eps: the constant beside the mean square; ``None`` takes the spec's.
        spec: the convention: a :class:`~rmsnorm.NormSpec` or the name of one in
            :data:`rmsnorm.specs`. The default is that of ``torch.nn.functional.rms_norm``.
        normalized_shape: the dimensions to normalise over; by default those of ``weight``, or the
            last one.
        bias: like ``weight``, added to the result.
        out: where to write the result, of its shape and dtype; may be ``x`` itself.

    Returns:
        A contiguous tensor (array, list) of x's shape; its dtype is x's unless the spec says
        otherwise.

    Raises:
        ValueError: shapes that do not fit, a negative or infinite eps, an unknown spec or one with
            a gate.
        TypeError: a dtype that is not float32, float64, bfloat16 or float16, or mixed containers.
        RuntimeError: tensors on different devices, or ``out`` beside a tensor that requires a
            gradient.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2))
        tensor([0.8485, 1.1314])
        >>> rms_norm([3.0, 4.0], [1.0, 1.0])  # doctest: +ELLIPSIS
        [0.848528..., 1.131370...]
    """
    resolved = as_spec(spec)
    if resolved.gate is not None:
        raise ValueError(
            f"spec {spec!r} has a gate, but rms_norm takes no gate; use a spec without one"
        )
    if isinstance(x, (list, tuple, int, float)):
        return _lists(x, weight, eps, resolved, normalized_shape, bias, out)
    operation = _operation()
    if not isinstance(x, operation.Tensor):
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(x, numpy.ndarray):
            return _arrays(x, weight, eps, resolved, normalized_shape, bias, out)
        raise TypeError(f"x is a {type(x).__name__}; expected a tensor, an array or a list")
    ndim = 1
    if normalized_shape is not None:
        ndim = operation.count_dimensions(x, as_shape(normalized_shape))
    elif weight is not None:
        ndim = getattr(weight, "ndim", 1) or 1
    return operation.forward(x, weight, bias, eps, resolved, ndim, out)


_imported: Any = None


def _operation() -> Any:
    """The part that needs torch, imported at the first tensor."""
    # No functools.cache: torch.compile warns that it looks through one.
    global _imported
    if _imported is None:
        from rmsnorm.ops import rms_norm as operation

        _imported = operation
    return _imported


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """``normalized_shape`` as a tuple.

    Raises:
        TypeError: it is neither an int nor a sequence of ints.

    Example:
        >>> as_shape(8), as_shape([4, 8])
        ((8,), (4, 8))
    """
    try:
        if isinstance(normalized_shape, Sequence):
            return tuple(operator.index(size) for size in normalized_shape)
        return (operator.index(normalized_shape),)
    except TypeError:
        raise TypeError(
            f"normalized_shape is {normalized_shape!r}; expected an int or a sequence of ints"
        ) from None


def _lists(
    x: Any,
    weight: Any,
    eps: float | None,
    spec: NormSpec,
    normalized_shape: int | Sequence[int] | None,
    bias: Any,
    out: Any,
) -> Any:
    from rmsnorm import reference

    if out is not None:
        raise TypeError("out= is for tensors and arrays; a list is returned anew")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and not isinstance(value, (list, tuple)):
            raise TypeError(f"x is a list but {name} is a {type(value).__name__}")
    if normalized_shape is not None:
        shape, found = as_shape(normalized_shape), reference.shape_of(x)
        if len(shape) != 1:
            raise ValueError(
                f"normalized_shape is {normalized_shape!r}; lists are normalised over the last "
                "dimension only"
            )
        if found and found[-1:] != shape:
            raise ValueError(
                f"normalized_shape is {normalized_shape!r}, but the rows of x have {found[-1]} "
                "elements"
            )
    return reference.rms_norm(x, weight, eps, spec=spec, bias=bias)


def _arrays(
    x: Any,
    weight: Any,
    eps: float | None,
    spec: NormSpec,
    normalized_shape: int | Sequence[int] | None,
    bias: Any,
    out: Any,
) -> Any:
    import numpy as np
    import torch

    def wrap(name: str, array: Any) -> Any:
        if array is None:
            return None
        if not isinstance(array, np.ndarray):
            raise TypeError(f"x is a NumPy array but {name} is a {type(array).__name__}")
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array; fill it first, since no element is left out"
            )
        if array.dtype not in (np.float16, np.float32, np.float64):
            raise TypeError(f"{name} is {array.dtype}; expected float16, float32 or float64")
        if name == "out" and not array.flags.writeable:
            raise ValueError("out is a read-only array")
        if name == "out" and any(stride < 0 for stride in array.strides):
            raise ValueError("out is an array with a negative stride, which torch cannot express")
        # torch knows neither read-only memory nor negative strides: those two are copied.
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            return torch.from_numpy(array.copy())
        return torch.from_numpy(array)

    tensors = [wrap("x", x), wrap("weight", weight), wrap("bias", bias)]
    wrapped_out = wrap("out", out)
    with torch.no_grad():
        y = rms_norm(
            tensors[0],
            tensors[1],
            eps,
            spec=spec,
            normalized_shape=normalized_shape,
            bias=tensors[2],
            out=wrapped_out,
        )
    return y.numpy() if out is None else out
