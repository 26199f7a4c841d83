"""The results as a picture: rooflines, bars against every peer, and the sweep over widths.

Matplotlib is imported when a picture is drawn; it comes with the extra ``bench``.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm.bench.grid import BUFFERS, DTYPES, SPECS, SWEEP_WIDTHS, Buffers, peers_of
from rmsnorm.bench.limit import limit_bytes
from rmsnorm.bench.report import KINDS
from rmsnorm.bench.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".html")

# Told apart by those who do not see all colours too, and by their markers.
_COLORS = {"torch": "#0072b2", "llama": "#d55e00", "peer": "#8c8c8c", "limit": "#222222"}
_MARKERS = {"float32": "o", "bfloat16": "s"}


class PlotError(RuntimeError):
    """A picture that cannot be drawn here."""


@dataclass(frozen=True)
class Bar:
    """How much longer a peer takes than ours.

    Attributes:
        mean: the geometric mean over cells.
        smallest: the cell in which the peer does best.
        largest: the cell in which it does worst.
    """

    label: str
    mean: float
    smallest: float
    largest: float
    cells: int


@dataclass(frozen=True)
class Point:
    """One candidate in one cell of a roofline.

    Attributes:
        moved: the bytes that the limit reads and writes.
        rate: these bytes divided by the candidate's time, in bytes per second.
    """

    dtype: str
    name: str
    moved: int
    rate: float


def require(path: Path) -> None:
    """Raises where no picture could be written to ``path``, before anything is measured.

    Raises:
        PlotError: the name's ending is not one of :data:`FORMATS`, or Matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f"{path.name!r} ends in none of {', '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlotError(
            f"a plot needs Matplotlib ({error}); install the extra: pip install 'rmsnorm[bench]'"
        ) from None


def bars(results: Sequence[Result]) -> list[Bar]:
    """One for each kind of cell and peer that was measured, in the order of the tables."""
    found = []
    for kind in KINDS:
        for spec in SPECS:
            ours = f"ours {spec}"
            for peer in ("separate", *peers_of(kind, spec)):
                name = f"{peer} {spec}"
                ratios = [
                    result.timings[name].median / result.timings[ours].median
                    for result in results
                    if result.cell.kind == kind
                    and {name, ours} <= set(result.timings)
                    and result.timings[ours].median
                ]
                if not ratios:
                    continue
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                label = f"{kind.replace('_', ' ')}: {name}"
                found.append(Bar(label, mean, min(ratios), max(ratios), len(ratios)))
    return found


