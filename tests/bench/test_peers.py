import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm.bench import peers
from rmsnorm.bench.grid import Cell
from rmsnorm.bench.limit import Memory
from rmsnorm.bench.peers import Compiler, call_candidates, forward_candidates


def candidates(cell, compiler):
    weight = nn.Parameter(torch.linspace(0.5, 1.5, cell.d, dtype=getattr(torch, cell.dtype)))
    x, out = Memory(cell.dtype, 1024).buffers(cell).first()
    with torch.inference_mode():
        found = forward_candidates(cell, weight, compiler, (x, out))
    return {candidate.name: candidate for candidate in found}, x, out, weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("output", ["fresh", "given"])
def test_every_candidate_of_a_spec_computes_the_same(dtype, output):
    cell = Cell("forward", 3, 64, dtype, "hot", output)
    found, x, out, weight = candidates(cell, Compiler(enabled=False))
    with torch.inference_mode():
        expected = F.rms_norm(x, (64,), weight, peers.EPS)
        tolerance = (
            {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 0.01, "atol": 0}
        )
        for candidate in found.values():
            result = candidate.call(*candidate.bind(x, out))
            assert (result is out) == (output == "given" and not candidate.name.startswith("eager"))
            torch.testing.assert_close(result, expected, **tolerance)
    assert {"ours torch", "eager torch", "ours llama", "eager llama"} <= set(found)
    assert not any(name.startswith("compiled") for name in found)


def test_the_llama_norm_rounds_before_the_weight():
    x = torch.randn(4, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 576, dtype=torch.bfloat16))
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + peers.EPS)
    expected = weight * (x.float() * rstd).bfloat16()
    assert torch.equal(peers.LlamaNorm(weight)(x), expected)


def test_compiled_peers_are_made_once_for_each_shape(monkeypatch):
    made = []

    def compile_(function, *, dynamic):
        assert dynamic is False
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    compiler = Compiler()
    for output in ("fresh", "given"):
        cell = Cell("forward", 2, 16, "float32", "hot", output)
        assert compiler.has(cell) is (output == "given")
        found = candidates(cell, compiler)[0]
        assert {"compiled torch", "compiled llama"} <= set(found)
        assert compiler.has(cell)
    assert len(made) == 2
    candidates(Cell("forward", 3, 16, "float32"), compiler)
    assert len(made) == len({id(function.__code__) for function in made}) == 4


def test_large_compiled_peers_write_into_the_given_output(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    cell = Cell("forward", 256, 1024, "float32", "hot", "given")
    found, x, out, _ = candidates(cell, Compiler())
    for name in ("compiled torch", "compiled llama"):
        assert found[name].call(*found[name].bind(x, out)) is out


def test_without_a_compiler_the_compiled_peers_are_absent(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no C++ compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: fail)
    compiler = Compiler()
    found = candidates(Cell("forward", 2, 16, "float32"), compiler)[0]
    assert not any(name.startswith("compiled") for name in found)
    assert compiler.failure == "no C++ compiler"
    assert compiler.has(Cell("forward", 9, 16, "float32"))


def test_a_call_cell_times_the_operation_against_torch_add():
    cell = Cell("call", 1, 64, "bfloat16")
    found = call_candidates(cell, nn.Parameter(torch.ones(64, dtype=torch.bfloat16)))
    assert found[0].call is torch.add
    assert [candidate.name for candidate in found] == ["add", "op torch"]
