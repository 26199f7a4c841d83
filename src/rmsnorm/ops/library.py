"""The one library that the operations of this package are registered in, and what they share."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

library = torch.library.Library("rmsnorm", "DEF")


def bumps_version(operation: str) -> None:
    """Let autograd notice what ``operation`` changes in place, whoever calls it."""
    assert library.m is not None
    library.m.register_ad_inplace_or_view_fallback(f"rmsnorm::{operation}")


def or_nothing(gradient: Tensor | None, x: Tensor) -> Tensor:
    """What a backward operation returns for a gradient: (0,) where it was not wanted."""
    return x.new_empty(0) if gradient is None else gradient


def to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """``tensor`` with the dimension that ``vmap`` runs over in front.

    Args:
        dim: where that dimension is; ``None`` where the tensor is the same for all.
        size: of that dimension.

    Example:
        >>> to_front(torch.ones(2, 3), 1, 3).shape, to_front(torch.ones(2), None, 3).shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def first_of(tensor: Tensor | None, dim: int | None) -> Tensor | None:
    """``tensor`` as one call under ``vmap`` sees it."""
    return tensor if tensor is None or dim is None else tensor.select(dim, 0)


_T = TypeVar("_T", Tensor, Tensor | None)


def distinct(tensor: _T, *others: Tensor | None) -> _T:
    """``tensor``, or a view of it while ``torch.compile`` traces and it is one of ``others``.

    An ``autograd.Function`` that is given one tensor twice cannot be traced.

    Example:
        >>> x = torch.ones(2)
        >>> distinct(x, x) is x
        True
    """
    if tensor is not None and torch.compiler.is_compiling():
        for other in others:
            if other is tensor:
                return tensor.view_as(tensor)
    return tensor
