"""The proven computation of one module: what a call of it becomes, and which calls it covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rmsnorm.ops.transforms import in_autocast, in_jit_trace, is_ordinary
from rmsnorm.rewrite.probe import Slot, dtype_name
from rmsnorm.rewrite.prove import Pair
from rmsnorm.rewrite.report import spec_name
from rmsnorm.spec import NormSpec


@dataclass(frozen=True)
class Plan:
    """What a swapped module knows about itself; everything else is read from it at each call.

    Args:
        spec: the convention, its eps ``None``: what is passed beside it decides.
        eps: the hard-coded eps, or the one at the time of the proof.
        eps_path: the attributes that lead to eps, or ``None`` if it is hard-coded.
        shape: the normalised dimensions, or ``None`` for rows of any width.
        ndim: how many they are.
        weight: where the weight is.
        bias: where the bias is.
        pairs: the proven pairs of dtypes.
        device: the type of device on which they were proven.
        argument: the name of forward's argument.
        bit_identical: whether all pairs gave the module's own bits.
        watched: attributes whose change makes the proof void.
        reshapes: a weight or bias has leading dimensions of 1.
        had_forward: the instance had its class's own forward as an attribute.
    """

    spec: NormSpec
    eps: float | None
    eps_path: tuple[str, ...] | None
    shape: tuple[int, ...] | None
    ndim: int
    weight: Slot | None
    bias: Slot | None
    pairs: frozenset[Pair]
    device: str
    argument: str | None
    bit_identical: bool
    watched: tuple[tuple[str, Any], ...]
    reshapes: bool = False
    had_forward: bool = False

    def eps_of(self, module: nn.Module) -> Any:
        """The eps that ``module`` uses now."""
        if self.eps_path is None:
            return self.eps
        value: Any = module
        for name in self.eps_path:
            value = getattr(value, name)
        return value

    def operands(self, module: nn.Module, x: Tensor) -> tuple[Any, ...] | None:
        """(weight, bias, eps) of a call that is proven, or ``None``.

        Runs at every call, so the usual case asks each tensor as little as possible.
        """
        weight: Tensor | None = None
        bias: Tensor | None = None
        if self.weight is not None:
            weight = module._parameters.get(self.weight.name)
            if weight is None:  # a buffer, an attribute, or a parameter that somebody wraps
                weight = getattr(module, self.weight.name, None)
        if self.bias is not None:
            bias = getattr(module, self.bias.name, None)
        if type(x) is not Tensor and not is_ordinary(x):
            return None
        beside = bias if weight is None else weight
        if (x.dtype, None if beside is None else beside.dtype) not in self.pairs:
            return None
        if not (x.is_cpu if self.device == "cpu" else x.device.type == self.device):
            return None
        shape = x.shape
        if self.ndim > 1:
            if shape[-self.ndim :] != self.shape:
                return None
        elif not shape or (self.shape is not None and shape[-1] != self.shape[0]):
            return None
        if self.weight is not None and not self._fits(self.weight, weight, x, weight):
            return None
        if self.bias is not None and not self._fits(self.bias, bias, x, weight):
            return None
        # A graph that torch.jit records should run, or be converted, without this package.
        if in_autocast() or in_jit_trace():
            return None
        eps = self.eps if self.eps_path is None else self.eps_of(module)
        if type(eps) is float:
            if not eps >= 0.0:
                return None
        elif type(eps) is int and eps >= 0:
            eps = float(eps)
        elif eps is not None or self.eps is not None:
            return None
        if self.reshapes:
            # Broadcasting would add dimensions to a shorter x.
            if any(s is not None and len(shape) < len(s.shape) for s in (self.weight, self.bias)):
                return None
            if self.weight is not None and weight is not None:
                weight = weight.reshape(self.weight.row_shape)
            if self.bias is not None and bias is not None:
                bias = bias.reshape(self.bias.row_shape)
        return weight, bias, eps

    def is_void_with(self, name: str, value: Any) -> bool:
        """Whether a module proven otherwise has got an attribute ``name`` of this ``value``."""
        return any(
            name == watched and not (type(value) is type(before) and value == before)
            for watched, before in self.watched
        )

    def __str__(self) -> str:
        return f"{spec_name(self.spec)} in {_pairs_text(self.pairs)}"

    @staticmethod
    def _fits(slot: Slot, tensor: Any, x: Tensor, weight: Tensor | None) -> bool:
        """Whether a weight or bias is as it was when the module was proven."""
        if type(tensor) is not nn.Parameter and not is_ordinary(tensor):
            return False
        if tensor.shape != slot.shape or tensor.is_cpu is not x.is_cpu:
            return False
        return tensor is weight or weight is None or tensor.dtype == weight.dtype


def _pairs_text(pairs: frozenset[Pair]) -> str:
    """The dtypes of rows, and those of their weights where not all of these were proven."""
    alike = sorted(dtype_name(x) for x, weight in pairs if weight in (x, None))
    mixed = sorted(
        f"{dtype_name(x)} with {dtype_name(weight)} weight"
        for x, weight in pairs
        if weight is not None and weight != x
    )
    every = len(alike) ** 2 == len(pairs)
    return ", ".join(alike if every else alike + mixed)
