"""The memory that a cell runs on, and the physical limit: a copy of the same bytes.

A norm reads its input once and writes its output once, as a copy does, so no kernel is faster than
the best copy in the same state of the memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsnorm.bench.grid import Cell

MEBIBYTE = 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

Arguments = tuple[Any, ...]
Bind = Callable[[Tensor, "Tensor | None"], Arguments]


@dataclass(frozen=True)
class Candidate:
    """One way to do the work of a cell.

    Attributes:
        call: what is timed.
        bind: the arguments of ``call`` for one input and, where the output is given, one output.
            It runs outside the timed region.
    """

    name: str
    call: Callable[..., object]
    bind: Bind


def last_level_cache_bytes(root: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """The size of the last-level cache, 32 MiB where the system does not tell.

    Example:
        >>> last_level_cache_bytes("/nonexistent") == 32 * 2**20
        True
    """
    found = [(0, 32 * MEBIBYTE)]
    for index in Path(root).glob("index*"):
        try:
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
            found.append((level, int(size[:-1]) * _UNITS[size[-1]]))
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(found)[1]


def rotating_bytes(cache_bytes: int) -> int:
    """How many bytes of input the rotating cells walk through: three times the cache.

    At least 96 MiB, since a virtual machine may report less cache than it shares; at most 512 MiB,
    since large servers report more than one process is given.

    Example:
        >>> rotating_bytes(16 * 2**20) // 2**20
        96
    """
    return min(max(3 * cache_bytes, 96 * MEBIBYTE), 512 * MEBIBYTE)


class Memory:
    """The buffers of one dtype, made once and viewed as each cell needs them.

    Args:
        dtype: the name of a torch dtype.
        rotating: bytes of input that rotating cells walk through.
    """

    def __init__(self, dtype: str, rotating: int) -> None:
        self._dtype = getattr(torch, dtype)
        self._rotating = rotating
        self._source = torch.empty(0, dtype=self._dtype)
        self._target = torch.empty(0, dtype=self._dtype)

    def buffers(self, cell: Cell) -> CellBuffers:
        """The buffers of ``cell``, at least two of them where they rotate."""
        count = 1
        if cell.buffers == "rotating":
            count = max(2, math.ceil(self._rotating / cell.nbytes))
        size = count * cell.rows * cell.d
        if self._source.numel() < size:
            self._source = _random(size, self._dtype)
        target = None
        if cell.output == "given":
            if self._target.numel() < size:
                # Written once, so that no timed call pays for the first touch of its pages.
                self._target = torch.zeros(size, dtype=self._dtype).fill_(1.0)
            target = self._target[:size].view(count, cell.rows, cell.d)
        return CellBuffers(self._source[:size].view(count, cell.rows, cell.d), target)


class CellBuffers:
    """``count`` inputs ``(rows, d)`` and as many outputs, walked through in order.

    Args:
        sources: ``(count, rows, d)``.
        targets: ``(count, rows, d)``, or None where every call allocates its result.
    """

    def __init__(self, sources: Tensor, targets: Tensor | None) -> None:
        self._sources, self._targets = sources, targets
        self._next = 0

    def first(self) -> tuple[Tensor, Tensor | None]:
        return self._sources[0], None if self._targets is None else self._targets[0]

    def batch(self, bind: Bind, calls: int) -> Iterable[Arguments]:
        """The arguments of the next ``calls`` calls. Views are made here, and touch no data."""
        if len(self._sources) == 1:
            return repeat(bind(*self.first()), calls)
        return list(self._walk(bind, calls))

    def _walk(self, bind: Bind, calls: int) -> Iterator[Arguments]:
        for _ in range(calls):
            target = None if self._targets is None else self._targets[self._next]
            yield bind(self._sources[self._next], target)
            self._next = (self._next + 1) % len(self._sources)


def copies(cell: Cell) -> list[Candidate]:
    """A tensor copy and a ``memcpy`` of the bytes of the cell's input.

    Where the output is fresh, both allocate it, as the norm has to.
    """
    if cell.output == "given":
        return [
            Candidate("copy", Tensor.copy_, lambda x, out: (out, x)),
            Candidate("memcpy", ctypes.memmove, _addresses),
        ]
    return [
        Candidate("copy", torch.clone, lambda x, out: (x,)),
        Candidate("memcpy", _memcpy_fresh, lambda x, out: (x,)),
    ]


def _addresses(x: Tensor, out: Tensor | None) -> Arguments:
    assert out is not None
    return out.data_ptr(), x.data_ptr(), x.nbytes


def _memcpy_fresh(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out


def _random(size: int, dtype: torch.dtype) -> Tensor:
    """``size`` normal numbers; a million are drawn and repeated, which is much faster."""
    block = torch.randn(min(size, 2**20), generator=torch.Generator().manual_seed(0)).to(dtype)
    return block.repeat(math.ceil(size / block.numel()))[:size].clone()
