"""The operation ``rmsnorm::rms_norm``, its backward, and the checks on their arguments.

No autograd is registered for the operations, so that inference pays nothing for it. A direct call
that needs a gradient is recorded by a node in C++ (kernels/cpu/autograd_node.cpp), any other takes
an ``autograd.Function`` over ``rms_norm_fwd`` and ``rms_norm_bwd``, where there are kernels for
them; any other derivative comes from :mod:`rmsnorm.ops.composite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rmsnorm.ops import composite, extension
from rmsnorm.ops.composite import compute_dtype, output_dtype
from rmsnorm.ops.direct import entry
from rmsnorm.ops.library import bumps_version, distinct, first_of, or_nothing, to_front
from rmsnorm.ops.library import library as _library
from rmsnorm.ops.transforms import (
    is_distributed,
    needs_composite,
    needs_gradient,
    plain_apply,
    refuse_forward_mode,
    was_forward_mode_refused,
)
from rmsnorm.spec import NormSpec, check_eps

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_ARGUMENTS = (
    "Tensor x, Tensor? weight=None, Tensor? bias=None, float? eps=None, str spec='', int ndim=1"
)
for _schema in (
    f"rms_norm({_ARGUMENTS}) -> Tensor",
    f"rms_norm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)",
    f"rms_norm_fwd({_ARGUMENTS}) -> (Tensor y, Tensor rstd)",
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? dresidual, "
    "float? eps, str spec, int ndim, bool need_dx, bool need_dweight, bool need_dbias) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    "rms_norm_gradients(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? dresidual, "
    "float? eps, str spec, int ndim, bool need_dx, bool need_dweight) "
    "-> (Tensor dx, Tensor dweight)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("rmsnorm::rms_norm", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> Tensor:
    _check_tensors(x, weight, bias, ndim)
    decoded = decode(spec)
    dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, decoded)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::rms_norm.out", lib=_library
)
def _fake_out(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    *,
    out: Tensor,
) -> Tensor:
    decoded = decode(spec)
    check(x, weight, bias, eps, decoded, ndim)
    check_out(out, x, weight, decoded)
    return out


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::rms_norm_fwd", lib=_library
)
def _fake_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    return _fake(x, weight, bias, eps, spec, ndim), empty_rstd(x, decode(spec), ndim)


def empty_rstd(x: Tensor, spec: NormSpec, ndim: int) -> Tensor:
    """(*x.shape[:-ndim], groups), in the dtype that accumulates."""
    shape = (*x.shape[: x.dim() - ndim], spec.groups)
    return torch.empty(shape, dtype=compute_dtype(x.dtype, spec), device=x.device)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::rms_norm_bwd", lib=_library
)
def _fake_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    eps: float | None,
    spec: str,
    ndim: int,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_backward(dy, x, weight, rstd, dresidual, decode(spec), ndim)

    def empty(wanted: bool, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device) if wanted else x.new_empty(0)

    normalized = x.shape[x.dim() - ndim :]
    return (
        empty(need_dx, x.shape, x.dtype),
        empty(
            need_dweight and weight is not None,
            normalized,
            x.dtype if weight is None else weight.dtype,
        ),
        empty(need_dbias, normalized, compute_dtype(x.dtype, decode(spec))),
    )


def _composite(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> Tensor:
    return _composite_fwd(x, weight, bias, eps, spec, ndim)[0]


def _composite_out(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    *,
    out: Tensor,
) -> Tensor:
    check_out(out, x, weight, decode(spec))
    return out.copy_(_composite(x, weight, bias, eps, spec, ndim))


def _composite_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    refuse_forward_mode("rms_norm")
    decoded = decode(spec)
    check(x, weight, bias, eps, decoded, ndim)
    return composite.rms_norm_with_rstd(x, weight, bias, eps, decoded, ndim, x.dtype)


def _composite_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    eps: float | None,
    spec: str,
    ndim: int,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_forward_mode("rms_norm")
    decoded = decode(spec)
    check_backward(dy, x, weight, rstd, dresidual, decoded, ndim)
    needs = (need_dx, need_dweight, need_dbias)
    dx, dweight, dbias = composite.rms_norm_backward(
        dy, x, weight, eps, decoded, ndim, dresidual, needs
    )
    return or_nothing(dx, x), or_nothing(dweight, x), or_nothing(dbias, x)


# Every device for which no kernel is registered below; where the kernels were not built, the CPU.
for _name, _function in (
    ("rms_norm", _composite),
    ("rms_norm.out", _composite_out),
    ("rms_norm_fwd", _composite_fwd),
    ("rms_norm_bwd", _composite_bwd),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")

bumps_version("rms_norm.out")

has_kernels = extension.load()

op = torch.ops.rmsnorm.rms_norm.default
op_out = torch.ops.rmsnorm.rms_norm.out
op_fwd = torch.ops.rmsnorm.rms_norm_fwd.default
op_bwd = torch.ops.rmsnorm.rms_norm_bwd.default
op_gradients = torch.ops.rmsnorm.rms_norm_gradients.default


# What a call is given besides tensors, as one argument: autograd looks at each of them.
Settings = tuple[float | None, NormSpec, int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _RMSNorm(torch.autograd.Function):
    """Saves x, the weight and rstd; xhat is computed again, unrounded."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
    ) -> Tensor:
        eps, spec, ndim = settings
        y: Tensor
        found = None
        if entry is not None and bias is None and not is_dynamo_compiling():
            found = entry.forward(x, None, weight, eps, spec, ndim)
        if found is not None:
            y, _, rstd = found
        else:
            y, rstd = op_fwd(x, weight, bias, eps, spec.encode(), ndim)
        ctx.save_for_backward(x, weight, rstd)
        ctx.settings = settings
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dx, dweight, dbias = gradients(dy, x, weight, rstd, None, ctx.settings, needs)
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        return dx, dweight, dbias, None


