"""The operations on distributed tensors (``torch.distributed.tensor.DTensor``).

What is computed depends on where the rows of x lie, separately in every dimension of the mesh:

* **Rows on different ranks** (``Shard`` of a batch or sequence dimension): each rank calls the
  kernels for its own rows. The weight is replicated; its gradient is the sum over the rows of one
  rank, so ``Partial``.
* **Elements of a row on different ranks** (``Shard`` of a normalised dimension): each rank adds up
  the squares of its elements; one all-reduce of a number for each row and group makes rstd. The
  backward has one of two such numbers, or a second one where the rows are accumulated in the widest
  type. The weight and its gradient are cut as the rows are. Groups that lie whole on one rank need
  no communication.
* **Everything on every rank** (``Replicate``): as on one device.

The other tensors of a call follow x: a residual, gate or gradient is moved to where the rows are, a
sum that is pending (``Partial``) is finished. Where x itself is on every rank, or pending, the rows
go to where the next such tensor has them. Shards may be uneven, and empty.

The rules act below autograd, so the operations that compute gradients have rules of their own.
:func:`register` is called by whoever meets a distributed tensor first: importing its module takes
long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rmsnorm.ops import add_rms_norm as add
from rmsnorm.ops import composite, gated_composite
from rmsnorm.ops import gated_rms_norm as gated
from rmsnorm.ops import rms_norm as norm
from rmsnorm.ops.library import library
from rmsnorm.spec import NormSpec

Needs = tuple[bool, bool, bool]


class _Layout:
    """On which ranks the rows of a call lie.

    Args:
        rows: the tensors of x's shape by name, the one that decides first.
        parameters: the other tensors by name; ``None`` where there is none.
        ndim: how many dimensions are normalised.

    Raises:
        RuntimeError: a plain tensor among distributed ones, or tensors on different meshes.
    """

    def __init__(
        self, rows: dict[str, Tensor | None], parameters: dict[str, Tensor | None], ndim: int
    ) -> None:
        given = {
            name: tensor for name, tensor in {**rows, **parameters}.items() if tensor is not None
        }
        self.mesh = next(t.device_mesh for t in given.values() if isinstance(t, DTensor))
        for name, tensor in given.items():
            if not isinstance(tensor, DTensor):
                raise RuntimeError(
                    f"{name} is a plain tensor beside distributed ones; expected a DTensor on "
                    f"{self.mesh}, as torch.distributed.tensor.distribute_tensor makes"
                )
            if tensor.device_mesh != self.mesh:
                raise RuntimeError(
                    f"{name} is on {tensor.device_mesh}, but another tensor is on {self.mesh}"
                )
        found = [tensor for tensor in rows.values() if isinstance(tensor, DTensor)]
        self.placements = tuple(
            _first_shard([tensor.placements[i] for tensor in found]) for i in range(self.mesh.ndim)
        )
        self.shape = tuple(found[0].shape)
        self.lead = len(self.shape) - ndim

    @property
    def cut(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which a row has parts."""
        return tuple(
            i
            for i, placement in enumerate(self.placements)
            if isinstance(placement, Shard) and placement.dim >= self.lead
        )

    def rows(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of x's shape."""
        return _local(tensor, self.placements)

    def parameter(self, tensor: Tensor | None) -> Tensor | None:
        """What this rank needs of a weight or bias."""
        return None if tensor is None else _local(tensor, self._of_parameter(Replicate()))

    def rstd(self, tensor: Tensor, whole_groups: bool) -> Tensor:
        """The rstd of this rank's rows."""
        return _local(tensor, self._of_rstd(whole_groups))

    def wrap_rows(self, local: Tensor) -> Tensor:
        return self._wrap(local, self.placements, self.shape)

    def wrap_rstd(self, local: Tensor, groups: int, whole_groups: bool) -> Tensor:
        shape = (*self.shape[: self.lead], groups)
        return self._wrap(local, self._of_rstd(whole_groups), shape)

    def wrap_gradients(
        self, of_rows: int, row: Tensor, found: Sequence[Tensor | None], needs: Needs
    ) -> tuple[Tensor, ...]:
        """What a backward operation returns: ``of_rows`` tensors of x's shape, then parameters'.

        Each is (0,) where it is not needed.
        """
        parameter = self._of_parameter(Partial())
        nothing = (Replicate(),) * self.mesh.ndim
        wrapped = []
        for i, (local, needed) in enumerate(zip(found, needs, strict=True)):
            if local is None or not needed:
                wrapped.append(self._wrap(row.new_empty(0), nothing, (0,)))
            elif i < of_rows:
                wrapped.append(self.wrap_rows(local))
            else:
                wrapped.append(self._wrap(local, parameter, self.shape[self.lead :]))
        return tuple(wrapped)

    def finish_sum(self, local: Tensor) -> Tensor:
        """The sum of ``local`` over the ranks that have parts of the same rows."""
        pending: list[Placement] = [Replicate()] * self.mesh.ndim
        for i in self.cut:
            pending[i] = Partial()
        total = DTensor.from_local(local, self.mesh, pending, run_check=False)
        return _local(total, (Replicate(),) * self.mesh.ndim)

    def index_in_row(self, device: torch.device) -> Tensor:
        """Which elements of a row, flattened, this rank has: (elements,), int64."""
        index = torch.zeros(1, dtype=torch.int64, device=device)
        for dim, size in enumerate(self.shape[self.lead :], self.lead):
            start, length = 0, size
            for i, placement in enumerate(self.placements):
                if isinstance(placement, Shard) and placement.dim == dim:
                    # As torch.chunk cuts: all alike but for the last ones, which may be empty.
                    part = -(-length // self.mesh.size(i))
                    skipped = min(part * self.mesh.get_local_rank(i), length)
                    start, length = start + skipped, min(part, length - skipped)
            steps = torch.arange(start, start + length, device=device)
            index = (index[:, None] * size + steps).flatten()
        return index

    def _of_parameter(self, over_rows: Placement) -> tuple[Placement, ...]:
        """The placements of a parameter; ``over_rows``: where different ranks have other rows."""
        found: list[Placement] = []
        for placement in self.placements:
            if not isinstance(placement, Shard):
                found.append(Replicate())
            elif placement.dim >= self.lead:
                found.append(Shard(placement.dim - self.lead))
            else:
                found.append(over_rows)
        return tuple(found)

    def _of_rstd(self, whole_groups: bool) -> tuple[Placement, ...]:
        return tuple(
            Replicate() if i in self.cut and not whole_groups else placement
            for i, placement in enumerate(self.placements)
        )

    def _wrap(
        self, local: Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...]
    ) -> Tensor:
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        wrapped: Tensor = DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return wrapped


def _first_shard(placements: list[Placement]) -> Placement:
    # Exactly Shard: the subclass in which FSDP keeps its parameters has its rows in another order.
    return next((p for p in placements if type(p) is Shard), Replicate())


def _local(tensor: Tensor, placements: tuple[Placement, ...]) -> Tensor:
    assert isinstance(tensor, DTensor)
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    local: Tensor = tensor.to_local()
    return local


class _CutRows:
    """The norm of rows of which this rank has a part: what needs the rest of them.

    Sums are taken in float64 where the device has it, so that rows that are out of float32's range,
    or cancel, need no second look.
    """

    def __init__(self, layout: _Layout, spec: NormSpec, x: Tensor) -> None:
        self.layout, self.groups = layout, spec.groups
        self.compute = composite.compute_dtype(x.dtype, spec)
        d = math.prod(layout.shape[layout.lead :])
        self.width = spec.width(d)
        self.group_size = d // spec.groups
        index = layout.index_in_row(x.device)
        self.group = None if spec.groups == 1 else index // max(self.group_size, 1)
        self.counted = None if self.width == self.group_size else index < self.width

    def normalise(
        self, row: Tensor, width: int, eps: float, spec: NormSpec
    ) -> tuple[Tensor, Tensor]:
        """:func:`rmsnorm.ops.composite.normalise`; rstd is (..., groups)."""
        if self.width == 0:
            return row.clone(), row.new_zeros(*row.shape[:-1], self.groups)
        wide = row.to(composite.widest(row.device))
        _, _, half, rstd, _ = self._statistics(wide, eps, spec)
        xhat = wide * self._spread(half) * self._spread(rstd) * self._spread(half)
        return xhat.to(row.dtype), (rstd * half * half).to(row.dtype)

    def differentiate(
        self,
        row: Tensor,
        u: Tensor | None,
        width: int,
        eps: float | None,
        compute: torch.dtype,
        spec: NormSpec,
    ) -> tuple[Tensor, Tensor | None]:
        """:func:`rmsnorm.ops.composite.differentiate`."""
        if self.width == 0:
            return row.clone(), None if u is None else u.clone()
        eps = composite.resolve_eps(eps, compute, spec)
        along = u if self.group_size > 1 else None
        total, e, half, rstd, product = self._statistics(row, eps, spec, along)
        scale, factor = self._spread(half), self._spread(rstd)
        xhat = row * scale * factor * scale
        if u is None:
            return xhat, None
        k = composite.share_of_norm(total, self.width, e, spec)
        if along is None:
            slope = self._spread(composite.slope_of_one(k, rstd, e, spec) * rstd)
            return xhat, u * slope * scale * scale
        # Without the product, xhat is at least in range.
        product = self._finish([u * xhat])[0] if product is None else product * rstd
        c2 = 1 if spec.reduce == "sum" else self.width
        through_norm = self._spread(product * k / c2)
        if self.counted is not None:
            through_norm = torch.where(self.counted, through_norm, 0.0)
        return xhat, (u - xhat * through_norm) * factor * scale * scale

    def _statistics(
        self, row: Tensor, eps: float, spec: NormSpec, along: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The sum of squares of ``row * half * half``, eps beside it, half, rstd, and the sum of
        ``row * along``.

        Each is (..., groups) or (); rstd is that of the scaled row. The last is ``None`` where it
        may leave the range of ``row``, or nothing is asked for.
        """
        counted = row if self.counted is None else torch.where(self.counted, row, 0.0)
        e = torch.full((), eps, dtype=self.compute, device=row.device).to(row.dtype)
        half = torch.ones((), dtype=row.dtype, device=row.device)
        product = None
        if row.dtype != self.compute:
            products = [counted.square()] if along is None else [counted.square(), row * along]
            total, *products = self._finish(products)
            product = products[0] if products else None
        else:
            # Nothing wider is at hand. Squares are summed at three scales, at one of which they
            # are in range (Blue 1978, https://doi.org/10.1145/355769.355771).
            limits = composite.RANGES[row.dtype]
            scales = (1.0, 1.0 / limits.half_scale, limits.half_scale)
            totals = self._finish([(counted * s * s).square() for s in scales])
            total = totals[0]
            half = torch.ones_like(total)
            floor = eps if spec.eps_in == "mean_square" else eps * eps
            wrong = [torch.isinf(total)]
            can_vanish = (floor if spec.reduce == "sum" else floor * self.width) < limits.tiny
            wrong.append(total < limits.tiny if can_vanish else torch.zeros_like(wrong[0]))
            for scaled, s, chosen in zip(totals[1:], scales[1:], wrong, strict=True):
                total = torch.where(chosen, scaled, total)
                half = torch.where(chosen, s, half)
            e = composite.scaled_eps(e, half, spec)
        return total, e, half, composite.rstd_of(total, self.width, e, spec), product

    def _finish(self, products: list[Tensor]) -> list[Tensor]:
        """The sums of each of ``products`` (..., elements) over the whole groups: (..., groups)."""
        sums = []
        for product in products:
            if self.group is None:
                sums.append(product.sum(dim=-1, keepdim=True))
            else:
                zeros = product.new_zeros(*product.shape[:-1], self.groups)
                sums.append(zeros.index_add(-1, self.group, product))
        return list(self.layout.finish_sum(torch.cat(sums, dim=-1)).split(self.groups, dim=-1))

    def _spread(self, statistic: Tensor) -> Tensor:
        """A number for each group (..., groups), or for all, in a shape beside the elements."""
        if self.group is None or statistic.dim() == 0:
            return statistic
        return statistic[..., self.group]


@functools.lru_cache(maxsize=256)
def _uncut(spec: NormSpec) -> NormSpec:
    """``spec`` for a row whose groups and counted elements :class:`_CutRows` keeps account of."""
    return replace(spec, groups=1, partial=1.0)


def _whole_groups(layout: _Layout, spec: NormSpec, ndim: int) -> int:
    """How many whole groups every rank has, if it has no parts of others; otherwise 0."""
    ranks = math.prod(layout.mesh.size(i) for i in layout.cut)
    whole = bool(layout.cut) and ndim == 1 and spec.groups % ranks == 0
    return spec.groups // ranks if whole else 0


def _local_spec(layout: _Layout, spec: NormSpec, ndim: int) -> tuple[NormSpec | None, bool]:
    """With which spec the kernels can serve the rows on this rank alone, or ``None``; and whether
    rstd is cut as the groups of a row are."""
    if not layout.cut:
        return spec, False
    groups = _whole_groups(layout, spec, ndim)
    return (replace(spec, groups=groups), True) if groups else (None, False)


def _rms_norm_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    decoded = norm.decode(spec)
    norm.check(x, weight, bias, eps, decoded, ndim)
    layout = _Layout({"x": x}, {"weight": weight, "bias": bias}, ndim)
    row, w, b = layout.rows(x), layout.parameter(weight), layout.parameter(bias)
    local, whole = _local_spec(layout, decoded, ndim)
    if local is not None:
        y, rstd = norm.op_fwd(row, w, b, eps, local.encode(), ndim)
    else:
        cut = _CutRows(layout, decoded, row)
        y, rstd = composite.rms_norm_with_rstd(
            row, w, b, eps, _uncut(decoded), ndim, x.dtype, cut.normalise
        )
    return layout.wrap_rows(y), layout.wrap_rstd(rstd, decoded.groups, whole)


def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
) -> Tensor:
    decoded = norm.decode(spec)
    norm.check(x, weight, bias, eps, decoded, ndim)
    layout = _Layout({"x": x}, {"weight": weight, "bias": bias}, ndim)
    local, _ = _local_spec(layout, decoded, ndim)
    if local is None:
        return _rms_norm_fwd(x, weight, bias, eps, spec, ndim)[0]
    row, w, b = layout.rows(x), layout.parameter(weight), layout.parameter(bias)
    return layout.wrap_rows(norm.op(row, w, b, eps, local.encode(), ndim))


def _rms_norm_out(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    *,
    out: Tensor,
) -> Tensor:
    decoded = norm.decode(spec)
    norm.check(x, weight, bias, eps, decoded, ndim)
    norm.check_out(out, x, weight, decoded)
    layout = _Layout({"x": x}, {"weight": weight, "bias": bias, "out": out}, ndim)
    assert isinstance(out, DTensor)
    _refuse_pending("out", out)
    local, _ = _local_spec(layout, decoded, ndim)
    if local is not None and out.placements == layout.placements:
        row, w, b = layout.rows(x), layout.parameter(weight), layout.parameter(bias)
        norm.op_out(row, w, b, eps, local.encode(), ndim, out=out.to_local())
    else:
        y = _rms_norm(x, weight, bias, eps, spec, ndim)
        out.to_local().copy_(_local(y, out.placements))
    return out


def _rms_norm_bwd(
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
) -> tuple[Tensor, ...]:
    decoded = norm.decode(spec)
    norm.check_backward(dy, x, weight, rstd, dresidual, decoded, ndim)
    rows = {"x": x, "dy": dy, "dresidual": dresidual}
    layout = _Layout(rows, {"weight": weight, "rstd": rstd}, ndim)
    needs = (need_dx, need_dweight and weight is not None, need_dbias)
    incoming, row, w = layout.rows(dy), layout.rows(x), layout.parameter(weight)
    past = None if dresidual is None else layout.rows(dresidual)
    local, whole = _local_spec(layout, decoded, ndim)
    found: Sequence[Tensor | None]
    if local is not None:
        factor = layout.rstd(rstd, whole)
        found = norm.op_bwd(incoming, row, w, factor, past, eps, local.encode(), ndim, *needs)
    else:
        cut = _CutRows(layout, decoded, row)
        found = composite.rms_norm_backward(
            incoming, row, w, eps, _uncut(decoded), ndim, past, needs, 0, cut.differentiate
        )
    return layout.wrap_gradients(1, row, found, needs)


def _add_rms_norm_fwd(
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
    add.check(x, residual, weight, eps, decoded, ndim, alpha, residual_dtype)
    layout = _Layout({"x": x, "residual": residual}, {"weight": weight}, ndim)
    branch, stream, w = layout.rows(x), layout.rows(residual), layout.parameter(weight)
    local, whole = _local_spec(layout, decoded, ndim)
    if local is not None:
        y, h, rstd = add.op_fwd(branch, stream, w, eps, local.encode(), ndim, alpha, residual_dtype)
    else:
        h = composite.add_scaled(branch, stream, alpha, residual_dtype)
        cut = _CutRows(layout, decoded, h)
        y, rstd = composite.rms_norm_with_rstd(
            h, w, None, eps, _uncut(decoded), ndim, x.dtype, cut.normalise
        )
    wrapped = layout.wrap_rstd(rstd, decoded.groups, whole)
    return layout.wrap_rows(y), layout.wrap_rows(h), wrapped


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    decoded = norm.decode(spec)
    add.check(x, residual, weight, eps, decoded, ndim, alpha, residual_dtype)
    layout = _Layout({"x": x, "residual": residual}, {"weight": weight}, ndim)
    local, _ = _local_spec(layout, decoded, ndim)
    if local is None:
        return _add_rms_norm_fwd(x, residual, weight, eps, spec, ndim, alpha, residual_dtype)[:2]
    branch, stream, w = layout.rows(x), layout.rows(residual), layout.parameter(weight)
    y, h = add.op(branch, stream, w, eps, local.encode(), ndim, alpha, residual_dtype)
    return layout.wrap_rows(y), layout.wrap_rows(h)


def _add_rms_norm_inplace(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
    ndim: int = 1,
    alpha: float = 1.0,
) -> None:
    decoded = norm.decode(spec)
    add.check(x, residual, weight, eps, decoded, ndim, alpha, residual.dtype)
    add.check_inplace(x, residual, weight, decoded, residual.dtype)
    layout = _Layout({"x": x, "residual": residual}, {"weight": weight}, ndim)
    assert isinstance(x, DTensor)
    assert isinstance(residual, DTensor)
    _refuse_pending("x", x)
    _refuse_pending("residual", residual)
    local, _ = _local_spec(layout, decoded, ndim)
    if local is not None and x.placements == residual.placements == layout.placements:
        w = layout.parameter(weight)
        add.op_inplace(x.to_local(), residual.to_local(), w, eps, local.encode(), ndim, alpha)
        return
    y, h = _add_rms_norm(x, residual, weight, eps, spec, ndim, alpha, residual.dtype)
    x.to_local().copy_(_local(y, x.placements))
    residual.to_local().copy_(_local(h, residual.placements))


def _gated_rms_norm_fwd(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> tuple[Tensor, Tensor]:
    decoded = gated.decode(spec)
    gated.check(x, gate, weight, eps, decoded)
    layout = _Layout({"x": x, "gate": gate}, {"weight": weight}, 1)
    row, beside, w = layout.rows(x), layout.rows(gate), layout.parameter(weight)
    local, whole = _local_spec(layout, decoded, 1)
    if local is not None:
        y, rstd = gated.op_fwd(row, beside, w, eps, local.encode())
    else:
        cut = _CutRows(layout, decoded, row)
        y, rstd = gated_composite.gated_rms_norm_with_rstd(
            row, beside, w, eps, _uncut(decoded), cut.normalise
        )
    return layout.wrap_rows(y), layout.wrap_rstd(rstd, decoded.groups, whole)


def _gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> Tensor:
    decoded = gated.decode(spec)
    gated.check(x, gate, weight, eps, decoded)
    layout = _Layout({"x": x, "gate": gate}, {"weight": weight}, 1)
    local, _ = _local_spec(layout, decoded, 1)
    if local is None:
        return _gated_rms_norm_fwd(x, gate, weight, eps, spec)[0]
    row, beside, w = layout.rows(x), layout.rows(gate), layout.parameter(weight)
    return layout.wrap_rows(gated.op(row, beside, w, eps, local.encode()))


def _gated_rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float | None,
    spec: str,
    need_dx: bool,
    need_dgate: bool,
    need_dweight: bool,
) -> tuple[Tensor, ...]:
    decoded = gated.decode(spec)
    gated.check_backward(dy, x, gate, weight, rstd, eps, decoded)
    layout = _Layout({"x": x, "gate": gate, "dy": dy}, {"weight": weight, "rstd": rstd}, 1)
    needs = (need_dx, need_dgate, need_dweight and weight is not None)
    incoming, row, beside = layout.rows(dy), layout.rows(x), layout.rows(gate)
    w = layout.parameter(weight)
    local, whole = _local_spec(layout, decoded, 1)
    found: Sequence[Tensor | None]
    if local is not None:
        factor = layout.rstd(rstd, whole)
        found = gated.op_bwd(incoming, row, beside, w, factor, eps, local.encode(), *needs)
    else:
        cut = _CutRows(layout, decoded, row)
        found = gated_composite.gated_rms_norm_backward(
            incoming, row, beside, w, eps, _uncut(decoded), needs, 0, cut.differentiate
        )
    return layout.wrap_gradients(2, row, found, needs)


def _refuse_pending(name: str, tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise RuntimeError(
            f"{name} is written to, but it is a sum that is pending: its placements are "
            f"{tensor.placements}; redistribute it first"
        )


_RULES: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "rms_norm.out": _rms_norm_out,
    "rms_norm_fwd": _rms_norm_fwd,
    "rms_norm_bwd": _rms_norm_bwd,
    "add_rms_norm": _add_rms_norm,
    "add_rms_norm_fwd": _add_rms_norm_fwd,
    "add_rms_norm_": _add_rms_norm_inplace,
    "gated_rms_norm": _gated_rms_norm,
    "gated_rms_norm_fwd": _gated_rms_norm_fwd,
    "gated_rms_norm_bwd": _gated_rms_norm_bwd,
}


@functools.cache
def register() -> None:
    """Give every operation its rule for distributed tensors, once."""
    for name, rule in _RULES.items():
        torch.library.register_torch_dispatch(
            f"rmsnorm::{name}", DTensor, _below_autograd(rule), lib=library
        )


def _below_autograd(rule: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(cls: type, operation: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():  # or taking a distributed tensor apart would be recorded
            return rule(*args, **(kwargs or {}))

    return dispatch
