"""How the tests call rms_norm and compare what it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rmsnorm import NormSpec, rms_norm, specs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

UNGATED = {name: specs[name] for name in specs if specs[name].gate is None}
# The named conventions, and every other field of NormSpec at least once.
ALL_SPECS: dict[str, NormSpec] = {
    **UNGATED,
    "llama_input": replace(specs.llama, output="input"),
    "gemma_before": replace(specs.llama, offset=1.0),
    "weight_out": replace(specs.torch, output="weight", eps=1e-5),
    "root_mean": replace(specs.gemma, eps_in="root"),
    "partial": replace(specs.torch, partial=0.0625, eps=1e-6),
    "partial_llama": replace(specs.llama, partial=0.3),
}


def bits(x: Tensor) -> Tensor:
    """The patterns of ``x`` as integers, every nan as one of them."""
    patterns = x.detach().contiguous().view(_INTEGERS[x.element_size()])
    return torch.where(x.isnan(), torch.iinfo(patterns.dtype).max, patterns)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit: -0 is not 0, nan is nan."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bits(a), bits(b))


def normalise(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, **kw: Any
) -> Tensor:
    """:func:`rms_norm`, also into an ``out`` full of nan: both must have the same bits."""
    with torch.no_grad():
        y = rms_norm(x, weight, eps, **kw)
        out = torch.full(y.shape, torch.nan, dtype=y.dtype)
        returned = rms_norm(x, weight, eps, out=out, **kw)
    assert returned is out
    assert same_bits(y, out)
    assert y.shape == x.shape
    assert y.is_contiguous()
    return y


def rows_of(dtype: torch.dtype, rows: int, d: int, seed: int) -> Tensor:
    """Normal numbers (rows, d), each row on a scale of its own, between 1/64 and 64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, generator=generator)
    return (x * 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)).to(dtype)


def weight_of(dtype: torch.dtype, d: int, seed: int) -> Tensor:
    """Weights (d,) around 1, a few of them negative."""
    generator = torch.Generator().manual_seed(seed + 1)
    return (1.0 + torch.randn(d, generator=generator) / 2).to(dtype)
