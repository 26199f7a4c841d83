"""An oracle for the gated norm: the formula in extended precision, rounded where the spec rounds.

It shares no code with the package, and nothing with torch but the tensors that go in and come out.
``numpy.longdouble`` has 64 significant bits and 15 bits of exponent on x86, so products that leave
the range of float64 stay in its own; where it is no wider than float64, float64 rows lose about one
unit in the last place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import oracle
from rmsnorm.spec import NormSpec, as_spec

Wide = NDArray[np.longdouble]

_HALVES = (torch.float16, torch.bfloat16)


class Gradients(NamedTuple):
    """Unrounded, as float64."""

    dx: Tensor
    dgate: Tensor
    dweight: Tensor
    dx_size: Tensor
    """dx without its second term, which may nearly cancel it."""
    dgate_size: Tensor
    dweight_size: Tensor
    """The sum of the magnitudes that dweight is the sum of."""


def wide(x: Tensor) -> Wide:
    """The values of ``x``."""
    return oracle.to_array(x).astype(np.longdouble)


def round_to(values: Wide, dtype: torch.dtype) -> Wide:
    """``values`` as numbers of ``dtype``."""
    return oracle.round_to(values.astype(np.float64), dtype).astype(np.longdouble)


def activation(gate: Wide, name: str) -> tuple[Wide, Wide]:
    """silu or sigmoid of the gate, and its slope."""
    sigmoid = 1 / (1 + np.exp(-gate))
    # 1 - sigmoid, without the cancellation.
    rest = 1 / (1 + np.exp(gate))
    if name == "sigmoid":
        return sigmoid, sigmoid * rest
    return gate / (1 + np.exp(-gate)), sigmoid * (1 + gate * rest)


def _compute(x: Tensor, spec: NormSpec) -> torch.dtype:
    keep = x.dtype == torch.float64 and spec.accumulate == "input"
    return torch.float64 if keep else torch.float32


def _eps(eps: float | None, compute: torch.dtype, spec: NormSpec) -> np.longdouble:
    if eps is None:
        eps = spec.eps
    if eps is None:
        eps = 2.0**-52 if compute == torch.float64 else 2.0**-23
    return round_to(np.array(eps, np.longdouble), compute)[()]


class _Normed(NamedTuple):
    """Of rows (rows * groups, d / groups)."""

    xhat: Wide
    rstd: Wide
    """(rows * groups, 1)"""
    k: Wide
    """How much of what goes through the norm there is: see rmsnorm.reference. The same shape."""
    count: int
    """Elements under one norm."""


def _normalise(rows: Wide, eps: np.longdouble, spec: NormSpec) -> _Normed:
    count = spec.width(rows.shape[-1] * spec.groups)
    # The norm by way of the largest element, so that no square leaves the range.
    largest = np.abs(rows[:, :count]).max(axis=1, keepdims=True, initial=0)
    scale = np.where(np.isfinite(largest) & (largest > 0), largest, 1)
    norm = np.sqrt(np.square(rows[:, :count] / scale).sum(axis=1, keepdims=True)) * scale
    root = norm if spec.reduce == "sum" else norm / np.sqrt(np.longdouble(count))
    ones = np.ones_like(norm)
    if spec.eps_in == "mean_square":
        divisor, k = np.hypot(root, np.sqrt(eps)), ones
    elif spec.eps_in == "root":
        divisor = root + eps
        k = np.where(root > 0, divisor / np.where(root > 0, root, 1), 0)
    else:
        divisor = np.maximum(norm, eps) / np.sqrt(np.longdouble(count))
        k = np.where(norm >= eps, ones, 0)
    rstd = 1 / divisor
    return _Normed(rows * rstd, rstd, k, count)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "mamba2",
) -> Tensor:
    """What the spec says of ``x`` and ``gate`` (..., d), in the dtype that it says."""
    convention = as_spec(spec)
    assert convention.gate is not None
    with np.errstate(all="ignore"):
        compute = _compute(x, convention)
        act, _ = activation(round_to(wide(gate), compute), convention.gate)
        values = round_to(wide(x), compute)
        if convention.gate_order == "before":
            values = values * act
        d = x.shape[-1]
        rows = values.reshape(-1, d // convention.groups)
        normed = _normalise(rows, _eps(eps, compute, convention), convention)
        y = normed.xhat.reshape(values.shape)
        return _finish(y, act, x.dtype, weight, compute, convention)


def _finish(
    xhat: Wide,
    act: Wide,
    x_dtype: torch.dtype,
    weight: Tensor | None,
    compute: torch.dtype,
    spec: NormSpec,
) -> Tensor:
    w_dtype = None if weight is None else weight.dtype
    out = x_dtype
    if w_dtype is not None and spec.output == "promote":
        out = torch.promote_types(x_dtype, w_dtype)
    if w_dtype is not None and spec.output == "weight":
        out = w_dtype
    normed = compute
    if spec.rounding == "before_weight":
        normed = x_dtype
    elif spec.rounding == "weight_dtype" and w_dtype in _HALVES:
        assert w_dtype is not None
        normed = w_dtype
    y = xhat if normed == compute else round_to(xhat, normed)
    if weight is not None:
        w = wide(weight)
        if spec.offset:
            w = round_to(round_to(w, compute) + spec.offset, compute)
        y = y * w
    if spec.gate_order == "after":
        if spec.rounding != "after_weight":
            product = normed if w_dtype is None else torch.promote_types(normed, w_dtype)
            if product in _HALVES:
                y = round_to(y, product)
        y = y * act
    return oracle.to_tensor(y.astype(np.float64), out)


def gated_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "mamba2",
) -> Gradients:
    """The gradients, given that of the result, ``dy`` (..., d); roundings have slope 1."""
    convention = as_spec(spec)
    assert convention.gate is not None
    before = convention.gate_order == "before"
    with np.errstate(all="ignore"):
        compute = _compute(x, convention)
        values = round_to(wide(x), compute)
        act, slope = activation(round_to(wide(gate), compute), convention.gate)
        d = x.shape[-1]
        w = np.ones(d, np.longdouble)
        if weight is not None:
            w = wide(weight) + convention.offset
        rows = (values * act if before else values).reshape(-1, d // convention.groups)
        normed = _normalise(rows, _eps(eps, compute, convention), convention)
        xhat = normed.xhat.reshape(values.shape)
        dnormed = wide(dy) if before else wide(dy) * act  # gradient of xhat * w

        u = (dnormed * w).reshape(rows.shape)
        counted = np.arange(rows.shape[-1]) < normed.count
        inner = _through_the_norm(u, normed, _eps(eps, compute, convention), convention)
        d_rows = (normed.rstd * np.where(counted, inner, u)).reshape(values.shape)
        direct = (normed.rstd * u).reshape(values.shape)
        after = wide(dy) * xhat * w * slope

        terms = (dnormed * xhat).reshape(-1, d)
        arrays = (
            d_rows * act if before else d_rows,
            d_rows * values * slope if before else after,
            terms.sum(axis=0),
            direct * act if before else direct,
            direct * values * slope if before else after,
            np.abs(terms).sum(axis=0),
        )
    return Gradients(*(torch.from_numpy(a.astype(np.float64)) for a in arrays))


def _through_the_norm(u: Wide, normed: _Normed, eps: np.longdouble, spec: NormSpec) -> Wide:
    """``u - xhat * k * sum(u * xhat) / c^2`` with the cancellation taken out of short rows.

    With D = 1/rstd it is ``extra * u_i + k * sum_j xhat_j (u_i xhat_j - u_j xhat_i) / c^2``, in
    which a row of one element, or a u parallel to x, leaves the extra alone: eps/D^2 under the
    root, eps/D beside it, and under a clamp 1 below the floor and 0 above.
    """
    c2 = 1 if spec.reduce == "sum" else normed.count
    x = normed.xhat[:, : normed.count]
    if u.shape[1] > 64 or u.shape[1] > normed.count:
        along = (u * normed.xhat).sum(axis=1, keepdims=True)
        return np.asarray(u - normed.xhat * normed.k * along / c2)
    extra = {
        "mean_square": eps * normed.rstd**2,
        "root": eps * normed.rstd,
        "clamp": 1 - normed.k,
    }[spec.eps_in]
    # A row of zeros beside the root has no k.
    extra = np.where((normed.k == 0) & (spec.eps_in == "root"), 1, extra)
    out = np.empty_like(u)
    for r in range(u.shape[0]):
        row, counted = u[r], u[r, : normed.count]
        cross = np.multiply.outer(row, x[r]) - np.multiply.outer(normed.xhat[r], counted)
        out[r] = extra[r] * row + normed.k[r] * (cross * x[r]).sum(axis=1) / c2
    return out


def relative_error(given: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of ``exact``; 0 where both are nothing."""
    difference = float((given.double() - exact).norm())
    size = float(exact.norm())
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)


def ulp(dtype: torch.dtype) -> float:
    """The spacing of ``dtype`` at 1."""
    return float(torch.finfo(dtype).eps)


def draw(*shape: int, dtype: torch.dtype, seed: int, **kw: Any) -> Tensor:
    """Normal numbers."""
    return oracle.random(*shape, dtype=dtype, seed=seed, **kw)
