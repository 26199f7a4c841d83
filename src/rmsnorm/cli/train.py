"""``rmsnorm train``: a language model learns from text."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rmsnorm.cli.common import one_error
from rmsnorm.lm.config import (
    DEVICE_CHOICES,
    DTYPE_CHOICES,
    NORMS,
    PARALLEL_CHOICES,
    PLACEMENTS,
    PRESETS,
    TRAIN_FILE,
    ConfigError,
    TrainConfig,
    parse_train_toml,
)
from rmsnorm.lm.watch import Watch

# Between two lines where there is no terminal.
_SECONDS = 10.0
_Command = TypeVar("_Command", bound=Callable[..., Any])

_COUNT = click.IntRange(min=1)
_COUNT_OR_NONE = click.IntRange(min=0)
_POSITIVE = click.FloatRange(min=0.0, min_open=True)
_NOT_NEGATIVE = click.FloatRange(min=0.0)

# The name of a field, the type of its option, and what the help says.
_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("preset", click.Choice(tuple(PRESETS)), "The model; default: tiny."),
    ("minutes", _POSITIVE, "How long; the number of steps is fixed after the first 20."),
    ("steps", _COUNT, "How many updates."),
    ("init", str, "A folder with a model to go on from, instead of a preset."),
    ("tokenizer", str, "A folder with a tokenizer; default: one is trained."),
    ("vocab_size", _COUNT, "Tokens of a tokenizer that is trained; default: the preset's."),
    ("seq_len", _COUNT, "Tokens of a sequence."),
    ("batch_size", _COUNT, "Sequences of a forward pass, on each rank."),
    ("accumulate", _COUNT, "Forward passes of a step."),
    ("lr", _POSITIVE, "The highest learning rate."),
    ("min_lr", _NOT_NEGATIVE, "The last learning rate."),
    ("warmup", _COUNT_OR_NONE, "Steps in which the learning rate rises."),
    ("weight_decay", _NOT_NEGATIVE, "AdamW's, of the matrices; norms are not decayed."),
    ("clip", _NOT_NEGATIVE, "The largest norm of a gradient; 0: any."),
    ("dtype", click.Choice(DTYPE_CHOICES), "Of the matrix products."),
    ("seed", click.IntRange(0, 2**62 - 1), "Of the first weights and of the order of the text."),
    ("held_out", click.FloatRange(0.0, 0.5, min_open=True), "The part not trained on."),
    ("log_every", _COUNT, "Steps between two lines of metrics.jsonl."),
    ("eval_every", _COUNT_OR_NONE, "Steps between two evaluations; default: 8 in a run."),
    ("save_every", _COUNT, "Steps between two checkpoints; default: 20 in a run, at most 200."),
    ("sample_every", _COUNT_OR_NONE, "Steps between two samples; default: with evaluations."),
    ("lora_rank", _COUNT_OR_NONE, "Train low-rank additions to --init's matrices, with peft."),
    ("lora_alpha", _COUNT, "Their scale, times the rank; default: twice the rank."),
    ("device", click.Choice(DEVICE_CHOICES), "Where to train."),
    ("threads", _COUNT, "Threads for torch; default: its own."),
    ("parallel", click.Choice(PARALLEL_CHOICES), "How the ranks of torchrun share the work."),
    ("model_parallel", _COUNT, "Ranks that share a model, with tp; default: all."),
)
_SWITCHES = (
    ("compile", "Run the model through torch.compile."),
    ("gradient_checkpointing", "Compute each block twice instead of keeping what is in it."),
    ("tensorboard", "Write for TensorBoard, too."),
)
_MODEL_FIELDS = ("norm", "partial", "placement")


def _options(command: _Command) -> _Command:
    defaults = {name: field.default for name, field in TrainConfig.__dataclass_fields__.items()}
    for name, text in reversed(_SWITCHES):
        flag = name.replace("_", "-")
        default = "on" if defaults[name] else "off"
        option = click.option(
            f"--{flag}/--no-{flag}", name, default=None, help=f"{text} [default: {default}]"
        )
        command = option(command)
    for name, kind, text in reversed(_OPTIONS):
        if defaults[name] not in (None, 0, ""):
            text = f"{text} [default: {defaults[name]}]"
        # What was not given is None here, so that it leaves alone what a TOML file says.
        option = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)
        command = option(command)
    return command


@click.command()
@click.argument("data", required=False)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder.")
@click.option("--resume", is_flag=True, help="Continue the run in the folder, if there is one.")
@click.option(
    "--config",
    "toml",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file of settings, named as the options are; options come before it.",
)
@click.option("--norm", type=click.Choice(NORMS), help="The model's norms.")
@click.option("--partial", type=_POSITIVE, help="The part of a row that --norm partial looks at.")
@click.option("--placement", type=click.Choice(PLACEMENTS), help="Where the norms stand.")
@_options
def train(data: str | None, out: Path, resume: bool, toml: Path | None, **given: Any) -> int:
    """Train a language model on DATA.

    DATA is a text file, a folder of them, or a .jsonl file whose lines are {"text": ...} or chats,
    {"conversations": [{"role": ..., "content": ...}, ...]}, of which the assistant's turns are
    learned. --out takes everything: settings, tokenizer, checkpoints, metrics.jsonl, and at the end
    a model that `rmsnorm generate` and transformers load. At the end the bits per byte on held-out
    text are printed. A run that was interrupted, at any moment, continues with --resume and ends
    with the same bits.
    """
    started = time.monotonic()
    given["data"] = data
    with one_error():
        config = _config(out, resume, toml, given)
        from rmsnorm.lm.train import DivergedError
        from rmsnorm.lm.train import train as run

        try:
            with _watch() as watch:
                result = run(config, out, resume=resume, started=started, watch=watch)
        except DivergedError as error:
            click.echo(f"error: {error}", err=True)
            return 1
        except KeyboardInterrupt:
            click.echo(f"interrupted; --resume continues {out} from its last checkpoint", err=True)
            raise
    if _is_main():
        click.echo(f"steps {result.steps}")
        click.echo(f"tokens {result.tokens}")
        click.echo(f"seconds {time.monotonic() - started:.1f}")
        click.echo(f"held_out_loss {result.held_out_loss:.4f}")
        click.echo(f"bits_per_byte {result.bits_per_byte:.4f}")
        click.echo(f"xz_bits_per_byte {result.xz_bits_per_byte:.4f}")
    return 0


def _config(out: Path, resume: bool, toml: Path | None, given: dict[str, Any]) -> TrainConfig:
    """The settings: of the run that continues, of the TOML file, and of the options, in turn."""
    fields: dict[str, Any] = {}
    for path in (out / TRAIN_FILE if resume else None, toml):
        if path is not None and path.is_file():
            try:
                found = parse_train_toml(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise click.ClickException(f"{path} is not UTF-8") from None
            except ConfigError as error:
                raise click.ClickException(f"{path}: {error}") from None
            if not isinstance(found.get("model", {}), dict):
                wrong = f"model is {found['model']!r}; expected a table of the model's fields"
                raise click.ClickException(f"{path}: {wrong}")
            model = {**fields.get("model", {}), **found.get("model", {})}
            fields = {**fields, **found, "model": model}
    model = dict(fields.get("model", {}))
    for name in _MODEL_FIELDS:
        value = given.pop(name)
        if value is not None:
            model[name] = value
    options = {name: value for name, value in given.items() if value is not None}
    if "steps" in options:
        fields.pop("minutes", None)
    if "minutes" in options:
        fields.pop("steps", None)
    fields = {**fields, **options, "model": model}
    if "data" not in fields:
        raise click.UsageError("Missing argument 'DATA'.")
    for name in ("data", "init", "tokenizer"):
        # So that the run can be continued from another folder; a package's name is not a path.
        value = fields.get(name)  # of another type, it is refused below
        if isinstance(value, str) and value and Path(value).exists():
            fields[name] = str(Path(value).absolute())
    return TrainConfig(**fields)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _watch() -> Iterator[Watch]:
    """Shows a run on the terminal, or as a line every few seconds; the other ranks are silent."""
    console = Console(file=sys.stderr, highlight=False)
    if not _is_main():
        yield Watch()
    elif not console.is_terminal:
        yield _Lines()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[about]}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
            yield _Bar(progress, progress.add_task("loading", total=None, about=""))


class _Lines(Watch):
    """A line of plain text now and then."""

    def __init__(self) -> None:
        self.steps: int | None = None
        self.said = 0.0

    def note(self, words: str) -> None:
        self.line(f"note: {words}")

    def begin(self, step: int, steps: int | None) -> None:
        self.steps = steps
        if steps is not None:
            self.line(f"{steps} steps, from step {step}" if step else f"{steps} steps")

    def step(self, entry: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self.said >= _SECONDS or entry["step"] == self.steps:
            self.said = now
            self.line(f"step {entry['step']}/{self.steps or '?'}  {_described(entry)}")

    def held_out(self, entry: Mapping[str, Any]) -> None:
        self.line(
            f"step {entry['step']}: held_out_loss {entry['held_out_loss']:.4f}  bits_per_byte "
            f"{entry['bits_per_byte']:.4f}  (xz {entry['xz_bits_per_byte']:.4f})"
        )

    def sample(self, step: int, prompt: str, text: str) -> None:
        self.line(f"sample: {_plain(prompt)} | {_plain(text)}")

    def line(self, text: str) -> None:
        click.echo(text, err=True)


class _Bar(_Lines):
    """A bar of progress; what is to be kept is printed above it."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        super().__init__()
        self.progress, self.task = progress, task

    def say(self, words: str) -> None:
        self.progress.update(self.task, description=words)

    def begin(self, step: int, steps: int | None) -> None:
        self.steps = steps
        self.progress.reset(self.task, total=steps, completed=step, description="training")

    def step(self, entry: Mapping[str, Any]) -> None:
        self.progress.update(
            self.task,
            completed=entry["step"],
            description=f"{entry['step']}/{self.steps or '?'}",
            about=_described(entry),
        )

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    """On one line, and without what would steer a terminal: an untrained model writes anything."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _described(entry: Mapping[str, Any]) -> str:
    first, last = entry["activation_rms"]
    return (
        f"loss {entry['loss']:.4f}  {entry['tokens_per_second']:.0f} tokens/s  "
        f"activations {first:.2g} to {last:.2g}"
    )
