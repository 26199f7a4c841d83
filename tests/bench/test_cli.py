import json

import pytest
from click.testing import CliRunner

from rmsnorm.bench.run import Bench, Timing, WrongResultError
from rmsnorm.cli.bench import bench

NAMES = ("ours torch", "ours llama", "op torch")


@pytest.fixture
def stub_timer(monkeypatch):
    """Every cell takes what the returned dict says, 2 microseconds otherwise."""
    medians = {}

    def time_cell(self, cell):
        names = ("copy", "add", "eager torch", "eager llama", *NAMES)
        return {name: Timing((medians.get(name, 2.0),) * 5, 1) for name in names}

    monkeypatch.setattr(Bench, "time_cell", time_cell)
    return medians


@pytest.mark.parametrize(
    ("ours", "arguments", "code"),
    [(1.0, ["--check"], 0), (5.0, ["--check"], 1), (5.0, [], 0), (1.0, [], 0)],
)
def test_check_exits_1_where_a_cell_loses(stub_timer, ours, arguments, code):
    stub_timer.update(dict.fromkeys(NAMES, ours))
    result = CliRunner().invoke(bench, ["--quick", "--no-compile", *arguments])
    assert result.exit_code == code, result.output
    assert ("LOSES" in result.output) is (ours > 2)
    assert "one call through torch.ops" in result.output


def test_only_the_calls(stub_timer):
    result = CliRunner().invoke(bench, ["--calls"])
    assert "2 of 2 cells hold" in result.output


def test_a_wrong_result_is_one_error(monkeypatch):
    def time_cell(self, cell):
        raise WrongResultError(f"{cell}: ours and eager differ")

    monkeypatch.setattr(Bench, "time_cell", time_cell)
    result = CliRunner().invoke(bench, ["--shape", "2x64"])
    assert result.exit_code == 1
    assert "2x64 float32 hot fresh: ours and eager differ" in result.output
    assert "Traceback" not in result.output


def test_json_to_a_file_and_to_stdout(stub_timer, tmp_path):
    stub_timer.update(dict.fromkeys(NAMES, 1.0))
    path = tmp_path / "bench.json"
    arguments = ["--shape", "2x64", "--dtype", "float32", "--output", "fresh", "--json"]
    result = CliRunner().invoke(bench, [*arguments, str(path)])
    assert result.exit_code == 0, result.output
    assert "2x64" in result.output
    document = json.loads(path.read_text())
    assert [cell["buffers"] for cell in document["cells"]] == ["hot", "rotating"]
    result = CliRunner().invoke(bench, [*arguments, "-"])
    assert set(json.loads(result.stdout)) == set(document)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "12"],
        ["--dtype", "int8"],
        ["--threads", "0"],
        ["--calls", "--shape", "1x576"],
        ["--json", "/nonexistent/folder/file.json"],
    ],
)
def test_bad_input_exits_2(arguments):
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
