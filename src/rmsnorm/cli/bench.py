"""``rmsnorm bench``: speed and memory against the peers and against a plain copy."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from rmsnorm.bench.grid import (
    BUFFERS,
    DTYPES,
    OUTPUTS,
    Buffers,
    Cell,
    Kind,
    Output,
    call_cells,
    grid_cells,
    heads_cells,
    parse_shape,
    sweep_cells,
)

if TYPE_CHECKING:  # all of it imports torch, which --help and bad usage should not wait for
    from rich.console import Console
    from rich.table import Table

    from rmsnorm.bench.engines import Engines
    from rmsnorm.bench.memory import Usage
    from rmsnorm.bench.peers import Compiler
    from rmsnorm.bench.run import Result
    from rmsnorm.bench.verdicts import Verdict
    from rmsnorm.lm.step import StepTimes

# What --kind chooses: the kinds of cells of each, in the order of a run; none for the memory and
# for the steps of whole models.
_KINDS: dict[str, tuple[Kind, ...]] = {
    "call": ("call",),
    "forward": ("forward",),
    "heads": ("heads",),
    "train": ("train",),
    "add": ("add", "add_train"),
    "sweep": ("sweep",),
    "memory": (),
    "step": (),
}
# The kinds that have cells of their own, whatever shapes are asked for, before and after the grid.
_FIXED_CELLS = {"call": call_cells, "heads": heads_cells, "sweep": sweep_cells}
_FIXED = (*_FIXED_CELLS, "memory", "step")


def _parse_shapes(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[int, int]]:
    try:
        return [parse_shape(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@dataclass(frozen=True)
class _Request:
    check: bool
    quick: bool
    rounds: int
    compiled: bool
    engines: bool
    json_path: str | None
    plot_path: str | None
    threads: int | None


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 where a goal does not hold; list them all.")
@click.option("--quick", is_flag=True, help="Fewer rounds: a first impression.")
@click.option(
    "--rounds",
    metavar="N",
    default=1,
    type=click.IntRange(1, 100),
    help="N times as many rounds, where noise hides what is looked for.",
)
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out.")
@click.option("--no-engines", is_flag=True, help="Leave ONNX Runtime and OpenVINO out.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write everything measured to FILE; - writes it to stdout instead of the tables.",
)
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    help="Draw rooflines, bars against every peer and the sweep to FILE, by its ending an .svg, "
    ".png or .html.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="ROWSxWIDTH",
    callback=_parse_shapes,
    help="Only this shape. May be repeated.",
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Only this.")
@click.option("--buffers", multiple=True, type=click.Choice(BUFFERS), help="Only this state.")
@click.option("--output", "outputs", multiple=True, type=click.Choice(OUTPUTS), help="Only this.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(tuple(_KINDS)),
    help="Only this: the cost of one call, the forward, attention heads inside a projection, "
    "forward and backward, the fused residual addition, the same bytes in rows of every width, the "
    "peak memory, or the training step of whole models. May be repeated.",
)
@click.option("--memory", is_flag=True, help="The same as --kind memory.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads; torch's default otherwise.")
def bench(
    check: bool,
    quick: bool,
    rounds: int,
    no_compile: bool,
    no_engines: bool,
    json_path: str | None,
    plot_path: str | None,
    shapes: list[tuple[int, int]],
    dtypes: tuple[str, ...],
    buffers: tuple[str, ...],
    outputs: tuple[str, ...],
    kinds: tuple[str, ...],
    memory: bool,
    threads: int | None,
) -> None:
    """Time the norm against F.rms_norm, a model's own norm, torch.compile and plain copies.

    Timed are one call by each way to make it, the forward, forward and backward, and the residual
    addition with its norm: in one process, interleaved; medians. Ratios above 1 in the columns
    separate/ours, eager/ours and so on mean that this package is faster; ours/limit is the distance
    from the fastest copy of the same bytes; "call us" is a call that computes next to nothing, and
    "kernel us" the rest. ONNX Runtime and OpenVINO are timed where they are installed. The peak
    memory of forward and backward is measured for each peer in a process of its own. Of two small
    language models the whole training step is timed, with these norms, with torch.nn.RMSNorm and
    without norms. Below the tables stands each goal and whether it holds.
    """
    chosen = {*kinds, *(("memory",) if memory else ())}
    selected = bool(shapes or dtypes or buffers or outputs)
    fixed = [kind for kind in _FIXED if kind in chosen]
    if fixed and selected:
        raise click.UsageError(
            f"--kind {fixed[0]} measures what is fixed; it takes no other selection"
        )
    if not chosen:
        chosen = {kind for kind in _KINDS if not (selected and kind in _FIXED)}
    cells = grid_cells(
        [kind for name, found in _KINDS.items() if name in chosen - {*_FIXED} for kind in found],
        shapes or None,
        dtypes or DTYPES,
        cast("tuple[Buffers, ...]", buffers) or BUFFERS,
        cast("tuple[Output, ...]", outputs) or OUTPUTS,
    )
    for name, make in _FIXED_CELLS.items():
        if name in chosen:
            # First the calls, which the memory of larger cells would disturb.
            cells = [*make(), *cells] if name == "call" else [*cells, *make()]
    others = tuple(name for name in ("memory", "step") if name in chosen)
    if not cells and not others:
        raise click.UsageError("nothing is left to measure: no cell of this kind has this output")
    if json_path is not None and json_path != "-":
        _check_writable(Path(json_path), "--json")
    if plot_path is not None:
        _check_plot(Path(plot_path), cells)
    if shapes:
        _check_memory(cells)
    request = _Request(
        check, quick, rounds, not no_compile, not no_engines, json_path, plot_path, threads
    )
    held = _run(cells, others, request)
    if check and not held:
        click.get_current_context().exit(1)


def _check_plot(path: Path, cells: list[Cell]) -> None:
    """Refuses a picture that could not be drawn, before anything is measured."""
    from rmsnorm.bench.plot import PlotError, require

    try:
        require(path)
    except PlotError as error:
        raise click.BadParameter(str(error), param_hint="'--plot'") from None
    if all(cell.kind == "call" for cell in cells):
        raise click.UsageError("--plot draws cells, and none of these kinds has one to draw")
    _check_writable(path, "--plot")


def _check_writable(path: Path, option: str) -> None:
    """Refuses a path that the results could not be written to, before they are measured."""
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # raises for a name that no file can have
    reason = None
    if not path.absolute().parent.is_dir():
        reason = "its folder does not exist"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        reason = "it cannot be written"
    if reason is not None:
        raise click.BadParameter(f"{str(path)!r}: {reason}", param_hint=f"'{option}'")


def _check_memory(cells: list[Cell]) -> None:
    """Refuses a shape whose buffers, and what the peers allocate, would not fit in memory."""
    available = _available_bytes()
    if available is None:
        return
    for cell in cells:
        buffers = 2 if cell.buffers == "rotating" else 1
        # The output that is given, or the copies that are written over.
        given = {"given": 1, "inplace": cell.inputs}.get(cell.output, 0)
        # A model's own norm makes two float32 tensors and one result on its way; with its backward
        # it keeps up to eight.
        temporaries = (8 if cell.trains else 2) * 4 * cell.rows * cell.d
        needed = buffers * (cell.inputs + given) * cell.nbytes + temporaries + cell.nbytes
        if needed > available:
            raise click.BadParameter(
                f"{cell.shape} in {cell.dtype} needs {needed / 2**30:.1f} GiB of memory; "
                f"{available / 2**30:.1f} GiB are available",
                param_hint="'--shape'",
            )


def _available_bytes() -> int | None:
    """The memory that can be had without swapping; ``None`` where the system does not tell."""
    try:
        with Path("/proc/meminfo").open() as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _run(cells: list[Cell], others: tuple[str, ...], request: _Request) -> bool:
    """Measures and prints; whether every goal holds that was measured."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rmsnorm.bench import report
    from rmsnorm.bench.ahead import compile_ahead
    from rmsnorm.bench.engines import Engines
    from rmsnorm.bench.limit import absent_conditions, last_level_cache_bytes, rotating_bytes
    from rmsnorm.bench.memory import NAMES, MeasurementError, measure_memory
    from rmsnorm.bench.peers import EPS, Compiler
    from rmsnorm.bench.run import FULL, QUICK, Bench, WrongResultError, run
    from rmsnorm.bench.verdicts import verdicts

    if request.threads is not None:
        torch.set_num_threads(request.threads)
    quick, compiled, json_path = request.quick, request.compiled, request.json_path
    policy = (QUICK if quick else FULL).with_rounds(request.rounds)
    absent = absent_conditions()
    engines = Engines(EPS, request.engines)
    cache = last_level_cache_bytes()
    rotating = rotating_bytes(cache)
    compiler = Compiler(compiled)
    machine = report.machine(cache, rotating)

    errors = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as progress:
        names = [name for name in NAMES if compiled or not name.startswith("compiled")]
        total = len(cells) + ("memory" in others) * len(names) + ("step" in others)
        task = progress.add_task("starting", total=total)

        def say(text: str) -> None:
            progress.update(task, description=text)

        timer = Bench(policy, compiler, cache=cache, rotating=rotating, engines=engines, say=say)
        usages: list[Usage] = []
        steps: list[StepTimes] = []
        try:
            if "memory" in others:
                usages = measure_memory(names, say=say)
                progress.advance(task, len(names))
            if compiled:
                compile_ahead(cells, say)
            results = run(
                cells,
                timer.time_cell,
                policy,
                lambda result: progress.advance(task),
                absent=absent,
                overheads=timer.overheads,
            )
            if "step" in others:
                from rmsnorm.lm.step import QUICK_WORKLOADS, WORKLOADS, measure_steps

                workloads = [
                    one.with_rounds(request.rounds)
                    for one in (QUICK_WORKLOADS if quick else WORKLOADS)
                ]
                steps = measure_steps(workloads, compiled, say)
        except (WrongResultError, MeasurementError) as error:
            raise click.ClickException(str(error)) from None

    found = verdicts(results, usages, steps, absent)
    if json_path is not None:
        settings = {
            "quick": quick,
            "rounds": request.rounds,
            "compile": compiled and compiler.failure is None,
            "engines": engines.names,
        }
        document = report.to_dict(results, machine, settings, usages, steps, absent)
        text = json.dumps(document, indent=2)
        if json_path == "-":
            click.echo(text)
        else:
            Path(json_path).write_text(text + "\n")
    if request.plot_path is not None:
        from rmsnorm.bench.plot import draw

        draw(results, Path(request.plot_path), report.machine_line(machine))
    if json_path != "-":
        _print(results, usages, steps, machine, compiler, engines)
        _print_goals(found, request.check)
    return all(verdict.ok for verdict in found)


