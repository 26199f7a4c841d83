"""RMSNorm as plain torch expressions: any device, any transform, any order of derivative.

The formula is Zhang & Sennrich 2019 (https://arxiv.org/abs/1910.07467), section 3, equation 4; the
places where it rounds are those of :class:`rmsnorm.spec.NormSpec`. On the CPU the result has the
bits of the same expressions in eager PyTorch, because it is those expressions, with two additions:

* A row whose sum of squares leaves the range of its dtype although its elements are finite is
  computed again with room to spare. Eager PyTorch gives 0, inf or noise for such a row.
* A single row is summed in the same order as a row of a batch. Eager PyTorch may cut a single row
  of more than 2**15 elements into one part for each thread.

Derivatives come from autograd, so every intermediate is arranged to have a finite derivative where
the formula has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsnorm.ops import transforms
from rmsnorm.spec import NormSpec


@dataclass(frozen=True)
class _Range:
    """What one compute dtype needs to know about its own range.

    Args:
        eps: its machine epsilon, which is what ``eps=None`` means.
        tiny: a sum of squares below this has lost bits to underflow, or may have.
        far: the factor from 1 beyond which the derivative of 1/sqrt, a cube, would leave the range.
        scale: a power of two that brings 1/sqrt of such a value back near 1.
        half_scale: a power of two; applied twice, it brings the squares of any row that left the
            range back into it.
    """

    eps: float
    tiny: float
    far: float
    scale: float
    half_scale: float


_RANGES = {
    torch.float32: _Range(
        eps=2.0**-23, tiny=2.0**-100, far=2.0**60, scale=2.0**50, half_scale=2.0**45
    ),
    torch.float64: _Range(
        eps=2.0**-52, tiny=2.0**-960, far=2.0**500, scale=2.0**400, half_scale=2.0**300
    ),
}

_HALF_TYPES = (torch.float16, torch.bfloat16)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    """Normalise ``x`` over its last ``ndim`` dimensions, which count as one row of d elements.

    Args:
        x: (..., *normalized_shape), floating point, any strides.
        weight: (*normalized_shape), floating point of any width, or ``None``.
        bias: (*normalized_shape), or ``None``.
        eps: replaces ``spec.eps`` unless it is ``None``.
        spec: the convention; its gate is not looked at here.
        ndim: how many dimensions are normalised, at least 1.

    Returns:
        A contiguous tensor of x's shape and of the dtype ``spec.output`` names.

    Nothing is validated: :func:`rmsnorm.ops.rms_norm.rms_norm` has done that.

    Example:
        >>> from rmsnorm.spec import specs
        >>> x = torch.tensor([3.0, 4.0])
        >>> [round(v, 4) for v in rms_norm(x, torch.ones(2), None, 0.0, specs.torch, 1).tolist()]
        [0.8485, 1.1314]
    """
    keep_float64 = x.dtype == torch.float64 and spec.accumulate == "input"
    compute = torch.float64 if keep_float64 else torch.float32
    if eps is None:
        eps = _RANGES[compute].eps if spec.eps is None else spec.eps

    batch = x.shape[: x.dim() - ndim]
    d = math.prod(x.shape[x.dim() - ndim :])
    parts = (d,) if spec.groups == 1 else (spec.groups, d // spec.groups)
    row = x.to(compute).contiguous().reshape(*batch, *parts)
    xhat = _normalise(row, spec.width(d), eps, spec).reshape(*batch, d)

    weight_dtype = None if weight is None else weight.dtype
    if spec.rounding == "before_weight":
        xhat = xhat.to(x.dtype)
    elif spec.rounding == "weight_dtype" and weight_dtype in _HALF_TYPES:
        xhat = xhat.to(weight_dtype)

    multiply = _multiply_dtype(x.dtype, weight_dtype, compute, spec)
    out_dtype = output_dtype(x.dtype, weight_dtype, spec)
    y = xhat
    if weight is not None:
        scale = weight.reshape(d)
        if spec.offset:
            scale = scale.to(compute) + spec.offset
        y = y.to(multiply) * scale.to(multiply)
    if bias is not None:
        if spec.rounding != "after_weight":
            y = y.to(out_dtype)
        y = y.to(multiply) + bias.reshape(d).to(multiply)
    return y.to(out_dtype).reshape(x.shape)


def _multiply_dtype(
    x: torch.dtype, weight: torch.dtype | None, compute: torch.dtype, spec: NormSpec
) -> torch.dtype:
    """The dtype in which xhat meets the weight: the wider of the two, and at least float32.

    A weight with an offset has already been brought to the compute dtype, and only
    ``"before_weight"`` brings xhat back to x's own.
    """
    wide = (
        compute == torch.float64
        or (spec.offset == 0.0 and weight == torch.float64)
        or (spec.rounding == "before_weight" and x == torch.float64)
    )
    return torch.float64 if wide else torch.float32


def output_dtype(x: torch.dtype, weight: torch.dtype | None, spec: NormSpec) -> torch.dtype:
    """The dtype of the result, as ``spec.output`` says.

    Example:
        >>> from rmsnorm.spec import specs
        >>> output_dtype(torch.bfloat16, torch.float32, specs.llama)
        torch.float32
    """
    if weight is None or spec.output == "input":
        return x
    return torch.promote_types(x, weight) if spec.output == "promote" else weight


def _normalise(row: Tensor, width: int, eps: float, spec: NormSpec) -> Tensor:
    """xhat of ``row`` (..., d / groups), in its own dtype."""
    if width == 0:
        return row.clone()
    total = _sum_of_squares(row[..., :width])
    limits = _RANGES[row.dtype]
    # eps**2, because there eps stands beside the root of the mean, not beside the mean.
    floor = eps if spec.eps_in == "mean_square" else eps * eps
    can_vanish = (floor if spec.reduce == "sum" else floor * width) < limits.tiny
    plain_eager = _is_plain_eager(row)
    if plain_eager and _all_in_range(total, limits.tiny if can_vanish else 0.0):
        return row * _rstd(total, width, eps, spec)

    # A row that holds an infinite element may come along: it is 0 and nan either way.
    redo = torch.isinf(total)
    if can_vanish:
        redo = redo | (total < limits.tiny)
    if plain_eager and not redo.any():
        return row * _rstd(total, width, eps, spec)
    # Each branch sees ones in the other's rows: torch.where stops a value that is not finite, but
    # its zero gradient times an infinite derivative would still be nan.
    usual = torch.where(redo, 1.0, row)
    extreme = torch.where(redo, row, 1.0)
    usual = usual * _rstd(_sum_of_squares(usual[..., :width]), width, eps, spec)
    return torch.where(redo, _normalise_extreme(extreme, width, eps, spec), usual)


def _normalise_extreme(row: Tensor, width: int, eps: float, spec: NormSpec) -> Tensor:
    """The same for rows whose squares leave the dtype's range: xhat, rounded once to that dtype."""
    e = torch.full((), eps, dtype=row.dtype, device=row.device)
    if row.dtype == torch.float32 and _has_float64(row.device):
        wide = row.to(torch.float64)
        rstd = _rstd(_sum_of_squares(wide[..., :width]), width, e.to(torch.float64), spec)
        return (wide * rstd).to(row.dtype)
    # Nothing wider is at hand: scale up what is small and down what is large, exactly. eps takes
    # the scale of what it stands beside. In steps, since the whole scale may be out of range.
    largest = row[..., :width].detach().abs().amax(dim=-1, keepdim=True)
    half_scale = _RANGES[row.dtype].half_scale
    half = torch.where(largest < 1.0, half_scale, torch.full_like(largest, 1.0 / half_scale))
    total = _sum_of_squares(row[..., :width] * half * half)
    e = e * half * half
    if spec.eps_in == "mean_square":
        e = e * half * half
    return row * half * _rstd(total, width, e, spec) * half


