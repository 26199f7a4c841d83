"""The operation ``rmsnorm::add_rms_norm``: a residual addition and the norm of the sum.

``h = residual + alpha * x`` is the new residual and ``y`` its norm, in one pass over memory. The
sum is rounded to its dtype before it is normalised, so both results are those of two separate
operations, bit for bit. The backward is that of the norm (``rms_norm_bwd``), which adds h's own
incoming gradient after the norm's Jacobian: h passes it on unchanged.

As for :mod:`rmsnorm.ops.rms_norm`, no autograd is registered for the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rmsnorm.ops import composite
from rmsnorm.ops import rms_norm as norm
from rmsnorm.ops.composite import output_dtype
from rmsnorm.ops.direct import entry
from rmsnorm.ops.library import distinct, first_of, to_front
from rmsnorm.ops.library import library as _library
from rmsnorm.ops.transforms import (
    has_memory,
    needs_composite,
    needs_gradient,
    plain_apply,
    refuse_forward_mode,
    was_forward_mode_refused,
)
from rmsnorm.spec import NormSpec, check_eps

_PARAMETERS = "Tensor? weight=None, float? eps=None, str spec='', int ndim=1, float alpha=1.0"
_ARGUMENTS = f"Tensor x, Tensor residual, {_PARAMETERS}, ScalarType? residual_dtype=None"
for _schema in (
    f"add_rms_norm({_ARGUMENTS}) -> (Tensor y, Tensor new_residual)",
    f"add_rms_norm_fwd({_ARGUMENTS}) -> (Tensor y, Tensor new_residual, Tensor rstd)",
    f"add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, {_PARAMETERS}) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::add_rms_norm", lib=_library
)
def _fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    y, h, _ = _fake_fwd(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)
    return y, h


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::add_rms_norm_fwd", lib=_library
)
def _fake_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    decoded = norm.decode(spec)
    check(x, residual, weight, eps, decoded, ndim, alpha, residual_dtype)
    y_dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, decoded)
    h_dtype = residual_dtype or torch.promote_types(x.dtype, residual.dtype)
    y, h = (torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (y_dtype, h_dtype))
    return y, h, norm.empty_rstd(h, decoded, ndim)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::add_rms_norm_", lib=_library
)
def _fake_inplace(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
) -> None:
    decoded = norm.decode(spec)
    check(x, residual, weight, eps, decoded, ndim, alpha, residual.dtype)
    check_inplace(x, residual, weight, decoded, residual.dtype)


def _composite(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    y, h, _ = _composite_fwd(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)
    return y, h


def _composite_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("add_rms_norm")
    decoded = norm.decode(spec)
    check(x, residual, weight, eps, decoded, ndim, alpha, residual_dtype)
    return composite.add_rms_norm(x, residual, weight, eps, decoded, ndim, alpha, residual_dtype)


def _composite_inplace(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
) -> None:
    check_inplace(x, residual, weight, norm.decode(spec), residual.dtype)
    _check_may_change(x, residual)
    y, h = _composite(x, residual, weight, eps, spec, ndim, alpha, residual.dtype)
    x.copy_(y)
    residual.copy_(h)


# Every device for which no kernel is registered; where the kernels were not built, the CPU.
for _name, _function in (
    ("add_rms_norm", _composite),
    ("add_rms_norm_fwd", _composite_fwd),
    ("add_rms_norm_", _composite_inplace),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")

op = torch.ops.rmsnorm.add_rms_norm.default
op_fwd = torch.ops.rmsnorm.add_rms_norm_fwd.default
op_inplace = torch.ops.rmsnorm.add_rms_norm_.default


class _AddRMSNorm(torch.autograd.Function):
    """Saves the new residual, which is a result anyway, the weight and rstd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        settings: norm.Settings,
        alpha: float,
        residual_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        eps, spec, ndim = settings
        y: Tensor
        h: Tensor
        found = None
        simple = alpha == 1.0 and residual_dtype is None
        if simple and entry is not None and not is_dynamo_compiling():
            found = entry.forward(x, residual, weight, eps, spec, ndim)
        if found is None:
            options = (eps, spec.encode(), ndim, alpha, residual_dtype)
            found = op_fwd(x, residual, weight, *options)
        y, h, rstd = found
        ctx.save_for_backward(h, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.alpha = settings, alpha
        ctx.dtypes = x.dtype, residual.dtype
        return y, h

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        dh, dweight = dresidual, None
        if dy is not None:
            h, weight, rstd = ctx.saved_tensors
            needs = (need_x or need_residual, need_weight, False)
            dh, dweight, _ = norm.gradients(dy, h, weight, rstd, dresidual, ctx.settings, needs)
        dx = None
        if dh is not None:
            x_dtype, residual_dtype = ctx.dtypes
            if need_x:
                dx = dh if ctx.alpha == 1.0 else dh * ctx.alpha
                dx = dx if dx.dtype == x_dtype else dx.to(x_dtype)
            if not need_residual:
                dh = None
            elif dh.dtype != residual_dtype:
                dh = dh.to(residual_dtype)
        return dx, dh, dweight, None, None, None


_apply: Callable[..., Any] = _AddRMSNorm.apply
_apply_plain = plain_apply(_AddRMSNorm)


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    arguments = (eps, spec, ndim, alpha, residual_dtype)
    results = _vmapped(op, info.batch_size, in_dims, (x, residual, weight), *arguments)
    return results[:2], (0, 0)


def _vmap_fwd(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    arguments = (eps, spec, ndim, alpha, residual_dtype)
    results = _vmapped(op_fwd, info.batch_size, in_dims, (x, residual, weight), *arguments)
    return results, (0, 0, 0)


def _vmap_inplace(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
) -> tuple[None, None]:
    x_dim, residual_dim, *rest = in_dims
    if x_dim is None or residual_dim is None:
        raise RuntimeError(
            "add_rms_norm(inplace=True) under vmap writes to x and residual, so vmap must run over "
            "both of them"
        )
    if not rest or rest[0] is None:
        x, residual = x.movedim(x_dim, 0), residual.movedim(residual_dim, 0)
        op_inplace(x, residual, weight, eps, spec, ndim, alpha)
        return None, None
    arguments = (eps, spec, ndim, alpha, residual.dtype)
    y, h, *_ = _vmapped(op, info.batch_size, in_dims, (x, residual, weight), *arguments)
    x.movedim(x_dim, 0).copy_(y)
    residual.movedim(residual_dim, 0).copy_(h)
    return None, None


def _vmapped(
    operation: Any,
    size: int,
    in_dims: tuple[int | None, ...],
    tensors: tuple[Tensor, Tensor, Tensor | None],
    eps: float | None,
    spec: str,
    ndim: int,
    alpha: float,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """The results of an operation, with the dimension that ``vmap`` runs over in front."""
    x_dim, residual_dim, weight_dim = (*in_dims, None)[:3]
    x, residual, weight = tensors
    x, residual = to_front(x, x_dim, size), to_front(residual, residual_dim, size)
    if weight is None or weight_dim is None:
        results: tuple[Tensor, ...] = operation(
            x, residual, weight, eps, spec, ndim, alpha, residual_dtype
        )
        return results
    # No kernel has a weight for each row.
    once = first_of(weight, weight_dim)
    decoded = norm.decode(spec)
    check(x[0], residual[0], once, eps, decoded, ndim, alpha, residual_dtype)
    weight = weight.movedim(weight_dim, 0)
    return composite.add_rms_norm(x, residual, weight, eps, decoded, ndim, alpha, residual_dtype)


torch.library.register_vmap(op, _vmap, lib=_library)
torch.library.register_vmap(op_fwd, _vmap_fwd, lib=_library)
torch.library.register_vmap(op_inplace, _vmap_inplace, lib=_library)


def check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    alpha: float,
    residual_dtype: torch.dtype | None,
) -> None:
    """Refuse what the operation cannot do.

    Raises:
        TypeError: a dtype that is not float32, float64, bfloat16 or float16, or an alpha that is
            not a number.
        ValueError: shapes that do not fit each other or the spec, or a bad eps.
        RuntimeError: tensors on different devices.
    """
    norm.check_floating("x", x)
    norm.check_floating("residual", residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}; expected the same "
            "shape, since neither is broadcast"
        )
    if x.device != residual.device:
        raise RuntimeError(f"residual is on {residual.device} but x is on {x.device}")
    norm.check(x, weight, None, eps, spec, ndim)
    if residual_dtype is not None and residual_dtype not in norm.FLOATING:
        raise TypeError(
            f"residual_dtype is {residual_dtype!r}; expected None, torch.float32, torch.float64, "
            "torch.bfloat16 or torch.float16"
        )
    check_alpha(alpha)


def check_alpha(alpha: object) -> float:
    """``alpha`` as a float.

    Raises:
        TypeError: it is not a real number.

    Example:
        >>> check_alpha(2)
        2.0
    """
    if isinstance(alpha, (bool, str, Tensor)) or not hasattr(alpha, "__float__"):
        raise TypeError(
            f"alpha is {alpha!r}; expected a number. To scale by a tensor, multiply x by it"
        )
    return float(alpha)


def check_inplace(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    spec: NormSpec,
    residual_dtype: torch.dtype | None,
) -> None:
    """Refuse an x and a residual that cannot hold the results.

    Raises:
        TypeError: a result has another dtype than the tensor that it is to be written to.
        RuntimeError: several elements share one place in memory.
    """
    y_dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, spec)
    if x.dtype != y_dtype:
        raise TypeError(f"inplace: x is {x.dtype}, but the result is {y_dtype}")
    h_dtype = residual_dtype or torch.promote_types(x.dtype, residual.dtype)
    if residual.dtype != h_dtype:
        raise TypeError(
            f"inplace: residual is {residual.dtype}, but the new residual is {h_dtype}; to round "
            f"it, say residual_dtype={residual.dtype}"
        )
    for name, tensor in (("x", x), ("residual", residual)):
        if any(
            size > 1 and stride == 0
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise RuntimeError(
                f"inplace: {name} is expanded: several of its elements share one place in memory"
            )
    if share_memory(x, residual):
        raise RuntimeError("inplace: x and residual overlap in memory, but each is overwritten")


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of ``a`` is one of ``b``, two strided tensors of one shape.

    Where their strides differ too, only whether the stretches of memory overlap that they lie in.

    Example:
        >>> both = torch.zeros(4, 6)
        >>> share_memory(both[:, :3], both[:, 3:]), share_memory(both[:, :3], both[:, 2:5])
        (False, True)
    """
    if a.numel() == 0 or not (has_memory(a) and has_memory(b)):
        return False  # where there is no memory to look at, whoever provides it will look
    distance, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if rest or a.dtype != b.dtype or a.stride() != b.stride():
        distance = b.data_ptr() - a.data_ptr()
        return -_extent(b) < distance < _extent(a)
    # Where the strides are nested, the steps from an element of a to one of b are found from the
    # longest stride down: what the shorter ones can add up to is less than one step of it.
    dims = sorted(
        (stride, size)
        for size, stride in zip(a.shape, a.stride(), strict=True)
        if size > 1 and stride
    )

    def reachable(distance: int, depth: int) -> bool:
        if depth < 0:
            return distance == 0
        stride, size = dims[depth]
        below = sum((n - 1) * s for s, n in dims[:depth])
        low, high = -((below - distance) // stride), (distance + below) // stride
        return any(
            reachable(distance - step * stride, depth - 1)
            for step in range(max(low, 1 - size), min(high, size - 1) + 1)
        )

    return reachable(distance, len(dims) - 1)


def _extent(tensor: Tensor) -> int:
    """The bytes from the first element to the end of the last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


torch.fx.wrap("forward")  # torch.fx.symbolic_trace records the call, as for a torch function


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rmsnorm.add_rms_norm`, with every argument resolved.

    Args:
        x: (..., *normalized_shape).
        residual: of x's shape.
        weight: (*normalized_shape), or ``None``.
        eps: ``None`` takes the spec's.
        spec: the convention.
        ndim: how many dimensions are normalised.
        alpha: the factor of x.
        residual_dtype: the dtype of the new residual; ``None`` for the promoted one.
        inplace: write y into x and the new residual into residual.

    Raises: as :func:`rmsnorm.add_rms_norm`.
    """
    results: tuple[Tensor, Tensor]
    simple = type(alpha) is float and alpha == 1.0 and residual_dtype is None
    found = None
    if simple and entry is not None and not is_dynamo_compiling():
        if inplace:
            if entry.add_rms_norm_(x, residual, weight, eps, spec, ndim):
                return x, residual
        else:
            found = entry.add_rms_norm(x, residual, weight, eps, spec, ndim)
            if found is not None and found is not True:
                results = found
                return results
    try:
        composed = found is None and needs_composite(x, residual, weight)
        differentiated = found is True or needs_gradient(x, residual, weight)
    except AttributeError:  # what has no requires_grad is no tensor
        _check_are_tensors(x, residual, weight)
        raise
    try:
        if type(alpha) is not float:
            alpha = check_alpha(alpha)
        if inplace:
            _in_place(
                x,
                residual,
                weight,
                eps,
                spec,
                ndim,
                alpha,
                residual_dtype,
                composed,
                differentiated,
            )
            results = x, residual
        elif found is True:
            results = _apply_plain(x, residual, weight, (eps, spec, ndim), alpha, None)
        elif composed or (differentiated and not norm.kernels_differentiate(x)):
            results = _composed(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)
        elif differentiated:
            eps = None if eps is None else check_eps(eps)
            residual, weight = distinct(residual, x), distinct(weight, x, residual)
            results = _apply(x, residual, weight, (eps, spec, ndim), alpha, residual_dtype)
        else:
            results = op(x, residual, weight, eps, spec.encode(), ndim, alpha, residual_dtype)
        return results
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # As in rms_norm: the checks cost as much as a small call.
        _check_are_tensors(x, residual, weight)
        check(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)
        if inplace:
            check_inplace(x, residual, weight, spec, residual_dtype)
        if inplace or not was_forward_mode_refused(error):
            raise
        return _composed(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)


def _composed(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    alpha: float,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    check(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)
    y, h, _ = composite.add_rms_norm(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)
    return y, h


def _in_place(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    alpha: float,
    residual_dtype: torch.dtype | None,
    composed: bool,
    differentiated: bool,
) -> None:
    if differentiated:
        raise RuntimeError(
            "add_rms_norm(inplace=True) overwrites what a gradient would need, but an argument "
            "requires one: call it under torch.no_grad(), or without inplace"
        )
    if composed or x.dtype != residual.dtype or residual_dtype is not None:
        check_inplace(x, residual, weight, spec, residual_dtype)
    # No kernel writes through a pending minus, which a compiled graph does not have.
    negated = not torch.compiler.is_compiling() and (x.is_neg() or residual.is_neg())
    if composed or negated:
        y, h = _composed(x, residual, weight, eps, spec, ndim, alpha, residual.dtype)
        x.copy_(y)
        residual.copy_(h)
        return
    tracked: tuple[Tensor, ...] = ()
    if not torch.compiler.is_compiling():  # which sees for itself what an operation changes
        tracked = tuple(tensor for tensor in (x, residual) if not tensor.is_inference())
        _check_may_change(x, residual)
    op_inplace(x, residual, weight, eps, spec.encode(), ndim, alpha)
    if tracked:
        # Autograd must notice that what it may have saved has changed. The kernels count the
        # versions of what they are given, which of a distributed tensor is the local part.
        torch.autograd.graph.increment_version(tracked)


def _check_may_change(x: Tensor, residual: Tensor) -> None:
    is_inference = x.is_inference() or residual.is_inference()
    if is_inference and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "x or residual is an inference tensor: only inference mode may change it"
        )


def _check_are_tensors(x: object, residual: object, weight: object) -> None:
    norm.check_is_tensor("x", x)
    norm.check_is_tensor("residual", residual)
    if weight is not None:
        norm.check_is_tensor("weight", weight)
