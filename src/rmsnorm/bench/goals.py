"""What this package is to reach, in one table.

A goal is a bound on the ratio of two times, and says in which cells it is asked. What a cell has
to hold (:func:`limits`) follows from it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from rmsnorm.bench.grid import (
    BEYOND_CACHE,
    CALL_SHAPES,
    HEAD_DIM,
    HEADS,
    SPECS,
    SWEEP_WIDTHS,
    Buffers,
    Cell,
    GradMode,
    Output,
    peers_of,
)

HUGE_PAGES = "huge pages on request"
KEPT_MEMORY = "an allocator that can be told to keep memory"


@dataclass(frozen=True)
class Limit:
    """``ours`` may take at most ``ratio`` times as long as ``rival``; both name candidates.

    The rival ``limit`` is the fastest of the copies. A ``strict`` limit is also broken by equality:
    the same speed as a peer is not faster.
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


@dataclass(frozen=True)
class Goal:
    """One bound, and the cells in which it is asked; None asks it in every one of them.

    Attributes:
        name: what is to be reached, in words.
        kinds: of cells; ``memory`` and ``step`` are measured apart from the cells.
        rival: ``limit`` (the fastest copy), ``copy``, ``add``, one of the peers, ``peers`` (each of
            them), or ``neighbours`` (the same bytes in rows of half and of twice the width).
        ratio: the time of ours over the rival's is at most this.
        ours: by which way ours is called.
        strict: equality breaks it too.
        needs: what the system must have; where it has not, the goal is not asked.
        share: the share of the cells that may break the bound all the same ...
        at_most: ... and the ratio that none of them may exceed.
    """

    name: str
    kinds: tuple[str, ...]
    rival: str
    ratio: float
    ours: str = "ours"
    strict: bool = False
    specs: tuple[str, ...] = SPECS
    shapes: tuple[tuple[int, int], ...] | None = None
    dtypes: tuple[str, ...] | None = None
    buffers: tuple[Buffers, ...] | None = None
    outputs: tuple[Output, ...] | None = None
    modes: tuple[GradMode, ...] | None = None
    min_rows: int = 0
    needs: str = ""
    share: float = 0.0
    at_most: float = 0.0

    def covers(self, cell: Cell) -> bool:
        """Whether it is asked in ``cell``.

        Example:
            >>> [one.ratio for one in GOALS if one.covers(Cell("call", 1, 576, "bfloat16"))]
            [1.0, 1.6, 1.9]
        """
        return (
            cell.kind in self.kinds
            and cell.rows >= self.min_rows
            and (self.shapes is None or (cell.rows, cell.d) in self.shapes)
            and (self.dtypes is None or cell.dtype in self.dtypes)
            and (self.buffers is None or cell.buffers in self.buffers)
            and (self.outputs is None or cell.output in self.outputs)
            and (self.modes is None or cell.grad_mode in self.modes)
        )

    def limits(self, cell: Cell) -> list[Limit]:
        """What it asks of a cell that it covers."""
        if self.rival == "neighbours":
            pairs = [*pairwise(SWEEP_WIDTHS), *pairwise(reversed(SWEEP_WIDTHS))]
            return [self._limit(f"ours d={one}", f"ours d={other}") for one, other in pairs]
        if self.rival == "peers":
            return [
                self._limit(f"{self.ours} {spec}", f"{peer} {spec}")
                for spec in self.specs
                for peer in peers_of(cell.kind, spec)
            ]
        one_for_all = self.rival in ("limit", "copy", "add")
        return [
            self._limit(
                f"{self.ours} {spec}", self.rival if one_for_all else f"{self.rival} {spec}"
            )
            for spec in self.specs
            if one_for_all or self.rival == "separate" or self.rival in peers_of(cell.kind, spec)
        ]

    def _limit(self, ours: str, rival: str) -> Limit:
        return Limit(ours, rival, self.ratio, self.strict)


AHEAD = Goal(
    "ahead of every peer: 97 % of the cells, none behind by more than a tenth",
    ("forward", "heads", "train", "add", "add_train"),
    "peers",
    1.0,
    strict=True,
    share=0.03,
    at_most=1.1,
)
MEMORY = Goal("peak memory of forward and backward: y and dx", ("memory",), "y + dx", 1.02)
STEP = Goal(
    "a model's training step: no slower, 3/4 of eager norms gone, equal losses",
    ("step",),
    "eager",
    1.0,
)

