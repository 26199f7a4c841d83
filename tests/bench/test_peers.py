import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm.bench import peers
from rmsnorm.bench.engines import MODULES
from rmsnorm.bench.grid import HEADS, SWEEP_WIDTHS, Cell, peers_of
from rmsnorm.bench.limit import Memory
from rmsnorm.bench.peers import Compiler, call_candidates, forward_candidates
from rmsnorm.bench.run import grad_mode


def every_candidate(cell, compiler=None):
    """The candidates of any kind by name, and their tensors."""
    weight = nn.Parameter(torch.linspace(0.5, 1.5, cell.d, dtype=getattr(torch, cell.dtype)))
    first = Memory(cell.dtype, 1024).buffers(cell).first()
    with grad_mode(cell):
        found = peers.candidates(cell, weight, compiler or Compiler(enabled=False), first)
    return {candidate.name: candidate for candidate in found}, first, weight


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


def test_a_single_formula_that_cannot_be_compiled_is_absent_alone(monkeypatch):
    def compile_(function, *, dynamic):
        def fail(*arguments):
            raise RuntimeError("KeyError: 'buf1'")

        return fail if "llama" in function.__name__ else function

    monkeypatch.setattr(torch, "compile", compile_)
    compiler = Compiler()
    for rows in (2, 3):
        cell = Cell("forward", rows, 16, "float32")
        found = every_candidate(cell, compiler)[0]
        assert "compiled torch" in found
        assert "compiled llama" not in found
        assert compiler.has(cell)
    assert compiler.enabled
    assert compiler.failure == "KeyError: 'buf1'"


def test_what_is_compiled_has_memory_of_its_own(monkeypatch):
    """Views of larger memory would miss the compiler's cache, inference tensors be compiled
    twice."""
    seen = []

    def compile_(function, *, dynamic):
        def call(x, *others):
            seen.append(x)
            return function(x, *others)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    cell = Cell("add", 3, 64, "float32", "rotating", "inplace")
    first = every_candidate(cell, Compiler())[1]
    assert first[0].untyped_storage().nbytes() > first[0].nbytes
    for one in seen:
        assert one.untyped_storage().nbytes() == one.nbytes
        assert not one.is_inference()
        assert one.data_ptr() != first[0].data_ptr()


@pytest.fixture
def uncompiled(monkeypatch):
    """``torch.compile`` returns what it is given."""
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    return Compiler()


def expected_results(kind, first, weight):
    """The formula in float64 and its gradients, by autograd."""
    leaves = [tensor.double().requires_grad_() for tensor in first[: 1 if kind == "train" else 2]]
    gradients = [tensor.double() for tensor in first[len(leaves) :]]
    wide = weight.detach().double().requires_grad_()
    total = leaves[0] if kind == "train" else leaves[0] + leaves[1]
    y = F.rms_norm(total, wide.shape, wide, peers.EPS)
    results = (y,) if kind == "train" else (y, total)
    if kind == "add":
        return results
    return (*results, *torch.autograd.grad(results, (*leaves, wide), gradients))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["train", "add", "add_train"])
def test_every_candidate_returns_the_same_results(kind, dtype, uncompiled):
    cell = Cell(kind, 3, 64, dtype)
    found, first, weight = every_candidate(cell, uncompiled)
    least = found.pop("product", None)  # computes something else
    assert (least is not None) == (kind == "train")
    others = ("ours",) if kind == "train" else ("ours", "separate")
    assert set(found) == {
        f"{name} {spec}"
        for spec in ("torch", "llama")
        for name in (*others, *peers_of(kind, spec))
        if name not in MODULES
    }
    expected = expected_results(kind, first, weight)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.05}
    with grad_mode(cell):
        for candidate in found.values():
            results = candidate.call(*candidate.bind(*first))
            assert len(results) == len(expected)
            for one, other in zip(results, expected, strict=True):
                assert one.dtype == first[0].dtype
                torch.testing.assert_close(one.double(), other, **tolerance)
    assert weight.grad is None
    assert not any(tensor.requires_grad for tensor in first)


