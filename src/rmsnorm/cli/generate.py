"""``rmsnorm generate`` and ``rmsnorm chat``: a model writes text."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rmsnorm.cli.common import DTYPE, one_error, progress, torch_dtype

if TYPE_CHECKING:
    from rmsnorm.lm.model import MindForCausalLM
    from rmsnorm.lm.tokenizer import Tokenizer

_MOST_TOKENS = 256
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _options(command: _Command) -> _Command:
    """The options of both commands."""
    for option in reversed(
        (
            click.option(
                "-n",
                "--max-new-tokens",
                type=click.IntRange(min=1),
                help=f"The most tokens to write; default: {_MOST_TOKENS}, or what fits.",
            ),
            click.option(
                "--temperature",
                type=click.FloatRange(min=0.0),
                default=0.8,
                show_default=True,
                help="Divides the logits; 0 takes the likeliest token.",
            ),
            click.option(
                "--top-k",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                help="Sample from the K likeliest tokens; 0: from all.",
            ),
            click.option(
                "--top-p",
                type=click.FloatRange(min=0.0, max=1.0, min_open=True),
                default=1.0,
                show_default=True,
                help="Sample from the fewest tokens with this probability together.",
            ),
            click.option(
                "--repetition-penalty",
                type=click.FloatRange(min=0.0, min_open=True),
                default=1.0,
                show_default=True,
                help="Divides the logits of tokens that occurred already.",
            ),
            click.option(
                "--seed",
                type=click.IntRange(min=0, max=2**62 - 1),
                default=0,
                show_default=True,
                help="The same seed gives the same text.",
            ),
            click.option("--stop", multiple=True, help="End at this text. May be repeated."),
            click.option(
                "--dtype",
                type=DTYPE,
                help="Dtype of the weights; default: as they are stored.",
            ),
            click.option(
                "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True
            ),
            click.option(
                "--threads",
                type=click.IntRange(1, 2**16),
                help="Threads for torch; default: its own.",
            ),
        )
    ):
        command = option(command)
    return command


@dataclass
class _Loaded:
    model: MindForCausalLM
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings


def _load(path: str, dtype: str | None, device: str, threads: int | None) -> _Loaded:
    with progress() as say:
        say("loading PyTorch")
        import torch

        from rmsnorm.lm import convert

        if device == "cuda" and not torch.cuda.is_available():
            raise click.ClickException("--device cuda: PyTorch finds no such device")
        if threads is not None:
            torch.set_num_threads(threads)
        folder = convert.model_folder(path, say=say)
        model, tokenizer = convert.load(folder, torch_dtype(dtype), say=say)
        return _Loaded(model.to(device), tokenizer, convert.end_ids(folder, tokenizer))


class _Clock:
    """Counts tokens, and the time from the first one on: before it the prompts are read."""

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows
        self.start = time.perf_counter()
        self.first = self.last = self.start
        self.tokens = 0

    def tick(self) -> None:
        self.last = time.perf_counter()
        if self.tokens < self.rows:  # every row's first token is computed with the prompts
            self.first = self.last
        self.tokens += 1

    def rate(self) -> float | None:
        """Tokens a second, if there were enough to tell."""
        seconds, counted = self.last - self.first, self.tokens - self.rows
        return counted / seconds if counted > 0 and seconds > 0 else None

    def words(self) -> str:
        rate = self.rate()
        total = f"{self.tokens} token{'s' * (self.tokens != 1)} in {self.last - self.start:.2f} s"
        return total if rate is None else f"{total}, {rate:.1f} tokens/s after the first"


@click.command()
@click.argument("model")
@click.option(
    "-p",
    "--prompt",
    "prompts",
    multiple=True,
    default=("",),
    help="How the text begins; repeated, a batch of texts. Without it, as a document begins.",
)
@_options
@click.option("--cache/--no-cache", default=True, help="Keep keys and values of earlier tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    max_new_tokens: int | None,
    stop: tuple[str, ...],
    dtype: str | None,
    device: str,
    threads: int | None,
    cache: bool,
    as_json: bool,
    **sampling: Any,
) -> int:
    """Continue a text with MODEL.

    MODEL is the folder of a training run, a Hugging Face folder with a LLaMA or a Qwen3, a GGUF
    file of such a model, or the name of an installed one: smollm2. A single text is printed while
    it is written. Prompt i of a batch is continued as alone with the seed plus i.
    """
    _check_text("--prompt", *prompts)
    _check_text("--stop", *stop)
    with one_error():
        loaded = _load(model, dtype, device, threads)
        from rmsnorm.lm.generate import generate as continue_prompts

        ids = [_encode(loaded.tokenizer, prompt) for prompt in prompts]
        if max_new_tokens is None:
            max_new_tokens = max(1, min(_MOST_TOKENS, loaded.context - max(map(len, ids))))
        clock = _Clock(len(prompts))
        streaming = len(prompts) == 1 and not as_json
        unwritten = list(prompts)  # until the first token: what is refused prints nothing

        def on_token(row: int, token: int | None, text: str) -> None:
            if token is not None:
                clock.tick()
            if streaming:
                _write(unwritten.pop() + text if unwritten else text)

        completions = continue_prompts(
            loaded.model,
            ids,
            max_new_tokens=max_new_tokens,
            tokenizer=loaded.tokenizer,
            stop=stop,
            eos_ids=loaded.end_ids,
            use_cache=cache,
            on_token=on_token,
            **sampling,
        )
    if as_json:
        document = {
            "model": model,
            "completions": [
                {"prompt": prompt, "text": done.text, "ids": done.ids, "reason": done.reason}
                for prompt, done in zip(prompts, completions, strict=True)
            ],
            "tokens": clock.tokens,
            "seconds": clock.last - clock.start,
            "tokens_per_second": clock.rate(),
        }
        print(json.dumps(document, indent=2))
        return 0
    if streaming:
        _write("".join([*unwritten, "\n"]))
    else:
        for number, (prompt, done) in enumerate(zip(prompts, completions, strict=True)):
            between = "\n" if number else ""
            _write(f"{between}==> {number + 1} <==\n{prompt}{done.text}\n")
    click.echo(clock.words(), err=True)
    return 0


@click.command()
@click.argument("model")
@click.option("--system", help="What the model is told first.")
@_options
def chat(
    model: str,
    system: str | None,
    max_new_tokens: int | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    **sampling: Any,
) -> int:
    """Talk with MODEL, which was trained on conversations.

    Each line of the input is a question; the end of the input (Ctrl-D) ends the conversation.
    MODEL is what `rmsnorm generate` takes.
    """
    _check_text("--system", *([] if system is None else [system]))
    _check_text("--stop", *sampling["stop"])
    with one_error():
        loaded = _load(model, dtype, device, threads)
        from rmsnorm.lm.generate import Conversation

        conversation = Conversation(
            loaded.model,
            loaded.tokenizer,
            system=system,
            eos_ids=loaded.end_ids,
            max_new_tokens=max_new_tokens or max(1, min(_MOST_TOKENS, loaded.context // 2)),
            **sampling,
        )
        forgotten = 0
        for question in _questions():
            _check_text("the question", question)
            clock = _Clock()

            def on_token(row: int, token: int | None, text: str, clock: _Clock = clock) -> None:
                if token is not None:
                    clock.tick()
                _write(text)

            conversation.ask(question, on_token)
            _write("\n")
            if conversation.forgotten > forgotten:
                forgotten = conversation.forgotten
                click.echo(
                    f"note: the context is full; the first {forgotten} answers are forgotten",
                    err=True,
                )
            if sys.stderr.isatty():
                click.echo(click.style(clock.words(), dim=True), err=True)
    return 0


def _questions() -> Iterator[str]:
    """The lines of the input that are not empty."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and remembers them
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except UnicodeDecodeError as error:
            raise click.ClickException(f"the input is not valid UTF-8: {error}") from None
        if line.strip():
            yield line.strip()


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of ``prompt``; an empty one begins where a document ends."""
    return tokenizer.encode(prompt, add_special_tokens=True) or [tokenizer.eos_id]


def _check_text(option: str, *texts: str) -> None:
    """Refuses what a shell passed on that is not valid UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise click.ClickException(f"{option} is not valid UTF-8") from None


# A model can write what steers a terminal; only line ends and tabs pass.
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


def _write(text: str) -> None:
    if sys.stdout.isatty():
        text = text.translate(_CONTROLS)
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
