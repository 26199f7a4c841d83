"""The memory that a cell runs on, and the physical limit: copies of the same bytes.

A norm reads its input once and writes its output once, as a copy does, so no kernel is faster than
the best copy in the same state of the memory. Forward and backward read x and dy twice and write y
and dx once: that is three copies, x to y, dy to dx, and one that stands for the second reads. An
addition with its norm copies x to y and the residual to the sum, and its backward dy to dx besides.
In place nothing is copied: there the limit reads and writes back every element.

Three copies are timed, and the fastest is the limit: PyTorch's, by all threads; the C library's, by
one; and, where the system has a compiler for it, one by all threads that stores past the cache,
which wins where the output goes to memory.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsnorm.bench.goals import HUGE_PAGES, KEPT_MEMORY
from rmsnorm.bench.grid import HEADS, Cell
from rmsnorm.bench.stream import stream_copy
from rmsnorm.libc import c_function

COPIES = ("copy", "memcpy", "stream", "rewrite")
"""The names of the candidates that make up the limit."""

MEBIBYTE = 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

Arguments = tuple[Any, ...]
Bind = Callable[..., Arguments]


def _as_tuple(results: object) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True)
class Candidate:
    """One way to do the work of a cell.

    Attributes:
        call: what is timed.
        bind: the arguments of ``call`` for the tensors of the cell: ``(x, out)`` in forward cells,
            with None for a fresh output, ``(x, dy)``, ``(x, residual)`` or
            ``(x, residual, dy, dresidual)`` in the others. It runs outside the timed region.
        results: the tensors in what ``call`` returns, also outside of it.
    """

    name: str
    call: Callable[..., object]
    bind: Bind
    results: Callable[[object], tuple[Tensor, ...]] = _as_tuple


def absent_conditions(
    huge_pages: str = "/sys/kernel/mm/transparent_hugepage/enabled",
) -> frozenset[str]:
    """What goals need and this system lacks.

    Fresh memory in huge pages is an advantage only where a program has to ask for them: where the
    system gives them to everyone, the plain clone has them too.

    Args:
        huge_pages: the file that tells how the system gives them.

    Example:
        >>> HUGE_PAGES in absent_conditions("/nonexistent")
        True
    """
    absent = set()
    try:
        on_request = "[madvise]" in Path(huge_pages).read_text()
    except OSError:
        on_request = False
    if not on_request or os.environ.get("RMSNORM_HUGE_PAGES") == "0":
        absent.add(HUGE_PAGES)
    if c_function("mallopt") is None:
        absent.add(KEPT_MEMORY)
    return frozenset(absent)


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
        rotating: bytes of each input that rotating cells walk through.
    """

    def __init__(self, dtype: str, rotating: int) -> None:
        self._dtype = getattr(torch, dtype)
        self._rotating = rotating
        self._sources: list[Tensor] = []
        self._target = torch.empty(0, dtype=self._dtype)

    def buffers(self, cell: Cell) -> CellBuffers:
        """The buffers of ``cell``, at least two of each tensor where they rotate."""
        count = 1
        if cell.buffers == "rotating":
            count = max(2, math.ceil(self._rotating / cell.nbytes))
        if cell.kind == "heads":
            return self._heads(cell, count)
        size = count * cell.rows * cell.d
        shape = (count, cell.rows, cell.d)
        tensors: list[Tensor | None] = []
        for number in range(cell.inputs):
            source = self._source(number, size)[:size].view(shape)
            # What is overwritten is a copy, so that the next cell finds random numbers again.
            tensors.append(source.clone() if cell.output == "inplace" else source)
        if not cell.trains and cell.kind != "add":
            tensors.append(self._targets(size).view(shape) if cell.output == "given" else None)
        return CellBuffers(tensors)

    def _heads(self, cell: Cell, count: int) -> CellBuffers:
        """x is ``(count, batch, sequence, queries, d)``, a part of a fused projection; the output
        that is given is contiguous."""
        size = count * HEADS.stored * cell.d
        shape = (count, HEADS.batch, HEADS.sequence, HEADS.queries + HEADS.others, cell.d)
        x = self._source(0, size)[:size].view(shape)[:, :, :, : HEADS.queries]
        given = cell.output == "given"
        return CellBuffers([x, self._targets(x.numel()).view(x.shape) if given else None])

    def _source(self, number: int, size: int) -> Tensor:
        if number == len(self._sources):
            self._sources.append(torch.empty(0, dtype=self._dtype))
        if self._sources[number].numel() < size:
            self._sources[number] = random_values(size, self._dtype, seed=number)
        return self._sources[number]

    def _targets(self, size: int) -> Tensor:
        if self._target.numel() < size:
            # Written once, so that no timed call pays for the first touch of its pages.
            self._target = torch.zeros(size, dtype=self._dtype).fill_(1.0)
        return self._target[:size]