@pytest.mark.parametrize("rows", [3, 512])
def test_in_place_every_candidate_writes_the_sum_over_the_residual(rows, uncompiled):
    cell = Cell("add", rows, 1024, "float32", "hot", "inplace")
    found, first, weight = every_candidate(cell, uncompiled)
    for name, candidate in found.items():
        # From 1 MiB on the compiled peer writes in place too.
        allocates = name == "compiled torch" and rows == 3
        x, residual = (tensor.clone() for tensor in first)
        expected = expected_results("add", (x, residual), weight)
        with grad_mode(cell):
            y, total = candidate.call(*candidate.bind(x, residual))
        assert (total is residual) is not allocates, name
        assert (y is x) is name.startswith(("ours", "separate")), name
        torch.testing.assert_close(y.double(), expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(total.double(), expected[1], rtol=1e-4, atol=1e-5)


def test_cells_that_differ_in_the_buffers_alone_share_their_compiled_peers(uncompiled):
    cell = Cell("train", 3, 64, "float32")
    assert not uncompiled.has(cell)
    every_candidate(cell, uncompiled)
    assert uncompiled.has(Cell("train", 3, 64, "float32", "rotating"))
    assert not uncompiled.has(Cell("forward", 3, 64, "float32"))
    assert not uncompiled.has(Cell("add_train", 3, 64, "float32"))


def test_a_call_cell_times_every_way_to_call_against_torch_add():
    cell = Cell("call", 1, 64, "bfloat16")
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 64, dtype=torch.bfloat16))
    found = call_candidates(cell, weight)
    assert found[0].call is torch.add
    assert [candidate.name for candidate in found] == [
        "add",
        "ours torch",
        "module torch",
        "op torch",
        "identity",
        "clone",
        "addcmul",
    ]
    x = Memory("bfloat16", 1024).buffers(cell).first()[0]
    norm = F.rms_norm(x, (64,), weight, peers.EPS)
    right = (x + x, norm, norm, norm, x, x, torch.addcmul(x, x, weight))
    with torch.inference_mode():
        for candidate, expected in zip(found, right, strict=True):
            assert torch.equal(candidate.call(*candidate.bind(x, None)), expected)


@pytest.mark.parametrize("output", ["fresh", "given"])
def test_heads_are_read_where_they_lie(output, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    cell = Cell("heads", HEADS.rows, 8, "float32", "hot", output)
    found, (x, out), weight = every_candidate(cell, Compiler())
    assert x.shape == (4, 512, 16, 8)
    assert not x.is_contiguous()
    expected = F.rms_norm(x, (8,), weight, peers.EPS)
    with grad_mode(cell):
        for candidate in found.values():
            result = candidate.call(*candidate.bind(x, out))
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert {"ours torch", "compiled llama"} <= set(found)


def test_the_strides_of_heads_are_compiled_for(monkeypatch):
    seen = []

    def compile_(function, *, dynamic):
        def call(x, *others):
            seen.append(x)
            return function(x, *others)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    first = every_candidate(Cell("heads", HEADS.rows, 8, "float32"), Compiler())[1]
    assert seen
    assert {one.stride() for one in seen} == {first[0].stride()}


def test_the_sweep_cuts_the_same_bytes_into_rows_of_each_width():
    cell = Cell("sweep", 1, SWEEP_WIDTHS[-1], "float32", "hot", "given")
    x, out = Memory("float32", 1024).buffers(cell).first()
    found = peers.candidates(cell, nn.Parameter(torch.ones(cell.d)), Compiler(enabled=False), ())
    assert [one.name for one in found] == [f"ours d={d}" for d in SWEEP_WIDTHS]
    with grad_mode(cell):
        for candidate, d in zip(found, SWEEP_WIDTHS, strict=True):
            candidate.call(*candidate.bind(x, out))
            expected = F.rms_norm(x.view(-1, d), (d,), None, peers.EPS)
            torch.testing.assert_close(out.view(-1, d), expected, rtol=1e-4, atol=1e-5)