GOALS: tuple[Goal, ...] = (
    # Beyond the last-level cache: what memory allows.
    Goal(
        "beyond the cache, output given, float32",
        ("forward",),
        "limit",
        1.15,
        shapes=BEYOND_CACHE,
        dtypes=("float32",),
        outputs=("given",),
    ),
    Goal(
        "beyond the cache, output given, bfloat16",
        ("forward",),
        "limit",
        1.20,
        shapes=BEYOND_CACHE,
        dtypes=("bfloat16",),
        outputs=("given",),
    ),
    Goal(
        "4096x4096 bfloat16, output given, against a plain tensor copy",
        ("forward",),
        "copy",
        1.3,
        shapes=((4096, 4096),),
        dtypes=("bfloat16",),
        outputs=("given",),
    ),
    Goal(
        "beyond the cache, addition and norm in place",
        ("add",),
        "limit",
        1.20,
        shapes=BEYOND_CACHE,
        outputs=("inplace",),
    ),
    Goal(
        "beyond the cache, forward and backward in recycled memory",
        ("train",),
        "limit",
        1.5,
        shapes=BEYOND_CACHE,
        outputs=("recycled",),
        needs=KEPT_MEMORY,
    ),
    Goal(
        "beyond the cache, fresh output, against a plain clone",
        ("forward",),
        "copy",
        1 / 2,
        shapes=BEYOND_CACHE,
        outputs=("fresh",),
        needs=HUGE_PAGES,
    ),
    Goal(
        "beyond the cache, fresh output, against torch.compile",
        ("forward",),
        "compiled",
        1 / 2.5,
        shapes=BEYOND_CACHE,
        outputs=("fresh",),
        needs=HUGE_PAGES,
    ),
    # Between memory and cache.
    Goal(
        "rotating 512x4096 and 4096x768, output given",
        ("forward",),
        "limit",
        1.3,
        shapes=((512, 4096), (4096, 768)),
        buffers=("rotating",),
        outputs=("given",),
    ),
    Goal(
        "rotating 32768x128 bfloat16, output given",
        ("forward",),
        "limit",
        1.25,
        shapes=((32768, 128),),
        dtypes=("bfloat16",),
        buffers=("rotating",),
        outputs=("given",),
    ),
    Goal(
        "rotating heads in a fused projection, output given",
        ("heads",),
        "limit",
        1.3,
        shapes=((HEADS.rows, HEAD_DIM),),
        buffers=("rotating",),
        outputs=("given",),
    ),
    # In the cache: what arithmetic allows.
    Goal(
        "hot 512x4096 bfloat16, rounded after the weight",
        ("forward",),
        "limit",
        2.3,
        specs=("torch",),
        shapes=((512, 4096),),
        dtypes=("bfloat16",),
        buffers=("hot",),
        outputs=("given",),
    ),
    Goal(
        "hot 512x4096 bfloat16, rounded before the weight",
        ("forward",),
        "limit",
        2.9,
        specs=("llama",),
        shapes=((512, 4096),),
        dtypes=("bfloat16",),
        buffers=("hot",),
        outputs=("given",),
    ),
    Goal(
        "hot 512x4096 float32",
        ("forward",),
        "limit",
        1.8,
        shapes=((512, 4096),),
        dtypes=("float32",),
        buffers=("hot",),
        outputs=("given",),
    ),
    Goal(
        "hot 8x4096 and 32x2048",
        ("forward",),
        "limit",
        2.6,
        shapes=((8, 4096), (32, 2048)),
        buffers=("hot",),
        outputs=("given",),
    ),
    Goal(
        "hot 32768x128 bfloat16",
        ("forward",),
        "limit",
        2.8,
        shapes=((32768, 128),),
        dtypes=("bfloat16",),
        buffers=("hot",),
        outputs=("given",),
    ),
    Goal(
        "hot 512x4096 bfloat16, forward and backward",
        ("train",),
        "limit",
        4.0,
        shapes=((512, 4096),),
        dtypes=("bfloat16",),
        buffers=("hot",),
        outputs=("fresh",),
    ),
    # One call.
    Goal(
        "a call of rms_norm",
        ("call",),
        "add",
        1.0,
        specs=("torch",),
        shapes=CALL_SHAPES,
        modes=("inference",),
    ),
    Goal(
        "a call of the module",
        ("call",),
        "add",
        1.6,
        ours="module",
        specs=("torch",),
        shapes=CALL_SHAPES,
        modes=("inference",),
    ),
    Goal(
        "a call through torch.ops",
        ("call",),
        "add",
        1.9,
        ours="op",
        specs=("torch",),
        shapes=CALL_SHAPES,
    ),
    # Against the others.
    Goal(
        "forward and backward, 512 rows or more, against eager F.rms_norm",
        ("train",),
        "eager",
        1 / 4,
        specs=("torch",),
        min_rows=512,
    ),
    Goal(
        "forward and backward, 32 rows or more, against torch.compile",
        ("train",),
        "compiled",
        1 / 3,
        min_rows=32,
    ),
    Goal(
        "addition and norm, against our norm after an addition",
        ("add", "add_train"),
        "separate",
        1.0,
        strict=True,
    ),
    AHEAD,
    # The cost of a row is that of its elements.
    Goal(
        "no cliff between a width and its double",
        ("sweep",),
        "neighbours",
        1.3,
    ),
    MEMORY,
    STEP,
)


def limits(cell: Cell, absent: Collection[str] = ()) -> list[Limit]:
    """What must hold in ``cell``: one limit for each pair of candidates, the tightest.

    Args:
        cell: the cell.
        absent: what this system lacks; goals that need it are not asked.

    Example:
        >>> limits(Cell("call", 1, 4096, "bfloat16", grad_mode="no_grad"))
        [Limit(ours='op torch', rival='add', ratio=1.9, strict=False)]
    """
    tightest: dict[tuple[str, str], Limit] = {}
    for goal in GOALS:
        if goal.needs not in absent and goal.covers(cell):
            for limit in goal.limits(cell):
                known = tightest.setdefault((limit.ours, limit.rival), limit)
                if limit.ratio < known.ratio:
                    tightest[limit.ours, limit.rival] = limit
    return list(tightest.values())


def has_figure(cell: Cell) -> bool:
    """Whether ``cell`` is compared with a copy, with one addition or with its neighbours.

    Example:
        >>> has_figure(Cell("forward", 1, 576, "float32"))
        False
    """
    figures = ("limit", "copy", "add", "neighbours")
    return any(goal.covers(cell) for goal in GOALS if goal.rival in figures)
