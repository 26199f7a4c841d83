"""Gated RMSNorm as plain torch expressions: any device, any transform, any order of derivative.

A gate z, through an activation a (SiLU, or the sigmoid), multiplies the row on one side of its
norm::

    before:  y = norm(x * a(z)) * w       Mamba2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060,
                                          section 7.1), where the norm is taken over groups
    after:   y = norm(x) * w * a(z)       gated delta nets (Yang et al. 2024,
                                          https://arxiv.org/abs/2412.06464, section 3.4)

The norm itself, with its constants, groups and roundings, is that of
:mod:`rmsnorm.ops.composite`. The activation is computed in float32 (float64 where the row is kept
in float64) from the gate as it is given.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsnorm.ops import composite, transforms
from rmsnorm.spec import NormSpec, Output


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float | None, spec: NormSpec
) -> Tensor:
    """Normalise ``x`` over its last dimension and multiply it by the activated ``gate``.

    Args:
        x: (..., d), floating point, any strides.
        gate: (..., d), x's shape, floating point of any width.
        weight: (d,), floating point of any width, or ``None``.
        eps: replaces ``spec.eps`` unless it is ``None``.
        spec: the convention, with a gate.

    Returns:
        A contiguous tensor of x's shape and of the dtype ``spec.output`` names.

    Nothing is validated: :func:`rmsnorm.ops.gated_rms_norm.forward` has done that.

    Example:
        >>> from rmsnorm.spec import specs
        >>> x, gate = torch.tensor([3.0, 4.0]), torch.zeros(2)
        >>> [round(v, 4) for v in gated_rms_norm(x, gate, None, 0.0, specs.kimi_linear).tolist()]
        [0.4243, 0.5657]
    """
    return gated_rms_norm_with_rstd(x, gate, weight, eps, spec)[0]


def gated_rms_norm_with_rstd(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    normalise_rows: composite.Normalise | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`gated_rms_norm`, and what each row (times its gate, where that comes before) was
    multiplied by.

    Args:
        weight: may have x's first dimensions too, where each of those has its own.
        normalise_rows: replaces :func:`rmsnorm.ops.composite.normalise`.

    Returns:
        y, and rstd: (..., groups), in the dtype that accumulates.
    """
    compute = composite.compute_dtype(x.dtype, spec)
    eps = composite.resolve_eps(eps, compute, spec)
    if spec.gate_order == "before":
        return _gate_then_norm(x, gate, weight, eps, spec, normalise_rows)
    return _norm_then_gate(x, gate, weight, eps, spec, normalise_rows)


def _gate_then_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    spec: NormSpec,
    normalise_rows: composite.Normalise | None,
) -> tuple[Tensor, Tensor]:
    compute = composite.compute_dtype(x.dtype, spec)
    values, gates = x.to(compute), gate.to(compute)
    wide = composite.widest(x.device)
    kept = replace(spec, accumulate="input")
    if normalise_rows is not None:
        # Part of a row cannot tell whether the rest is in range.
        product = values.to(wide) * _activation(gates.to(wide), spec)
        y, rstd = composite.rms_norm_with_rstd(
            product, weight, None, eps, kept, 1, x.dtype, normalise_rows
        )
        return y, rstd.to(compute)
    product = values * _activation(gates, spec)
    lost = None
    if wide != compute:
        lost = _out_of_range(product, eps, spec)
        if composite.is_plain_eager(product) and not lost.any():
            lost = None
    if lost is None:
        return composite.rms_norm_with_rstd(product, weight, None, eps, spec, 1, x.dtype)
    # As in the norm itself: each branch sees ones in the other's rows.
    product = torch.where(lost, 1.0, product)
    gates = torch.where(lost, gates, 1.0).to(wide)
    widened = torch.where(lost, values, 1.0).to(wide) * _activation(gates, spec)
    y, rstd = composite.rms_norm_with_rstd(product, weight, None, eps, spec, 1, x.dtype)
    if not torch.compiler.is_compiling():  # a constant there, and rounded only where it is tiny
        eps = float(torch.tensor(eps, dtype=compute))
    wide_y, wide_rstd = composite.rms_norm_with_rstd(widened, weight, None, eps, kept, 1, x.dtype)
    return torch.where(lost, wide_y, y), torch.where(lost, wide_rstd.to(compute), rstd)


def _out_of_range(product: Tensor, eps: float, spec: NormSpec) -> Tensor:
    """Which rows of x * act(gate) (..., d) must be formed in a wider type: (..., 1).

    Those in which a product of two finite numbers is infinite, and those with a group in which all
    are so small, and eps with them, that the norm scales up what underflow has left of them.
    """
    _, parts, d = composite.shape_of_rows(product, spec, 1)
    rows = product.detach().abs().reshape(*product.shape[:-1], *parts)
    if d == 0:
        return torch.zeros_like(product[..., :1], dtype=torch.bool)
    largest = rows[..., : spec.width(d)].amax(dim=-1, keepdim=True)
    lost = torch.isinf(largest)
    if (eps if spec.eps_in == "mean_square" else eps * eps) < 2.0**-100:
        lost = lost | (largest < 2.0**-50)
    return lost if spec.groups == 1 else lost.any(dim=-2)


