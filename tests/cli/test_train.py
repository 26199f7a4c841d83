"""``rmsnorm train``: what it prints and where, what it refuses, and how settings are chosen."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import click
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from rmsnorm.cli.main import main
from rmsnorm.lm import train as trainer
from rmsnorm.lm.config import TrainConfig

SMALL = """
vocab_size = 270
seq_len = 16
batch_size = 2
threads = 1
tensorboard = false
log_every = 2

[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    source = random.Random(0)
    path.write_text("\n".join("".join(source.choices("abcd ", k=30)) for _ in range(120)))
    return path


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["train", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_prints_the_result_and_continues(
    text: Path, toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code, printed, said = run(capsys, text, "--out", out, "--config", toml, "--steps", 8)
    assert code == 0, said
    result = dict(line.split() for line in printed.splitlines())
    assert list(result) == [
        "steps",
        "tokens",
        "seconds",
        "held_out_loss",
        "bits_per_byte",
        "xz_bits_per_byte",
    ]
    assert result["steps"] == "8"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = [entry for entry in lines if "bits_per_byte" in entry][-1]
    assert result["bits_per_byte"] == f"{last['bits_per_byte']:.4f}"
    assert "\x1b" not in said
    assert re.search(r"^step 8/8  loss \d\.\d{4}  \d+ tokens/s  activations", said, re.MULTILINE)
    assert re.search(r"^sample: .+ \| ", said, re.MULTILINE)
    # A second time: refused, then complete, from another folder and without naming the text.
    assert run(capsys, text, "--out", out, "--config", toml, "--steps", 8)[0] == 2
    code, again, _ = run(capsys, "--out", out, "--resume")
    assert code == 0
    unlike = re.compile("seconds.*")
    assert unlike.sub("", again) == unlike.sub("", printed)
    code, printed, said = run(capsys, "--out", out, "--resume", "--lr", 1)
    assert (code, printed) == (2, "")
    assert said.startswith("error: lr is 1.0; expected 0.005, with which the run in")
    assert said.count("\n") == 1


def test_options_come_before_the_file_and_the_file_before_the_defaults(
    text: Path, toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainConfig] = []

    def record(config: TrainConfig, *_: object, **__: object) -> None:
        seen.append(config)
        raise click.Abort

    monkeypatch.setattr(trainer, "train", record)
    toml.write_text("minutes = 5\nlr = 0.25\nclip = 2\n" + SMALL)
    more = ["--steps", "7", "--lr", "0.5", "--norm", "layer", "--compile", "--seq-len", "8"]
    assert main(["train", str(text), "--out", str(tmp_path / "x"), "--config", str(toml), *more])
    [config] = seen
    assert (config.steps, config.minutes, config.lr, config.clip) == (7, None, 0.5, 2.0)
    assert (config.seq_len, config.vocab_size, config.compile) == (8, 270, True)
    assert config.model["norm"] == "layer"
    assert config.model["hidden_size"] == 16
    assert config.warmup == TrainConfig("x", steps=1).warmup
    assert config.data == str(text)


def test_every_setting_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    without = {"data", "model", "beta1", "beta2"}
    for name in set(TrainConfig.__dataclass_fields__) - without:
        assert f"--{name.replace('_', '-')}" in printed
    assert "[default: 0.005]" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "Missing argument 'DATA'"),
        (["{text}"], "expected either steps or minutes"),
        (["{text}", "--steps", "3", "--minutes", "1"], "expected either steps or minutes"),
        (["{text}", "--steps", "0"], "0 is not in the range x>=1"),
        (["no/such", "--steps", "3"], "no/such: no such file or folder"),
        (["{text}", "--steps", "3", "--init", "no/such"], "no/such does not exist"),
        (["{text}", "--steps", "3", "--config", "no/such"], "File 'no/such' does not exist"),
        (["{text}", "--steps", "3", "--norm", "batch"], "'batch' is not one of"),
        (["{text}", "--steps", "3", "--partial", "0.5"], "partial is 0.5, but norm is 'rms'"),
        (["{text}", "--steps", "3", "--config", "{text}"], "text.txt: not TOML"),
        (["{text}", "--minutes", "1", "--warmup", "5"], "warmup is 5; expected at least 20"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [argument.replace("{text}", str(text)) for argument in arguments]
    code, printed, said = run(capsys, *filled, "--out", tmp_path / "run")
    assert (code, printed) == (2, "")
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model = 3", "model is 3; expected a table"),
        ("model = ['norm']", "model is ['norm']; expected a table"),
        ("data = ['a', 'b']", "data is ['a', 'b']; expected str"),
        ("init = 3", "init is 3; expected str"),
        ("tokenizer = 1.5", "tokenizer is 1.5; expected str"),
    ],
)
def test_settings_of_another_type(
    setting: str, message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(setting)
    data = [] if setting.startswith("data") else [text]
    code, printed, said = run(
        capsys, *data, "--out", tmp_path / "run", "--config", path, "--steps", 1
    )
    assert (code, printed) == (2, "")
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_loss_that_is_no_number_is_a_failure(
    text: Path, toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--steps", 20, "--lr", 1e30, "--warmup", 0, "--clip", 0]
    code, printed, said = run(capsys, text, "--out", tmp_path / "run", "--config", toml, *more)
    assert (code, printed) == (1, "")
    assert "error: the loss is nan at step" in said
