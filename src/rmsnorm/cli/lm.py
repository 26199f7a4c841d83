"""``rmsnorm lm``: models to and from Hugging Face's form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rmsnorm.cli.common import DTYPE, one_error, progress, torch_dtype
from rmsnorm.models.files import PICKLED

if TYPE_CHECKING:
    from rmsnorm.lm.model import MindForCausalLM

# Logits in float32 that are further apart than this, relative to the largest, are not equal.
_TOLERANCE = 1e-5
_OUT = click.Path(file_okay=False, path_type=Path)


@click.group()
def lm() -> None:
    """Convert language models.

    A model with RMSNorm before each sublayer has the form of Hugging Face's LLaMA and, with norms
    of queries and keys, of Qwen3.
    """


@lm.command("export")
@click.argument("model")
@click.option("--out", required=True, type=_OUT, help="The folder to write; new or empty.")
@click.option("--dtype", type=DTYPE, help="Dtype of the weights; default: as they are stored.")
@click.option(
    "--check/--no-check",
    default=True,
    help="Whether to compare the logits with those of transformers, where it is installed.",
)
def export_(model: str, out: Path, dtype: str | None, check: bool) -> int:
    """Write MODEL as a folder that plain transformers loads.

    MODEL is the folder of a training run, or what else `rmsnorm generate` takes. The command exits
    with 1 if the logits differ.
    """
    with one_error(), progress() as say:
        say("loading PyTorch")
        from rmsnorm.lm import convert

        _check_empty(out)
        loaded, tokenizer = convert.load(model, torch_dtype(dtype), say=say)
        say(f"writing {out}")
        convert.export(loaded, tokenizer, out)
    return _report(loaded, out, check)


@lm.command("import")
@click.argument("source")
@click.option("--out", required=True, type=_OUT, help="The folder to write; new or empty.")
@click.option("--preset", help="For a .pth file: the sizes of the model.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For a .pth file: a mind.json, or the config.json of a LLaMA or a Qwen3.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="For a .pth file: the folder or the tokenizer.json of its tokenizer.",
)
@click.option("--dtype", type=DTYPE, help="Dtype of the weights; default: as they are stored.")
@click.option(
    "--check/--no-check",
    default=True,
    help="Whether to compare the logits with those of transformers, where it is installed.",
)
def import_(
    source: str,
    out: Path,
    preset: str | None,
    config: Path | None,
    tokenizer: Path | None,
    dtype: str | None,
    check: bool,
) -> int:
    """Read SOURCE and write a folder that the other commands take.

    SOURCE is a Hugging Face folder with a LLaMA or a Qwen3, a GGUF file of such a model, the name
    of an installed one (smollm2), or a .pth file with a state dict of minimind's or LLaMA's names.
    A .pth file holds neither sizes nor a tokenizer: without --preset or --config it is taken for
    the preset that has its shapes. Nothing but tensors is read from it.
    """
    pickled = Path(source).suffix in PICKLED
    given: dict[str, Any] = {"--preset": preset, "--config": config, "--tokenizer": tokenizer}
    if pickled and tokenizer is None:
        raise click.ClickException(f"{source} holds no tokenizer: give --tokenizer")
    if preset is not None and config is not None:
        raise click.ClickException("--preset and --config were both given; expected one of them")
    for option, value in given.items():
        if value is not None and not pickled:
            raise click.ClickException(f"{option} is for .pth files; {source} has its own")
    with one_error(), progress() as say:
        say("loading PyTorch")
        from rmsnorm.lm import config as configs
        from rmsnorm.lm import convert
        from rmsnorm.lm.tokenizer import Tokenizer

        _check_empty(out)
        if pickled:
            assert tokenizer is not None
            sizes = None
            if preset is not None:
                sizes = configs.preset(preset)
            elif config is not None:
                sizes = convert.read_config(config)
            read = Tokenizer.load(tokenizer)
            model = convert.import_pth(source, sizes, torch_dtype(dtype))
        else:
            model, read = convert.load(source, torch_dtype(dtype), say=say)
        say(f"writing {out}")
        convert.save(model, read, out)
    return _report(model, out, check)


def _check_empty(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise click.ClickException(f"--out {out} is not empty; expected a new folder")


def _report(model: MindForCausalLM, out: Path, check: bool) -> int:
    """Says what was written, and whether transformers computes the same from it."""
    import importlib.util

    from rmsnorm.lm import convert

    count = sum(parameter.numel() for parameter in model.parameters())
    form = "LlamaForCausalLM" if not model.config.qk_norm else "Qwen3ForCausalLM"
    if not (out / "config.json").is_file():
        click.echo(f"{out}: {count:,} parameters; transformers has no model of this form")
        return 0
    click.echo(f"{out}: {count:,} parameters, loads in transformers as {form}")
    if not check:
        return 0
    if importlib.util.find_spec("transformers") is None:
        click.echo("note: not compared with transformers, which is not installed", err=True)
        return 0
    with one_error(), progress() as say:
        say("comparing with transformers")
        apart, largest = convert.difference(model, out)
    equal = apart <= _TOLERANCE * max(1.0, largest)
    click.echo(
        f"logits in float32 are {'equal' if equal else 'DIFFERENT'}: at most {apart:.3g} apart, "
        f"the largest is {largest:.3g}"
    )
    return 0 if equal else 1
