"""What several commands share: one clear error, progress on a terminal, dtypes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console

from rmsnorm.progress import Say

if TYPE_CHECKING:
    import torch

DTYPE = click.Choice(["float32", "bfloat16", "float16"])
"""The dtypes of the weights of a language model."""


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of torch that is called so; ``None`` stays ``None``."""
    import torch

    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


@contextlib.contextmanager
def one_error() -> Iterator[None]:
    """Turns what the library says about bad input into the command's one-line error.

    Every error that it raises on purpose is a ValueError of a name of its own; a plain one would be
    a mistake in it and keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is ValueError or not type(error).__module__.startswith("rmsnorm."):
            raise
        raise click.ClickException(" ".join(str(error).split())) from None


@contextlib.contextmanager
def progress() -> Iterator[Say]:
    """Shows what is being done, on a terminal; elsewhere nothing."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda words: status.update(words)
