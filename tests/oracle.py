"""An oracle for RMSNorm: the exact row, rounded where the spec rounds and nowhere else.

It shares no code with the package. Rows that the package computes in float32 are computed here in
float64; rows that it computes in float64 are computed here in pairs of float64, with the sum of the
squares taken exactly and 1/sqrt in 60 decimal digits. What the spec rounds is rounded once, to
nearest even, straight from that: never to float32 on the way to a half type.

All of it works on whole arrays; only the exact sums and roots of float64 rows loop over the rows.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmsnorm.spec import NormSpec, as_spec

Array = NDArray[np.float64]

# Significant bits, the exponent of the smallest subnormal, and the largest finite value.
_FORMATS = {
    torch.bfloat16: (8, -133, (2.0 - 2.0**-7) * 2.0**127),
    torch.float16: (11, -24, 65504.0),
    torch.float32: (24, -149, (2.0 - 2.0**-23) * 2.0**127),
}
_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_DIGITS = Context(prec=60)


def round_to(values: Array, dtype: torch.dtype) -> Array:
    """``values`` rounded to nearest even in ``dtype``, as float64; beyond its range, infinite."""
    if dtype == torch.float64:
        return values
    bits, lowest, largest = _FORMATS[dtype]
    exponent = np.frexp(values)[1]
    quantum = np.maximum(exponent - bits, lowest)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(values, -quantum)), quantum)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)


def to_array(x: Tensor) -> Array:
    """The values of ``x`` as float64, which holds every dtype here exactly."""
    return x.detach().to(torch.float64).contiguous().numpy().copy()


def to_tensor(values: Array, dtype: torch.dtype) -> Tensor:
    """``values`` rounded to nearest even, as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(round_to(values, dtype))).to(dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    bias: Tensor | None = None,
    ndim: int = 1,
    x_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the spec says, of ``x`` (..., *normalized_shape), in the dtype that it says.

    ``x_dtype`` is what the spec calls x's dtype, where that is not the dtype of ``x``.
    """
    convention = as_spec(spec)
    rows = _Rows(x, eps, convention, ndim)
    with np.errstate(all="ignore"):
        high, low = rows.xhat()
        y = _finish(high, low, x_dtype or x.dtype, weight, bias, rows.compute, convention)
    return y.reshape(x.shape)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, h)``: the sum h = residual + alpha * x, and its norm.

    The sum is exact until it is rounded to the dtype that holds both (at least float32), and from
    there to that of h. alpha is rounded to the dtype that holds both, to float32 if another one is
    asked for.
    """
    dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    factor = float(round_to(np.array(alpha), dtype if residual_dtype in (None, dtype) else wide))
    h = to_tensor(_fused(to_array(x), factor, to_array(residual), wide), residual_dtype or dtype)
    return rms_norm(h, weight, eps, spec=spec, ndim=ndim, x_dtype=x.dtype), h


def _fused(x: Array, alpha: float, residual: Array, dtype: torch.dtype) -> Array:
    """alpha * x + residual, rounded once."""
    with np.errstate(all="ignore"):
        plain = np.asarray(alpha * x + residual)
        if dtype == torch.float64:
            for i in np.ndindex(plain.shape):
                if np.isfinite(x[i]) and np.isfinite(residual[i]) and plain[i] != 0.0:
                    exact = Fraction(alpha) * Fraction(float(x[i])) + Fraction(float(residual[i]))
                    plain[i] = _nearest(exact)
            return plain
        # The product is exact. The sum is brought to an odd last bit where it is not, so that the
        # next rounding goes where the exact sum would go.
        product = alpha * x
        virtual = plain - product
        error = (product - (plain - virtual)) + (residual - virtual)
        last_bit = np.ascontiguousarray(plain).view(np.int64).reshape(plain.shape) & 1
        towards = np.copysign(np.inf, error)
        odd = np.where((error != 0.0) & (last_bit == 0), np.nextafter(plain, towards), plain)
        return round_to(np.where(np.isfinite(error), odd, plain), dtype)


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.copysign(math.inf, exact)


class Gradients(NamedTuple):
    """The exact gradients of :func:`rms_norm`, before they are rounded; and what they add up."""

    dx: Array
    dweight: Array
    dbias: Array
    dx_size: Array
    """The sums of the magnitudes of the terms that dx is the sum of."""
    dweight_size: Array
    """The sums of the magnitudes of the terms that dweight is the sum of."""
    dbias_size: Array


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    ndim: int = 1,
    dresidual: Tensor | None = None,
) -> Gradients:
    """The gradients, given the gradient ``dy`` of the result; roundings have a slope of 1.

    ``dresidual`` reaches x past the norm: it is added to dx. Float64 rows, and float32 rows whose
    two terms nearly cancel, are computed in integers and 60 decimal digits.
    """
    convention = as_spec(spec)
    rows = _Rows(x, eps, convention, ndim)
    d = rows.values.shape[1] * convention.groups
    incoming = to_array(dy).reshape(rows.values.shape)
    w = np.ones(d) if weight is None else to_array(weight).reshape(-1)
    if convention.offset and weight is not None:
        w = round_to(round_to(w, rows.compute) + convention.offset, rows.compute)
    w = np.broadcast_to(w, (rows.count, d)).reshape(rows.values.shape)
    with np.errstate(all="ignore"):
        xhat = rows.xhat()[0]
        terms = (incoming.reshape(rows.count, d) * xhat).astype(np.longdouble)
        dx, dx_size = _dx(incoming, w, rows)
    if dresidual is not None:
        dx = dx + to_array(dresidual).reshape(dx.shape)
    shape = x.shape[x.dim() - ndim :]
    dbias = incoming.reshape(rows.count, d).astype(np.longdouble)
    sums = [t.sum(axis=0).astype(float) for t in (terms, dbias, abs(terms), abs(dbias))]
    dweight, dbias, dweight_size, dbias_size = (total.reshape(shape) for total in sums)
    return Gradients(
        dx.reshape(x.shape), dweight, dbias, dx_size.reshape(x.shape), dweight_size, dbias_size
    )


