"""Writing text: against a loop without a cache and probabilities by hand; and bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from rmsnorm.cli import generate as commands
from rmsnorm.cli.main import main
from rmsnorm.lm import convert
from rmsnorm.lm.config import ModelConfig
from rmsnorm.lm.generate import Conversation, GenerateError, generate
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.lm.tokenizer import Tokenizer, train_tokenizer

SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    # Large, so that the likeliest tokens vary and stand out.
    initializer_range=0.3,
    tie_word_embeddings=False,
)


def small(**changes: Any) -> MindForCausalLM:
    torch.manual_seed(3)
    return MindForCausalLM(dataclasses.replace(SMALL, **changes))


def greedy(model: MindForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, one full computation each, without anything of rmsnorm.lm.generate."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Fixed(nn.Module):
    """A model whose next token has the same logits whatever came before."""

    def __init__(self, logits: list[float], context: int = 1000) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.config = dataclasses.replace(
            SMALL, vocab_size=len(logits), max_position_embeddings=context
        )

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits.expand(input_ids.shape[0], 1, -1))


class Letters:
    """A tokenizer whose token i is the i-th of some pieces of text."""

    class Stream:
        def __init__(self, pieces: list[str]) -> None:
            self.pieces = pieces

        def push(self, token: int) -> str:
            return self.pieces[token]

        def flush(self) -> str:
            return ""

    vocab_size = 10

    def __init__(self, *pieces: str) -> None:
        self.pieces = list(pieces)

    def stream(self) -> Letters.Stream:
        return self.Stream(self.pieces)


class Scripted(nn.Module):
    """A model that writes given tokens, row by row."""

    def __init__(self, *rows: list[int], vocab_size: int = 16, context: int = 1000) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.rows, self.step, self.calls = rows, 0, 0
        self.config = dataclasses.replace(
            SMALL, vocab_size=vocab_size, max_position_embeddings=context
        )

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        logits = torch.zeros(input_ids.shape[0], 1, self.config.vocab_size)
        for number, row in enumerate(self.rows):
            logits[number, 0, row[min(self.step, len(row) - 1)]] = 1.0
        self.step += 1
        return SimpleNamespace(logits=logits)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"fuse_residual": False},
    {"qk_norm": True},
    {"placement": "sandwich"},
    {"placement": "post", "norm": "layer"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_is_the_likeliest_token_of_a_full_computation(
    variant: dict[str, Any], use_cache: bool
) -> None:
    model = small(**variant)
    wanted = greedy(model, [5, 6, 7], 20)
    assert len(set(wanted)) > 3
    [found] = generate(model, [[5, 6, 7]], max_new_tokens=20, use_cache=use_cache)
    assert (found.ids, found.text, found.reason) == (wanted, "", "length")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_batch_of_unequal_prompts(variant: dict[str, Any], use_cache: bool) -> None:
    model = small(**variant)
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8]]
    found = generate(model, prompts, max_new_tokens=12, use_cache=use_cache)
    assert [row.ids for row in found] == [greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("use_cache", [True, False])
def test_sampled_text_depends_on_its_seed_alone(use_cache: bool) -> None:
    model = small()
    options: dict[str, Any] = {
        "max_new_tokens": 15,
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "use_cache": use_cache,
    }
    prompts = [[5, 6, 7], [9], [5, 6, 7]]
    together = [row.ids for row in generate(model, prompts, seed=11, **options)]
    torch.rand(3)  # the global generator plays no part
    alone = [
        generate(model, [prompt], seed=11 + number, **options)[0].ids
        for number, prompt in enumerate(prompts)
    ]
    assert together == alone
    assert together[0] != together[2]


LOGITS = [2.0, -1.0, 0.5, 1.5, -3.0, 1.0]


def probabilities(temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """By the definitions, in plain Python."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(LOGITS)}
    order = sorted(weights, key=lambda token: -weights[token])[: top_k or None]
    total = sum(weights[token] for token in order)
    kept: dict[int, float] = {}
    for token in order:
        if sum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / total
    total = sum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 3, 1.0),
        (1.0, 0, 0.6),
        (1.0, 4, 0.8),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-9),
        (1e-320, 0, 1.0),
        (1.0, 1000, 1.0),
    ],
)
def test_frequencies(temperature: float, top_k: int, top_p: float) -> None:
    count = 3000
    rows = generate(
        Fixed(LOGITS),
        [[0]] * count,
        max_new_tokens=1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    found = Counter(row.ids[0] for row in rows)
    wanted = {0: 1.0} if temperature < 1e-300 else probabilities(temperature, top_k, top_p)
    assert set(found) <= set(wanted)
    chi_square = sum(
        (found[token] - count * weight) ** 2 / (count * weight) for token, weight in wanted.items()
    )
    assert chi_square < 20.5  # 99.9 % of samples of 6 classes


def test_repetition_penalty_by_hand() -> None:
    def first(logits: list[float], penalty: float, prompt: list[int]) -> int:
        row = generate(Fixed(logits), [prompt], max_new_tokens=1, repetition_penalty=penalty)
        return row[0].ids[0]

    assert first([2.0, 1.5], 1.0, [0]) == 0
    assert first([2.0, 1.5], 1.3, [0]) == 0  # 1.54
    assert first([2.0, 1.5], 1.4, [0]) == 1  # 1.43
    assert first([-1.0, -1.5], 1.4, [0]) == 0  # -1.4
    assert first([-1.0, -1.5], 1.6, [0]) == 1  # -1.6
    assert first([2.0, 1.5], 1.4, [1, 0, 1, 0]) == 0  # once, however often it came
    # What is written counts as well.
    [row] = generate(Fixed([2.0, 1.9, 1.8, 0.1]), [[3]], max_new_tokens=3, repetition_penalty=1.5)
    assert row.ids == [0, 1, 2]


class Heard(NamedTuple):
    row: int
    token: int | None
    text: str


def listen(
    model: nn.Module, tokenizer: Any, rows: int = 1, **options: Any
) -> tuple[list[Any], list[Heard]]:
    heard: list[Heard] = []
    done = generate(
        model,
        [[0]] * rows,
        tokenizer=tokenizer,
        on_token=lambda *arguments: heard.append(Heard(*arguments)),
        **options,
    )
    for number, completion in enumerate(done):
        assert "".join(item.text for item in heard if item.row == number) == completion.text
    return done, heard


PIECES = Letters("one ", "#", "## two", "###", " three", "a#", "#")


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "used", "reason"),
    [
        ([0, 4], ["###"], "one  three", 2, "length"),
        ([0, 3, 4], ["###"], "one ", 2, "stop"),
        ([0, 1, 1, 1, 4], ["###"], "one ", 4, "stop"),
        ([0, 1, 2, 4], ["###"], "one ", 3, "stop"),
        ([5, 1, 4, 1, 1, 1], ["###"], "a## three", 6, "stop"),
        ([5, 2, 4], ["two", "###"], "a", 2, "stop"),
        ([0, 2, 4], ["two", "o t"], "one ## ", 2, "stop"),
        ([1, 1, 1, 1], ["####", "##"], "", 2, "stop"),
        ([0, 1, 1], ["###"], "one ##", 3, "length"),
        ([0, 1, 9], ["###"], "one #", 2, "eos"),
    ],
)
def test_stop_strings_across_tokens(
    tokens: list[int], stop: list[str], text: str, used: int, reason: str
) -> None:
    [done], heard = listen(
        Scripted(tokens), PIECES, max_new_tokens=len(tokens), stop=stop, eos_ids=[9]
    )
    assert (done.text, len(done.ids), done.reason) == (text, used, reason)
    assert [item.token for item in heard if item.token is not None] == tokens[:used]


