"""``rmsnorm inspect``: find, replace, prove and time the norms of a model."""

from __future__ import annotations

import codecs
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rmsnorm.cli.common import one_error, progress
from rmsnorm.progress import Say

if TYPE_CHECKING:
    from rmsnorm.rewrite.inspect import Inspection
    from rmsnorm.rewrite.speed import Speeds

# Genesis 1:1-3 in the King James version, which is in the public domain.
GENESIS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light."
)


# More than any model's context takes; a device or a pipe may never end.
_MOST_TEXT = 1 << 20


def _parse_dtypes(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    from rmsnorm.models.load import DTYPES

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise click.BadParameter(
                f"{name!r}; expected some of {', '.join(DTYPES)}, separated by commas", ctx, param
            )
    return names


# Before this process adds to it; not every system tells.
_LOAD_AVERAGE = os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@click.command()
@click.argument("model", default="smollm2")
@click.option(
    "--dtype",
    "dtypes",
    default="float32",
    show_default=True,
    callback=_parse_dtypes,
    help="Dtypes of the weights, separated by commas.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text file to run through the model instead of Genesis 1:1-3.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Use at most this many tokens of the text.",
)
@click.option(
    "--speed/--no-speed",
    default=None,
    help="Time whole models (prefill, decoding, a training step) until norms can be told from "
    "noise, or time nothing. By default norms and forward passes are timed for ten seconds.",
)
@click.option("--compile", "compiled", is_flag=True, help="With --speed: time torch.compile, too.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0, max=1e6),
    default=600.0,
    show_default=True,
    help="With --speed: about how long to time each dtype; six rounds in any case.",
)
@click.option(
    "--work",
    "works",
    type=click.Choice(["prefill", "decoding", "training"]),
    multiple=True,
    help="With --speed: time only this. May be repeated.",
)
@click.option("--exact", is_flag=True, help="Replace only norms that agree bit for bit.")
@click.option(
    "--fuse-residual", is_flag=True, help="Join residual additions with the norms after them."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads for torch; default: its own.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def inspect(
    model: str,
    dtypes: list[str],
    text: Path | None,
    tokens: int,
    speed: bool | None,
    compiled: bool,
    seconds: float,
    works: tuple[str, ...],
    exact: bool,
    fuse_residual: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Find, replace, prove and time the norms of MODEL.

    MODEL is a Hugging Face folder, a GGUF file, or the name of an installed model: smollm2 (the
    default) or gemma3. Or it is a small model of random weights, made up here: random:llama4,
    random:qwen3, random:qwen3-next, random:deepseek-v3, random:olmo2, random:gpt-oss, random:t5,
    random:mamba2, random:gemma3n, random:whisper, random:modernbert.

    Each norm's convention is found by how it behaves. The norms are replaced in a copy, and the
    copy's logits are compared with the model's: the command exits with 1 unless they are identical,
    bit for bit, in prefill and in decoding with a cache (of an encoder, the hidden states). The
    results of gated norms are not, so for a model with them say --exact, which leaves those alone.
    """
    if compiled and not speed:
        raise click.UsageError("--compile is about --speed, which was not given")
    if works and not speed:
        raise click.UsageError("--work is about --speed, which was not given")
    words = GENESIS if text is None else _read_text(text)
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = []
    for dtype in dtypes:
        with one_error(), progress() as say:
            inspection, speeds = _inspect(
                model,
                dtype,
                words,
                tokens,
                speed,
                threads,
                say,
                exact,
                fuse_residual,
                compiled,
                seconds,
                works,
            )
        found.append((inspection, speeds))
        if not as_json:
            _print(console, model, inspection, first=len(found) == 1)
            if speeds is not None:
                _print_speeds(console, speeds)
            sys.stdout.flush()  # the next dtype takes a while
    proven = all(inspection.proof.holds for inspection, _ in found)
    if as_json:
        document = {
            "model": model,
            "proven": proven,
            "environment": _environment(),
            "inspections": [
                inspection.to_dict() | ({} if speeds is None else {"speed": speeds.to_dict()})
                for inspection, speeds in found
            ],
        }
        print(json.dumps(document, indent=2))
    return 0 if proven else 1


def _read_text(path: Path) -> str:
    """The beginning of the file, at most ``_MOST_TEXT`` bytes of it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_TEXT + 1)
        cut = len(content) > _MOST_TEXT
        # The cut may fall within a character, which is then left out.
        text = codecs.getincrementaldecoder("utf-8")().decode(content[:_MOST_TEXT], final=not cut)
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"--text {path} cannot be read: {error}") from None
    if cut:
        click.echo(f"note: only the first {_MOST_TEXT >> 20} MiB of {path} are read", err=True)
    return text


def _inspect(
    model: str,
    dtype: str,
    text: str,
    tokens: int,
    speed: bool | None,
    threads: int | None,
    say: Say,
    exact: bool,
    fuse_residual: bool,
    compiled: bool,
    seconds: float,
    works: tuple[str, ...],
) -> tuple[Inspection, Speeds | None]:
    say("loading PyTorch")
    import torch

    from rmsnorm.models.load import load_model
    from rmsnorm.rewrite.inspect import inspect_model, token_ids

    if threads is not None:
        torch.set_num_threads(threads)
    loaded, tokenizer = load_model(model, dtype, say=say)
    ids = token_ids(loaded, tokenizer, text, tokens)
    if tokenizer is None:
        click.echo("note: the model has no tokenizer, so its tokens are random", err=True)
    if ids.shape[1] < 2:
        raise click.ClickException("the text has fewer than 2 tokens")
    inspection = inspect_model(
        loaded,
        ids,
        seconds=10.0 if speed is None else 0.0,
        exact=exact,
        fuse_residual=fuse_residual,
        say=say,
    )
    if not speed:
        return inspection, None
    from rmsnorm.rewrite.speed import WORKS, measure_speed

    return inspection, measure_speed(
        loaded,
        ids,
        exact=exact,
        compiled=compiled,
        seconds=seconds,
        works=works or tuple(WORKS),
        say=say,
    )


def _environment() -> dict[str, Any]:
    import torch

    import rmsnorm

    return {
        "rmsnorm": rmsnorm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_isa": rmsnorm.cpu_isa(),
        "threads": torch.get_num_threads(),
        "load_average": _LOAD_AVERAGE,
    }


def _print(console: Console, model: str, inspection: Inspection, first: bool) -> None:
    from rmsnorm.bench.report import load_warning

    if first:
        env = _environment()
        kernels = f"{env['cpu_isa']} kernels" if env["cpu_isa"] else "without kernels"
        threads = f"{env['threads']} thread" + ("s" if env["threads"] > 1 else "")
        console.print(
            f"[bold]{escape(model)}[/], torch {env['torch']}, {kernels}, {threads}",
            highlight=False,
        )
        warning = load_warning(env) if inspection.timings else None
        if warning:
            console.print(warning, highlight=False)
    console.print(
        f"\n[bold]{inspection.dtype}[/]: {inspection.swapped} of {inspection.norms} norms replaced",
        highlight=False,
    )
    if not inspection.swapped:
        console.print("none was found to be an RMSNorm that can be replaced")
    if inspection.blocks:
        console.print(
            f"{inspection.fused_blocks} of {inspection.blocks} blocks: residual additions joined "
            "with the norms after them",
            highlight=False,
        )
    tables = [_norms_table(inspection), _proof_table(inspection)]
    if inspection.timings:
        tables.append(_times_table(inspection))
    for table in tables:
        if table.row_count:
            console.print(table)


def _norms_table(inspection: Inspection) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("norms", "class", "convention", "eps", "shape"):
        table.add_column(name, overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("result")
    for group in inspection.groups:
        if not group.swapped:
            result = f"left: {group.reason}"
        elif group.bit_identical:
            result = "replaced, bit for bit"
        else:
            result = "replaced, last bits differ"
        cells = (
            group.pattern,
            group.cls,
            group.convention or "-",
            "-" if not group.convention else "machine" if group.eps is None else f"{group.eps:.6g}",
            "x".join(map(str, group.shape)) or "-",
            str(group.count),
            result,
        )
        table.add_row(*map(escape, cells))
    return table


def _proof_table(inspection: Inspection) -> Table:
    proof = inspection.proof
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{proof.compared}, against the model as it was")
    table.add_column("tokens", justify="right")
    table.add_column("result")
    for what, tokens, identical in (
        ("prefill", proof.prefill_tokens, proof.prefill_identical),
        ("decoding with a cache", proof.decode_tokens, proof.decode_identical),
    ):
        if not tokens:  # an encoder decodes nothing
            continue
        off = f"[red]different, by up to {proof.max_abs_diff:.3g}[/]"
        table.add_row(what, str(tokens), "[green]identical, bit for bit[/]" if identical else off)
    wrong = f"off by up to {proof.wrong_max_abs_diff:.3g}"
    if inspection.dtype == "float32":
        wrong += " (only half types tell the conventions apart)"
    if inspection.swapped:
        table.add_row("prefill with the wrong convention", str(proof.prefill_tokens), wrong)
    return table


def _times_table(inspection: Inspection) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("median time, ms")
    for name in ("before", "after", "ratio", "rounds"):
        table.add_column(name, justify="right")
    for timing in inspection.timings:
        table.add_row(
            timing.what,
            f"{timing.before * 1e3:.2f}",
            f"{timing.after * 1e3:.2f}",
            f"{timing.before / timing.after:.2f}x",
            str(timing.rounds),
        )
    return table


def _print_speeds(console: Console, speeds: Speeds) -> None:
    for speed in speeds.found:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column(f"{speed.what}, {speed.paired.rounds} rounds")
        for name in ("ms", "median round, ms", "times as fast (95 %)"):
            table.add_column(name, justify="right")
        for variant in speed.paired.variants:
            ratio = speed.ratio(variant)
            table.add_row(
                variant,
                f"{speed.paired.seconds(variant) * 1e3:.2f}",
                f"{speed.paired.median(variant) * 1e3:.2f}",
                "" if ratio is None else ratio.times(),
            )
        console.print(table)
        for line in speed.lines():
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    for reason in speeds.left:
        console.print(reason, highlight=False, markup=False, soft_wrap=True)
