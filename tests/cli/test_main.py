"""The command: exit codes, one clear error for bad input, nothing on the wrong stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rmsnorm
from rmsnorm.cli.main import main


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rmsnorm, version {rmsnorm.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "inspect" in out
    assert "bench" in out
    assert "Exit codes: 0 done and proven, 1 a check failed, 2 bad input." in out


def test_help_of_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--dtype", "--text", "--tokens", "--speed", "--json", "--threads"):
        assert option in out


def test_help_does_not_import_torch() -> None:
    result = python(
        "import sys\n"
        "from rmsnorm.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['inspect', '--help']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    assert result.returncode == 0, result.stderr


def test_python_dash_m() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rmsnorm", "inspect", "no/such"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: no/such does not exist")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["inspect", "no/such"], "no/such does not exist"),
        (["inspect", "--nonsense"], "No such option"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["inspect", "--dtype", "int8"], "Invalid value for '--dtype': 'int8'; expected some of"),
        (["inspect", "--dtype", "float32,"], "'--dtype': ''; expected"),
        (["inspect", "--tokens", "1"], "1 is not in the range x>=2"),
        (["inspect", "--tokens", "many"], "'many' is not a valid integer"),
        (["inspect", "--threads", "0"], "0 is not in the range x>=1"),
        (["inspect", "--text", "no/such"], "File 'no/such' does not exist"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_text_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xff\xfe\xff")
    assert main(["inspect", "--text", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_inspect_json(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(tiny_llama), "--dtype", "float32,bfloat16", "--no-speed", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    assert err.startswith("note: the model has no tokenizer")
    assert found["proven"] is True
    assert found["model"] == str(tiny_llama)
    assert [one["dtype"] for one in found["inspections"]] == ["float32", "bfloat16"]
    for one in found["inspections"]:
        assert (one["norms"], one["swapped"]) == (5, 5)
        assert [group["count"] for group in one["groups"]] == [2, 2, 1]
        assert {group["convention"] for group in one["groups"]} == {"llama"}
        assert one["proof"]["max_abs_diff"] == 0.0
        assert one["timings"] == []
    assert found["inspections"][1]["proof"]["wrong_max_abs_diff"] > 0.0


def test_inspect_table(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_llama), "--tokens", "5", "--no-speed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "float32: 5 of 5 norms replaced" in lines
    assert any(line.split()[:3] == ["prefill", "5", "identical,"] for line in lines)
    assert any(line.split()[-4:] == ["replaced,", "bit", "for", "bit"] for line in lines)


def test_inspect_a_failed_proof_exits_with_1(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rmsnorm.rewrite.inspect as inspect_module

    def patch_wrongly(twin: Any) -> Any:
        report = rmsnorm.patch(twin)
        twin.model.norm.variance_epsilon = 1.0
        return report

    monkeypatch.setattr(inspect_module, "patch", patch_wrongly)
    assert main(["inspect", str(tiny_llama), "--no-speed"]) == 1
    assert "different, by up to" in capsys.readouterr().out
    assert main(["inspect", str(tiny_llama), "--no-speed", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["proven"] is False
