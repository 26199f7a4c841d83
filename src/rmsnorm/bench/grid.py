"""The cells of the benchmark, and what must hold in each of them.

A cell is one shape, one dtype, one state of the memory, of one kind:

* ``forward``: the norm against its peers and against a copy of the same bytes;
* ``train``: the norm and its backward, to the gradients of x and of the weight;
* ``add``: the residual addition and the norm of the sum;
* ``add_train``: the same and its backward, with a gradient for both results;
* ``call``: the cost of one call through ``torch.ops`` against ``torch.add``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "train", "add", "add_train", "call"]
Buffers = Literal["hot", "rotating"]
Output = Literal["fresh", "given", "inplace"]
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
OUTPUTS: tuple[Output, ...] = ("fresh", "given", "inplace")

# The conventions that are timed: torch's own, and the one most model families use. Each is
# compared with peers that compute the same function.
SPECS: tuple[str, ...] = ("torch", "llama")

# Which outputs the cells of a kind have. A backward allocates what it returns.
OUTPUTS_OF: dict[Kind, tuple[Output, ...]] = {
    "forward": ("fresh", "given"),
    "train": ("fresh",),
    "add": ("fresh", "inplace"),
    "add_train": ("fresh",),
}
ADD_TRAIN_SHAPES: tuple[tuple[int, int], ...] = ((1, 4096), (512, 4096), (4096, 4096))

# Forward and backward against PyTorch's own norm: at most these shares of its time.
TRAIN_EAGER_LIMIT = 1 / 4
# With fewer rows autograd itself, which eager pays too, is a large part of a step: see the peer
# "autograd". There ours must be faster, no more.
TRAIN_EAGER_ROWS = 512
TRAIN_COMPILED_LIMIT = 1 / 1.5
TRAIN_COMPILED_ROWS = 32

CALL_SHAPES: tuple[tuple[int, int], ...] = ((1, 4096),)
CALL_LIMIT = 1.9
COPY_SHAPE = (4096, 4096)
COPY_LIMIT = 1.3

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

# How many tensors of x's size a cell is given (x; x and dy; x and residual; these two and the
# gradients of both results), and how many results of x's size a fresh cell allocates.
_INPUTS: dict[Kind, int] = {"forward": 1, "train": 2, "add": 2, "add_train": 4, "call": 1}
_RESULTS: dict[Kind, int] = {"forward": 1, "train": 2, "add": 2, "add_train": 3, "call": 1}


@dataclass(frozen=True)
class Cell:
    """One cell: ``x`` is ``(rows, d)`` of ``dtype``.

    Attributes:
        buffers: ``hot``: one input (and output) buffer, used again and again. ``rotating``: the
            calls walk through buffers that together exceed the last-level cache.
        output: ``fresh``: every call allocates its results. ``given``: the result is written into a
            tensor that exists. ``inplace``: the results are written over x and the residual.

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

    @property
    def inputs(self) -> int:
        """How many tensors of x's shape the calls are given, an output not counted."""
        return _INPUTS[self.kind]

    @property
    def touched_bytes(self) -> int:
        """The bytes that one call reads or writes: its inputs and its results."""
        results = 0 if self.output == "inplace" else _RESULTS[self.kind]
        return (self.inputs + results) * self.nbytes

    @property
    def trains(self) -> bool:
        """Whether a call is a forward and a backward."""
        return self.kind in ("train", "add_train")

    def __str__(self) -> str:
        if self.kind == "call":
            return f"{self.shape} {self.dtype} call {self.grad_mode}"
        start = f"{self.shape} {self.dtype} {self.buffers}"
        return {
            "forward": f"{start} {self.output}",
            "train": f"{start} train",
            "add": f"{start} {self.output} add",
            "add_train": f"{start} add train",
        }[self.kind]


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


def grid_cells(
    kinds: Iterable[Kind],
    shapes: Iterable[tuple[int, int]] | None = None,
    dtypes: Iterable[str] = DTYPES,
    buffers: Iterable[Buffers] = BUFFERS,
    outputs: Iterable[Output] = OUTPUTS,
) -> list[Cell]:
    """Every combination, one kind, one dtype and one shape after the other.

    Args:
        kinds: any but ``call``.
        shapes: None takes the shapes of each kind: all of the grid, or a few for ``add_train``.
        dtypes: names of dtypes.
        buffers: the states of the memory.
        outputs: those that a kind does not have are left out.

    Example:
        >>> [len(grid_cells([kind])) for kind in ("forward", "train", "add", "add_train")]
        [80, 40, 80, 12]
    """
    dtypes, buffers, outputs = tuple(dtypes), tuple(buffers), tuple(outputs)
    chosen = None if shapes is None else tuple(shapes)
    return [
        Cell(kind, rows, d, dtype, buffer, output)
        for kind in kinds
        for dtype in dtypes
        for rows, d in chosen or (ADD_TRAIN_SHAPES if kind == "add_train" else SHAPES)
        for output in OUTPUTS_OF[kind]
        if output in outputs
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
    if cell.kind == "train":
        return _train_limits(cell)
    found = [
        Limit(f"ours {spec}", f"{peer} {spec}", 1.0, strict=True)
        for spec in SPECS
        for peer in peers_of(cell.kind, spec)
    ]
    is_copy_cell = (cell.rows, cell.d) == COPY_SHAPE and cell.dtype == "bfloat16"
    if is_copy_cell and cell.output == "given":
        found += [Limit(f"ours {spec}", "copy", COPY_LIMIT, strict=False) for spec in SPECS]
    return found


def peers_of(kind: Kind, spec: str) -> tuple[str, ...]:
    """What is timed beside ours.

    Example:
        >>> peers_of("add", "torch")
        ('separate', 'eager', 'compiled')
    """
    if kind in ("forward", "train"):
        return ("eager", "compiled")
    # One convention is enough to compare a compiler's fusion of the addition with ours.
    return ("separate", "eager", "compiled") if spec == "torch" else ("separate", "eager")


def _train_limits(cell: Cell) -> list[Limit]:
    return [
        Limit("ours torch", "eager torch", TRAIN_EAGER_LIMIT, strict=False)
        if cell.rows >= TRAIN_EAGER_ROWS
        else Limit("ours torch", "eager torch", 1.0, strict=True),
        Limit("ours torch", "compiled torch", TRAIN_COMPILED_LIMIT, strict=False)
        if cell.rows >= TRAIN_COMPILED_ROWS
        else Limit("ours torch", "compiled torch", 1.0, strict=True),
        Limit("ours llama", "eager llama", 1.0, strict=True),
        Limit("ours llama", "compiled llama", 1.0, strict=True),
    ]


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
