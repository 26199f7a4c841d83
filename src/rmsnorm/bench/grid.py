"""The cells of the benchmark. What must hold in them stands in :mod:`rmsnorm.bench.goals`.

A cell is one shape, one dtype, one state of the memory, of one kind:

* ``forward``: the norm against its peers and against a copy of the same bytes;
* ``heads``: the same on attention heads, read where they lie in a fused projection;
* ``train``: the norm and its backward, to the gradients of x and of the weight;
* ``add``: the residual addition and the norm of the sum;
* ``add_train``: the same and its backward, with a gradient for both results;
* ``call``: the cost of one call, by each way to make it, against ``torch.add``;
* ``sweep``: the same bytes cut into rows of every width, from short to very long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "heads", "train", "add", "add_train", "call", "sweep"]
Buffers = Literal["hot", "rotating"]
Output = Literal["fresh", "recycled", "given", "inplace"]
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
OUTPUTS: tuple[Output, ...] = ("fresh", "recycled", "given", "inplace")
# Those that no last-level cache of this class holds together with their results.
BEYOND_CACHE: tuple[tuple[int, int], ...] = ((16384, 1024), (2048, 8192), (4096, 4096))

# The conventions that are timed: torch's own, and the one most model families use. Each is
# compared with peers that compute the same function.
SPECS: tuple[str, ...] = ("torch", "llama")

# Which outputs the cells of a kind have. A backward allocates what it returns; whether that memory
# is new to the process matters where it is large.
OUTPUTS_OF: dict[Kind, tuple[Output, ...]] = {
    "forward": ("fresh", "given"),
    "train": ("fresh", "recycled"),
    "add": ("fresh", "inplace"),
    "add_train": ("fresh",),
}
ADD_TRAIN_SHAPES: tuple[tuple[int, int], ...] = ((1, 4096), (512, 4096), (4096, 4096))

CALL_SHAPES: tuple[tuple[int, int], ...] = ((1, 576), (1, 4096))


@dataclass(frozen=True)
class Heads:
    """The queries in a fused projection of queries, keys and values.

    Example:
        >>> Heads(batch=2, sequence=8, queries=4, others=4).rows
        64
    """

    batch: int
    sequence: int
    queries: int
    others: int

    @property
    def rows(self) -> int:
        return self.batch * self.sequence * self.queries

    @property
    def stored(self) -> int:
        """The rows of the whole projection."""
        return self.batch * self.sequence * (self.queries + self.others)


HEADS = Heads(batch=4, sequence=512, queries=16, others=16)
HEAD_DIM = 128

SWEEP_BYTES = 2**25
SWEEP_WIDTHS: tuple[int, ...] = tuple(2**power for power in range(6, 21))

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

# How many tensors of x's size a cell is given (x; x and dy; x and residual; these two and the
# gradients of both results), and how many results of x's size a fresh cell allocates.
_INPUTS: dict[Kind, int] = {"train": 2, "add": 2, "add_train": 4}
_RESULTS: dict[Kind, int] = {"train": 2, "add": 2, "add_train": 3}


@dataclass(frozen=True)
class Cell:
    """One cell: ``x`` is ``(rows, d)`` of ``dtype``.

    Attributes:
        buffers: ``hot``: one input (and output) buffer, used again and again. ``rotating``: the
            calls walk through buffers that together exceed the last-level cache.
        output: ``fresh``: every call allocates its results. ``recycled``: so it does, but the
            process keeps what is freed, so that the pages were touched before. ``given``: the
            result is written into a tensor that exists. ``inplace``: the results are written over
            x and the residual.

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
        return _INPUTS.get(self.kind, 1)

    @property
    def touched_bytes(self) -> int:
        """The bytes that one call reads or writes: its inputs and its results."""
        results = 0 if self.output == "inplace" else _RESULTS.get(self.kind, 1)
        return (self.inputs + results) * self.nbytes

    @property
    def trains(self) -> bool:
        """Whether a call is a forward and a backward."""
        return self.kind in ("train", "add_train")

    def __str__(self) -> str:
        if self.kind == "call":
            return f"{self.shape} {self.dtype} call {self.grad_mode}"
        if self.kind == "sweep":
            return f"sweep {self.dtype}"
        start = f"{self.shape} {self.dtype} {self.buffers}"
        return {
            "forward": f"{start} {self.output}",
            "heads": f"{start} {self.output} heads",
            "train": f"{start} {'recycled ' if self.output == 'recycled' else ''}train",
            "add": f"{start} {self.output} add",
            "add_train": f"{start} add train",
        }[self.kind]


