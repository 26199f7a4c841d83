"""The operations ``rmsnorm::gated_rms_norm``, ``gated_rms_norm_fwd`` and ``gated_rms_norm_bwd``:
schema, fake, kernels by device, autograd, vmap, and the checks on their arguments.

No autograd is registered on them, so that inference pays nothing for it: a call that needs a
gradient goes through an ``autograd.Function`` on the CPU, and everywhere else, as every transform
of ``torch.func``, through :mod:`rmsnorm.ops.gated_composite`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rmsnorm.ops import gated_composite
from rmsnorm.ops.composite import output_dtype
from rmsnorm.ops.library import distinct, first_of, or_nothing, to_front
from rmsnorm.ops.library import library as _library
from rmsnorm.ops.rms_norm import check as check_norm
from rmsnorm.ops.rms_norm import (
    check_floating,
    check_is_tensor,
    check_like_x,
    check_rstd,
    empty_rstd,
    kernel_gradients,
    kernels_differentiate,
)
from rmsnorm.ops.transforms import (
    needs_composite,
    needs_gradient,
    refuse_forward_mode,
    was_forward_mode_refused,
)
from rmsnorm.spec import NormSpec, check_eps

_ARGUMENTS = "Tensor x, Tensor gate, Tensor? weight=None, float? eps=None, str spec=''"
for _schema in (
    f"gated_rms_norm({_ARGUMENTS}) -> Tensor",
    f"gated_rms_norm_fwd({_ARGUMENTS}) -> (Tensor y, Tensor rstd)",
    "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, "
    "float? eps, str spec, bool need_dx, bool need_dgate, bool need_dweight) "
    "-> (Tensor dx, Tensor dgate, Tensor dweight)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::gated_rms_norm", lib=_library
)
def _fake(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> Tensor:
    decoded = decode(spec)
    check(x, gate, weight, eps, decoded)
    dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, decoded)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::gated_rms_norm_fwd", lib=_library
)
def _fake_fwd(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> tuple[Tensor, Tensor]:
    return _fake(x, gate, weight, eps, spec), empty_rstd(x, decode(spec), 1)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "rmsnorm::gated_rms_norm_bwd", lib=_library
)
def _fake_bwd(
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
) -> tuple[Tensor, Tensor, Tensor]:
    check_backward(dy, x, gate, weight, rstd, eps, decode(spec))

    def gradient(of: Tensor | None, needed: bool) -> Tensor:
        if of is None or not needed:
            return x.new_empty(0)
        return torch.empty(of.shape, dtype=of.dtype, device=of.device)

    return gradient(x, need_dx), gradient(gate, need_dgate), gradient(weight, need_dweight)


def _composite(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> Tensor:
    return _composite_fwd(x, gate, weight, eps, spec)[0]


def _composite_fwd(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> tuple[Tensor, Tensor]:
    refuse_forward_mode("gated_rms_norm")
    decoded = decode(spec)
    check(x, gate, weight, eps, decoded)
    return gated_composite.gated_rms_norm_with_rstd(x, gate, weight, eps, decoded)


def _composite_bwd(
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
) -> tuple[Tensor, Tensor, Tensor]:
    # Rows out of range and rows that cancel need more than rstd holds: it is computed again.
    refuse_forward_mode("gated_rms_norm")
    decoded = decode(spec)
    check_backward(dy, x, gate, weight, rstd, eps, decoded)
    dx, dgate, dweight = gated_composite.gated_rms_norm_backward(
        dy, x, gate, weight, eps, decoded, (need_dx, need_dgate, need_dweight)
    )
    return or_nothing(dx, x), or_nothing(dgate, x), or_nothing(dweight, x)


# Every device for which no kernel is registered; where the kernels were not built, the CPU.
for _name, _function in (
    ("gated_rms_norm", _composite),
    ("gated_rms_norm_fwd", _composite_fwd),
    ("gated_rms_norm_bwd", _composite_bwd),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")

op = torch.ops.rmsnorm.gated_rms_norm.default
op_fwd = torch.ops.rmsnorm.gated_rms_norm_fwd.default
op_bwd = torch.ops.rmsnorm.gated_rms_norm_bwd.default


class _GatedRMSNorm(torch.autograd.Function):
    """Saves x, gate, weight and rstd; xhat and the activation are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float | None,
        spec: NormSpec,
    ) -> Tensor:
        y: Tensor
        y, rstd = op_fwd(x, gate, weight, eps, spec.encode())
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.eps, ctx.spec = eps, spec
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found = kernel_gradients(
            op_bwd, (dy, x, gate, weight, rstd), (ctx.eps, ctx.spec.encode()), needs
        )
        if found is None:
            found = gated_composite.gated_rms_norm_backward(
                dy, x, gate, weight, ctx.eps, ctx.spec, needs
            )
        return (*found, None, None)


_apply: Callable[..., Any] = _GatedRMSNorm.apply


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> tuple[Tensor, int]:
    return _vmapped(op, info.batch_size, in_dims, (x, gate, weight), eps, spec)[0], 0


