"""The results as rows of a table, as sentences and as JSON. Every claim is a ratio."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rmsnorm.bench.goals import AHEAD
from rmsnorm.bench.grid import SPECS, SWEEP_WIDTHS, Kind, peers_of
from rmsnorm.bench.limit import absent_conditions
from rmsnorm.bench.memory import Usage
from rmsnorm.bench.run import Comparison, Result
from rmsnorm.bench.verdicts import Verdict, verdicts

if TYPE_CHECKING:  # a report without steps needs no language model
    from rmsnorm.lm.step import StepTimes

SCHEMA = 3
FORWARD_COLUMNS = (
    "shape",
    "dtype",
    "buffers",
    "output",
    "spec",
    "ours us",
    "spread",
    "call us",
    "kernel us",
    "ours/limit",
    "eager/ours",
    "compiled/ours",
    "onnxruntime/ours",
    "openvino/ours",
    "op/ours",
    "",
)
TRAIN_COLUMNS = (
    "shape",
    "dtype",
    "buffers",
    "output",
    "spec",
    "ours us",
    "spread",
    "call us",
    "kernel us",
    "ours/limit",
    "product/ours",
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
    "spread",
    "call us",
    "kernel us",
    "ours/limit",
    "separate/ours",
    "eager/ours",
    "compiled/ours",
    "onnxruntime/ours",
    "",
)
MEMORY_COLUMNS = ("candidate", "peak MiB", "peak/(y+dx)", "tensors/(y+dx)", "limit", "")
# As rmsnorm.lm.step has them, which a report without steps does not load.
_STEP_VARIANTS = ("ours", "unfused", "eager", "copies", "none")
STEP_COLUMNS = (
    "model",
    "compiled",
    *(f"{variant} ms" for variant in _STEP_VARIANTS),
    "eager/ours",
    "norms of eager",
    "norms of ours",
    "gone",
    "losses differ by",
    "",
)
KINDS: tuple[Kind, ...] = ("forward", "heads", "train", "add", "add_train")
CALL_COLUMNS = ("shape", "dtype", "mode", "by", "us", "spread", "add us", "us/add", "limit", "")
CALLS = {
    "ours torch": "rms_norm",
    "module torch": "module",
    "op torch": "torch.ops",
    "identity": "nn.Identity",
    "clone": "torch.ops.aten.clone",
    "addcmul": "torch.ops.aten.addcmul",
}
SWEEP_COLUMNS = ("dtype", "width", "rows", "us", "spread", "ours/limit", "us/narrower", "")
GOAL_COLUMNS = ("goal", "bound", "worst", "where", "cases", "")


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
        "lacks": sorted(absent_conditions()),
    }


def machine_line(machine_: dict[str, Any]) -> str:
    """The machine in one line, above the tables and the plots."""
    return (
        f"{machine_['cpu']}, {machine_['threads']} threads, torch {machine_['torch']}, "
        f"kernels: {machine_['isa'] or 'none'}, "
        f"rotating through {machine_['rotating_bytes'] >> 20} MiB"
    )


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


def heads_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The same for the cells of attention heads."""
    return _rows(results, ("heads",), FORWARD_COLUMNS)


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
        # The product knows no spec.
        other = above if above == "product" else f"{above} {spec}"
        return _ratio(_median(result, other), ours)
    if not column:
        lost = any(not one.ok and _is_about(one, spec) for one in result.comparisons)
        return _flags(lost, result.disturbed)
    return {
        "shape": cell.shape,
        "dtype": cell.dtype,
        "buffers": cell.buffers,
        "output": "train" if cell.kind == "add_train" else cell.output,
        "spec": spec,
        "ours us": _number(ours),
        "spread": _spread(result, f"ours {spec}"),
        "call us": _number(result.overheads.get(f"ours {spec}")),
        "kernel us": _number(result.kernel_us(f"ours {spec}")),
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
                for variant in _STEP_VARIANTS
            ),
            f"{found.ratio:.2f}",
            f"{found.share('eager'):.1%}",
            f"{found.share('ours'):.1%}",
            f"{found.gone:.0%}" if found.gone_interval.tells else "?",
            "" if found.loss_difference is None else f"{found.loss_difference:.1e}",
            _flags(not found.ok, disturbed=False),
        )
        for found in steps
    ]