def grid_cells(
    kinds: Iterable[Kind],
    shapes: Iterable[tuple[int, int]] | None = None,
    dtypes: Iterable[str] = DTYPES,
    buffers: Iterable[Buffers] = BUFFERS,
    outputs: Iterable[Output] = OUTPUTS,
) -> list[Cell]:
    """Every combination, one kind, one dtype and one shape after the other.

    Args:
        kinds: any but ``call``, ``heads`` and ``sweep``.
        shapes: None takes the shapes of each kind: all of the grid, or a few for ``add_train``.
            Recycled memory is timed at those that are beyond the cache.
        dtypes: names of dtypes.
        buffers: the states of the memory.
        outputs: those that a kind does not have are left out.

    Example:
        >>> [len(grid_cells([kind])) for kind in ("forward", "train", "add", "add_train")]
        [80, 46, 80, 12]
    """
    dtypes, buffers, outputs = tuple(dtypes), tuple(buffers), tuple(outputs)
    chosen = None if shapes is None else tuple(shapes)
    return [
        Cell(kind, rows, d, dtype, buffer, output)
        for kind in kinds
        for dtype in dtypes
        for rows, d in chosen or (ADD_TRAIN_SHAPES if kind == "add_train" else SHAPES)
        for output in OUTPUTS_OF[kind]
        if output in outputs and (output != "recycled" or (rows, d) in BEYOND_CACHE)
        for buffer in buffers
        if output != "recycled" or buffer == "hot"  # no cache holds them in either state
    ]


def call_cells() -> list[Cell]:
    """One row of bfloat16, in inference mode and under ``no_grad``.

    Example:
        >>> [str(cell) for cell in call_cells()][0]
        '1x576 bfloat16 call inference'
    """
    modes: tuple[GradMode, ...] = ("inference", "no_grad")
    return [
        Cell("call", rows, d, "bfloat16", grad_mode=mode)
        for rows, d in CALL_SHAPES
        for mode in modes
    ]


def heads_cells() -> list[Cell]:
    """The queries of :data:`HEADS`, in every dtype, state and kind of output.

    Example:
        >>> [str(cell) for cell in heads_cells()][0]
        '32768x128 float32 hot fresh heads'
    """
    return [
        Cell("heads", HEADS.rows, HEAD_DIM, dtype, buffers, output)
        for dtype in DTYPES
        for output in OUTPUTS_OF["forward"]
        for buffers in BUFFERS
    ]


def sweep_cells() -> list[Cell]:
    """:data:`SWEEP_BYTES` in each dtype; the cell's own shape is that of the longest rows.

    Example:
        >>> [cell.shape for cell in sweep_cells()]
        ['8x1048576', '16x1048576']
    """
    width = SWEEP_WIDTHS[-1]
    return [
        Cell("sweep", SWEEP_BYTES // ITEM_BYTES[dtype] // width, width, dtype, "rotating", "given")
        for dtype in DTYPES
    ]


def tiny(cell: Cell) -> Cell:
    """The cell in which next to nothing is computed, by the same way as in ``cell``.

    Example:
        >>> print(tiny(Cell("train", 512, 4096, "bfloat16", "rotating")))
        1x8 bfloat16 hot train
    """
    output: Output = "fresh" if cell.output == "recycled" else cell.output
    kind: Kind = "forward" if cell.kind in ("heads", "sweep") else cell.kind
    return Cell(kind, 1, 8, cell.dtype, "hot", output, cell.grad_mode)


def peers_of(kind: Kind, spec: str) -> tuple[str, ...]:
    """What is timed beside ours, where it is installed and can do it.

    Example:
        >>> peers_of("add", "llama")
        ('eager',)
    """
    if kind == "forward" and spec == "torch":
        return ("eager", "compiled", "onnxruntime", "openvino")
    if kind == "add":
        # One convention is enough to compare a compiler's fusion of the addition with ours.
        return ("eager", "compiled", "onnxruntime") if spec == "torch" else ("eager",)
    if kind == "add_train":
        return ("eager", "compiled") if spec == "torch" else ("eager",)
    return ("eager", "compiled") if kind in ("forward", "heads", "train") else ()


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
