"""Write docs/census.md: what rmsnorm.patch makes of every norm class of transformers.

    python scripts/census.py docs/census.md

It takes about a minute and needs the version of transformers that the list of classes is for.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import click

_ROOT = Path(__file__).resolve().parent.parent
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("page", type=_FILE)
@click.option(
    "--classes",
    type=_FILE,
    default=_ROOT / "tests" / "census" / "classes.json",
    help="The list of classes.",
)
def main(page: Path, classes: Path) -> None:
    """Examine every class of the list and write PAGE."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers

        from rmsnorm.rewrite import census as counting

        census = counting.Census.load(classes)
    except (ImportError, OSError, ValueError) as error:
        raise _BadInput(str(error)) from None
    if transformers.__version__ != census.transformers:
        raise _BadInput(
            f"transformers is {transformers.__version__}; {classes} is for {census.transformers}"
        )
    warnings.simplefilter("ignore")  # some classes warn when they are built
    rows = [*census.rms, *census.variants]
    norms = [*((norm, True) for norm in rows), *((norm, False) for norm in census.other)]
    hidden = not sys.stderr.isatty()
    with click.progressbar(norms, label="classes", file=sys.stderr, hidden=hidden) as shown:
        findings = [counting.examine(norm, compare=compare) for norm, compare in shown]
    command = "python scripts/census.py docs/census.md"
    text = counting.markdown(census, findings[: len(rows)], findings[len(rows) :], command)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _BadInput(f"{page}: {error.strerror}") from None


class _BadInput(click.ClickException):
    """What the command was given cannot be used."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        """Print it as all commands do."""
        click.echo(f"error: {self.message}", err=True)


if __name__ == "__main__":
    main()