def call_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row for each call cell and way to call, in the order of :data:`CALL_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        cell = result.cell
        if cell.kind != "call":
            continue
        add = _median(result, "add")
        for name, words in CALLS.items():
            asked = [one for one in result.comparisons if one.limit.ours == name]
            if name not in result.timings and not asked:
                continue
            took = _median(result, name)
            rows.append(
                (
                    cell.shape,
                    cell.dtype,
                    cell.grad_mode,
                    words,
                    _number(took),
                    _spread(result, name),
                    _number(add),
                    _ratio(took, add),
                    "".join(f"{one.limit.ratio:g}" for one in asked),
                    _flags(not all(one.ok for one in asked), result.disturbed),
                )
            )
    return rows


def sweep_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row for each dtype and width, in the order of :data:`SWEEP_COLUMNS`.

    The bytes are the same in every row, so the ratio of two times is that of the times per byte.
    """
    rows: list[tuple[str, ...]] = []
    for result in results:
        if result.cell.kind != "sweep":
            continue
        limit = _median(result, result.physical_limit)
        narrower = None
        for d in SWEEP_WIDTHS:
            name = f"ours d={d}"
            took = _median(result, name)
            lost = any(not one.ok and name == one.limit.ours for one in result.comparisons)
            rows.append(
                (
                    result.cell.dtype,
                    str(d),
                    str(result.cell.rows * result.cell.d // d),
                    _number(took),
                    _spread(result, name),
                    _ratio(took, limit),
                    _ratio(took, narrower),
                    _flags(lost, result.disturbed),
                )
            )
            narrower = took
    return rows


def goal_rows(found: Sequence[Verdict], unmeasured: bool = True) -> list[tuple[str, ...]]:
    """One row for each goal, in the order of :data:`GOAL_COLUMNS`.

    Args:
        found: the verdicts.
        unmeasured: whether to list the goals that this run has no cell for.
    """
    rows: list[tuple[str, ...]] = []
    for verdict in found:
        goal, worst = verdict.goal, verdict.worst
        if verdict.state == "not measured" and not unmeasured:
            continue
        relation = "<" if goal.strict else "<="
        rows.append(
            (
                goal.name,
                f"{goal.ours} / {goal.rival} {relation} {goal.ratio:.3g}",
                "-" if worst is None or worst.ratio is None else f"{worst.ratio:.3f}",
                "-" if worst is None else worst.where,
                f"{len(verdict.cases) - len(verdict.broken)} of {len(verdict.cases)}",
                f"{verdict.state}: no {verdict.missing}" if verdict.missing else verdict.state,
            )
        )
    return rows


def without_empty(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """The table without the columns in which nothing was measured.

    Example:
        >>> without_empty(("a", "b"), [("1", "-"), ("2", "-")])
        (['a'], [('1',), ('2',)])
    """
    kept = [
        number
        for number, column in enumerate(columns)
        if not column or any(row[number] != "-" for row in rows)
    ]
    return (
        [columns[number] for number in kept],
        [tuple(row[number] for number in kept) for row in rows],
    )


def summary(
    results: Sequence[Result], usages: Sequence[Usage] = (), steps: Sequence[StepTimes] = ()
) -> list[str]:
    """A line for each kind and peer, for the memory and the steps, and each broken limit."""
    lines = []
    for kind in KINDS:
        for spec in SPECS:
            for peer in ("separate", *peers_of(kind, spec)):
                lines += _peer_lines(results, kind, f"{peer} {spec}")
    lines += _ahead_lines(results)
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
        lines.append(f"{'' if found.ok else 'loses: '}step: {found.text()}")
    if results:
        losing = sum(result.loses for result in results)
        lines.append(f"{len(results) - losing} of {len(results)} cells hold, {losing} lose")
    disturbed = sum(result.disturbed for result in results)
    if disturbed:
        lines.append(f"{disturbed} cells were disturbed (~): something else used the machine")
    return lines


def _ahead_lines(results: Sequence[Result]) -> list[str]:
    """How many cells are behind a peer, and which."""
    (found,) = (one for one in verdicts(results) if one.goal is AHEAD)
    if not found.cases:
        return []
    behind = sorted(found.broken, key=lambda case: -(case.ratio or math.inf))
    total = len(found.cases)
    return [
        f"ahead of every peer in {total - len(behind)} of {total} cells, behind in "
        f"{len(behind) / total:.1%}",
        *(f"behind: {case.where}: {case.ratio:.2f}" for case in behind if case.ratio is not None),
    ]


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
    absent: Collection[str] = (),
) -> dict[str, Any]:
    """Everything, for JSON. Times are microseconds for one call."""
    found_verdicts = verdicts(results, usages, steps, absent)
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
                "intervals": found.intervals(),
                "share_of_eager": found.share("eager"),
                "share_of_ours": found.share("ours"),
                "loss_difference": found.loss_difference,
                "ok": found.ok,
            }
            for found in steps
        ],
        "goals": [_verdict_dict(verdict) for verdict in found_verdicts],
        "losing": [
            *(str(result.cell) for result in results if result.loses),
            *(f"memory of {usage.name}" for usage in usages if not usage.ok),
            *(f"step of {_step_name(found)}" for found in steps if not found.ok),
        ],
        "ok": all(verdict.ok for verdict in found_verdicts),
    }


def _verdict_dict(verdict: Verdict) -> dict[str, Any]:
    goal, worst = verdict.goal, verdict.worst
    return {
        "name": goal.name,
        "ours": goal.ours,
        "rival": goal.rival,
        "limit": goal.ratio,
        "state": verdict.state,
        "missing": verdict.missing or None,
        "cases": len(verdict.cases),
        "broken": [{"where": case.where, "ratio": case.ratio} for case in verdict.broken],
        "worst": None if worst is None else {"where": worst.where, "ratio": worst.ratio},
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
        "overheads_us": dict(result.overheads),
        "loses": result.loses,
    }


def _is_about(comparison: Comparison, spec: str) -> bool:
    return comparison.limit.ours == f"ours {spec}"


def _median(result: Result, name: str | None) -> float | None:
    timing = None if name is None else result.timings.get(name)
    return None if timing is None else timing.median


def _spread(result: Result, name: str) -> str:
    """The median absolute deviation, relative to the median."""
    timing = result.timings.get(name)
    if timing is None or not timing.median:
        return "-"
    return f"{timing.mad / timing.median:.1%}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ratio(above: float | None, below: float | None) -> str:
    return "-" if above is None or not below else f"{above / below:.2f}"


def _flags(loses: bool, disturbed: bool) -> str:
    return " ".join([*(["LOSES"] if loses else []), *(["~"] if disturbed else [])])