def _vmap_fwd(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: str = "",
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    return _vmapped(op_fwd, info.batch_size, in_dims, (x, gate, weight), eps, spec), (0, 0)


def _vmapped(
    operation: Any,
    size: int,
    in_dims: tuple[int | None, ...],
    tensors: tuple[Tensor, Tensor, Tensor | None],
    eps: float | None,
    spec: str,
) -> tuple[Tensor, ...]:
    """The results of a forward operation, with the dimension that ``vmap`` runs over in front."""
    x_dim, gate_dim, weight_dim = (*in_dims, None)[:3]
    x, gate, weight = tensors
    rows, gates = to_front(x, x_dim, size), to_front(gate, gate_dim, size)
    if weight is None or weight_dim is None:
        result = operation(rows, gates, weight, eps, spec)
        return result if isinstance(result, tuple) else (result,)
    # No kernel has a weight for each row.
    decoded = decode(spec)
    check(rows[0], gates[0], first_of(weight, weight_dim), eps, decoded)
    weight = weight.movedim(weight_dim, 0)
    return gated_composite.gated_rms_norm_with_rstd(rows, gates, weight, eps, decoded)


def _vmap_bwd(
    info: Any,
    in_dims: tuple[int | None, ...],
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
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    needs = (need_dx, need_dgate, need_dweight and weight is not None)
    out_dims = tuple(0 if needed else None for needed in needs)
    dims = zip((dy, x, gate, rstd), (*in_dims[:3], in_dims[4]), strict=True)
    dy, x, gate, rstd = (to_front(tensor, dim, info.batch_size) for tensor, dim in dims)
    if in_dims[3] is None and not needs[2]:
        return op_bwd(dy, x, gate, weight, rstd, eps, spec, *needs), out_dims
    if weight is not None:
        weight = to_front(weight, in_dims[3], info.batch_size)
    gradients = gated_composite.gated_rms_norm_backward(
        dy, x, gate, weight, eps, decode(spec), needs, lead=1
    )
    return tuple(or_nothing(gradient, x) for gradient in gradients), out_dims


torch.library.register_vmap(op, _vmap, lib=_library)
torch.library.register_vmap(op_fwd, _vmap_fwd, lib=_library)
torch.library.register_vmap(op_bwd, _vmap_bwd, lib=_library)


def check(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float | None, spec: NormSpec
) -> None:
    """Refuse what the operation cannot do.

    Raises:
        TypeError: a dtype that is not float32, float64, bfloat16 or float16.
        ValueError: shapes that do not fit each other or the spec, a spec without a gate, or a bad
            eps.
        RuntimeError: tensors on different devices.
    """
    check_floating("x", x)
    check_like_x("gate", gate, x)
    check_has_gate(spec)
    check_norm(x, weight, None, eps, spec, 1)


def check_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float | None,
    spec: NormSpec,
) -> None:
    check(x, gate, weight, eps, spec)
    check_rstd(rstd, x, spec, 1)
    check_like_x("dy", dy, x)


def decode(spec: str) -> NormSpec:
    """The spec that an operation was given.

    Raises:
        ValueError: it is none, or has no gate.
    """
    decoded = NormSpec.decode(spec)
    check_has_gate(decoded)
    return decoded


def check_has_gate(spec: NormSpec) -> None:
    """Refuse a spec that does not say what to do with the gate.

    Raises:
        ValueError: it has no gate.
    """
    if spec.gate is None:
        raise ValueError(
            f"{spec} has no gate; use one with gate='silu' or 'sigmoid', such as 'mamba2'"
        )


def with_group_size(spec: NormSpec, group_size: int, shape: tuple[int, ...]) -> NormSpec:
    """``spec`` with groups of ``group_size`` elements, for rows at the end of ``shape``.

    Raises:
        TypeError: ``group_size`` is not an int.
        ValueError: it does not divide the rows, or the spec's mean square is a partial one.

    Example:
        >>> from rmsnorm.spec import specs
        >>> with_group_size(specs.mamba2, 64, (3, 256)).groups
        4
    """
    try:
        size = operator.index(group_size)
    except TypeError:
        raise TypeError(f"group_size is {group_size!r}; expected an int") from None
    d = shape[-1] if shape else 0
    if size < 1 or not shape or d % size:
        raise ValueError(
            f"group_size is {group_size}; expected a divisor of the last dimension of x, whose "
            f"shape is {shape}"
        )
    groups = max(d // size, 1)
    if groups == spec.groups:
        return spec
    # torch.compile looks through the cache, and warns.
    return replace(spec, groups=groups) if torch.compiler.is_compiling() else _cut(spec, groups)


@functools.lru_cache(maxsize=256)
def _cut(spec: NormSpec, groups: int) -> NormSpec:
    return replace(spec, groups=groups)


torch.fx.wrap("forward")  # torch.fx.symbolic_trace records the call, as for a torch function


def forward(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float | None, spec: NormSpec
) -> Tensor:
    """:func:`rmsnorm.gated_rms_norm` with every argument resolved.

    Args:
        x: (..., d).
        gate: (..., d), x's shape.
        weight: (d,), or ``None``.
        eps: ``None`` takes the spec's.
        spec: the convention, with a gate.

    Raises: as :func:`rmsnorm.gated_rms_norm`.
    """
    try:
        composed = needs_composite(x, gate, weight)
        if not composed:
            result: Tensor
            if not needs_gradient(x, gate, weight):
                result = op(x, gate, weight, eps, spec.encode())
                return result
            if kernels_differentiate(x):
                eps = None if eps is None else check_eps(eps)
                gate, weight = distinct(gate, x), distinct(weight, x, gate)
                result = _apply(x, gate, weight, eps, spec)
                return result
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        # The checks cost as much as a small call, so they run only once something is wrong: they
        # raise the same complaint with the type of error that Python users expect.
        _check_are_tensors(x, gate, weight)
        check(x, gate, weight, eps, spec)
        if not was_forward_mode_refused(error):
            raise
    _check_are_tensors(x, gate, weight)
    check(x, gate, weight, eps, spec)
    return gated_composite.gated_rms_norm(x, gate, weight, eps, spec)


def _check_are_tensors(x: object, gate: object, weight: object) -> None:
    check_is_tensor("x", x)
    check_is_tensor("gate", gate)
    if weight is not None:
        check_is_tensor("weight", weight)