def _dx(dy: Array, w: Array, rows: _Rows) -> tuple[Array, Array]:
    """dx and the magnitudes it is the sum of, both (rows * groups, d / groups)."""
    x, n, spec = rows.values, rows.width, rows.spec
    counted = np.arange(x.shape[1]) < n
    c2 = 1.0 if spec.reduce == "sum" else float(n)
    u = dy * w
    norm = np.sqrt(np.square(x[:, :n]).sum(axis=1, keepdims=True))
    rstd = _rstd(x, n, rows.eps, spec)
    k = np.ones_like(norm)
    if spec.eps_in == "root":
        k = np.where(norm > 0.0, np.sqrt(c2) / (rstd * norm), 0.0)
    if spec.eps_in == "clamp":
        k = np.where(norm >= rows.eps, 1.0, 0.0)
    through = np.where(counted, x * rstd * k / c2, 0.0)
    dx = (u - through * (u * x * rstd).sum(axis=1, keepdims=True)) * rstd
    size = (abs(u) + abs(through) * abs(u * x * rstd).sum(axis=1, keepdims=True)) * rstd
    finite = np.isfinite(x).all(axis=1) & np.isfinite(u).all(axis=1) & np.isfinite(rstd[:, 0])
    if rows.compute == torch.float64:
        finite = np.isfinite(x).all(axis=1) & np.isfinite(dy).all(axis=1)
        finite &= (norm[:, 0] > 0.0) | (x != 0.0).any(axis=1) | (rows.eps > 0.0)
        again = finite
    else:
        remains = np.linalg.norm(dx[:, :n], axis=1)
        again = finite & (remains < 2.0**-16 * np.linalg.norm(size[:, :n], axis=1))
    for row in np.flatnonzero(again):
        dx[row], size[row] = _exact_dx(dy[row], w[row], x[row], n, rows.eps, spec)
    return dx, size


