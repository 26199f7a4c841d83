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
from collections.abc import Callable
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


RANGES = {
    torch.float32: _Range(
        eps=2.0**-23, tiny=2.0**-100, far=2.0**60, scale=2.0**50, half_scale=2.0**45
    ),
    torch.float64: _Range(
        eps=2.0**-52, tiny=2.0**-960, far=2.0**500, scale=2.0**400, half_scale=2.0**300
    ),
}

HALF_TYPES = (torch.float16, torch.bfloat16)

# Called as normalise and differentiate are, for rows of which only a part is at hand.
Normalise = Callable[[Tensor, int, float, NormSpec], tuple[Tensor, Tensor]]
Differentiate = Callable[
    [Tensor, Tensor | None, int, float | None, torch.dtype, NormSpec],
    tuple[Tensor, Tensor | None],
]


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

    Nothing is validated: :func:`rmsnorm.ops.rms_norm.forward` has done that.

    Example:
        >>> from rmsnorm.spec import specs
        >>> x = torch.tensor([3.0, 4.0])
        >>> [round(v, 4) for v in rms_norm(x, torch.ones(2), None, 0.0, specs.torch, 1).tolist()]
        [0.8485, 1.1314]
    """
    return rms_norm_with_rstd(x, weight, bias, eps, spec, ndim, x.dtype)[0]


def rms_norm_with_rstd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    x_dtype: torch.dtype,
    normalise_rows: Normalise | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm`, and what each row was multiplied by.

    Args:
        weight, bias: may have x's first dimensions too, where each of those has its own.
        x_dtype: what counts as x's dtype where the spec rounds, and for the result. x may have
            another one, which decides what accumulates: a residual that is kept in float32.
        normalise_rows: replaces :func:`normalise`.

    Returns:
        y, and rstd: (..., groups), in the dtype that accumulates.
    """
    compute = compute_dtype(x.dtype, spec)
    batch, parts, d = shape_of_rows(x, spec, ndim)
    row = x.to(compute).contiguous().reshape(*batch, *parts)
    grouped, rstd = (normalise_rows or normalise)(
        row, spec.width(d), resolve_eps(eps, compute, spec), spec
    )
    xhat = grouped.reshape(*batch, d)

    weight_dtype = None if weight is None else weight.dtype
    if spec.rounding == "before_weight":
        xhat = xhat.to(x_dtype)
    elif spec.rounding == "weight_dtype" and weight_dtype in HALF_TYPES:
        xhat = xhat.to(weight_dtype)

    multiply = multiply_dtype(x_dtype, weight_dtype, compute, spec)
    out_dtype = output_dtype(x_dtype, weight_dtype, spec)
    y = xhat
    if weight is not None:
        scale = beside_rows(weight, ndim, batch, (d,))
        if spec.offset:
            scale = scale.to(compute) + spec.offset
        y = y.to(multiply) * scale.to(multiply)
    if bias is not None:
        if spec.rounding != "after_weight":
            y = y.to(out_dtype)
        y = y.to(multiply) + beside_rows(bias, ndim, batch, (d,)).to(multiply)
    return y.to(out_dtype).reshape(x.shape), rstd.flatten(len(batch))


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    dresidual: Tensor | None,
    needs: tuple[bool, bool, bool],
    lead: int = 0,
    differentiate_rows: Differentiate | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of :func:`rms_norm`, as expressions that can be differentiated again.

    Derived in :mod:`rmsnorm.reference`; roundings pass the gradient straight through. rstd is
    computed again from x, so that the next derivative knows where it comes from. float32 rows are
    computed in float64 where the device has it.

    Args:
        dy: the gradient of the result, of x's shape, any strides.
        x, weight, eps, spec, ndim: as the forward was given them.
        dresidual: of x's shape, added to dx before that is rounded; or ``None``.
        needs: whether dx, dweight and dbias are wanted.
        lead: how many of the first dimensions have a dweight and dbias of their own; the weight
            then has those dimensions too.
        differentiate_rows: replaces :func:`differentiate`.

    Returns:
        dx, contiguous and in x's dtype; dweight in the weight's shape and dtype; dbias in the
        normalised shape and the dtype that accumulates. ``None`` for what is not wanted.

    Example:
        >>> from rmsnorm.spec import specs
        >>> dy, x = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])
        >>> needs = (True, False, False)
        >>> dx, _, _ = rms_norm_backward(dy, x, None, 0.0, specs.torch, 1, None, needs)
        >>> [round(v, 4) for v in dx.tolist()]
        [0.181, -0.1358]
    """
    compute = compute_dtype(x.dtype, spec)
    wide = widest(x.device)
    batch, parts, d = shape_of_rows(x, spec, ndim)
    row = x.to(compute).to(wide).contiguous().reshape(*batch, *parts)
    dy_row = dy.to(wide).reshape(*batch, *parts)
    u = None
    if needs[0]:
        u = dy_row
        if weight is not None:
            scale = beside_rows(weight, ndim, batch, parts)
            if spec.offset:
                scale = scale.to(compute) + spec.offset
            u = u * scale.to(wide)
    xhat, d_row = (differentiate_rows or differentiate)(row, u, spec.width(d), eps, compute, spec)

    def over_rows(products: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and transforms.is_distributed(products):
            # Uneven parts of several dimensions cannot be made those of one.
            return products.sum(tuple(range(len(batch)))).reshape(x.shape[x.dim() - ndim :])
        rows = products.reshape(*batch[:lead], math.prod(batch[lead:]), d)
        return rows.sum(lead).reshape(*batch[:lead], *x.shape[x.dim() - ndim :])

    dx = dweight = dbias = None
    if d_row is not None:
        dx = d_row.reshape(x.shape)
        if dresidual is not None:
            dx = dx + dresidual.to(wide)
        dx = dx.to(x.dtype).contiguous()
    if needs[1] and weight is not None:
        dweight = over_rows(dy_row * xhat).to(weight.dtype)
    if needs[2]:
        dbias = over_rows(dy_row).to(compute)
    return dx, dweight, dbias


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec,
    ndim: int,
    alpha: float,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of ``h = residual + alpha * x``: (y, h, rstd).

    h is rounded to its own dtype first, so y is that of two separate operations, bit for bit.

    Args:
        x, residual: (..., *normalized_shape), of any two floating dtypes.
        weight, eps, spec, ndim: as for :func:`rms_norm`; what counts as x's dtype is the dtype of
            the argument x.
        alpha: the factor of x.
        residual_dtype: the dtype of h, by default that to which residual and x promote.

    Example:
        >>> from rmsnorm.spec import specs
        >>> x, residual = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
        >>> y, h, _ = add_rms_norm(x, residual, None, 0.0, specs.torch, 1, 1.0, None)
        >>> h.tolist(), [round(v, 4) for v in y.tolist()]
        ([3.0, 4.0], [0.8485, 1.1314])
    """
    h = add_scaled(x, residual, alpha, residual_dtype)
    y, rstd = rms_norm_with_rstd(h, weight, None, eps, spec, ndim, x.dtype)
    return y, h, rstd


