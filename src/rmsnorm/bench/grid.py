"""The cells of the benchmark, and what must hold in each of them.

A cell is one shape, one dtype, one state of the memory. Two kinds exist: ``forward`` compares the
norm with its peers and with a copy of the same bytes; ``call`` compares the cost of one call
through ``torch.ops`` with ``torch.add``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "call"]
Buffers = Literal["hot", "rotating"]
Output = Literal["fresh", "given"]
GradMode = Literal["inference", "no_grad"]

SHAPES: tuple[tuple[int, int], ...] = (
    (1, 576),
    (1, 4096),
    (8, 4096),
    (32, 2048),
    (512, 4096),
    (4096, 768),
    (32768, 128),
    (16384, 1024),
    (2048, 8192),
    (4096, 4096),
)
DTYPES: tuple[str, ...] = ("float32", "bfloat16")
BUFFERS: tuple[Buffers, ...] = ("hot", "rotating")
OUTPUTS: tuple[Output, ...] = ("fresh", "given")

# The conventions that are timed: torch's own, and the one most model families use. Each is
# compared with peers that compute the same function.
SPECS: tuple[str, ...] = ("torch", "llama")

CALL_SHAPES: tuple[tuple[int, int], ...] = ((1, 4096),)
CALL_LIMIT = 1.9
COPY_SHAPE = (4096, 4096)
COPY_LIMIT = 1.3

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Cell:
    """One cell: ``x`` is ``(rows, d)`` of ``dtype``.

    Attributes:
        buffers: ``hot``: one input (and output) buffer, used again and again. ``rotating``: the
            calls walk through buffers that together exceed the last-level cache.
        output: ``fresh``: every call allocates its result. ``given``: the result is written into a
            tensor that exists.

    Example:
        >>> print(Cell("forward", 8, 4096, "bfloat16", "hot", "given"))
        8x4096 bfloat16 hot given
    """

    kind: Kind
    rows: int
    d: int
    dtype: str
    buffers: Buffers = "hot"
    output: Output = "fresh"
    grad_mode: GradMode = "inference"

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.d}"

    @property
    def nbytes(self) -> int:
        """The bytes of ``x``."""
        return self.rows * self.d * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        if self.kind == "call":
            return f"{self.shape} {self.dtype} call {self.grad_mode}"
        return f"{self.shape} {self.dtype} {self.buffers} {self.output}"


@dataclass(frozen=True)
class Limit:
    """``ours`` may take at most ``ratio`` times as long as ``rival``; both name candidates.

    A ``strict`` limit is also broken by equality: the same speed as a peer is not faster.
    """

    ours: str
    rival: str
    ratio: float
    strict: bool

    def holds(self, ratio: float) -> bool:
        """
        Example:
            >>> Limit("ours torch", "eager torch", 1.0, strict=True).holds(1.0)
            False
        """
        return ratio < self.ratio if self.strict else ratio <= self.ratio


def forward_cells(
    shapes: Iterable[tuple[int, int]] = SHAPES,
    dtypes: Iterable[str] = DTYPES,
    buffers: Iterable[Buffers] = BUFFERS,
    outputs: Iterable[Output] = OUTPUTS,
) -> list[Cell]:
    """Every combination, one dtype and one shape after the other.

    Example:
        >>> len(forward_cells())
        80
    """
    buffers, outputs, shapes = tuple(buffers), tuple(outputs), tuple(shapes)
    return [
        Cell("forward", rows, d, dtype, buffer, output)
        for dtype in dtypes
        for rows, d in shapes
        for output in outputs
        for buffer in buffers
    ]


def call_cells() -> list[Cell]:
    """One row of bfloat16 through ``torch.ops``, in inference mode and under ``no_grad``.

    Example:
        >>> [str(cell) for cell in call_cells()][0]
        '1x4096 bfloat16 call inference'
    """
    modes: tuple[GradMode, ...] = ("inference", "no_grad")
    return [
        Cell("call", rows, d, "bfloat16", grad_mode=mode)
        for rows, d in CALL_SHAPES
        for mode in modes
    ]


def limits(cell: Cell) -> list[Limit]:
    """What must hold in ``cell``.

    Example:
        >>> limits(Cell("call", 1, 4096, "bfloat16"))
        [Limit(ours='op torch', rival='add', ratio=1.9, strict=False)]
    """
    if cell.kind == "call":
        return [Limit("op torch", "add", CALL_LIMIT, strict=False)]
    found = [
        Limit(f"ours {spec}", f"{peer} {spec}", 1.0, strict=True)
        for spec in SPECS
        for peer in ("eager", "compiled")
    ]
    is_copy_cell = (cell.rows, cell.d) == COPY_SHAPE and cell.dtype == "bfloat16"
    if is_copy_cell and cell.output == "given":
        found += [Limit(f"ours {spec}", "copy", COPY_LIMIT, strict=False) for spec in SPECS]
    return found


def parse_shape(text: str) -> tuple[int, int]:
    """``"512x4096"`` as ``(512, 4096)``.

    Raises:
        ValueError: ``text`` is not of that form.

    Example:
        >>> parse_shape("1x576")
        (1, 576)
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a shape; expected ROWSxWIDTH, such as 512x4096")
    return int(match[1]), int(match[2])