def _exact_dx(
    dy: Array, w: Array, x: Array, n: int, eps: float, spec: NormSpec
) -> tuple[list[float], list[float]]:
    """dx of one row, and the magnitudes it is the sum of.

    With N = |x| over the counted elements and c^2 their number (1 for a sum), both are a factor
    times u_i (N^2 + ...) - x_i sum(u x), whose first part and sum are integers on some power of 2:
    mean_square: c/D^3 (u_i N^2 - x_i sum(u x) + u_i c^2 eps), D^2 = N^2 + c^2 eps;
    root: c/(D^2 N) (u_i N^2 - x_i sum(u x) + u_i c eps N), D = N + c eps; clamp: without eps.
    """
    exact = _DIGITS
    (xs, x_power), (dys, dy_power), (ws, w_power) = (_integers(v) for v in (x, dy, w))
    us = [a * b for a, b in zip(dys, ws, strict=True)]
    u_unit = exact.power(Decimal(2), dy_power + w_power)
    square_unit = exact.power(Decimal(4), x_power)
    square = sum(v * v for v in xs[:n])
    pull = sum(u * v for u, v in zip(us, xs, strict=True))
    c2 = Decimal(1 if spec.reduce == "sum" else n)
    c, e = exact.sqrt(c2), Decimal(eps)
    norm2 = exact.multiply(Decimal(square), square_unit)
    norm = exact.sqrt(norm2)
    if spec.eps_in == "mean_square":
        extra = exact.multiply(c2, e)
        big_d = exact.sqrt(exact.add(norm2, extra))
    elif spec.eps_in == "root":
        extra = exact.multiply(exact.multiply(c, e), norm)
        big_d = exact.add(norm, exact.multiply(c, e))
    else:
        extra = Decimal(0)
        big_d = max(norm, e)
    rstd = exact.divide(c, big_d)
    dx = [exact.multiply(exact.multiply(Decimal(u), u_unit), rstd) for u in us]
    size = [abs(v) for v in dx]
    if norm and not (spec.eps_in == "clamp" and norm < e):
        other_d = norm if spec.eps_in == "root" else big_d
        factor = exact.divide(rstd, exact.multiply(big_d, other_d))
        pull_size = sum(abs(u * v) for u, v in zip(us, xs, strict=True))
        pull_unit = exact.multiply(exact.multiply(square_unit, u_unit), factor)
        for i in range(n):
            pulled = exact.multiply(Decimal(abs(xs[i]) * pull_size), pull_unit)
            size[i] = exact.add(size[i], pulled)
            whole = exact.multiply(Decimal(us[i] * square - xs[i] * pull), square_unit)
            total = exact.add(whole, exact.multiply(Decimal(us[i]), extra))
            dx[i] = exact.multiply(exact.multiply(total, u_unit), factor)
    return [float(v) for v in dx], [float(v) for v in size]


def _integers(values: Array) -> tuple[list[int], int]:
    """``values`` as integers times one power of two."""
    mantissas, exponents = np.frexp(values)
    lowest = int(exponents[mantissas != 0.0].min(initial=2000))
    whole = np.ldexp(mantissas, 53).astype(np.int64).tolist()
    shifts = np.maximum(exponents - lowest, 0).tolist()
    return [m << s for m, s in zip(whole, shifts, strict=True)], lowest - 53