def _has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def _sum_of_squares(counted: Tensor) -> Tensor:
    """(..., n) -> (..., 1), in the order of a row within a batch."""
    squares = counted.pow(2)
    # 2**15 is the grain of PyTorch's CPU loops: above it a sum with one result is shared out.
    if _is_plain_eager(squares) and squares.shape[-1] == squares.numel() > 2**15:
        return squares.expand(2, *squares.shape).sum(dim=-1, keepdim=True)[0]
    return squares.sum(dim=-1, keepdim=True)


def _rstd(total: Tensor, width: int, eps: float | Tensor, spec: NormSpec) -> Tensor:
    """The factor of each row, from its sum of squares (..., 1)."""
    if spec.eps_in == "clamp":
        return math.sqrt(width) / _sqrt(total).clamp(min=eps)
    mean = total if spec.reduce == "sum" else total / width
    if spec.eps_in == "root":
        return 1.0 / (_sqrt(mean) + eps)
    shifted = mean + eps
    # d(v**-0.5) = -0.5 v**-1.5 leaves the range long before v**-0.5 does; near 1 it does not. The
    # scale is a power of four under the root, so the bits are those of rsqrt(v) itself.
    limits = _RANGES[total.dtype]
    value = shifted.detach()
    scale = torch.where(value < 1.0 / limits.far, limits.scale, torch.ones_like(value))
    scale = torch.where(value > limits.far, 1.0 / limits.scale, scale)
    return torch.rsqrt(shifted * (scale * scale)) * scale


def _sqrt(value: Tensor) -> Tensor:
    """The square root, with derivative 0 where ``value`` is 0: there eps alone makes the factor."""
    zero = value == 0.0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, value).sqrt())


def _all_in_range(total: Tensor, tiny: float) -> bool:
    """Whether no row needs a second look; nan asks for one."""
    if total.numel() == 0:
        return True
    low, high = torch.aminmax(total.detach())
    return float(low) >= tiny and float(high) < math.inf


def _is_plain_eager(x: Tensor) -> bool:
    """Whether the values of ``x`` can be looked at, here and now, without waiting for a device."""
    if torch.compiler.is_compiling() or transforms.in_jit_trace():
        return False
    return (
        x.device.type == "cpu"
        and type(x) in transforms.PLAIN
        and not transforms.in_func_transform()
        and not transforms.in_dispatch_mode()
    )
