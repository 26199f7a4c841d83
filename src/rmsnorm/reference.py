"""RMSNorm: the definition, in plain Python.

For a row x of n elements, a weight g and a small eps (Zhang & Sennrich 2019, section 3,
https://arxiv.org/abs/1910.07467)::

    y_i = x_i / sqrt(mean(x^2) + eps) * g_i

>>> [round(y, 4) for y in rms_norm([3.0, 4.0], [1.0, 1.0], eps=0.0)]
[0.8485, 1.1314]

Forward. With ``norm = sqrt(sum(x^2))`` and ``c = sqrt(n)``, every convention of
:class:`rmsnorm.spec.NormSpec` is one division::

    xhat_i = c * x_i / D        D = sqrt(norm^2 + c^2 eps)      eps_in="mean_square"
                                D = norm + c eps                eps_in="root"
                                D = max(norm, eps)              eps_in="clamp"

    y_i = xhat_i * w_i + b_i    w = g + offset

``reduce="sum"`` takes no mean, so there ``c = 1``. Each of ``groups`` parts of the row has its own
norm; with ``partial`` the norm is that of the first elements only. Written so, nothing is ever
squared outside of ``math.hypot``, which neither overflows nor underflows.

Backward. Let ``u_i = dy_i * w_i`` be the gradient that reaches xhat. x_j acts on xhat_j directly,
and on every xhat_i through D, whose slope is ``D' = dD/dnorm``; and ``dnorm/dx_j = x_j / norm``::

    dx_j = c/D * u_j  -  sum_i(u_i * c * x_i / D^2) * D' * x_j / norm
         = c/D * (u_j  -  xhat_j * k * sum_i(u_i * xhat_i) / c^2),    k = D * D' / norm

The second term is there for the elements that the norm is taken over. In the three cases k is

    mean_square:  D' = norm/D                   k = 1, and sum/c^2 is the mean: the usual formula
    root:         D' = 1                        k = D/norm
    clamp:        D' = 1 above the floor        k = 1, and 0 below it, where D is constant

A row of zeros has ``xhat = 0``, and with it no second term: there ``dx = u * c/D``.
The rest is linear: over all rows, ``dg_i = sum(dy_i * xhat_i)`` and ``db_i = sum(dy_i)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rmsnorm.spec import NormSpec, as_spec, check_eps


def rms_norm(
    x: Sequence[Any],
    weight: Sequence[float] | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
    bias: Sequence[float] | None = None,
) -> list[Any]:
    """Normalise one row of numbers, or every row of nested lists of them.

    A Python float is a float64, so nothing is rounded to a shorter type: the spec's
    ``accumulate``, ``rounding`` and ``output`` have no effect here. Neither has its gate.

    Args:
        x: d numbers, or lists of such rows nested to any depth.
        weight: d numbers, or ``None`` for none.
        eps: replaces the spec's. Where both are ``None`` it is 2**-52, float64's machine epsilon.
        spec: the convention, a :class:`~rmsnorm.spec.NormSpec` or the name of one.
        bias: d numbers that are added at the end.

    Returns:
        Lists nested as x is.

    Raises:
        TypeError: something is not a number, or not a sequence of them.
        ValueError: rows of unequal width; a weight or bias of another width than x; a width that
            the spec's groups do not divide; eps negative, infinite or nan.

    Example:
        >>> rms_norm([[2.0, 2.0], [0.0, 5.0]], eps=0.0, spec="l2_sum")
        [[0.7071067811865475, 0.7071067811865475], [0.0, 1.0]]
    """
    convention, e = _convention(spec, eps)
    rows = _rows("x", x)
    d = len(rows[0]) if rows else 0
    w = _vector("weight", weight, d)
    b = _vector("bias", bias, d)
    y = []
    for row in rows:
        out, _ = _normalise(row, convention, e)
        if w is not None:
            out = [v * (g + convention.offset) for v, g in zip(out, w, strict=True)]
        if b is not None:
            out = [v + shift for v, shift in zip(out, b, strict=True)]
        y.append(out)
    return _nested_as(x, y)


def rms_norm_backward(
    dy: Sequence[Any],
    x: Sequence[Any],
    weight: Sequence[float] | None = None,
    eps: float | None = None,
    *,
    spec: NormSpec | str = "torch",
) -> tuple[list[Any], list[float] | None, list[float]]:
    """The gradients of :func:`rms_norm`, given the gradient ``dy`` of its result.

    Args:
        dy: numbers nested as x is.
        x, weight, eps, spec: what the forward was given.

    Returns:
        ``(dx, dweight, dbias)``: dx nested as x is, dweight and dbias of d numbers each, summed
        over the rows. dweight is ``None`` where there is no weight.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`, and where dy and x differ in shape.

    Example:
        >>> dx, dweight, dbias = rms_norm_backward([1.0, 0.0], [3.0, 4.0], [1.0, 1.0], 0.0)
        >>> [round(v, 6) for v in dx], [round(v, 6) for v in dweight], dbias
        ([0.181019, -0.135765], [0.848528, 0.0], [1.0, 0.0])
    """
    convention, e = _convention(spec, eps)
    rows, dy_rows = _rows("x", x), _rows("dy", dy)
    d = len(rows[0]) if rows else 0
    if shape_of(dy) != shape_of(x):
        raise ValueError(f"dy has shape {shape_of(dy)} and x {shape_of(x)}; expected the same")
    w = _vector("weight", weight, d)
    dx, dw, db = [], [], []
    for row, dy_row in zip(rows, dy_rows, strict=True):
        xhat, groups = _normalise(row, convention, e)
        u = dy_row
        if w is not None:
            u = [v * (g + convention.offset) for v, g in zip(dy_row, w, strict=True)]
        dx_row: list[float] = []
        for group in groups:
            indices = range(group.start, group.end)
            pull = group.through_norm * _sum(u[i] * xhat[i] for i in indices)
            dx_row += [
                group.direct * (u[j] - xhat[j] * pull if j < group.counted else u[j])
                for j in indices
            ]
        dx.append(dx_row)
        dw.append([v * h for v, h in zip(dy_row, xhat, strict=True)])
        db.append(dy_row)
    dweight = None if w is None else [_sum(row[i] for row in dw) for i in range(d)]
    return _nested_as(x, dx), dweight, [_sum(row[i] for row in db) for i in range(d)]


class _Group(NamedTuple):
    """What the backward needs to know of one group: the elements [start, end) of its row."""

    start: int
    end: int
    counted: int
    """Where the elements end that the norm is taken over."""
    direct: float
    """c/D: how dy reaches dx directly."""
    through_norm: float
    """k/c^2: the factor of what reaches it through the norm."""


def _normalise(row: list[float], spec: NormSpec, eps: float) -> tuple[list[float], list[_Group]]:
    """xhat of one row, and its groups."""
    n = spec.width(len(row))
    c = 1.0 if spec.reduce == "sum" else math.sqrt(n)
    size = len(row) // spec.groups
    xhat: list[float] = []
    groups: list[_Group] = []
    for start in range(0, len(row), size or 1):
        norm = _norm(row[start : start + n])
        k = 1.0
        if spec.eps_in == "mean_square":
            big_d = math.hypot(norm, c * math.sqrt(eps))
        elif spec.eps_in == "root":
            big_d = norm + c * eps
            k = big_d / norm if norm else 0.0
        else:
            big_d = max(norm, eps)
            k = 1.0 if norm >= eps else 0.0
        xhat += [c * _divide(v, big_d) for v in row[start : start + size]]
        groups.append(
            _Group(
                start,
                end=start + size,
                counted=start + n,
                direct=_divide(c, big_d),
                through_norm=k / (c * c),
            )
        )
    return xhat, groups


def _norm(values: list[float]) -> float:
    # hypot answers inf for inf beside nan; the sum of the squares would be nan.
    return math.nan if any(map(math.isnan, values)) else math.hypot(*values)


def _divide(a: float, b: float) -> float:
    """a / b for b >= 0, as IEEE 754 has it where b is 0."""
    return a / b if b else a * math.inf


def _sum(values: Iterable[float]) -> float:
    """The sum, rounded once; where that is not a finite number, the one that addition gives."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return sum(terms)


def _convention(spec: NormSpec | str, eps: float | None) -> tuple[NormSpec, float]:
    convention = as_spec(spec)
    if eps is None:
        eps = 2.0**-52 if convention.eps is None else convention.eps
    return convention, check_eps(eps)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of nested lists: the lengths along the first element of each level.

    Example:
        >>> shape_of([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), shape_of(1.0)
        ((2, 3), ())
    """
    shape: list[int] = []
    while _is_sequence(x):
        shape.append(len(x))
        x = x[0] if len(x) else None
    return tuple(shape)


def _rows(name: str, x: Any) -> list[list[float]]:
    """All rows of ``x`` in order, each a list of floats."""
    if not _is_sequence(x):
        raise TypeError(f"{name} is a {type(x).__name__}; expected a list of numbers or of rows")
    shape = shape_of(x)
    rows: list[list[float]] = []

    def collect(part: Any, depth: int) -> None:
        if not _is_sequence(part) or len(part) != shape[depth]:
            found = f"a row of {len(part)}" if _is_sequence(part) else repr(part)
            raise ValueError(
                f"{name} is ragged: {found} where its first elements have shape {shape}"
            )
        if depth == len(shape) - 1:
            rows.append(_numbers(name, part))
        else:
            for inner in part:
                collect(inner, depth + 1)

    collect(x, 0)
    return rows


def _numbers(name: str, row: Sequence[Any]) -> list[float]:
    for value in row:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} holds {value!r}; expected numbers, in rows of equal width")
    return [float(value) for value in row]


def _vector(name: str, values: Sequence[Any] | None, d: int) -> list[float] | None:
    """``values`` as d floats."""
    if values is None:
        return None
    if not _is_sequence(values):
        raise TypeError(f"{name} is a {type(values).__name__}; expected a list of {d} numbers")
    if len(values) != d:
        raise ValueError(f"{name} has {len(values)} elements; x has rows of {d}")
    return _numbers(name, values)


def _nested_as(x: Sequence[Any], rows: list[list[float]]) -> list[Any]:
    """``rows`` in order, in lists nested as x is."""
    remaining = iter(rows)

    def build(part: Sequence[Any], depth: int) -> list[Any]:
        if depth == 1:
            return next(remaining)
        return [build(inner, depth - 1) for inner in part]

    return build(x, len(shape_of(x)))
