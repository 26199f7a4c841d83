import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from rmsnorm.bench import memory
from rmsnorm.bench.grid import SWEEP_WIDTHS
from rmsnorm.bench.memory import MeasurementError, Usage
from rmsnorm.bench.run import Bench, Timing, WrongResultError
from rmsnorm.cli.bench import bench
from rmsnorm.lm import step
from rmsnorm.lm.step import StepTimes

NAMES = ("ours torch", "ours llama", "op torch", "module torch")
WIDTHS = [f"ours d={d}" for d in SWEEP_WIDTHS]
# In the order of the tables.
TITLES = {
    "call": "one call",
    "forward": "forward",
    "heads": "heads in a fused projection",
    "train": "forward and backward",
    "add": "residual addition and norm",
    "sweep": "the same bytes in rows of every width",
    "memory": "peak memory of forward and backward",
    "step": "training steps of whole models",
}


@pytest.fixture
def stub_timer(monkeypatch):
    """Every cell takes what the returned dict says, 2 microseconds otherwise."""
    medians = {}

    def time_cell(self, cell):
        names = ("copy", "rewrite", "add", "eager torch", "eager llama", *NAMES, *WIDTHS)
        return {name: Timing((medians.get(name, 2.0),) * 5, 1) for name in names}

    def measure_memory(names, say):
        ours = medians.get("memory", 1.0)
        ratios = {name: ours if name.startswith("ours") else 6.5 for name in names}
        return [Usage(name, 1000, 1000, int(1000 * ratio)) for name, ratio in ratios.items()]

    def measure_steps(workloads, compiled, say):
        ours = medians.get("step", 101.0)
        samples = {"ours": ours, "unfused": 102.0, "eager": 110.0, "none": 100.0}
        samples = {name: (milliseconds,) * 3 for name, milliseconds in samples.items()}
        return [StepTimes(workload.name, compiled, samples, 1e-5) for workload in workloads]

    monkeypatch.setattr(Bench, "time_cell", time_cell)
    monkeypatch.setattr(Bench, "overheads", lambda self, cell: {})
    monkeypatch.setattr(memory, "measure_memory", measure_memory)
    monkeypatch.setattr(step, "measure_steps", measure_steps)
    return medians


@pytest.mark.parametrize(
    ("ours", "arguments", "code"),
    [(0.5, ["--check"], 0), (5.0, ["--check"], 1), (5.0, [], 0), (0.5, [], 0)],
)
def test_check_exits_1_where_a_cell_loses(stub_timer, ours, arguments, code):
    stub_timer.update(dict.fromkeys(NAMES, ours))
    result = CliRunner().invoke(bench, ["--quick", "--no-compile", *arguments])
    assert result.exit_code == code, result.output
    assert ("LOSES" in result.output) is (ours > 2)
    for title in TITLES.values():
        assert title in result.output
    assert "of 232 cells hold" in result.output


@pytest.mark.parametrize(
    ("arguments", "shown", "cells"),
    [
        (["--kind", "call"], ["call"], 4),
        (["--kind", "forward"], ["forward"], 80),
        (["--kind", "heads"], ["heads"], 8),
        (["--kind", "train"], ["train"], 46),
        (["--kind", "train", "--output", "recycled"], ["train"], 6),
        (["--kind", "add"], ["add"], 92),
        (["--kind", "sweep"], ["sweep"], 2),
        (["--kind", "train", "--kind", "call"], ["call", "train"], 50),
        (["--kind", "memory"], ["memory"], 0),
        (["--memory"], ["memory"], 0),
        (["--kind", "step"], ["step"], 0),
        (["--memory", "--kind", "call"], ["call", "memory"], 4),
        (["--shape", "2x64"], ["forward", "train", "add"], 24),
        (["--shape", "2x64", "--kind", "train", "--dtype", "float32"], ["train"], 2),
        (["--output", "inplace", "--buffers", "hot"], ["add"], 20),
        (["--output", "given", "--kind", "forward", "--shape", "2x8"], ["forward"], 4),
    ],
)
def test_selection(stub_timer, arguments, shown, cells):
    stub_timer.update(dict.fromkeys(NAMES, 0.5))
    result = CliRunner().invoke(bench, ["--no-compile", *arguments])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert [kind for kind, title in TITLES.items() if title in lines] == shown
    assert (f"{cells} of {cells} cells hold, 0 lose" in lines) is (cells > 0)


@pytest.mark.parametrize(
    ("name", "bound", "goal"),
    [
        ("ours torch", 1.0, "a call of rms_norm"),
        ("module torch", 1.6, "a call of the module"),
        ("op torch", 1.9, "a call through torch.ops"),
    ],
)
def test_a_goal_broken_by_one_percent_is_named_and_exits_1(stub_timer, name, bound, goal):
    arguments = ["--kind", "call", "--check", "--no-compile"]
    stub_timer[name] = 2.0 * bound  # torch.add takes 2
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    assert "3 goals hold, 0 do not" in result.output
    stub_timer[name] = 2.0 * bound * 1.01
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 1
    (row,) = (line for line in result.output.splitlines() if f" {goal} " in line)
    assert f" {bound * 1.01:.3f} " in row
    assert " does not hold " in row
    assert "2 goals hold, 1 do not" in result.output


