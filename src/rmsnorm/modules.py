"""RMSNorm as modules: with the signature of ``torch.nn.RMSNorm``, and with a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from rmsnorm.ops import add_rms_norm as add_operation
from rmsnorm.ops import gated_rms_norm as gated_operation
from rmsnorm.ops import rms_norm as operation
from rmsnorm.ops.direct import entry
from rmsnorm.ops.route import as_shape
from rmsnorm.spec import NormSpec, as_spec, check_eps, specs


class _Norm(nn.Module):
    """What both modules have: a spec, and a weight unless it is left out."""

    elementwise_affine: bool
    spec: NormSpec
    weight: nn.Parameter | None

    def _make_weight(
        self,
        shape: tuple[int, ...],
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
    ) -> None:
        if self.elementwise_affine:
            weight = torch.empty(shape, device=device, dtype=dtype)
            operation.check_floating("weight", weight)
            self.weight = nn.Parameter(weight)
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to the value with which the norm only normalises."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.spec.offset)


class RMSNorm(_Norm):
    """Root mean square layer normalisation (Zhang & Sennrich 2019,
    https://arxiv.org/abs/1910.07467) over the last dimension(s), with a learnable weight.

    Replaces ``torch.nn.RMSNorm`` by a change of the import: the parameter is called ``weight``,
    state dicts have the same keys, and the result has the same bits.

    Args:
        normalized_shape: size of the last dimension, or sizes of the last dimensions.
        eps: the constant beside the mean square; ``None`` takes the spec's.
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        spec: the convention, a :class:`~rmsnorm.NormSpec` or the name of one in
            :data:`rmsnorm.specs`.

    Shape:
        input (..., *normalized_shape), output the same, contiguous; float32, float64, bfloat16 or
        float16, the output in the dtype that the spec names (x's, for the default).

    The weight starts at 1, or at 0 for a zero-centred spec (offset 1).

    Raises:
        ValueError: an empty or negative shape, a bad eps, an unknown spec, a spec with a gate or
            with groups that do not divide the shape.
        TypeError: a shape that is not made of ints.

    Example:
        >>> norm = RMSNorm(2, eps=1e-6, spec="llama")
        >>> norm(torch.tensor([3.0, 4.0])).detach()
        tensor([0.8485, 1.1314])
        >>> y, residual = norm(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0]))  # adds first
        >>> residual.detach()
        tensor([3., 4.])
        >>> norm
        RMSNorm((2,), eps=1e-06, elementwise_affine=True, spec='llama')
    """

    __constants__ = ("elementwise_affine", "eps", "normalized_shape")
    normalized_shape: tuple[int, ...]
    eps: float | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: NormSpec | str = "torch",
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = None if eps is None else check_eps(eps)
        self.elementwise_affine = elementwise_affine
        self.spec = as_spec(spec)
        if self.spec.gate is not None:
            raise ValueError(
                f"{self.spec} has a gate, but RMSNorm takes one input; use a spec without a gate"
            )
        self.spec.width(math.prod(self.normalized_shape))  # refuses groups that do not fit
        self._make_weight(self.normalized_shape, device, dtype)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise ``x`` (..., *normalized_shape), or the sum of ``x`` and ``residual``.

        Args:
            x: float32, float64, bfloat16 or float16.
            residual: of x's shape. If it is given, the result is a pair: the norm of x + residual,
                and that sum, which is the new residual. The bits are those of the two steps.

        Raises:
            ValueError: x does not end in ``normalized_shape``, or residual has another shape.
            TypeError: a dtype that has no RMSNorm.
            RuntimeError: x, residual and the weight are on different devices.
        """
        found = None
        if entry is not None and residual is None and not is_dynamo_compiling():
            if type(self) is RMSNorm:
                found = entry.module_norm(self, x)
            elif (weight := self._parameters.get("weight")) is not None:
                # It may have properties in the place of attributes.
                ndim = len(self.normalized_shape)
                found = entry.rms_norm(x, weight, self.eps, self.spec, ndim)
            if found is not None and found is not True:
                y: Tensor = found
                return y
        # `self.weight` would search the class and __getattr__ first.
        weight = self._parameters.get("weight")
        ndim = len(self.normalized_shape)
        if found is True and weight is not None:
            return operation.forward_plain(x, weight, self.eps, self.spec, ndim)
        if weight is None:
            weight = self.weight  # a parametrization, or None
        if weight is None:  # otherwise the operation compares x with the weight
            operation.count_dimensions(x, self.normalized_shape)
        if residual is not None:
            operation.check_is_tensor("residual", residual)
            # Under autocast a sublayer's result is narrower than the stream.
            if x.dtype != residual.dtype and x.is_floating_point() and residual.is_floating_point():
                dtype = torch.promote_types(x.dtype, residual.dtype)
                x, residual = x.to(dtype), residual.to(dtype)
            return add_operation.forward(x, residual, weight, self.eps, self.spec, ndim)
        return operation.forward(x, weight, None, self.eps, self.spec, ndim)

    def extra_repr(self) -> str:
        text = (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )
        name = _name_of(self.spec)
        return text if name == "torch" else f"{text}, spec={name!r}"


