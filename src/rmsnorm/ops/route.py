"""Decides, in one place, what computes a call of :func:`rms_norm` and of its relatives.

* plain tensors in plain eager code: the direct call of :mod:`rmsnorm.ops.direct`, which the
  modules and patched norms try first too;
* lists and floats: :mod:`rmsnorm.reference`, without torch;
* NumPy arrays: wrapped, not copied, and computed as tensors;
* tensors under a transform (see :mod:`rmsnorm.ops.transforms`), or that need a gradient where there
  is no kernel for it: :mod:`rmsnorm.ops.composite`;
* tensors that need a gradient: an ``autograd.Function``, in the file of the operation;
* everything else: the operation in ``torch.ops.rmsnorm``, whose kernel the device chooses.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from rmsnorm.spec import NormSpec, as_spec

if TYPE_CHECKING:
    import numpy as np
    import torch
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
    if _direct is not None and bias is None and normalized_shape is None and not _in_dynamo():
        if out is not None:
            y = _direct(x, weight, eps, spec, 0, out)
        else:
            y = _direct(x, weight, eps, spec, 0)
            if y is True:
                ndim = 1 if weight is None else weight.ndim or 1
                return _imported.rms_norm.forward_plain(x, weight, eps, as_spec(spec), ndim)
        if y is not None and y is not True:
            return y
    resolved = as_spec(spec)
    if resolved.gate is not None:
        raise ValueError(
            f"spec {spec!r} has a gate, but rms_norm takes no gate; use a spec without one"
        )
    if isinstance(x, (list, tuple, int, float)):
        return _lists(x, weight, eps, resolved, normalized_shape, bias, out)
    operation = operations().rms_norm
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


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum, in one pass over memory::

        new_residual = residual + alpha * x
        y = rms_norm(new_residual, weight, eps)

    as a pre-norm Transformer block does between its sublayers (Zhang & Sennrich 2019,
    https://arxiv.org/abs/1910.07467, for the norm). The sum is rounded to its dtype before it is
    normalised: by default both results have the bits of the two operations done separately.

    Args:
        x: (..., d), or (..., *normalized_shape): the branch, a floating-point tensor of any rank
            and strides.
        residual: of x's shape, of any floating dtype.
        weight: (d,) or (*normalized_shape), of any floating dtype, or ``None``. Its dimensions are
            the ones that are normalised over; without it, the last one.
        eps: the constant beside the mean square; ``None`` takes the spec's.
        spec: the convention, a :class:`~rmsnorm.NormSpec` or the name of one in
            :data:`rmsnorm.specs`. Where it rounds to x's dtype, that is the dtype of ``x``, while
            the sum is accumulated as its own dtype asks for.
        alpha: the factor of x.
        residual_dtype: the dtype of the new residual; by default the one that x and residual
            promote to. ``torch.float32`` keeps the stream in float32 beside half branches.
        inplace: write y into x and the new residual into residual, for inference.

    Returns:
        y and the new residual, contiguous and of x's shape; in place, x and residual themselves.

    Raises:
        ValueError: shapes that do not fit (x and residual are not broadcast), a negative or
            infinite eps, an unknown spec or one with a gate.
        TypeError: a dtype that is not float32, float64, bfloat16 or float16; in place, a result
            whose dtype is not that of the tensor it goes to.
        RuntimeError: tensors on different devices; in place, an argument that requires a gradient,
            or x and residual that overlap or are expanded.

    Example:
        >>> import torch
        >>> y, h = add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), eps=0.0)
        >>> y, h
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    resolved = as_spec(spec)
    if resolved.gate is not None:
        raise ValueError(
            f"spec {spec!r} has a gate, but add_rms_norm takes no gate; use a spec without one"
        )
    ndim = 1 if weight is None else getattr(weight, "ndim", 1) or 1
    results: tuple[Tensor, Tensor] = operations().add_rms_norm.forward(
        x, residual, weight, eps, resolved, ndim, alpha, residual_dtype, inplace
    )
    return results


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "mamba2",
    group_size: int | None = None,
) -> Tensor:
    """RMSNorm of every row of ``x``, multiplied by an activated ``gate`` before or after::

        y = norm(x * act(gate)) * weight        gate_order="before"
        y = norm(x) * weight * act(gate)        gate_order="after"

    Before, with SiLU and over groups: Mamba2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060,
    section 7.1), Zamba2, Nemotron-H (https://arxiv.org/abs/2504.03624): the spec ``"mamba2"``;
    Falcon-H1 (https://arxiv.org/abs/2507.22448), which rounds once: ``"falcon_h1"``. After, with
    SiLU: Qwen3-Next and other gated delta nets (Yang et al. 2024,
    https://arxiv.org/abs/2412.06464): ``"qwen3_next"``; with the sigmoid: Kimi Linear
    (https://arxiv.org/abs/2510.26692): ``"kimi_linear"``.

    Args:
        x: (..., d), a floating-point tensor of any rank and strides.
        gate: (..., d), of x's shape and any floating dtype; the activation is computed in float32
            (float64 where the spec keeps float64).
        weight: (d,), of any floating dtype, or ``None``.
        eps: the constant beside the mean square; ``None`` takes the spec's.
        spec: the convention, a :class:`~rmsnorm.NormSpec` with a gate or the name of one in
            :data:`rmsnorm.specs`.
        group_size: take the mean square over parts of this many elements, instead of over the
            spec's ``groups`` parts.

    Returns:
        A contiguous tensor of x's shape; its dtype is the one that the spec names.

    Raises:
        ValueError: shapes that do not fit, a group_size that does not divide d, a negative or
            infinite eps, an unknown spec or one without a gate.
        TypeError: a dtype that is not float32, float64, bfloat16 or float16, or something that is
            not a tensor.
        RuntimeError: tensors on different devices.

    Example:
        >>> import torch
        >>> x, gate = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.ones(4)
        >>> gated_rms_norm(x, gate, eps=0.0, spec="qwen3_next")
        tensor([0.3269, 0.3269, 0.9808, 0.9808])
        >>> gated_rms_norm(x, gate, eps=0.0, spec="mamba2", group_size=2)
        tensor([1., 1., 1., 1.])
    """
    resolved = as_spec(spec)
    operation = operations().gated_rms_norm
    operation.check_has_gate(resolved)
    if group_size is not None:
        operation.check_is_tensor("x", x)
        resolved = operation.with_group_size(resolved, group_size, tuple(x.shape))
    y: Tensor = operation.forward(x, gate, weight, eps, resolved)
    return y


_imported: Any = None
_direct: Any = None  # see rmsnorm.ops.direct
_in_dynamo: Any = None


def operations() -> Any:
    """The package of the operations, which need torch, imported at the first tensor."""
    # No functools.cache: torch.compile warns that it looks through one.
    global _imported, _direct, _in_dynamo
    if _imported is None:
        from rmsnorm import ops
        from rmsnorm.ops import add_rms_norm, direct, gated_rms_norm, rms_norm  # noqa: F401

        if "torch.distributed.tensor" in sys.modules:
            from rmsnorm.ops import sharding

            sharding.register()
        _imported = ops
        if direct.entry is not None:
            from torch.compiler import is_dynamo_compiling

            # In this order: another thread that sees the last one uses the other.
            _in_dynamo = is_dynamo_compiling
            _direct = direct.entry.rms_norm
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