def add_scaled(
    x: Tensor, residual: Tensor, alpha: float, residual_dtype: torch.dtype | None
) -> Tensor:
    """``residual + alpha * x``, contiguous and rounded once, as :func:`add_rms_norm` adds."""
    promoted = torch.promote_types(x.dtype, residual.dtype)
    h_dtype = promoted if residual_dtype is None else residual_dtype
    if alpha != 1.0 and h_dtype == promoted and promoted in HALF_TYPES:
        # torch.add rounds alpha to a half type, then computes in float32, except for the elements
        # after its last whole vector. Here all elements are alike, and exact up to the sum.
        factor = torch.full((), alpha, dtype=promoted, device=x.device).to(torch.float32)
        h = (residual.to(torch.float32) + factor * x.to(torch.float32)).to(h_dtype)
    elif h_dtype == promoted:
        h = torch.add(residual, x, alpha=alpha)
    else:
        wide = torch.float64 if promoted == torch.float64 else torch.float32
        h = torch.add(residual.to(wide), x.to(wide), alpha=alpha).to(h_dtype)
    return h.contiguous()


def compute_dtype(x: torch.dtype, spec: NormSpec) -> torch.dtype:
    """The dtype that accumulates a row of dtype ``x``.

    Example:
        >>> from rmsnorm.spec import specs
        >>> compute_dtype(torch.float64, specs.torch), compute_dtype(torch.float64, specs.llama)
        (torch.float64, torch.float32)
    """
    keep_float64 = x == torch.float64 and spec.accumulate == "input"
    return torch.float64 if keep_float64 else torch.float32


def resolve_eps(eps: float | None, compute: torch.dtype, spec: NormSpec) -> float:
    """The eps of a call: the argument, else the spec's, else ``compute``'s machine epsilon.

    Example:
        >>> from rmsnorm.spec import specs
        >>> resolve_eps(None, torch.float32, specs.torch) == 2.0**-23
        True
    """
    if eps is not None:
        return eps
    return RANGES[compute].eps if spec.eps is None else spec.eps