class _Rows:
    """x cut into rows and groups, in the values and with the eps that the spec computes with."""

    def __init__(self, x: Tensor, eps: float | None, spec: NormSpec, ndim: int) -> None:
        self.spec = spec
        in_float64 = x.dtype == torch.float64 and spec.accumulate == "input"
        self.compute = torch.float64 if in_float64 else torch.float32
        if eps is None:
            eps = spec.eps
        if eps is None:
            eps = 2.0**-52 if in_float64 else 2.0**-23
        self.eps = float(round_to(np.array(eps), self.compute))
        lead = x.dim() - ndim
        d = math.prod(x.shape[lead:])
        self.count = math.prod(x.shape[:lead])
        self.width = spec.width(d)
        rounded = round_to(to_array(x), self.compute)
        self.values = rounded.reshape(self.count * spec.groups, d // spec.groups)

    def xhat(self) -> tuple[Array, Array]:
        """xhat (rows, d) as a pair of float64."""
        if self.compute == torch.float64:
            high, low = _xhat_pair(self.values, self.width, self.eps, self.spec)
        else:
            high = self.values * _rstd(self.values, self.width, self.eps, self.spec)
            low = np.zeros_like(high)
        d = self.values.shape[1] * self.spec.groups
        return high.reshape(self.count, d), low.reshape(self.count, d)


def _finish(
    high: Array,
    low: Array,
    x_dtype: torch.dtype,
    weight: Tensor | None,
    bias: Tensor | None,
    compute: torch.dtype,
    spec: NormSpec,
) -> Tensor:
    """The weight, the bias and the roundings, of xhat = high + low (rows, d)."""
    out_dtype = x_dtype
    if weight is not None and spec.output == "promote":
        out_dtype = torch.promote_types(x_dtype, weight.dtype)
    if weight is not None and spec.output == "weight":
        out_dtype = weight.dtype
    halves = (torch.float16, torch.bfloat16)
    if spec.rounding == "before_weight":
        high, low = round_to(high, x_dtype), np.zeros_like(low)
    if spec.rounding == "weight_dtype" and weight is not None and weight.dtype in halves:
        high, low = round_to(high, weight.dtype), np.zeros_like(low)
    if weight is not None:
        w = to_array(weight).reshape(-1)
        if spec.offset:
            w = round_to(round_to(w, compute) + spec.offset, compute)
        high, low = _times(high, low, w)
    if bias is not None:
        b = to_array(bias).reshape(-1)
        if spec.rounding == "after_weight":
            total = high + b
            # The error of that sum, exactly (Knuth's two-sum).
            virtual = total - high
            low = low + ((high - (total - virtual)) + (b - virtual))
            high = total
        else:
            high, low = round_to(high + low, out_dtype) + b, np.zeros_like(low)
    # Infinite values have no error term: theirs came out as nan.
    return to_tensor(np.where(np.isfinite(high), high + low, high), out_dtype)


def _rstd(rows: Array, n: int, e: float, spec: NormSpec) -> Array:
    """1/rms (rows, 1) of float32 rows, good to float64."""
    total = np.square(rows[:, :n]).sum(axis=1, keepdims=True)
    mean = total if spec.reduce == "sum" else total / n
    if spec.eps_in == "mean_square":
        rstd = 1.0 / np.sqrt(mean + e)
    elif spec.eps_in == "root":
        rstd = 1.0 / (np.sqrt(mean) + e)
    else:
        rstd = np.sqrt(float(n)) / np.maximum(np.sqrt(total), e)
    return np.asarray(rstd)


def _xhat_pair(rows: Array, n: int, e: float, spec: NormSpec) -> tuple[Array, Array]:
    """xhat of float64 rows (rows, d) as an unevaluated sum of two float64."""
    pairs = [_rstd_pair(row[:n], n, e, spec) for row in rows]
    mantissa = np.array([pair[0] for pair in pairs]).reshape(-1, 1)
    rest = np.array([pair[1] for pair in pairs]).reshape(-1, 1)
    power = np.array([pair[2] for pair in pairs], dtype=np.int64).reshape(-1, 1)
    fraction, exponent = np.frexp(rows)
    high, low = _times(mantissa, rest, fraction)
    shift = (exponent + power).astype(np.int32)
    plain = rows * (mantissa * np.exp2(power.astype(np.float64)))
    ordinary = np.isfinite(rows) & np.isfinite(mantissa)
    return (
        np.where(ordinary, np.ldexp(high + low, shift), plain),
        np.where(ordinary, np.ldexp(low - ((high + low) - high), shift), 0.0),
    )


def _rstd_pair(counted: Array, n: int, e: float, spec: NormSpec) -> tuple[float, float, int]:
    """(m, r, p) with 1/rms = (m + r) * 2**p, to about 100 bits."""
    if not np.isfinite(counted).all():
        return (math.nan if np.isnan(counted).any() else 0.0), 0.0, 0
    top = int(np.frexp(np.abs(counted).max(initial=0.0))[1])
    scaled = np.ldexp(counted, -top)
    square, error = _times(scaled, np.zeros_like(scaled), scaled)
    terms = [*square.tolist(), *error.tolist()]
    total_high = math.fsum(terms)
    total_low = math.fsum([*terms, -total_high])

    exact = _DIGITS
    four = exact.power(Decimal(4), top)
    total = exact.multiply(exact.add(Decimal(total_high), Decimal(total_low)), four)
    count = Decimal(n if n else 1)
    mean = total if spec.reduce == "sum" else exact.divide(total, count)
    if spec.eps_in == "mean_square":
        root, scale = exact.sqrt(exact.add(mean, Decimal(e))), Decimal(1)
    elif spec.eps_in == "root":
        root, scale = exact.add(exact.sqrt(mean), Decimal(e)), Decimal(1)
    else:
        root, scale = max(exact.sqrt(total), Decimal(e)), exact.sqrt(count)
    if not root:
        return math.inf, 0.0, 0
    power = math.floor((scale.adjusted() - root.adjusted()) * math.log2(10.0))
    rstd = exact.divide(exact.divide(scale, root), exact.power(Decimal(2), power))
    return float(rstd), float(exact.subtract(rstd, Decimal(float(rstd)))), power


def _times(high: Array, low: Array, factor: Array) -> tuple[Array, Array]:
    """(high + low) * factor as a pair: Dekker's product, which needs no fused multiply-add."""
    product = high * factor
    a, b = _split(high)
    c, d = _split(factor)
    error = ((a * c - product) + a * d + b * c) + b * d
    error = np.where(np.isfinite(error), error, 0.0)
    return product, error + low * factor


def _split(value: Array) -> tuple[Array, Array]:
    """``value`` as the sum of two numbers of 26 bits each (Veltkamp)."""
    large = value * (2.0**27 + 1.0)
    high = large - (large - value)
    return high, value - high


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie from ``a`` to ``b``, element by element, int64.

    Both zeros are one number; infinity follows the largest finite one; nan is 0 from nan and 2**62
    from everything else.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
    far = 2**62
    bits = [t.detach().contiguous().view(_INTEGERS[t.dtype]).to(torch.int64) for t in (a, b)]
    lowest = -(2 ** (8 * a.element_size() - 1))
    ordered = [torch.where(t < 0, lowest - t, t) for t in bits]
    one, two = (t.numpy().astype(object) if a.dtype == torch.float64 else t for t in ordered)
    if a.dtype == torch.float64:
        distance = torch.tensor(np.minimum(np.abs(one - two), far).astype(np.int64))
    else:
        distance = (one - two).abs()
    distance = torch.where(a.isnan() & b.isnan(), 0, distance)
    return torch.where(a.isnan() ^ b.isnan(), far, distance).reshape(a.shape)


def max_ulp(a: Tensor, b: Tensor) -> int:
    """The largest ulp distance, 0 of empty tensors."""
    return int(ulp_distance(a, b).max()) if a.numel() else 0


def fraction_differing(a: Tensor, b: Tensor) -> float:
    """The fraction of the elements that are not the same number."""
    return float((ulp_distance(a, b) != 0).double().mean()) if a.numel() else 0.0


def random(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0, **kw: Any) -> Tensor:
    """Normal numbers times ``scale``, drawn in float64 and rounded once."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, **kw)
    return to_tensor(to_array(drawn) * scale, dtype)