class GatedRMSNorm(_Norm):
    """RMSNorm over the last dimension, multiplied by an activated gate before or after.

    As the mixers of Mamba2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section 7.1), of
    Zamba2, Nemotron-H and Falcon-H1, and of the gated delta nets (Yang et al. 2024,
    https://arxiv.org/abs/2412.06464) of Qwen3-Next and Kimi Linear use it; the formula is that of
    :func:`rmsnorm.gated_rms_norm`. The parameter is called ``weight``, as in the classes of
    transformers, so their state dicts load.

    Args:
        hidden_size: size of the last dimension.
        eps: the constant beside the mean square; ``None`` takes the spec's.
        group_size: take the mean square over parts of this many elements; ``None`` takes the
            spec's ``groups``, which is 1 in every named spec.
        device: of the weight.
        dtype: of the weight.
        spec: the convention, a :class:`~rmsnorm.NormSpec` with a gate or the name of one in
            :data:`rmsnorm.specs`: ``"mamba2"``, ``"falcon_h1"``, ``"qwen3_next"``,
            ``"kimi_linear"``.
        elementwise_affine: whether there is a weight.

    Shape:
        input and gate (..., hidden_size), output the same, contiguous; float32, float64, bfloat16
        or float16, the output in the dtype that the spec names.

    The weight starts at 1, or at 0 for a zero-centred spec (offset 1).

    Raises:
        ValueError: a negative size, a group_size that does not divide it, a bad eps, an unknown
            spec or one without a gate.
        TypeError: a size that is not an int.

    Example:
        >>> norm = GatedRMSNorm(4, eps=0.0, group_size=2)
        >>> x, gate = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.ones(4)
        >>> norm(x, gate).detach()
        tensor([1., 1., 1., 1.])
        >>> GatedRMSNorm(4, spec="kimi_linear")
        GatedRMSNorm(4, eps=None, group_size=None, elementwise_affine=True, spec='kimi_linear')
    """

    __constants__ = ("elementwise_affine", "eps", "group_size", "hidden_size")
    hidden_size: int
    eps: float | None
    group_size: int | None

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = None,
        *,
        group_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        spec: NormSpec | str = "mamba2",
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        shape = _shape(hidden_size)
        if len(shape) != 1:
            raise ValueError(f"hidden_size is {hidden_size!r}; expected one size")
        self.hidden_size = shape[0]
        self.eps = None if eps is None else check_eps(eps)
        self.group_size = group_size
        self.elementwise_affine = elementwise_affine
        self.spec = as_spec(spec)
        gated_operation.check_has_gate(self.spec)
        if group_size is not None:
            self.spec = gated_operation.with_group_size(self.spec, group_size, shape)
        self.spec.width(self.hidden_size)  # refuses groups that do not fit
        self._spec_without_gate = replace(self.spec, gate=None)
        self._make_weight(shape, device, dtype)

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise ``hidden_states`` (..., hidden_size), with ``gate`` of the same shape.

        Without a gate it is the spec's norm alone.

        Raises:
            ValueError: hidden_states does not end in ``hidden_size``, or gate has another shape.
            TypeError: a dtype that has no RMSNorm.
            RuntimeError: tensors on different devices.
        """
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight  # a parametrization, or None
        if weight is None:  # otherwise the operation compares hidden_states with the weight
            operation.count_dimensions(hidden_states, (self.hidden_size,))
        if gate is None:
            return operation.forward(hidden_states, weight, None, self.eps, self._spec_without_gate)
        return gated_operation.forward(hidden_states, gate, weight, self.eps, self.spec)

    def extra_repr(self) -> str:
        named = replace(self.spec, groups=1) if self.group_size is not None else self.spec
        text = (
            f"{self.hidden_size}, eps={self.eps}, group_size={self.group_size}, "
            f"elementwise_affine={self.elementwise_affine}"
        )
        return f"{text}, spec={_name_of(named)!r}"


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    shape = as_shape(normalized_shape)
    if not shape or any(size < 0 for size in shape):
        raise ValueError(
            f"normalized_shape is {normalized_shape!r}; expected at least one size, none negative"
        )
    return shape


def _name_of(spec: NormSpec) -> NormSpec | str:
    """The name under which the spec can be given, or the spec itself."""
    for name in specs:
        if specs[name] == spec:
            return name
    return spec