def _print(
    results: list[Result],
    usages: list[Usage],
    steps: list[StepTimes],
    machine: dict[str, Any],
    compiler: Compiler,
    engines: Engines,
) -> None:
    """Prints a table for each kind that was measured, and the sentences below them."""
    from rmsnorm.bench import report

    console = _console()
    console.print(report.machine_line(machine), highlight=False)
    for title, columns, rows in (
        ("one call", report.CALL_COLUMNS, report.call_rows(results)),
        ("forward", report.FORWARD_COLUMNS, report.forward_rows(results)),
        ("heads in a fused projection", report.FORWARD_COLUMNS, report.heads_rows(results)),
        ("forward and backward", report.TRAIN_COLUMNS, report.train_rows(results)),
        ("residual addition and norm", report.ADD_COLUMNS, report.add_rows(results)),
        ("the same bytes in rows of every width", report.SWEEP_COLUMNS, report.sweep_rows(results)),
        ("peak memory of forward and backward", report.MEMORY_COLUMNS, report.memory_rows(usages)),
        ("training steps of whole models", report.STEP_COLUMNS, report.step_rows(steps)),
    ):
        if rows:
            console.print(_table(title, *report.without_empty(columns, rows)))
    warning = report.load_warning(machine)
    if warning is not None:
        console.print(warning, highlight=False)
    if compiler.failure is not None:
        where = "failed in some cells" if compiler.enabled else "is absent"
        console.print(f"torch.compile {where}: {compiler.failure}", markup=False)
    for what, reason in engines.failures.items():
        console.print(f"{what} is absent: {reason}", markup=False, soft_wrap=True)
    for line in report.summary(results, usages, steps):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_goals(found: list[Verdict], unmeasured: bool) -> None:
    from rmsnorm.bench import report

    rows = report.goal_rows(found, unmeasured)
    if rows:
        _console().print(_table("goals", report.GOAL_COLUMNS, rows))
    broken = sum(not verdict.ok for verdict in found)
    held = sum(verdict.state == "holds" for verdict in found)
    click.echo(f"{held} goals hold, {broken} do not, {len(found) - held - broken} not measured")


def _console() -> Console:
    from rich.console import Console

    # Off a terminal the width is the table's: a wrapped row cannot be searched.
    return Console(width=None if sys.stdout.isatty() else 240)


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        number = "/" in column or column in ("spread", "worst") or column.endswith(" us")
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        lost = row[-1].startswith(("LOSES", "does not hold"))
        table.add_row(*row, style="red" if lost else None)
    return table
