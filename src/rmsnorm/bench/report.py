"""The results as rows of a table, as sentences and as JSON. Every claim is a ratio."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm.bench.grid import SPECS, Kind, peers_of
from rmsnorm.bench.memory import Usage
from rmsnorm.bench.run import Comparison, Result

if TYPE_CHECKING:  # a report without steps needs no language model
    from rmsnorm.lm.step import StepTimes

SCHEMA = 1
FORWARD_COLUMNS = (
    "shape",
    "dtype",
    "buffers",
    "output",
    "spec",
    "ours us",
    "ours/limit",
    "eager/ours",
    "compiled/ours",
    "op/ours",
    "",
)
TRAIN_COLUMNS = (
    "shape",
    "dtype",
    "buffers",
    "spec",
    "ours us",
    "autograd us",
    "ours/limit",
    "eager/ours",
    "compiled/ours",
    "",
)
ADD_COLUMNS = (
    "shape",
    "dtype",
    "buffers",
    "output",
    "spec",
    "ours us",
    "ours/limit",
    "separate/ours",
    "eager/ours",
    "compiled/ours",
    "",
)
MEMORY_COLUMNS = ("candidate", "peak MiB", "peak/(y+dx)", "tensors/(y+dx)", "limit", "")
STEP_COLUMNS = (
    "model",
    "compiled",
    "ours ms",
    "unfused ms",
    "eager ms",
    "none ms",
    "eager/ours",
    "norms of eager",
    "norms of ours",
    "gone",
    "losses differ by",
    "",
)
KINDS: tuple[Kind, ...] = ("forward", "train", "add", "add_train")
CALL_COLUMNS = ("shape", "dtype", "mode", "op us", "add us", "op/add", "limit", "")


def machine(cache_bytes: int, rotating: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "isa": _isa(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "last_level_cache_bytes": cache_bytes,
        "rotating_bytes": rotating,
        "load_average": _load(),
    }


def _load() -> float | None:
    """How many processes ran or waited during the last minute, None where nobody counts."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def load_warning(machine_: dict[str, Any]) -> str | None:
    """A sentence where other processes were busy when the measuring began, or None.

    Threads that wait for each other slow down manyfold when one of them has to share its core.

    Example:
        >>> load_warning({"load_average": 0.1}) is None
        True
    """
    load = machine_["load_average"]
    if load is None or load < 0.5:
        return None
    return (
        f"the load average was {load:.2g} at the start: other processes share this machine, so the "
        "ratios may be off"
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _isa() -> str | None:
    """The instruction set of the kernels, None where there are none."""
    try:
        from rmsnorm import cpu_isa

        return cpu_isa()
    except (ImportError, RuntimeError):
        return None


def forward_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row for each forward cell and spec, in the order of :data:`FORWARD_COLUMNS`."""
    return _rows(results, ("forward",), FORWARD_COLUMNS)


def train_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row for each train cell and spec, in the order of :data:`TRAIN_COLUMNS`."""
    return _rows(results, ("train",), TRAIN_COLUMNS)


def add_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row for each cell of both add kinds and each spec, in the order of
    :data:`ADD_COLUMNS`; the output is ``train`` where the backward is timed too."""
    return _rows(results, ("add", "add_train"), ADD_COLUMNS)


def _rows(
    results: Sequence[Result], kinds: Sequence[Kind], columns: Sequence[str]
) -> list[tuple[str, ...]]:
    return [
        tuple(_value(result, spec, column) for column in columns)
        for result in results
        if result.cell.kind in kinds
        for spec in SPECS
    ]


def _value(result: Result, spec: str, column: str) -> str:
    cell = result.cell
    ours = _median(result, f"ours {spec}")
    above, slash, below = column.partition("/")
    if slash:
        if below == "limit":
            return _ratio(ours, _median(result, result.physical_limit))
        return _ratio(_median(result, f"{above} {spec}"), ours)
    if not column:
        lost = any(not one.ok and _is_about(one, spec) for one in result.comparisons)
        return _flags(lost, result.disturbed)
    return {
        "shape": cell.shape,
        "dtype": cell.dtype,
        "buffers": cell.buffers,
        "output": "train" if cell.trains else cell.output,
        "spec": spec,
        "ours us": _number(ours),
        "autograd us": _number(_median(result, "autograd")),
    }[column]


def memory_rows(usages: Sequence[Usage]) -> list[tuple[str, ...]]:
    """One row for each candidate, in the order of :data:`MEMORY_COLUMNS`."""
    return [
        (
            usage.name,
            f"{usage.peak / 2**20:.1f}",
            f"{usage.ratio:.3f}",
            f"{usage.allocated / usage.results:.3f}",
            "" if usage.limit is None else f"{usage.limit:g}",
            _flags(not usage.ok, disturbed=False),
        )
        for usage in usages
    ]


def step_rows(steps: Sequence[StepTimes]) -> list[tuple[str, ...]]:
    """One row for each model, in the order of :data:`STEP_COLUMNS`."""
    return [
        (
            found.name,
            "yes" if found.compiled else "no",
            *(
                f"{found.median(variant):.1f}" if variant in found.samples else ""
                for variant in ("ours", "unfused", "eager", "none")
            ),
            f"{found.ratio:.2f}",
            f"{found.share('eager'):.1%}",
            f"{found.share('ours'):.1%}",
            f"{found.gone:.0%}",
            "" if found.loss_difference is None else f"{found.loss_difference:.1e}",
            _flags(not found.ok, disturbed=False),
        )
        for found in steps
    ]


def call_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row for each call cell, in the order of :data:`CALL_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        cell = result.cell
        if cell.kind != "call":
            continue
        ours, add = _median(result, "op torch"), _median(result, "add")
        limit = "".join(f"{one.limit.ratio:g}" for one in result.comparisons)
        rows.append(
            (
                cell.shape,
                cell.dtype,
                cell.grad_mode,
                _number(ours),
                _number(add),
                _ratio(ours, add),
                limit,
                _flags(result.loses, result.disturbed),
            )
        )
    return rows


def summary(
    results: Sequence[Result], usages: Sequence[Usage] = (), steps: Sequence[StepTimes] = ()
) -> list[str]:
    """A line for each kind and peer, for each limit that is not a peer, and each broken one."""
    lines = []
    for kind in KINDS:
        for spec in SPECS:
            for peer in peers_of(kind, spec):
                lines += _peer_lines(results, kind, f"{peer} {spec}")
    for result in results:
        for comparison in result.comparisons:
            limit = comparison.limit
            if limit.rival == "copy" and comparison.ratio:
                lines.append(
                    f"{limit.ours} / copy: {comparison.ratio:.2f} (limit {limit.ratio:g}) "
                    f"at {result.cell}"
                )
    for usage in usages:
        limit_text = "" if usage.limit is None else f" (limit {usage.limit:g})"
        lines.append(f"memory: {usage.name} / (y + dx): {usage.ratio:.3f}{limit_text}")
    for result in results:
        for comparison in result.comparisons:
            if not comparison.ok:
                lines.append(f"loses: {result.cell}: {describe(comparison)}")
    lines += [
        f"loses: memory: {usage.name} needs {usage.ratio:.3f} of y + dx, "
        f"expected at most {usage.limit:g}"
        for usage in usages
        if not usage.ok
    ]
    for found in steps:
        lines.append(
            f"{'' if found.ok else 'loses: '}step: {_step_name(found)}: eager / ours: "
            f"{found.ratio:.3f}; {found.gone:.0%} of the time of eager norms is gone, which was "
            f"{found.share('eager'):.1%} of the step"
        )
    if results:
        losing = sum(result.loses for result in results)
        lines.append(f"{len(results) - losing} of {len(results)} cells hold, {losing} lose")
    disturbed = sum(result.disturbed for result in results)
    if disturbed:
        lines.append(f"{disturbed} cells were disturbed (~): something else used the machine")
    return lines


def _step_name(found: StepTimes) -> str:
    return f"{found.name}, compiled" if found.compiled else found.name


def _peer_lines(results: Sequence[Result], kind: Kind, peer: str) -> list[str]:
    ratios = sorted(
        (1.0 / comparison.ratio, str(result.cell))
        for result in results
        if result.cell.kind == kind
        for comparison in result.comparisons
        if comparison.limit.rival == peer and comparison.ratio
    )
    if not ratios:
        return []
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    return [
        f"{kind.replace('_', ' ')}: {peer} / ours: {mean:.2f} (geometric mean of {len(ratios)} "
        f"cells), smallest {ratios[0][0]:.2f} at {ratios[0][1]}"
    ]


def describe(comparison: Comparison) -> str:
    """A comparison as words."""
    limit = comparison.limit
    if comparison.ratio is None:
        return f"{limit.ours} could not be measured"
    relation = "below" if limit.strict else "at most"
    return (
        f"{limit.ours} / {limit.rival} is {comparison.ratio:.2f}, "
        f"expected {relation} {limit.ratio:.3g}"
    )


def to_dict(
    results: Sequence[Result],
    machine_: dict[str, Any],
    settings: dict[str, Any],
    usages: Sequence[Usage] = (),
    steps: Sequence[StepTimes] = (),
) -> dict[str, Any]:
    """Everything, for JSON. Times are microseconds for one call."""
    return {
        "schema": SCHEMA,
        "machine": machine_,
        "settings": settings,
        "cells": [_cell_dict(result) for result in results],
        "memory": [_usage_dict(usage) for usage in usages],
        "steps": [
            {
                "model": found.name,
                "compiled": found.compiled,
                "ms": {name: list(samples) for name, samples in found.samples.items()},
                "eager_over_ours": found.ratio,
                "gone": found.gone,
                "share_of_eager": found.share("eager"),
                "share_of_ours": found.share("ours"),
                "loss_difference": found.loss_difference,
                "ok": found.ok,
            }
            for found in steps
        ],
        "losing": [
            *(str(result.cell) for result in results if result.loses),
            *(f"memory of {usage.name}" for usage in usages if not usage.ok),
            *(f"step of {_step_name(found)}" for found in steps if not found.ok),
        ],
        "ok": not any(result.loses for result in results)
        and all(usage.ok for usage in usages)
        and all(found.ok for found in steps),
    }


def _usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        "name": usage.name,
        "y_and_dx_bytes": usage.results,
        "resident_peak_bytes": usage.resident,
        "allocated_peak_bytes": usage.allocated,
        "ratio": usage.ratio,
        "limit": usage.limit,
        "ok": usage.ok,
    }


def _cell_dict(result: Result) -> dict[str, Any]:
    cell = result.cell
    return {
        "kind": cell.kind,
        "shape": [cell.rows, cell.d],
        "dtype": cell.dtype,
        "buffers": cell.buffers,
        "output": cell.output,
        "grad_mode": cell.grad_mode,
        "attempts": result.attempts,
        "disturbed": result.disturbed,
        "limit": result.physical_limit,
        "timings": {
            name: {
                "median_us": timing.median,
                "mad_us": timing.mad,
                "rounds": len(timing.samples),
                "calls": timing.calls,
            }
            for name, timing in result.timings.items()
        },
        "comparisons": [
            {
                "ours": one.limit.ours,
                "rival": one.limit.rival,
                "ratio": one.ratio,
                "limit": one.limit.ratio,
                "ok": one.ok,
            }
            for one in result.comparisons
        ],
        "loses": result.loses,
    }


def _is_about(comparison: Comparison, spec: str) -> bool:
    return comparison.limit.ours == f"ours {spec}"


def _median(result: Result, name: str | None) -> float | None:
    timing = None if name is None else result.timings.get(name)
    return None if timing is None else timing.median


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ratio(above: float | None, below: float | None) -> str:
    return "-" if above is None or not below else f"{above / below:.2f}"


def _flags(loses: bool, disturbed: bool) -> str:
    return " ".join([*(["LOSES"] if loses else []), *(["~"] if disturbed else [])])
