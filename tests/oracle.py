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
from typing import Any

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
) -> Tensor:
    """What the spec says, of ``x`` (..., *normalized_shape), in the dtype that it says."""
    convention = as_spec(spec)
    in_float64 = x.dtype == torch.float64 and convention.accumulate == "input"
    compute = torch.float64 if in_float64 else torch.float32
    if eps is None:
        eps = convention.eps
    if eps is None:
        eps = 2.0**-52 if in_float64 else 2.0**-23
    e = float(round_to(np.array(eps), compute))

    lead = x.dim() - ndim
    d = math.prod(x.shape[lead:])
    rows = math.prod(x.shape[:lead])
    values = round_to(to_array(x), compute).reshape(rows * convention.groups, -1 if d else 0)
    n = convention.width(d)
    with np.errstate(all="ignore"):
        if in_float64:
            high, low = _xhat_pair(values, n, e, convention)
        else:
            high, low = _xhat(values, n, e, convention), np.zeros_like(values)
        high, low = high.reshape(rows, d), low.reshape(rows, d)
        y = _finish(high, low, x.dtype, weight, bias, compute, convention)
    return y.reshape(x.shape)


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


def _xhat(rows: Array, n: int, e: float, spec: NormSpec) -> Array:
    """xhat of float32 rows (rows, d), good to float64."""
    total = np.square(rows[:, :n]).sum(axis=1, keepdims=True)
    mean = total if spec.reduce == "sum" else total / n
    if spec.eps_in == "mean_square":
        rstd = 1.0 / np.sqrt(mean + e)
    elif spec.eps_in == "root":
        rstd = 1.0 / (np.sqrt(mean) + e)
    else:
        rstd = np.sqrt(float(n)) / np.maximum(np.sqrt(total), e)
    return np.asarray(rows * rstd)


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