def test_a_cell_behind_a_peer_by_less_than_a_tenth_does_not_fail_a_check(stub_timer, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["--kind", "forward", "--check", "--no-compile", "--json", str(path)]
    stub_timer.update(dict.fromkeys(NAMES, 0.5))

    def invoke(behind):
        time_cell = Bench.time_cell

        def slower(self, cell):
            found = dict(time_cell(self, cell))
            if (cell.shape, cell.dtype, cell.output) == ("1x576", "float32", "fresh"):
                found["ours llama"] = Timing((2.0 * behind,) * 5, 1)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bench, "time_cell", slower)
            return CliRunner().invoke(bench, arguments)

    result = invoke(1.09)
    assert "LOSES" in result.output  # named all the same
    assert "ahead of every peer in 78 of 80 cells" in result.output
    assert result.exit_code == 0
    assert json.loads(path.read_text())["ok"] is True
    assert invoke(1.11).exit_code == 1
    assert json.loads(path.read_text())["ok"] is False


def test_a_plot_is_drawn(stub_timer, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need the extra bench")
    path = tmp_path / "bench.svg"
    arguments = ["--kind", "forward", "--kind", "sweep", "--no-compile", "--plot", str(path)]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(bench, ["--plot", str(tmp_path / "bench.svg")])
    assert result.exit_code == 2
    assert "rmsnorm[bench]" in result.output


def test_check_exits_1_where_the_memory_is_too_much(stub_timer):
    stub_timer["memory"] = 1.03
    result = CliRunner().invoke(bench, ["--memory", "--check", "--no-compile"])
    assert result.exit_code == 1
    assert "loses: memory: ours torch needs 1.030 of y + dx, expected at most 1.02" in (
        result.output
    )
    assert "memory: eager torch / (y + dx): 6.500" in result.output
    assert "memory: compiled torch" not in result.output
    stub_timer["memory"] = 1.02
    assert CliRunner().invoke(bench, ["--memory", "--check"]).exit_code == 0


def test_check_exits_1_where_a_training_step_loses(stub_timer, tmp_path):
    stub_timer["step"] = 102.6
    path = tmp_path / "bench.json"
    arguments = ["--kind", "step", "--check", "--no-compile", "--json", str(path)]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 1
    assert (
        "loses: step: mind-26m: eager / ours: 1.072x (1.072 to 1.072); of the time of eager norms, "
        "9.1 % of the step (9.1 to 9.1 %), gone: by the clock 74 % (74 to 74 %)" in result.output
    )
    document = json.loads(path.read_text())
    assert document["losing"] == ["step of tiny", "step of mind-26m"]
    assert document["steps"][0]["gone"] == pytest.approx(0.74)
    gone = document["steps"][0]["intervals"]["gone_ours"]["clock"]
    assert gone["low"] == pytest.approx(0.74)
    stub_timer["step"] = 102.4
    assert CliRunner().invoke(bench, arguments).exit_code == 0


def test_a_failed_memory_process_is_one_error(stub_timer, monkeypatch):
    def fail(names, say):
        raise MeasurementError("the memory of ours torch could not be measured: killed")

    monkeypatch.setattr(memory, "measure_memory", fail)
    result = CliRunner().invoke(bench, ["--memory"])
    assert result.exit_code == 1
    assert "could not be measured: killed" in result.output
    assert "Traceback" not in result.output


def test_a_wrong_result_is_one_error(monkeypatch):
    def time_cell(self, cell):
        raise WrongResultError(f"{cell}: ours and eager differ")

    monkeypatch.setattr(Bench, "time_cell", time_cell)
    result = CliRunner().invoke(bench, ["--shape", "2x64", "--no-compile"])
    assert result.exit_code == 1
    assert "2x64 float32 hot fresh: ours and eager differ" in result.output
    assert "Traceback" not in result.output


def test_json_to_a_file_and_to_stdout(stub_timer, tmp_path):
    stub_timer.update(dict.fromkeys(NAMES, 1.0))
    path = tmp_path / "bench.json"
    arguments = ["--kind", "forward", "--shape", "2x64", "--dtype", "float32"]
    arguments += ["--output", "fresh", "--json"]
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
        ["--kind", "call", "--shape", "1x576"],
        ["--memory", "--dtype", "float32"],
        ["--kind", "memory", "--kind", "train", "--buffers", "hot"],
        ["--kind", "train", "--output", "given"],
        ["--kind", "heads", "--dtype", "float32"],
        ["--kind", "sweep", "--shape", "2x64"],
        ["--kind", "call", "--plot", "calls.svg"],
        ["--plot", "picture.pdf"],
        ["--plot", "/nonexistent/folder/picture.svg"],
        ["--kind", "backward"],
        ["--json", "/nonexistent/folder/file.json"],
    ],
)
def test_bad_input_exits_2(arguments):
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
