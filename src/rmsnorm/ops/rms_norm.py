"""The operation ``rmsnorm::rms_norm``: schema, fake, kernels, and the checks on its arguments.

The operation is forward only: no autograd is registered, so that inference pays nothing for it. A
call that needs a derivative takes :mod:`rmsnorm.ops.composite` instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmsnorm.ops import composite, extension
from rmsnorm.ops.composite import output_dtype
from rmsnorm.ops.transforms import needs_composite
from rmsnorm.spec import NormSpec, check_eps

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_library = torch.library.Library("rmsnorm", "DEF")
_library.define(
    "rms_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float? eps=None, str spec='', "
    "int ndim=1) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "rms_norm.out(Tensor x, Tensor? weight=None, Tensor? bias=None, float? eps=None, str spec='', "
    "int ndim=1, *, Tensor(a!) out) -> Tensor(a!)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
    dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, NormSpec.decode(spec))
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
    check_out(out, x, weight, NormSpec.decode(spec))
    return out


def _composite(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> Tensor:
    decoded = NormSpec.decode(spec)
    check(x, weight, bias, eps, decoded, ndim)
    return composite.rms_norm(x, weight, bias, eps, decoded, ndim)


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
    check_out(out, x, weight, NormSpec.decode(spec))
    return out.copy_(_composite(x, weight, bias, eps, spec, ndim))


# Every device for which no kernel is registered below; where the kernels were not built, the CPU.
_library.impl("rms_norm", _composite, "CompositeExplicitAutograd")
_library.impl("rms_norm.out", _composite_out, "CompositeExplicitAutograd")

extension.load()

op = torch.ops.rmsnorm.rms_norm.default
op_out = torch.ops.rmsnorm.rms_norm.out


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
    if eps is not None:
        check_eps(eps)
    spec.width(math.prod(x.shape[x.dim() - ndim :]))


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
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {tuple(x.shape)}, x's shape")
    if out.device != x.device:
        raise RuntimeError(f"out is on {out.device} but x is on {x.device}")


def count_dimensions(x: Tensor, normalized_shape: tuple[int, ...]) -> int:
    """How many dimensions of ``x`` a ``normalized_shape`` covers.

    Raises:
        ValueError: it is empty, or not the end of x's shape.
    """
    _check_is_tensor("x", x)
    ndim = len(normalized_shape)
    if ndim == 0 or tuple(x.shape[-ndim:]) != normalized_shape:
        raise ValueError(
            f"normalized_shape is {normalized_shape}; expected the last dimension(s) of x, whose "
            f"shape is {tuple(x.shape)}"
        )
    return ndim


def _check_is_tensor(name: str, value: object) -> None:
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
    try:
        composed = needs_composite(x, weight, bias)
    except AttributeError:  # what has no requires_grad is no tensor
        _check_are_tensors(x, weight, bias)
        raise
    if out is not None:
        _check_is_tensor("out", out)
        if composed or (torch.is_grad_enabled() and out.requires_grad):
            raise RuntimeError(
                "rms_norm(out=...) has no derivative, but an argument requires one: call it under "
                "torch.no_grad(), or without out"
            )
    if composed:
        check(x, weight, bias, eps, spec, ndim)
        return composite.rms_norm(x, weight, bias, eps, spec, ndim)
    try:
        result: Tensor
        if out is None:
            result = op(x, weight, bias, eps, spec.encode(), ndim)
        elif torch.compiler.is_compiling():
            # AOTAutograd cannot trace a custom operation that returns one of its arguments.
            check_out(out, x, weight, spec)
            result = out.copy_(op(x, weight, bias, eps, spec.encode(), ndim))
        else:
            if out.is_inference() and not torch.is_inference_mode_enabled():
                raise RuntimeError("out is an inference tensor: only inference mode may change it")
            result = op_out(x, weight, bias, eps, spec.encode(), ndim, out=out)
            if not out.is_inference():
                # Autograd must notice that what it may have saved has changed.
                torch.autograd.graph.increment_version(out)
        return result
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # The checks cost as much as a small call, so they run only once something is wrong: they
        # raise the same complaint with the type of error that Python users expect.
        _check_are_tensors(x, weight, bias)
        check(x, weight, bias, eps, spec, ndim)
        if out is not None:
            check_out(out, x, weight, spec)
        raise


def _check_are_tensors(x: object, weight: object, bias: object) -> None:
    _check_is_tensor("x", x)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _check_is_tensor(name, value)