class CellBuffers:
    """``count`` of each tensor of a cell, walked through in order.

    Args:
        tensors: each ``(count, rows, d)``, or ``(count, batch, sequence, heads, d)``; None where
            every call allocates its result.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = tuple(tensors)
        self._count = max(len(tensor) for tensor in self._tensors if tensor is not None)
        self._next = 0

    def first(self) -> tuple[Tensor | None, ...]:
        """The first of each."""
        return self._at(0)

    def batch(self, bind: Bind, calls: int) -> Iterable[Arguments]:
        """The arguments of the next ``calls`` calls. Views are made here, and touch no data."""
        if self._count == 1:
            return repeat(bind(*self.first()), calls)
        return list(self._walk(bind, calls))

    def _walk(self, bind: Bind, calls: int) -> Iterator[Arguments]:
        for _ in range(calls):
            yield bind(*self._at(self._next))
            self._next = (self._next + 1) % self._count

    def _at(self, index: int) -> tuple[Tensor | None, ...]:
        return tuple(None if tensor is None else tensor[index] for tensor in self._tensors)


def copies(cell: Cell) -> list[Candidate]:
    """Copies of the bytes that the cell has to move at the least.

    Where the output is fresh or recycled, they allocate it, as the norm has to. In place it is one
    pass that reads every element and writes it back unchanged. Heads that are copied lie in the
    projection; for the copies of bare bytes as many bytes are taken in a row.
    """
    if cell.output == "inplace":
        return [Candidate("rewrite", _rewrite, lambda *tensors: tuple(map(_as_integers, tensors)))]
    stream = stream_copy(torch.get_num_threads())
    if cell.output == "given":
        found = [
            Candidate("copy", Tensor.copy_, lambda x, out: (out, x)),
            Candidate("memcpy", ctypes.memmove, _addresses),
        ]
        return found if stream is None else [*found, Candidate("stream", stream, _addresses)]
    fresh: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("copy", torch.clone),
        ("memcpy", _fresh(ctypes.memmove)),
    ]
    # The first touch of fresh pages takes most of the time, however they are stored to.
    if stream is not None and cell.output == "recycled":
        fresh.append(("stream", _fresh(stream)))
    if cell.kind in ("forward", "heads"):
        return [Candidate(name, copy, lambda x, out: (x,)) for name, copy in fresh]
    if cell.kind == "train":
        over = {"copy": _copy_over, "memcpy": _over(ctypes.memmove)}
        if stream is not None:
            over["stream"] = _over(stream)
        return [
            Candidate(name, _twice_read(copy, over[name]), lambda x, dy: (x, dy))
            for name, copy in fresh
        ]
    # The gradient of the sum, the fourth tensor, is only read.
    return [Candidate(name, _each(copy), lambda *tensors: tensors[:3]) for name, copy in fresh]


def limit_bytes(cell: Cell) -> int:
    """The bytes that one call of each of :func:`copies` reads and writes.

    Example:
        >>> limit_bytes(Cell("train", 512, 4096, "bfloat16")) // 2**20
        24
    """
    if cell.output == "inplace":
        return 2 * cell.inputs * cell.nbytes
    if cell.kind in ("train", "add_train"):
        return 6 * cell.nbytes
    return 2 * cell.inputs * cell.nbytes


def _each(copy: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    return lambda *tensors: [copy(tensor) for tensor in tensors]


def _twice_read(
    copy: Callable[[Tensor], Tensor], over: Callable[[Tensor, Tensor], object]
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Copies x and dy to new tensors, and x once more, over its copy: no page is touched first."""

    def move(x: Tensor, dy: Tensor) -> list[Tensor]:
        results = [copy(x), copy(dy)]
        over(results[0], x)
        return results

    return move


def _copy_over(out: Tensor, x: Tensor) -> object:
    return out.copy_(x)


def _over(move: Callable[[int, int, int], object]) -> Callable[[Tensor, Tensor], object]:
    return lambda out, x: move(out.data_ptr(), x.data_ptr(), x.nbytes)


def _fresh(move: Callable[[int, int, int], object]) -> Callable[[Tensor], Tensor]:
    def copy(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        move(out.data_ptr(), x.data_ptr(), x.nbytes)
        return out

    return copy


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _rewrite(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.add_(0)


def _addresses(x: Tensor, out: Tensor | None) -> Arguments:
    assert out is not None
    return out.data_ptr(), x.data_ptr(), x.nbytes


def random_values(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """``size`` normal numbers; a million are drawn and repeated, which is much faster."""
    block = torch.randn(min(size, 2**20), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return block.repeat(math.ceil(size / block.numel()))[:size].clone()
