import types

import pytest
import torch
import torch.nn.functional as F

from rmsnorm.bench import engines, peers
from rmsnorm.bench.engines import Engines, installed
from rmsnorm.bench.grid import Cell
from rmsnorm.bench.limit import Candidate, Memory


def inputs(cell):
    weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, cell.d, dtype=getattr(torch, cell.dtype)))
    return Memory(cell.dtype, 1024).buffers(cell).first(), weight


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("output", ["fresh", "given"])
def test_an_installed_engine_computes_the_norm_of_the_cells_own_tensors(name, dtype, output):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    cell = Cell("forward", 5, 64, dtype, "hot", output)
    (x, out), weight = inputs(cell)
    made = Engines(peers.EPS)
    (candidate,) = (one for one in made.candidates(cell, weight) if one.name == f"{name} torch")
    with torch.inference_mode():
        expected = F.rms_norm(x, (64,), weight, peers.EPS)
        (result,) = candidate.results(candidate.call(*candidate.bind(x, out)))
    assert (result is out) == (output == "given")
    assert result.dtype == x.dtype
    tolerance = 1e-5 if dtype == "float32" else 0.02
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_onnxruntime_adds_too():
    if not installed("onnxruntime"):
        pytest.skip("onnxruntime is not installed")
    cell = Cell("add", 5, 64, "float32")
    (x, residual), weight = inputs(cell)
    (candidate,) = Engines(peers.EPS).candidates(cell, weight)
    y, total = candidate.results(candidate.call(*candidate.bind(x, residual)))
    torch.testing.assert_close(total, x + residual)
    expected = F.rms_norm(x + residual, (64,), weight, peers.EPS)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def installed_engine(monkeypatch):
    """An engine that is there, as far as the search for modules can tell."""
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    calls = []

    def make(cell, weight, eps):
        calls.append(cell)
        if cell.dtype == "bfloat16":
            raise types.new_class("EngineFail", (Exception,))("no kernel for it\nsecond line")
        return Candidate("onnxruntime torch", torch.clone, lambda x, out: (x,))

    monkeypatch.setattr(engines, "_onnxruntime", make)
    monkeypatch.setattr(engines, "_openvino", make)
    return calls


def test_an_engine_that_fails_is_absent_and_not_asked_again(installed_engine):
    made = Engines(1e-6)
    weight = torch.ones(8)
    for rows in (2, 3):
        assert made.candidates(Cell("forward", rows, 8, "bfloat16"), weight) == []
        assert len(made.candidates(Cell("forward", rows, 8, "float32"), weight)) == 2
    assert made.failures == {
        "onnxruntime forward bfloat16": "no kernel for it",
        "openvino forward bfloat16": "no kernel for it",
    }
    assert len(installed_engine) == 2 + 4


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        (Cell("forward", 2, 8, "float32"), 2),
        (Cell("add", 2, 8, "float32"), 1),
        (Cell("add", 2, 8, "float32", "hot", "inplace"), 0),
        (Cell("heads", 32768, 128, "float32"), 0),
        (Cell("train", 2, 8, "float32"), 0),
        (Cell("add_train", 2, 8, "float32"), 0),
    ],
)
def test_engines_are_asked_for_what_they_can_do(installed_engine, cell, count):
    assert len(Engines(1e-6).candidates(cell, torch.ones(cell.d))) == count
    assert Engines(1e-6, enabled=False).candidates(cell, torch.ones(cell.d)) == []


def test_no_engine_is_imported_before_it_is_used():
    assert "onnxruntime" not in vars(engines)
    assert installed("sys")
    assert not installed("no_such_module")
