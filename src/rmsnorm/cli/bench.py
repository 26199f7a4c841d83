"""``rmsnorm bench``: speed and memory against the peers and against a plain copy."""

from __future__ import annotations

import contextlib
import json
import os
import sys
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
    parse_shape,
)

if TYPE_CHECKING:  # all of it imports torch, which --help and bad usage should not wait for
    from rmsnorm.bench.memory import Usage
    from rmsnorm.bench.peers import Compiler
    from rmsnorm.bench.run import Result
    from rmsnorm.lm.step import StepTimes

# What --kind chooses: the kinds of cells of each, in the order of a run; none for the memory and
# for the steps of whole models.
_KINDS: dict[str, tuple[Kind, ...]] = {
    "call": ("call",),
    "forward": ("forward",),
    "train": ("train",),
    "add": ("add", "add_train"),
    "memory": (),
    "step": (),
}
_FIXED = ("call", "memory", "step")


def _parse_shapes(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[int, int]]:
    try:
        return [parse_shape(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command()
@click.option("--check", is_flag=True, help="Exit 1 where a cell loses.")
@click.option("--quick", is_flag=True, help="Fewer rounds: a first impression.")
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write everything measured to FILE; - writes it to stdout instead of the tables.",
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
    help="Only this: the cost of one call, the forward, forward and backward, the fused residual "
    "addition, the peak memory, or the training step of whole models. May be repeated.",
)
@click.option("--memory", is_flag=True, help="The same as --kind memory.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads; torch's default otherwise.")
def bench(
    check: bool,
    quick: bool,
    no_compile: bool,
    json_path: str | None,
    shapes: list[tuple[int, int]],
    dtypes: tuple[str, ...],
    buffers: tuple[str, ...],
    outputs: tuple[str, ...],
    kinds: tuple[str, ...],
    memory: bool,
    threads: int | None,
) -> None:
    """Time the norm against F.rms_norm, a model's own norm, torch.compile and a plain copy.

    Timed are one call through torch.ops, the forward, forward and backward, and the residual
    addition with its norm: in one process, interleaved; medians. Ratios above 1 in the columns
    separate/ours, eager/ours and compiled/ours mean that this package is faster; ours/limit is the
    distance from the fastest copy of the same bytes. The peak memory of forward and backward is
    measured for each peer in a process of its own. Of two small language models the whole training
    step is timed, with these norms, with torch.nn.RMSNorm and without norms.
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
    if "call" in chosen:
        cells = call_cells() + cells
    others = tuple(name for name in ("memory", "step") if name in chosen)
    if not cells and not others:
        raise click.UsageError("nothing is left to measure: no cell of this kind has this output")
    if json_path is not None and json_path != "-":
        _check_writable(Path(json_path))
    if shapes:
        _check_memory(cells)
    lost = _run(cells, others, quick, not no_compile, json_path, threads)
    if check and lost:
        click.get_current_context().exit(1)


def _check_writable(path: Path) -> None:
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
        raise click.BadParameter(f"{str(path)!r}: {reason}", param_hint="'--json'")


def _check_memory(cells: list[Cell]) -> None:
    """Refuses a shape whose buffers, and what the peers allocate, would not fit in memory."""
    available = _available_bytes()
    if available is None:
        return
    for cell in cells:
        buffers = 2 if cell.buffers == "rotating" else 1
        # The output that is given, or the copies that are written over.
        given = {"fresh": 0, "given": 1, "inplace": cell.inputs}[cell.output]
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


def _run(
    cells: list[Cell],
    others: tuple[str, ...],
    quick: bool,
    compiled: bool,
    json_path: str | None,
    threads: int | None,
) -> bool:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rmsnorm.bench import report
    from rmsnorm.bench.ahead import compile_ahead
    from rmsnorm.bench.limit import last_level_cache_bytes, rotating_bytes
    from rmsnorm.bench.memory import NAMES, MeasurementError, measure_memory
    from rmsnorm.bench.peers import Compiler
    from rmsnorm.bench.run import FULL, QUICK, Bench, WrongResultError, run

    if threads is not None:
        torch.set_num_threads(threads)
    policy = QUICK if quick else FULL
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

        timer = Bench(policy, compiler, cache=cache, rotating=rotating, say=say)
        usages: list[Usage] = []
        steps: list[StepTimes] = []
        try:
            if "memory" in others:
                usages = measure_memory(names, say=say)
                progress.advance(task, len(names))
            if compiled:
                compile_ahead(cells, say)
            results = run(cells, timer.time_cell, policy, lambda result: progress.advance(task))
            if "step" in others:
                from rmsnorm.lm.step import QUICK_WORKLOADS, WORKLOADS, measure_steps

                steps = measure_steps(QUICK_WORKLOADS if quick else WORKLOADS, compiled, say)
        except (WrongResultError, MeasurementError) as error:
            raise click.ClickException(str(error)) from None

    if json_path is not None:
        settings = {"quick": quick, "compile": compiled and compiler.failure is None}
        text = json.dumps(report.to_dict(results, machine, settings, usages, steps), indent=2)
        if json_path == "-":
            click.echo(text)
        else:
            Path(json_path).write_text(text + "\n")
    if json_path != "-":
        _print(results, usages, steps, machine, compiler)
    held = (
        all(not result.loses for result in results),
        all(usage.ok for usage in usages),
        all(found.ok for found in steps),
    )
    return not all(held)


def _print(
    results: list[Result],
    usages: list[Usage],
    steps: list[StepTimes],
    machine: dict[str, Any],
    compiler: Compiler,
) -> None:
    """Prints a table for each kind that was measured, and the sentences below them."""
    from rich.console import Console
    from rich.table import Table

    from rmsnorm.bench import report

    # Off a terminal the width is the table's: a wrapped row cannot be searched.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"kernels: {machine['isa'] or 'none'}, "
        f"rotating through {machine['rotating_bytes'] >> 20} MiB",
        highlight=False,
    )
    for title, columns, rows in (
        ("one call through torch.ops", report.CALL_COLUMNS, report.call_rows(results)),
        ("forward", report.FORWARD_COLUMNS, report.forward_rows(results)),
        ("forward and backward", report.TRAIN_COLUMNS, report.train_rows(results)),
        ("residual addition and norm", report.ADD_COLUMNS, report.add_rows(results)),
        ("peak memory of forward and backward", report.MEMORY_COLUMNS, report.memory_rows(usages)),
        ("training steps of whole models", report.STEP_COLUMNS, report.step_rows(steps)),
    ):
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right" if "/" in column else "left")
        for row in rows:
            table.add_row(*row, style="red" if "LOSES" in row[-1] else None)
        console.print(table)
    warning = report.load_warning(machine)
    if warning is not None:
        console.print(warning, highlight=False)
    if compiler.failure is not None:
        where = "failed in some cells" if compiler.enabled else "is absent"
        console.print(f"torch.compile {where}: {compiler.failure}", markup=False)
    for line in report.summary(results, usages, steps):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