def test_text_comes_as_early_as_it_is_certain() -> None:
    _, heard = listen(Scripted([0, 1, 4, 1]), PIECES, max_new_tokens=4, stop=["###"])
    assert heard == [(0, 0, "one "), (0, 1, ""), (0, 4, "# three"), (0, 1, ""), (0, None, "#")]


def test_padding_of_the_vocabulary_is_never_picked() -> None:
    logits = [0.0] * 9 + [1.0, 5.0, 9.0]
    for temperature in (0.0, 0.01):
        [done], _ = listen(
            Fixed(logits),
            Letters(*"abcdefghij"),
            max_new_tokens=2,
            temperature=temperature,
            repetition_penalty=1.0001,
        )
        assert done.text == "jj"


def test_rows_end_by_themselves() -> None:
    model = Scripted([0, 4, 9, 0], [3, 0, 0, 0], [0, 0, 0, 0])
    done, _ = listen(model, PIECES, rows=3, max_new_tokens=4, stop=["##"], eos_ids=[9, 8])
    assert [(row.reason, row.ids) for row in done] == [
        ("eos", [0, 4]),
        ("stop", [3]),
        ("length", [0, 0, 0, 0]),
    ]


def test_nothing_is_computed_after_the_last_row_has_ended() -> None:
    model = Scripted([0, 9, 0, 0], [9, 0, 0, 0])
    generate(model, [[0], [0]], max_new_tokens=4, eos_ids=[9])
    assert model.step == 2