def roofline(results: Sequence[Result], buffers: Buffers) -> list[Point]:
    """Ours, the best peer and the limit in the forward cells of one state of the memory.

    Where cells with a given output were measured, only these: a fresh one shows the allocator too.
    """
    cells = [
        result
        for result in results
        if result.cell.kind == "forward" and result.cell.buffers == buffers
    ]
    given = [result for result in cells if result.cell.output == "given"]
    points = []
    for result in given or cells:
        moved = limit_bytes(result.cell)
        medians = {f"ours {spec}": f"ours {spec}" for spec in SPECS}
        peers = [
            f"{peer} {spec}"
            for spec in SPECS
            for peer in peers_of("forward", spec)
            if f"{peer} {spec}" in result.timings
        ]
        if peers:
            medians["best peer"] = min(peers, key=lambda name: result.timings[name].median)
        if result.physical_limit is not None:
            medians["limit"] = result.physical_limit
        for label, name in medians.items():
            if name in result.timings and result.timings[name].median:
                rate = moved / (result.timings[name].median * 1e-6)
                points.append(Point(result.cell.dtype, label, moved, rate))
    return points


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Writes the picture to ``path``.

    Args:
        results: of one run.
        path: its ending chooses the format; an HTML page holds the picture itself.
        title: the machine.

    Raises:
        PlotError: see :func:`require`.
        OSError: the file cannot be written.
    """
    require(path)
    figure = _figure(results, title)
    suffix = path.suffix.lower()
    if suffix != ".html":
        figure.savefig(path, format=suffix[1:], dpi=150)
        return
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    picture = stream.getvalue()
    picture = picture[picture.index("<svg") :]
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<title>rmsnorm bench</title>\n"
        "<style>body { margin: 1rem auto; max-width: 75rem; font-family: sans-serif; }"
        " svg { width: 100%; height: auto; }</style>\n</head>\n<body>\n"
        f"<h1>rmsnorm bench</h1>\n<p>{html.escape(title)}</p>\n{picture}\n</body>\n</html>\n",
        encoding="utf-8",
    )


def _figure(results: Sequence[Result], title: str) -> Figure:
    from matplotlib.figure import Figure

    states = [buffers for buffers in BUFFERS if roofline(results, buffers)]
    found = bars(results)
    sweeps = [result for result in results if result.cell.kind == "sweep"]
    heights = [
        *([4.0] if states else []),
        *([0.8 + 0.26 * len(found)] if found else []),
        *([4.0] if sweeps else []),
    ]
    figure = Figure(figsize=(12, max(sum(heights), 1.0) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    parts: list[Any] = []
    if heights:
        below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        parts = [one for (one,) in below]
    if states:
        axes = parts.pop(0).subplots(1, len(states), squeeze=False, sharey=True)[0]
        for axis, buffers in zip(axes, states, strict=True):
            _draw_roofline(axis, roofline(results, buffers), buffers)
    if found:
        _draw_bars(parts.pop(0).subplots(), found)
    if sweeps:
        _draw_sweep(parts.pop(0).subplots(), sweeps)
    return figure


def _size(count: float) -> str:
    """A number of bytes as one writes it.

    Example:
        >>> _size(512), _size(2**23)
        ('512 B', '8 MiB')
    """
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def _draw_roofline(axis: Axes, points: Sequence[Point], buffers: str) -> None:
    for dtype in DTYPES:
        for label in ("limit", "best peer", *(f"ours {spec}" for spec in SPECS)):
            found = sorted(
                (point.moved, point.rate)
                for point in points
                if point.dtype == dtype and point.name == label
            )
            if not found:
                continue
            key = {"limit": "limit", "best peer": "peer"}.get(label, label.rpartition(" ")[2])
            axis.plot(
                [moved for moved, _ in found],
                [rate / 1e9 for _, rate in found],
                label=f"{label}, {dtype}",
                color=_COLORS[key],
                marker=_MARKERS[dtype],
                markersize=5,
                linestyle="-" if label == "limit" else "none",
                linewidth=1,
                alpha=0.9,
            )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda moved, _: _size(moved))
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("bytes read and written by one call")
    axis.set_ylabel("GB/s")
    axis.set_title(f"forward, {buffers} buffers; the limit is the fastest copy", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _draw_bars(axis: Axes, found: Sequence[Bar]) -> None:
    rows = range(len(found))
    means = [bar.mean for bar in found]
    axis.barh(rows, [mean - 1 for mean in means], left=1, color=_COLORS["torch"], height=0.6)
    axis.hlines(
        list(rows),
        [bar.smallest for bar in found],
        [bar.largest for bar in found],
        color=_COLORS["limit"],
        linewidth=1,
    )
    axis.set_yticks(list(rows), [f"{bar.label} ({bar.cells})" for bar in found], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color=_COLORS["llama"], linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.set_xlabel("time of the peer / time of ours: geometric mean, smallest and largest")
    axis.set_title(
        "against every peer (number of cells); right of 1 is slower than ours", fontsize=10
    )
    axis.grid(axis="x", alpha=0.3)


def _draw_sweep(axis: Axes, sweeps: Sequence[Result]) -> None:
    for result in sweeps:
        moved = limit_bytes(result.cell)
        dtype = result.cell.dtype
        widths = [d for d in SWEEP_WIDTHS if f"ours d={d}" in result.timings]
        # Microseconds for bytes, as picoseconds for one byte.
        costs = [result.timings[f"ours d={d}"].median * 1e6 / moved for d in widths]
        color = _COLORS["torch" if dtype == "float32" else "llama"]
        axis.plot(widths, costs, label=f"ours, {dtype}", color=color, marker=_MARKERS[dtype])
        if result.physical_limit is not None:
            limit = result.timings[result.physical_limit].median * 1e6 / moved
            axis.axhline(limit, label=f"limit, {dtype}", color=color, linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("width d; the bytes are the same at each")
    axis.set_ylabel("ps for a byte read or written")
    axis.set_title("cost over the width", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
