"""The ``rmsnorm`` command. Subcommands are imported when called, so ``--help`` is quick."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

import rmsnorm

# name -> (the module that holds a click command of that name, one line of help)
_COMMANDS = {
    "bench": ("rmsnorm.cli.bench", "Measure the speed of the kernels against PyTorch."),
    "chat": ("rmsnorm.cli.generate", "Talk to a language model, line by line."),
    "generate": ("rmsnorm.cli.generate", "Let a language model continue a text."),
    "inspect": ("rmsnorm.cli.inspect", "Find, replace, prove and time the norms of a model."),
    "lm": ("rmsnorm.cli.lm", "Convert language models: export, import."),
    "train": ("rmsnorm.cli.train", "Train a small language model on text."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rmsnorm.__version__, prog_name="rmsnorm")
def _rmsnorm() -> None:
    """RMSNorm, exact and at memory speed.

    Exit codes: 0 done and proven, 1 a check failed, 2 bad input.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with ``argv``, or the process's own arguments; the exit code.

    Example:
        >>> main(["--version"])
        rmsnorm, version 0.1.0
        0
    """
    # Python leaves the streams out that were closed when it started.
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        print("error: stdout is closed", file=sys.stderr)
        return 2
    # What is asked of transformers is local; without this it may still look for updates.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        code = _rmsnorm.main(
            args=None if argv is None else list(argv), prog_name="rmsnorm", standalone_mode=False
        )
        sys.stdout.flush()  # here, while a failure can still be reported
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        return 2
    except click.Abort:
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # its reader is gone
        return 1
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        print(f"error: {what}{error.strerror or error}", file=sys.stderr)
        _discard_output()
        return 2
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Sends what is left to flush to nowhere: at exit, flushing would fail once more."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # a stream without a file descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