def _norm_then_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    spec: NormSpec,
    normalise_rows: composite.Normalise | None,
) -> tuple[Tensor, Tensor]:
    compute = composite.compute_dtype(x.dtype, spec)
    weight_dtype = None if weight is None else weight.dtype
    # What the gate multiplies: a rounded product where the spec rounds before the weight, and
    # elsewhere the unrounded one, in the dtype in which xhat and the weight meet.
    output: Output = "promote" if spec.rounding == "before_weight" else "input"
    if spec.rounding == "before_weight":
        meet = x.dtype if weight_dtype is None else torch.promote_types(x.dtype, weight_dtype)
        rounded = x.dtype
    else:
        meet = composite.multiply_dtype(x.dtype, weight_dtype, compute, spec)
        if spec.rounding == "weight_dtype" and weight_dtype in composite.HALF_TYPES:
            meet = weight_dtype
        rounded = meet
    inner = spec if spec.output == output else replace(spec, output=output)
    normed, rstd = composite.rms_norm_with_rstd(
        x, weight, None, eps, inner, 1, rounded, normalise_rows
    )
    multiply = torch.promote_types(meet, compute)
    y = normed.to(multiply) * _activation(gate.to(compute), spec).to(multiply)
    return y.to(composite.output_dtype(x.dtype, weight_dtype, spec)).contiguous(), rstd


def gated_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    needs: tuple[bool, bool, bool],
    lead: int = 0,
    differentiate_rows: composite.Differentiate | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of :func:`gated_rms_norm`, as expressions that can be differentiated again.

    With J the Jacobian of the norm (:mod:`rmsnorm.reference` derives its transpose) and w the
    weight and offset; roundings pass the gradient straight through::

        before:  dt = J^T (dy w)              dx = dt a(z)     dz = dt x a'(z)
        after:   dx = J^T (dy w a(z))                          dz = dy xhat w a'(z)

    dweight is the sum of ``dy xhat`` over the rows, times a(z) where that comes after. float32 rows
    are computed in float64 where the device has it.

    Args:
        dy: the gradient of the result, of x's shape, any strides.
        x, gate, weight, eps, spec: as the forward was given them.
        needs: whether dx, dgate and dweight are wanted.
        lead: how many of the first dimensions have a dweight of their own; the weight then has
            those dimensions too.
        differentiate_rows: replaces :func:`rmsnorm.ops.composite.differentiate`.

    Returns:
        dx, dgate and dweight, contiguous, in the shapes and dtypes of x, gate and weight; ``None``
        for what is not wanted.

    Example:
        >>> from rmsnorm.spec import specs
        >>> dy, x, gate = torch.ones(2), torch.tensor([3.0, 4.0]), torch.zeros(2)
        >>> _, dgate, _ = gated_rms_norm_backward(
        ...     dy, x, gate, None, 0.0, specs.qwen3_next, (False, True, False)
        ... )
        >>> [round(v, 6) for v in dgate.tolist()]  # half of xhat
        [0.424264, 0.565685]
    """
    compute = composite.compute_dtype(x.dtype, spec)
    wide = composite.widest(x.device)
    batch, parts, d = composite.shape_of_rows(x, spec, 1)

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.to(wide).contiguous().reshape(*batch, *parts)

    dy_row, values, gates = as_rows(dy), as_rows(x.to(compute)), as_rows(gate.to(compute))
    act = _activation(gates, spec)
    before = spec.gate_order == "before"
    d_normed = dy_row if before else dy_row * act
    scale: Tensor | float = 1.0
    if weight is not None:
        offset = weight.to(compute) + spec.offset if spec.offset else weight
        scale = composite.beside_rows(offset.to(wide), 1, batch, parts)
    xhat, d_row = (differentiate_rows or composite.differentiate)(
        values * act if before else values,
        d_normed * scale if needs[0] or (needs[1] and before) else None,
        spec.width(d),
        eps,
        compute,
        spec,
    )

    dx = dgate = dweight = None
    if needs[0] and d_row is not None:
        dx = _finished(d_row * act if before else d_row, x)
    if needs[1]:
        direct = dy_row * xhat * scale if d_row is None or not before else d_row * values
        dgate = _finished(direct * _slope(gates, spec), gate)
    if needs[2] and weight is not None:
        products = d_normed * xhat
        if not torch.compiler.is_compiling() and transforms.is_distributed(products):
            total = products.sum(tuple(range(len(batch)))).reshape(d)
        else:
            rows = products.reshape(*batch[:lead], math.prod(batch[lead:]), d)
            total = rows.sum(dim=lead)
        dweight = total.to(weight.dtype)
    return dx, dgate, dweight


def _finished(gradient: Tensor, of: Tensor) -> Tensor:
    return gradient.to(of.dtype).reshape(of.shape).contiguous()


def _activation(gate: Tensor, spec: NormSpec) -> Tensor:
    # In float32, exp(-gate) is infinite from gate = -89 on, where SiLU is not yet 0, and the whole
    # is off by up to 2 units. A GPU, on which float64 may be 64 times slower, keeps that.
    wide = gate.to(torch.float64) if gate.is_cpu else gate
    return (F.silu(wide) if spec.gate == "silu" else torch.sigmoid(wide)).to(gate.dtype)


def _slope(gate: Tensor, spec: NormSpec) -> Tensor:
    """The derivative of :func:`_activation`."""
    sigmoid, rest = torch.sigmoid(gate), torch.sigmoid(-gate)
    return sigmoid * (1.0 + gate * rest if spec.gate == "silu" else rest)