_apply: Callable[..., Any] = _RMSNorm.apply
_apply_plain = plain_apply(_RMSNorm)


def kernels_differentiate(x: Tensor) -> bool:
    """Whether there are kernels for a gradient of a call on ``x``.

    An exported program holds no ``autograd.Function``: it would lose the gradient. Distributed
    tensors always take it, since plain operations on them would communicate at every step.
    """
    if torch.compiler.is_exporting():
        return False
    if has_kernels and x.is_cpu:
        return True
    return not torch.compiler.is_compiling() and is_distributed(x)


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    settings: Settings,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """dx, dweight and dbias of a norm, each ``None`` unless it is needed.

    They come from the kernel, or, where they must have a derivative in turn, from plain torch
    operations.

    Args:
        dy: (..., *normalized_shape), of any strides.
        x, weight: as the forward was given them.
        rstd: (..., groups), what the forward returned.
        dresidual: of x's shape, added to dx before that is rounded; or ``None``.
        settings: eps, the spec and ndim, as the forward was given them.
        needs: for dx, dweight and dbias.
    """
    eps, spec, ndim = settings
    need_dx, need_dweight, need_dbias = needs
    if entry is not None and not need_dbias and not is_dynamo_compiling():
        pair = entry.backward(
            dy, x, weight, rstd, dresidual, eps, spec, ndim, need_dx, need_dweight
        )
        if pair is not None:
            return pair[0], pair[1], None
    tensors = (dy, x, weight, rstd, dresidual)
    found = kernel_gradients(op_bwd, tensors, (eps, spec.encode(), ndim), needs)
    if found is not None:
        return found
    return composite.rms_norm_backward(dy, x, weight, eps, spec, ndim, dresidual, needs)


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    eps: float | None,
    spec: str,
    ndim: int,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """What a node in C++ (autograd_node.cpp) asks for where more than the kernel's numbers is due.

    An operation, since what calls for it is found by PyTorch's dispatcher: another derivative,
    ``vmap``, a mode, a wrapped tensor.
    """
    settings = eps, decode(spec), ndim
    needs = need_dx, need_dweight, False
    dx, dweight, _ = gradients(dy, x, weight, rstd, dresidual, settings, needs)
    return or_nothing(dx, x), or_nothing(dweight, x)


# Autograd and every mode see the operations in it, not this one.
_library.impl("rms_norm_gradients", _gradients, "CompositeImplicitAutograd")