def test_model_can_train_afterwards_and_keeps_its_mode() -> None:
    model = small()
    model.train()
    generate(model, [[1, 2]], max_new_tokens=2)
    assert model.training
    ids = torch.tensor([[1, 2, 3]])
    loss = model(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    generate(model, [[1, 2]], max_new_tokens=2)
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
        ({"temperature": -0.1}, r"temperature is -0\.1; expected a number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, r"top_p is 0\.0; expected more than 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ["a"]}, "stop strings need a tokenizer"),
        ({"stop": [""], "tokenizer": PIECES}, "strings that are not empty"),
        ({"stop": "end", "tokenizer": PIECES}, "stop is 'end'; expected a list"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[64]]}, "has the token 64, and the model's vocabulary 64: the tokenizer"),
        ({"prompts": [[-1]]}, "has the token -1"),
        ({"prompts": [[1] * 60]}, "60 tokens; with 5 new ones it exceeds the model's context of"),
    ],
)
def test_bad_parameters(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": [[1, 2]], "max_new_tokens": 5, **changes}
    with pytest.raises(GenerateError, match=message):
        generate(small(), arguments.pop("prompts"), **arguments)


def test_whole_context() -> None:
    [row] = generate(small(), [[1] * 60], max_new_tokens=4)
    assert row.ids == greedy(small(), [1] * 60, 4)
    assert generate(small(), [], max_new_tokens=4) == []


def test_logits_that_are_nan() -> None:
    with pytest.raises(GenerateError, match="logits are nan: its weights are not finite"):
        generate(Fixed([1.0, math.nan]), [[0]], max_new_tokens=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["In the beginning God created the heaven and the earth."] * 3, 300)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt nothing, in a folder; not to be written."""
    path = tmp_path_factory.mktemp("generate") / "model"
    convert.save(small(vocab_size=tokenizer.vocab_size), tokenizer, path)
    return path


def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é中🙂")
    assert len(ids) > 3  # a token is a byte of them
    model = Scripted(ids, vocab_size=tokenizer.vocab_size)
    [done], heard = listen(model, tokenizer, max_new_tokens=len(ids))
    assert done.text == "é中🙂"
    assert {item.text for item in heard} == {"", "é", "中", "🙂"}
    # One that is cut off still comes as something.
    [done], _ = listen(
        Scripted(ids, vocab_size=tokenizer.vocab_size), tokenizer, max_new_tokens=len(ids) - 1
    )
    assert done.text.startswith("é中")
    assert len(done.text) > 2


def test_conversation(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode("heaven")
    eos = tokenizer.eos_id
    assert eos is not None
    asked: list[list[int]] = []

    class Answering(Scripted):
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            if input_ids.shape[1] > 1:
                asked.append(input_ids[0].tolist())
                self.step = 0
            return super().forward(input_ids, **others)

    model = Answering([*answer, eos], vocab_size=tokenizer.vocab_size, context=150)
    talk = Conversation(
        model, tokenizer, system="Be brief.", eos_ids=[eos], max_new_tokens=20, temperature=0.0
    )
    history = [{"role": "system", "content": "Be brief."}]
    for question in ("Who?", "What?"):
        history.append({"role": "user", "content": question})
        done = talk.ask(question)
        assert (done.text, done.reason) == ("heaven", "eos")
        assert asked[-1] == tokenizer.render(history, add_generation_prompt=True)[0]
        history.append({"role": "assistant", "content": "heaven"})
    while not talk.forgotten:
        talk.ask("And then?")
    assert talk.messages[-2:] == [
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "heaven"},
    ]
    assert talk.messages[0]["role"] == "user"
    assert len(asked[-1]) <= 130
    with pytest.raises(GenerateError, match="exceeds the model's context of 150"):
        talk.ask("x" * 150)
    assert talk.messages[-2]["content"] == "And then?"  # the question that failed left no trace


def test_every_answer_of_a_conversation_has_a_seed_of_its_own(tokenizer: Tokenizer) -> None:
    model = Fixed([0.0] * tokenizer.vocab_size)
    talk = Conversation(model, tokenizer, eos_ids=(), max_new_tokens=6, seed=8, temperature=1.0)
    found = [talk.ask("Who?").ids for _ in range(3)]
    assert found == [
        generate(model, [[0]], max_new_tokens=6, seed=seed, temperature=1.0)[0].ids
        for seed in (8, 9, 10)
    ]


def run(command: Any, *arguments: object) -> int:
    code = command.main(args=[str(one) for one in arguments], standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_generate_command(
    folder: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (folder, "-p", "In the", "-n", 8, "--seed", 5, "--top-k", 50)
    assert run(commands.generate, *arguments) == 0
    out, err = capsys.readouterr()
    model, _ = convert.load(folder)
    [wanted] = generate(
        model,
        [tokenizer.encode("In the")],
        max_new_tokens=8,
        temperature=0.8,
        top_k=50,
        seed=5,
        tokenizer=tokenizer,
        eos_ids=convert.end_ids(folder, tokenizer),
    )
    assert out == f"In the{wanted.text}\n"
    assert err.startswith("8 tokens in ")
    assert err.endswith(" tokens/s after the first\n")


def test_generate_command_with_a_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (folder, "-n", 4, "--temperature", 0, "-p", "God", "-p", "In the beginning")
    assert run(commands.generate, *arguments, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    first, second = found["completions"]
    assert (first["prompt"], second["prompt"]) == ("God", "In the beginning")
    assert found["tokens"] == len(first["ids"]) + len(second["ids"])
    assert run(commands.generate, *arguments, "--no-cache") == 0
    assert capsys.readouterr().out == (
        f"==> 1 <==\nGod{first['text']}\n\n==> 2 <==\nIn the beginning{second['text']}\n"
    )


def test_generate_command_without_a_prompt(
    folder: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(commands.generate, folder, "--temperature", 0, "--json") == 0
    [found] = json.loads(capsys.readouterr().out)["completions"]
    model, _ = convert.load(folder)
    wanted = greedy(model, [tokenizer.eos_id], len(found["ids"]))
    assert found["ids"] == wanted
    # What fits into the context, unless the model ends it.
    assert len(wanted) == 63 or found["reason"] == "eos"


def test_chat_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("God?\n\n"))
    assert run(commands.chat, folder, "-n", 3, "--seed", 2) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("God?\n\nGod?"))
    assert run(commands.chat, folder, "-n", 3, "--seed", 2) == 0
    assert capsys.readouterr().out.startswith(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such"], "no/such does not exist; expected the folder of a run"),
        (["FOLDER", "-n", "0"], "0 is not in the range x>=1"),
        (["FOLDER", "--temperature", "-1"], "-1.0 is not in the range x>=0"),
        (["FOLDER", "--temperature", "nan"], "temperature is nan"),
        (["FOLDER", "--top-p", "0"], "0.0 is not in the range 0.0<x<=1.0"),
        (["FOLDER", "--top-k", "-1"], "-1 is not in the range"),
        (["FOLDER", "--repetition-penalty", "0"], "0.0 is not in the range"),
        (["FOLDER", "--seed", "-1"], "-1 is not in the range"),
        (["FOLDER", "--stop", ""], "strings that are not empty"),
        (["FOLDER", "--dtype", "int8"], "'int8' is not one of"),
        (["FOLDER", "-n", "100"], "exceeds the model's context of 64"),
        (["FOLDER", "-p", "x" * 200], "exceeds the model's context of 64"),
        (["FOLDER", "-p", "\udcff"], "--prompt is not valid UTF-8"),
        (["FOLDER", "--device", "cuda"], "--device cuda: PyTorch finds no such device"),
        (["EMPTY"], "it has no mind.json and no config.json"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_bad_input(
    command: str,
    arguments: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(arguments[-1] if "-p" in arguments else "Who?"))
    if command == "chat" and "-p" in arguments:
        arguments = arguments[:1]
        message = message.replace("--prompt", "the question")
    places = {"FOLDER": str(folder), "EMPTY": str(tmp_path)}
    assert main([command, *(places.get(one, one) for one in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_what_steers_a_terminal_is_not_written_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, written in ((Terminal(), "a\ufffd[2Jb\n\tc"), (io.StringIO(), "a\x1b[2Jb\n\tc")):
        monkeypatch.setattr(sys, "stdout", stream)
        commands._write("a\x1b[2Jb\n\tc")
        assert stream.getvalue() == written
