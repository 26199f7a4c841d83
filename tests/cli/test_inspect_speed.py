"""``rmsnorm inspect --speed``: what is asked for is timed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rmsnorm.cli.main import main
from rmsnorm.rewrite import speed


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PREFILL_TOKENS", 12)
    monkeypatch.setattr(speed, "DECODE_TOKENS", 3)
    monkeypatch.setattr(speed, "TRAIN_TOKENS", 8)


def test_whole_models(short: None, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(tiny_llama), "--tokens", "4", "--speed", "--seconds", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for what in ("prefill of 12 tokens", "decoding of 3 tokens", "training step of 4x8 tokens"):
        assert what in printed
    for line in (
        "residual fused",
        "without norms and additions",
        "share of the norms: ",
        "norms alone: before ",
        "patched: of the time of the norms, gone: ",
        "residual fused: of the time of norms and additions, gone: ",
        "by the laps around them alone: ",
    ):
        assert line in printed
    assert "median time, ms" not in printed

    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (inspection,) = document["inspections"]
    assert inspection["timings"] == []
    works = inspection["speed"]["works"]
    assert [work["what"].split()[0] for work in works] == ["prefill", "decoding", "training"]
    for work in works:
        assert len(work["variants"]["before"]["rounds"]) == work["rounds"]
        assert {"value", "low", "high"} == {*work["variants"]["patched"]["gone"]}
    assert inspection["speed"]["left"] == []

    assert main([*arguments, "--work", "decoding", "--json"]) == 0
    (inspection,) = json.loads(capsys.readouterr().out)["inspections"]
    assert [work["what"].split()[0] for work in inspection["speed"]["works"]] == ["decoding"]


def test_without_it_no_whole_model_is_timed(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(speed, "measure_speed")
    assert main(["inspect", str(tiny_llama), "--tokens", "4", "--no-speed", "--json"]) == 0
    (inspection,) = json.loads(capsys.readouterr().out)["inspections"]
    assert inspection["timings"] == []
    assert "speed" not in inspection


def test_compile_and_work_are_about_speed(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tiny_llama), "--compile"]) == 2
    assert "--compile is about --speed" in capsys.readouterr().err
    assert main(["inspect", str(tiny_llama), "--work", "prefill"]) == 2
    assert "--work is about --speed" in capsys.readouterr().err