def kernel_gradients(
    operation: Callable[..., tuple[Tensor, Tensor, Tensor]],
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    needs: tuple[bool, bool, bool],
) -> Gradients | None:
    """What a backward operation returns, each ``None`` unless it is needed.

    Returns:
        ``None`` where the operation cannot serve: the gradients must have a derivative in turn, or
        :func:`~rmsnorm.ops.transforms.needs_composite`.
    """
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # create_graph=True
    if again or needs_composite(*tensors):
        return None
    try:
        one, two, three = operation(*tensors, *settings, *needs)
    except RuntimeError as error:
        if was_forward_mode_refused(error):
            return None
        raise
    return one if needs[0] else None, two if needs[1] else None, three if needs[2] else None


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> tuple[Tensor, int]:
    return _vmapped(op, info.batch_size, in_dims, (x, weight, bias), eps, spec, ndim)[0], 0


def _vmap_fwd(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    return _vmapped(op_fwd, info.batch_size, in_dims, (x, weight, bias), eps, spec, ndim), (0, 0)


def _vmapped(
    operation: Any,
    size: int,
    in_dims: tuple[int | None, ...],
    tensors: tuple[Tensor, Tensor | None, Tensor | None],
    eps: float | None,
    spec: str,
    ndim: int,
) -> tuple[Tensor, ...]:
    """The results of a forward operation, with the dimension that ``vmap`` runs over in front."""
    x_dim, weight_dim, bias_dim = (*in_dims, None, None)[:3]
    x, weight, bias = tensors
    rows = to_front(x, x_dim, size)
    if weight_dim is None and bias_dim is None:
        result = operation(rows, weight, bias, eps, spec, ndim)
        return result if isinstance(result, tuple) else (result,)
    # No kernel has a weight for each row.
    decoded = decode(spec)
    check(rows[0], first_of(weight, weight_dim), first_of(bias, bias_dim), eps, decoded, ndim)
    if weight is not None and weight_dim is not None:
        weight = weight.movedim(weight_dim, 0)
    if bias is not None and bias_dim is not None:
        bias = bias.movedim(bias_dim, 0)
    return composite.rms_norm_with_rstd(rows, weight, bias, eps, decoded, ndim, x.dtype)


def _vmap_bwd(
    info: Any,
    in_dims: tuple[int | None, ...],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    eps: float | None,
    spec: str,
    ndim: int,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
    *,
    composed: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    need_dweight = need_dweight and weight is not None
    needs = (need_dx, need_dweight, need_dbias)
    out_dims = tuple(0 if needed else None for needed in needs)
    size = info.batch_size
    dy, x, rstd = (to_front(t, in_dims[i], size) for i, t in ((0, dy), (1, x), (3, rstd)))
    if dresidual is not None:
        dresidual = to_front(dresidual, in_dims[4], size)
    if in_dims[2] is None and not (composed or need_dweight or need_dbias):
        return op_bwd(dy, x, weight, rstd, dresidual, eps, spec, ndim, *needs), out_dims
    if weight is not None:
        weight = to_front(weight, in_dims[2], size)
    found = composite.rms_norm_backward(
        dy, x, weight, eps, decode(spec), ndim, dresidual, needs, lead=1
    )
    return tuple(or_nothing(gradient, x) for gradient in found), out_dims


def _vmap_gradients(
    info: Any,
    in_dims: tuple[int | None, ...],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    eps: float | None,
    spec: str,
    ndim: int,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    # Not torch.vmap over _gradients: PyTorch does not enter its transforms again inside of a rule.
    tensors = dy, x, weight, rstd, dresidual
    needs = need_dx, need_dweight, False
    composed = torch.is_grad_enabled()  # create_graph=True
    found, dims = _vmap_bwd(info, in_dims, *tensors, eps, spec, ndim, *needs, composed=composed)
    return found[:2], dims[:2]


torch.library.register_vmap(op, _vmap, lib=_library)
torch.library.register_vmap(op_fwd, _vmap_fwd, lib=_library)
torch.library.register_vmap(op_bwd, _vmap_bwd, lib=_library)
torch.library.register_vmap(op_gradients, _vmap_gradients, lib=_library)


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
) -> None:
    """Refuse what the operation cannot do.

    Raises:
        TypeError: a dtype that is not float32, float64, bfloat16 or float16.
        ValueError: shapes that do not fit each other or the spec, or a bad eps.
        RuntimeError: tensors on different devices.
    """
    _check_tensors(x, weight, bias, ndim)
    if eps is not None and check_eps(eps) > torch.finfo(compute_dtype(x.dtype, spec)).max:
        raise ValueError(f"eps is {eps!r}, which float32, in which {x.dtype} is computed, has not")
    spec.width(math.prod(x.shape[x.dim() - ndim :]))


def decode(spec: str) -> NormSpec:
    """The spec that an operation without a gate was given.

    Raises:
        ValueError: it is none, or has a gate.
    """
    decoded = NormSpec.decode(spec)
    if decoded.gate is not None:
        raise ValueError(f"{decoded} has a gate, which this operation does not take")
    return decoded


def _check_tensors(x: Tensor, weight: Tensor | None, bias: Tensor | None, ndim: int) -> None:
    check_floating("x", x)
    if not 1 <= ndim <= x.dim():
        raise ValueError(
            f"x has shape {tuple(x.shape)}; expected at least {max(ndim, 1)} dimension(s) to "
            "normalise over"
        )
    normalized = tuple(x.shape[x.dim() - ndim :])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check_floating(name, parameter)
        if tuple(parameter.shape) != normalized:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}; expected {normalized}, the last "
                f"dimension(s) of x, whose shape is {tuple(x.shape)}"
            )
        if parameter.device != x.device:
            raise RuntimeError(f"{name} is on {parameter.device} but x is on {x.device}")


