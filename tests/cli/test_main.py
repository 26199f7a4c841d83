"""The command: exit codes, one clear error for bad input, nothing on the wrong stream."""

from __future__ import annotations

import io
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
    for name in ("bench", "chat", "generate", "inspect", "lm", "train"):
        assert f"\n  {name} " in out
    assert "Exit codes: 0 done and proven, 1 a check failed, 2 bad input." in out


def test_help_of_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--dtype", "--text", "--tokens", "--speed", "--json", "--threads"):
        assert option in out


def test_help_of_inspect_names_every_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    from rmsnorm.models.small import PREFIX, SMALL

    assert main(["inspect", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ", ".join(PREFIX + name for name in SMALL) in out


def test_help_does_not_import_torch() -> None:
    result = python(
        "import sys\n"
        "from rmsnorm.cli.main import main\n"
        "for name in ('bench', 'chat', 'generate', 'inspect', 'lm', 'train'):\n"
        "    assert main([name, '--help']) == 0\n"
        "assert main(['--help']) == 0\n"
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
        (["inspect", "random:nonsense"], "random:nonsense is not known; expected random: and one"),
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


def test_text_without_an_end(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if Path("/dev/urandom").exists():
        assert main(["inspect", "--text", "/dev/urandom"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: --text /dev/urandom cannot be read: ")
        assert err.count("\n") == 1
    path = tmp_path / "text"
    # The limit is in the middle of a character.
    path.write_text("a" + "ä" * 2**20, encoding="utf-8")
    arguments = ["inspect", str(tiny_llama), "--tokens", "4", "--no-speed", "--text", str(path)]
    assert main(arguments) == 0
    assert f"note: only the first 1 MiB of {path} are read\n" in capsys.readouterr().err


def test_inspect_of_a_model_without_rms_norms(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["inspect", "random:modernbert"]) == 0
    out = capsys.readouterr().out
    assert "float32: 0 of 6 norms replaced" in out
    assert "none was found to be an RMSNorm that can be replaced" in out
    assert "hidden states, against the model as it was" in out
    assert "identical, bit for bit" in out
    assert "decoding" not in out
    assert "convention" not in out.partition("hidden states")[2]


def test_inspect_of_an_encoder_and_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["inspect", "random:t5", "--tokens", "9", "--no-speed"]) == 0
    out = capsys.readouterr().out
    assert "float32: 12 of 12 norms replaced" in out
    assert "decoding with a cache" in out


@pytest.mark.parametrize("name", ["x" * 300, "~nosuchuser/x"])
def test_path_that_cannot_be_looked_up(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {name}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect no/such", "bench --quick", "--version"])
def test_closed_stdout(command: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" -m rmsnorm {command} >&-', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (2, "error: stdout is closed\n")


def test_closed_stderr() -> None:
    result = subprocess.run(
        ["sh", "-c", 'exec "$0" -m rmsnorm inspect no/such 2>&-', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("as_json", [False, True])
def test_full_disk(as_json: bool, tiny_llama: Path) -> None:
    arguments = ["inspect", str(tiny_llama), "--tokens", "4", "--no-speed"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "rmsnorm", *arguments, *["--json"] * as_json],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 2
    # Before it may stand a note on the tokens and, where no kernels were built, a warning.
    assert result.stderr.splitlines()[-1] == "error: No space left on device"
    assert "Traceback" not in result.stderr


def test_error_while_printing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["--version"]) == 2
    assert capsys.readouterr().err == "error: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "FOLDER"], "it is a folder"),
        (["--json", "FOLDER/no/such"], "its folder does not exist"),
        (["--json", "FOLDER/" + "x" * 300], "File name too long"),
        (["--shape", "99999999x99999999"], "GiB are available"),
        (["--shape", "1x576", "--shape", "1x99999999999999999999"], "GiB are available"),
    ],
)
def test_bench_is_refused_before_it_runs(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import rmsnorm.cli.bench as bench_module

    def run(*_: Any) -> bool:
        raise AssertionError("it ran")

    monkeypatch.setattr(bench_module, "_run", run)
    monkeypatch.setattr(bench_module, "_available_bytes", lambda: 2**34)
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("lost", [False, True])
def test_bench_check_exits_with_1_when_a_goal_does_not_hold(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rmsnorm.cli.bench as bench_module

    monkeypatch.setattr(bench_module, "_run", lambda *_: not lost)
    assert main(["bench", "--shape", "1x576"]) == 0
    assert main(["bench", "--shape", "1x576", "--check"]) == int(lost)


def test_bench_takes_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    import rmsnorm.cli.bench as bench_module
    from rmsnorm.bench.run import FULL
    from rmsnorm.lm.step import WORKLOADS

    asked: list[int] = []

    def run(cells: object, others: object, request: Any) -> bool:
        asked.append(request.rounds)
        return True

    monkeypatch.setattr(bench_module, "_run", run)
    assert main(["bench", "--shape", "1x576", "--rounds", "3"]) == 0
    assert main(["bench", "--shape", "1x576", "--rounds", "0"]) == 2
    assert asked == [3]
    longer = FULL.with_rounds(3)
    assert longer.budget_ns == 3 * FULL.budget_ns
    assert (longer.min_rounds, longer.max_rounds) == (3 * FULL.min_rounds, 3 * FULL.max_rounds)
    assert [one.with_rounds(3).rounds for one in WORKLOADS] == [3 * one.rounds for one in WORKLOADS]


def test_available_memory() -> None:
    from rmsnorm.cli.bench import _available_bytes

    available = _available_bytes()
    assert available is None or available > 2**20


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

    def patch_wrongly(twin: Any, **options: Any) -> Any:
        report = rmsnorm.patch(twin, **options)
        twin.model.norm.variance_epsilon = 1.0
        return report

    monkeypatch.setattr(inspect_module, "patch", patch_wrongly)
    assert main(["inspect", str(tiny_llama), "--no-speed"]) == 1
    assert "different, by up to" in capsys.readouterr().out
    assert main(["inspect", str(tiny_llama), "--no-speed", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["proven"] is False