def widest(device: torch.device) -> torch.dtype:
    """The widest dtype in which ``device`` computes."""
    return torch.float64 if _has_float64(device) else torch.float32


def shape_of_rows(
    x: Tensor, spec: NormSpec, ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The dimensions before the rows, those of one row cut into groups, and its elements."""
    batch = tuple(x.shape[: x.dim() - ndim])
    d = math.prod(x.shape[x.dim() - ndim :])
    return batch, (d,) if spec.groups == 1 else (spec.groups, d // spec.groups), d


def beside_rows(
    parameter: Tensor, ndim: int, batch: tuple[int, ...], parts: tuple[int, ...]
) -> Tensor:
    """A weight (*lead, *normalized_shape) in a shape that broadcasts with (*batch, *parts)."""
    lead = parameter.shape[: parameter.dim() - ndim]
    between = (1,) * (len(batch) - len(lead)) if lead else ()
    return parameter.reshape(*lead, *between, *parts)


def multiply_dtype(
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


def normalise(row: Tensor, width: int, eps: float, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """xhat of ``row`` (..., d / groups) and rstd (..., 1), in the dtype of ``row``."""
    if width == 0:
        return row.clone(), row.new_zeros(*row.shape[:-1], 1)
    total = _sum_of_squares(row[..., :width])
    limits = RANGES[row.dtype]
    # eps**2, because there eps stands beside the root of the mean, not beside the mean.
    floor = eps if spec.eps_in == "mean_square" else eps * eps
    can_vanish = (floor if spec.reduce == "sum" else floor * width) < limits.tiny
    plain_eager = is_plain_eager(row)
    redo = None
    if not plain_eager or not _all_in_range(total, limits.tiny if can_vanish else 0.0):
        # A row that holds an infinite element may come along: it is 0 and nan either way.
        redo = torch.isinf(total)
        if can_vanish:
            redo = redo | (total < limits.tiny)
    if redo is None or (plain_eager and not redo.any()):
        rstd = rstd_of(total, width, eps, spec)
        return row * rstd, rstd
    # Each branch sees ones in the other's rows: torch.where stops a value that is not finite, but
    # its zero gradient times an infinite derivative would still be nan.
    usual = torch.where(redo, 1.0, row)
    extreme = torch.where(redo, row, 1.0)
    rstd = rstd_of(_sum_of_squares(usual[..., :width]), width, eps, spec)
    extreme_xhat, extreme_rstd = _normalise_extreme(extreme, width, eps, spec)
    return (
        torch.where(redo, extreme_xhat, usual * rstd),
        torch.where(redo, extreme_rstd, rstd),
    )


def _normalise_extreme(
    row: Tensor, width: int, eps: float, spec: NormSpec
) -> tuple[Tensor, Tensor]:
    """The same for rows whose squares leave the dtype's range, each rounded once to that dtype."""
    e = torch.full((), eps, dtype=row.dtype, device=row.device)
    if row.dtype == torch.float32 and _has_float64(row.device):
        wide = row.to(torch.float64)
        rstd = rstd_of(_sum_of_squares(wide[..., :width]), width, e.to(torch.float64), spec)
        return (wide * rstd).to(row.dtype), rstd.to(row.dtype)
    # Nothing wider is at hand: scale up what is small and down what is large, exactly. eps takes
    # the scale of what it stands beside. In steps, since the whole scale may be out of range.
    largest = row[..., :width].detach().abs().amax(dim=-1, keepdim=True)
    half_scale = RANGES[row.dtype].half_scale
    half = torch.where(largest < 1.0, half_scale, torch.full_like(largest, 1.0 / half_scale))
    total = _sum_of_squares(row[..., :width] * half * half)
    rstd = rstd_of(total, width, scaled_eps(e, half, spec), spec)
    return row * half * rstd * half, rstd * half * half


def scaled_eps(eps: Tensor, half: Tensor, spec: NormSpec) -> Tensor:
    """eps for a row that was multiplied by ``half`` twice."""
    eps = eps * half * half
    return eps * half * half if spec.eps_in == "mean_square" else eps


def differentiate(
    row: Tensor,
    u: Tensor | None,
    width: int,
    eps: float | None,
    compute: torch.dtype,
    spec: NormSpec,
) -> tuple[Tensor, Tensor | None]:
    """xhat of ``row`` (..., n), and the gradient of ``row`` where that of xhat is ``u``.

    That is ``u`` times the transposed Jacobian of :mod:`rmsnorm.reference`'s derivation::

        rstd * (u - xhat * k * sum(u * xhat) / c^2)

    Args:
        row: in ``compute`` or wider.
        u: of its shape and dtype, or ``None``, which gives ``None``.
        width: how many elements of a row the norm is taken over.
        eps, spec: as the forward was given them.
        compute: the dtype that accumulated in the forward; eps is rounded to it.
    """
    if width == 0:
        return row.clone(), None if u is None else u.clone()
    eps = resolve_eps(eps, compute, spec)
    e = torch.full((), eps, dtype=compute, device=row.device).to(row.dtype)
    half: Tensor | float = 1.0
    if row.dtype == compute:
        # Nothing wider is at hand. Powers of two, applied twice, keep the squares in range. The
        # larger of the row and eps decides, since the other is nothing beside it.
        floor = math.sqrt(eps) if spec.eps_in == "mean_square" else eps
        largest = row[..., :width].detach().abs().amax(dim=-1, keepdim=True).clamp(min=floor)
        scale = RANGES[row.dtype].half_scale
        half = torch.where(largest > scale, 1.0 / scale, torch.ones_like(largest))
        half = torch.where(largest < 1.0 / scale, scale, half)
        e = scaled_eps(e, half, spec)
    total = _sum_of_squares(row[..., :width] * half * half)
    rstd = rstd_of(total, width, e, spec)
    xhat = row * half * rstd * half

    if u is None:
        return xhat, None
    c2 = 1 if spec.reduce == "sum" else width
    k = share_of_norm(total, width, e, spec)
    if row.shape[-1] == 1:
        return xhat, u * slope_of_one(k, rstd, e, spec) * rstd * half * half
    through_norm = k * (u * xhat).sum(dim=-1, keepdim=True) / c2
    inner = u[..., :width] - xhat[..., :width] * through_norm
    if width < row.shape[-1]:
        inner = torch.cat((inner, u[..., width:]), dim=-1)
    return xhat, inner * rstd * half * half


def share_of_norm(total: Tensor, width: int, eps: Tensor, spec: NormSpec) -> Tensor | float:
    """The factor k of :func:`differentiate`: how rstd follows the norm of the row, whose sum of
    squares is ``total``; 1 where eps stands beside the mean square."""
    if spec.eps_in == "root":
        root = _sqrt(total if spec.reduce == "sum" else total / width)
        nonzero = torch.where(root == 0.0, 1.0, root)
        return torch.where(root == 0.0, 0.0, (root + eps) / nonzero)
    if spec.eps_in == "clamp":
        return (_sqrt(total) >= eps).to(total.dtype)
    return 1.0


def slope_of_one(
    share: Tensor | float, rstd: Tensor, eps: Tensor, spec: NormSpec
) -> Tensor | float:
    """``1 - xhat * k * xhat`` of a row of one element.

    The difference itself would be all rounding error where eps is small beside x^2.
    """
    if spec.eps_in == "mean_square":
        return eps * rstd * rstd
    return eps * rstd if spec.eps_in == "root" else 1.0 - share


def _has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def _sum_of_squares(counted: Tensor) -> Tensor:
    """(..., n) -> (..., 1), in the order of a row within a batch."""
    squares = counted.pow(2)
    # 2**15 is the grain of PyTorch's CPU loops: above it a sum with one result is shared out.
    if is_plain_eager(squares) and squares.shape[-1] == squares.numel() > 2**15:
        return squares.expand(2, *squares.shape).sum(dim=-1, keepdim=True)[0]
    return squares.sum(dim=-1, keepdim=True)


def rstd_of(total: Tensor, width: int, eps: float | Tensor, spec: NormSpec) -> Tensor:
    """The factor of each row of ``width`` counted elements, from its sum of squares."""
    if spec.eps_in == "clamp":
        return math.sqrt(width) / _sqrt(total).clamp(min=eps)
    mean = total if spec.reduce == "sum" else total / width
    if spec.eps_in == "root":
        return 1.0 / (_sqrt(mean) + eps)
    shifted = mean + eps
    # d(v**-0.5) = -0.5 v**-1.5 leaves the range long before v**-0.5 does; near 1 it does not. The
    # scale is a power of four under the root, so the bits are those of rsqrt(v) itself.
    limits = RANGES[total.dtype]
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


def is_plain_eager(x: Tensor) -> bool:
    """Whether the values of ``x`` can be looked at, here and now, without waiting for a device."""
    if torch.compiler.is_compiling() or transforms.in_jit_trace():
        return False
    return (
        x.device.type == "cpu"
        and type(x) in transforms.PLAIN
        and not transforms.in_func_transform()
        and not transforms.in_dispatch_mode()
    )