def check_rstd(rstd: Tensor, x: Tensor, spec: NormSpec, ndim: int) -> None:
    """Refuse an rstd that is not the forward's.

    Raises:
        TypeError: its dtype is not the one that accumulates.
        ValueError: it has not one number for each row and group.
        RuntimeError: it is on another device.
    """
    dtype = compute_dtype(x.dtype, spec)
    if rstd.dtype != dtype:
        raise TypeError(f"rstd is {rstd.dtype}; expected {dtype}")
    shape = (*x.shape[: x.dim() - ndim], spec.groups)
    if rstd.numel() != math.prod(shape):
        raise ValueError(f"rstd has shape {tuple(rstd.shape)}; expected {shape}")
    if rstd.device != x.device:
        raise RuntimeError(f"rstd is on {rstd.device} but x is on {x.device}")


def check_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> None:
    _check_tensors(x, weight, None, ndim)
    check_rstd(rstd, x, spec, ndim)
    check_like_x("dy", dy, x)
    if dresidual is not None:
        check_like_x("dresidual", dresidual, x)


def check_like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    """Refuse what does not lie beside every element of ``x``.

    Raises:
        TypeError: its dtype is not float32, float64, bfloat16 or float16.
        ValueError: its shape is not x's.
        RuntimeError: it is on another device.
    """
    check_floating(name, tensor)
    if tensor.shape != x.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected x's shape, {tuple(x.shape)}"
        )
    if tensor.device != x.device:
        raise RuntimeError(f"{name} is on {tensor.device} but x is on {x.device}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Refuse dtypes that have no RMSNorm.

    Raises:
        TypeError: the dtype is not float32, float64, bfloat16 or float16.
    """
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} is {tensor.dtype}; expected float32, float64, bfloat16 or float16")


def check_out(out: Tensor, x: Tensor, weight: Tensor | None, spec: NormSpec) -> None:
    """Refuse an ``out`` that does not fit the result.

    Raises:
        TypeError: its dtype is not the result's.
        ValueError: its shape is not x's.
        RuntimeError: it is on another device.
    """
    dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, spec)
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype}; the result of this call is {dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected x's shape, {tuple(x.shape)}")
    if out.device != x.device:
        raise RuntimeError(f"out is on {out.device} but x is on {x.device}")


def count_dimensions(x: Tensor, normalized_shape: tuple[int, ...]) -> int:
    """How many dimensions of ``x`` a ``normalized_shape`` covers.

    Raises:
        ValueError: it is empty, or not the end of x's shape.
    """
    check_is_tensor("x", x)
    ndim = len(normalized_shape)
    if ndim == 0 or tuple(x.shape[-ndim:]) != normalized_shape:
        raise ValueError(
            f"normalized_shape is {normalized_shape}; expected the last dimension(s) of x, whose "
            f"shape is {tuple(x.shape)}"
        )
    return ndim


def check_is_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor.

    Raises:
        TypeError: ``value`` is something else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor")


torch.fx.wrap("forward")  # torch.fx.symbolic_trace records the call, as for a torch function


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`rmsnorm.rms_norm` for tensors, with every argument resolved.

    Args:
        x: (..., *normalized_shape).
        weight: (*normalized_shape), or ``None``.
        bias: (*normalized_shape), or ``None``.
        eps: ``None`` takes the spec's.
        spec: the convention.
        ndim: how many dimensions are normalised.
        out: where to write the result; not differentiable.

    Raises: as :func:`rmsnorm.rms_norm`.
    """
    result: Tensor
    if entry is not None and bias is None and out is None and not is_dynamo_compiling():
        found = entry.rms_norm(x, weight, eps, spec, ndim)
        if found is True:
            return forward_plain(x, weight, eps, spec, ndim)
        if found is not None:
            result = found
            return result
    try:
        composed = needs_composite(x, weight, bias)
        differentiated = needs_gradient(x, weight, bias)
    except AttributeError:  # what has no requires_grad is no tensor
        _check_are_tensors(x, weight, bias)
        raise
    if out is not None:
        check_is_tensor("out", out)
        if composed or differentiated or (torch.is_grad_enabled() and out.requires_grad):
            raise RuntimeError(
                "rms_norm(out=...) has no derivative, but an argument requires one: call it under "
                "torch.no_grad(), or without out"
            )
    if composed or (differentiated and not kernels_differentiate(x)):
        _check_are_tensors(x, weight, bias)
        check(x, weight, bias, eps, spec, ndim)
        return composite.rms_norm(x, weight, bias, eps, spec, ndim)
    try:
        if differentiated:
            eps = None if eps is None else check_eps(eps)
            weight, bias = distinct(weight, x), distinct(bias, x, weight)
            result = _apply(x, weight, bias, (eps, spec, ndim))
        elif out is None:
            result = op(x, weight, bias, eps, spec.encode(), ndim)
        elif torch.compiler.is_compiling():
            # AOTAutograd cannot trace a custom operation that returns one of its arguments.
            check_out(out, x, weight, spec)
            result = out.copy_(op(x, weight, bias, eps, spec.encode(), ndim))
        else:
            if out.is_inference() and not torch.is_inference_mode_enabled():
                raise RuntimeError("out is an inference tensor: only inference mode may change it")
            result = op_out(x, weight, bias, eps, spec.encode(), ndim, out=out)
        return result
    except _REFUSALS as error:
        result = _refused(error, x, weight, bias, eps, spec, ndim, out)
        return result if out is None else out.copy_(result)


def forward_plain(
    x: Tensor, weight: Tensor | None, eps: float | None, spec: NormSpec, ndim: int
) -> Tensor:
    """:func:`forward` of a call that ``entry`` declined for the gradient alone."""
    try:
        y: Tensor = _apply_plain(x, weight, None, (eps, spec, ndim))
        return y
    except _REFUSALS as error:
        return _refused(error, x, weight, None, eps, spec, ndim)


_REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError)


def _refused(
    error: Exception,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    out: Tensor | None = None,
) -> Tensor:
    """Complain about a call that an operation refused, or compute it where the call is right.

    The checks cost as much as a small call, so they run only once something is wrong: they raise
    the same complaint with the type of error that Python users expect.
    """
    _check_are_tensors(x, weight, bias)
    check(x, weight, bias, eps, spec, ndim)
    if out is not None:
        check_out(out, x, weight, spec)
    if not was_forward_mode_refused(error):
        raise error
    return composite.rms_norm(x, weight, bias, eps, spec, ndim)


def _check_are_tensors(x: object, weight: object, bias: object) -> None:
    check_is_tensor("x", x)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check_is_tensor(name, value)
