"""Everything autograd is asked for, of all three operations, against the formula in plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from calls import ALL_SPECS, KERNELS, gradients, rows_of, same_bits, weight_of
from rmsnorm import (
    GatedRMSNorm,
    NormSpec,
    RMSNorm,
    add_rms_norm,
    gated_rms_norm,
    rms_norm,
    specs,
)

Function = Callable[..., Any]
EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """One operation under one spec, as a function of its tensors; and the formula."""

    f: Function
    plain: Function
    inputs: int

    def tensors(self, *lead: int, d: int = 6) -> list[Tensor]:
        """x, residual or gate: (*lead, d); weight: (d,)."""
        shapes = [(*lead, d)] * (self.inputs - 1) + [(d,)]
        return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def _plain(x: Tensor, weight: Tensor | None, spec: NormSpec) -> Tensor:
    n = spec.width(x.shape[-1])
    parts = x.unflatten(-1, (spec.groups, -1))
    total = parts[..., :n].square().sum(-1, keepdim=True)
    mean = total if spec.reduce == "sum" else total / n
    if spec.eps_in == "mean_square":
        xhat = parts * (mean + EPS).rsqrt()
    elif spec.eps_in == "root":
        xhat = parts / (mean.sqrt() + EPS)
    else:
        xhat = parts * n**0.5 / total.sqrt().clamp(min=EPS)
    y = xhat.flatten(-2)
    return y if weight is None else y * (weight + spec.offset)


def _rms(spec: NormSpec) -> Case:
    return Case(
        lambda x, w: rms_norm(x, w, EPS, spec=spec), lambda x, w: _plain(x, w, spec), inputs=2
    )


def _add(spec: NormSpec) -> Case:
    def plain(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + 0.5 * x
        return _plain(h, w, spec), h

    def f(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, w, EPS, spec=spec, alpha=0.5)

    return Case(f, plain, inputs=3)


def _gated(spec: NormSpec) -> Case:
    def plain(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        act = F.silu(gate) if spec.gate == "silu" else gate.sigmoid()
        if spec.gate_order == "before":
            return _plain(x * act, w, spec)
        return _plain(x, w, spec) * act

    return Case(lambda x, gate, w: gated_rms_norm(x, gate, w, EPS, spec=spec), plain, inputs=3)


def _cases() -> Iterator[tuple[str, Case]]:
    named = {name: replace(specs[name], accumulate="input") for name in specs}
    extra = {
        "groups": NormSpec(groups=3),
        "partial": NormSpec(partial=0.5),
        "root_sum": NormSpec(eps_in="root", reduce="sum", groups=2, offset=1.0),
    }
    for name, spec in {**named, **extra}.items():
        if spec.gate is None:
            yield f"rms_norm {name}", _rms(spec)
            yield f"add_rms_norm {name}", _add(spec)
        else:
            yield f"gated_rms_norm {name}", _gated(spec)
    yield "gated_rms_norm groups", _gated(replace(named["qwen3_next"], groups=2))


CASES = dict(_cases())
FEW = ["rms_norm torch", "rms_norm original", "add_rms_norm llama", "gated_rms_norm mamba2"]
every_case = pytest.mark.parametrize("name", CASES)
some_cases = pytest.mark.parametrize("name", FEW)


def _close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11)


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


@every_case
def test_gradcheck(name: str) -> None:
    inputs = _leaves(CASES[name].tensors(1))
    assert torch.autograd.gradcheck(
        CASES[name].f, inputs, check_forward_ad=True, check_batched_grad=True
    )
    for i in range(len(inputs)) if name in FEW else ():
        frozen = [t.detach() if i == j else t for j, t in enumerate(inputs)]
        assert torch.autograd.gradcheck(CASES[name].f, frozen)


@every_case
def test_gradgradcheck(name: str) -> None:
    inputs = _leaves(CASES[name].tensors(1, d=6 if "groups" in name or "sum" in name else 3))
    assert torch.autograd.gradgradcheck(CASES[name].f, inputs, check_fwd_over_rev=True)
    if name in FEW:
        for i in range(len(inputs)):
            frozen = [t.detach() if i == j else t for j, t in enumerate(inputs)]
            assert torch.autograd.gradgradcheck(CASES[name].f, frozen)


@every_case
def test_first_and_second_derivatives_are_those_of_the_formula(name: str) -> None:
    """With create_graph, on a strided x too; a rstd that counts as constant would show here."""
    case = CASES[name]
    inputs = case.tensors(3)
    inputs[0] = torch.stack([inputs[0], inputs[0]], -1)[..., 0]
    results = []
    for f in (case.f, case.plain):
        leaves = _leaves(inputs)
        outputs = f(*leaves)
        loss = sum((i + 1) * y.sin().sum() for i, y in enumerate(_tuple(outputs)))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        results.append((outputs, first, torch.autograd.grad(penalty, leaves)))
    _close(*results)


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_a_gradient_penalty_in_float32() -> None:
    for case in (CASES["rms_norm torch"], CASES["add_rms_norm l2"], CASES["gated_rms_norm mamba2"]):
        inputs = [t.float() for t in case.tensors(3, d=24)]
        results = []
        for f in (case.f, case.plain):
            leaves = _leaves(inputs)
            (g,) = torch.autograd.grad(_tuple(f(*leaves))[0].sum(), leaves[:1], create_graph=True)
            results.append(torch.autograd.grad(g.square().sum(), leaves))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@every_case
def test_transforms(name: str) -> None:
    case = CASES[name]
    inputs = case.tensors(3)
    every = tuple(range(case.inputs))
    several = [torch.stack([t, t.sin(), t + 1.0]) for t in inputs]
    tangents = tuple(t.cos() for t in inputs)

    def first(f: Function) -> Function:
        return lambda *a: _tuple(f(*a))[0]

    def total(f: Function) -> Function:
        return lambda *a: sum(y.sin().sum() for y in _tuple(f(*a)))

    def vmapped(f: Function) -> Function:
        return vmap(f, in_dims=(0,) * (case.inputs - 1) + (None,))

    calls: dict[str, Function] = {
        "jacrev": lambda f: jacrev(f, argnums=every)(*inputs),
        "jacfwd": lambda f: jacfwd(f, argnums=every)(*inputs),
        "hessian": lambda f: hessian(total(f), argnums=every)(*(t[..., :6] for t in inputs)),
        "jvp": lambda f: jvp(f, tuple(inputs), tangents)[1],
        "vjp": lambda f: vjp(first(f), *inputs)[1](inputs[0].cos()),
        "vmap of rows": lambda f: vmapped(f)(*inputs),
        "vmap of all": lambda f: vmap(f)(*several),
        "vmap of weights": lambda f: vmap(f, (None,) * (case.inputs - 1) + (0,))(
            *inputs[:-1], several[-1]
        ),
        "vmap of one": lambda f: vmap(f, (1,) + (None,) * (case.inputs - 1), 1)(
            several[0].transpose(0, 1), *inputs[1:]
        ),
        "vmap twice": lambda f: vmap(vmapped(f))(*several[:-1], several[-1]),
        "grad of vmap": lambda f: grad(total(vmapped(f)), argnums=every)(*inputs),
        "vmap of grad": lambda f: vmap(grad(total(f), argnums=every))(*several),
        "vmap of jacrev": lambda f: vmap(jacrev(f))(*several),
        "vmap of jacfwd": lambda f: vmap(jacfwd(f))(*several),
    }
    for call in calls.values():
        _close(call(case.f), call(case.plain))


@every_case
def test_vmap_has_the_bits_of_a_loop(name: str) -> None:
    """Nothing to differentiate: the operations' own rules, for every choice of dimensions."""
    case = CASES[name]
    samples = [[t.float() for t in case.tensors(3)] for _ in range(4)]
    weight = samples[0][-1]
    for dims in itertools.product((None, 0, 1, -1), repeat=case.inputs - 1):
        if not any(i is not None for i in dims):
            continue
        batched = [
            samples[0][j] if i is None else torch.stack([s[j] for s in samples], i)
            for j, i in enumerate(dims)
        ]
        found = _tuple(vmap(case.f, (*dims, None))(*batched, weight))
        for k, sample in enumerate(samples):
            picked = [samples[0][j] if i is None else sample[j] for j, i in enumerate(dims)]
            alone = _tuple(case.f(*picked, weight))
            assert all(same_bits(a[k], b) for a, b in zip(found, alone, strict=True))
    for dims in ((None,) * (case.inputs - 1) + (0,), (0,) * case.inputs):
        batched = [
            samples[0][j] if i is None else torch.stack([s[j] for s in samples])
            for j, i in enumerate(dims)
        ]
        found = _tuple(vmap(case.f, dims)(*batched))
        for k, sample in enumerate(samples):
            picked = [samples[0][j] if i is None else sample[j] for j, i in enumerate(dims)]
            torch.testing.assert_close([t[k] for t in found], list(_tuple(case.f(*picked))))


@every_case
def test_forward_mode(name: str) -> None:
    case = CASES[name]
    inputs, tangents = case.tensors(3), case.tensors(3)
    results: list[Any] = []
    for f in (case.f, case.plain):
        for no_grad in (False, True):
            with torch.set_grad_enabled(not no_grad), forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(t.requires_grad_(not no_grad), tangent)
                    for t, tangent in zip(inputs, tangents, strict=True)
                ]
                outputs = [forward_ad.unpack_dual(y) for y in _tuple(f(*duals))]
                results.append([(y.primal.detach(), y.tangent.detach()) for y in outputs])
    for other in results[1:]:
        _close(other, results[0])


RAW = ("rms_norm", "rms_norm_fwd", "add_rms_norm", "add_rms_norm_fwd", "gated_rms_norm")


@pytest.mark.parametrize("operation", RAW)
def test_the_raw_operation_refuses_a_dual(operation: str) -> None:
    x = torch.randn(3, 8)
    count = 1 if operation.startswith("rms") else 2
    raw = getattr(torch.ops.rmsnorm, operation)
    options = {"spec": specs.mamba2.encode()} if "gated" in operation else {}
    raw(*[x] * count, **options)
    for position in range(count):
        with forward_ad.dual_level():
            inputs = [x] * count
            inputs[position] = forward_ad.make_dual(x, x)
            with pytest.raises(RuntimeError, match="forward"):
                raw(*inputs, **options)
    with pytest.raises(RuntimeError, match="forward"):
        jvp(lambda t: raw(*[t] * count, **options), (x,), (x,))


def _options(*tensors: Tensor) -> Iterator[tuple[Tensor | None, ...]]:
    """Each combination of the tensors, present or None."""
    yield from itertools.product(*((None, t) for t in tensors))


def _opcheck(operation: Any, arguments: tuple[Any, ...], whole: bool = False) -> None:
    """Schema and shapes, with and without requires_grad; for a whole check under AOTAutograd too.

    No derivative is registered, so what belongs to one is not checked.
    """
    checks = ("test_schema", "test_faketensor")
    wanting = tuple(a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in arguments)
    torch.library.opcheck(operation, wanting, test_utils=checks)
    if whole:
        torch.library.opcheck(operation, arguments)
    else:
        torch.library.opcheck(operation, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    ops, whole = torch.ops.rmsnorm, dtype == torch.bfloat16
    x, dy, strided = rows_of(dtype, 3, 8, 0), rows_of(dtype, 3, 8, 1), rows_of(dtype, 8, 3, 2).t()
    weight, bias = weight_of(torch.float32, 8, 0), weight_of(dtype, 8, 1)
    spec = specs.t5.encode() if dtype == torch.float32 else specs.gemma.encode()
    for w, b in _options(weight, bias):
        _opcheck(ops.rms_norm_fwd.default, (strided, w, b, 1e-6, spec, 1), whole and b is w)
    rstd = ops.rms_norm_fwd(x, weight, None, 1e-6, spec, 1)[1]
    for w, dresidual in _options(weight, strided):
        for needs in ((True, True, True), (False, True, False), (True, False, False)):
            arguments = (dy, x, w, rstd, dresidual, 1e-6, spec, 1, *needs)
            _opcheck(ops.rms_norm_bwd.default, arguments, whole and all(needs) and w is not None)
            found = ops.rms_norm_bwd(*arguments)
            shapes = [x.shape, (8,) if w is not None else (0,), (8,)]
            for t, need, shape in zip(found, needs, shapes, strict=True):
                assert t.shape == (shape if need else (0,))
    for w, alpha, wide in itertools.product((None, weight), (1.0, 0.5), (None, torch.float32)):
        arguments = (x, strided, w, 1e-6, specs.torch.encode(), 1, alpha, wide)
        _opcheck(ops.add_rms_norm.default, arguments, whole and wide is None)
        _opcheck(ops.add_rms_norm_fwd.default, arguments, whole and wide is None and w is None)
    arguments = (x.clone(), dy.clone(), None, 1e-6, specs.torch.encode(), 1, 0.5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.add_rms_norm_.default, arguments, test_utils=checks)


@every_case
def test_meta_and_fake_tensors(name: str) -> None:
    case = CASES[name]
    for dtype, w_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        *rest, weight = case.tensors(4, 3)
        inputs = [t.to(dtype).transpose(0, 1) for t in rest] + [weight.to(w_dtype)]
        real = _tuple(case.f(*inputs))
        meta = _tuple(case.f(*(t.to("meta") for t in inputs)))
        with FakeTensorMode() as mode:
            fake = _tuple(case.f(*map(mode.from_tensor, inputs)))
        for a, *others in zip(real, meta, fake, strict=True):
            for b in others:
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        leaves = [t.to("meta").requires_grad_() for t in inputs]
        found = torch.autograd.grad([y.sum() for y in _tuple(case.f(*leaves))], leaves)
        assert [t.shape for t in found] == [t.shape for t in inputs]
        assert [t.dtype for t in found] == [t.dtype for t in inputs]


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@some_cases
def test_autocast_changes_no_dtype(name: str, autocast: torch.dtype) -> None:
    case = CASES[name]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.to(dtype) for t in case.tensors(3)]
        dys = [torch.ones_like(y) for y in _tuple(case.f(*inputs))]
        expected = case.f(*inputs), gradients(case.f, inputs, dys)
        with torch.autocast("cpu", dtype=autocast):
            found = case.f(*inputs), gradients(case.f, inputs, dys)
        for a, b in zip(_tuple(found[0]), _tuple(expected[0]), strict=True):
            assert same_bits(a, b)
        for a, b in zip(found[1], expected[1], strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
@some_cases
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    case = CASES[name]
    inputs = [t.bfloat16() for t in case.tensors(5)]
    dys = [torch.randn_like(y) for y in _tuple(case.f(*inputs))]
    expected = gradients(case.f, inputs, dys)
    leaves = _leaves(inputs)
    torch.autograd.backward(_tuple(checkpoint(case.f, *leaves, use_reentrant=reentrant)), dys)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert same_bits(leaf.grad, gradient)


class Mixer(nn.Module):
    """All three operations, one after the other."""

    def __init__(self, d: int = 16, spec: str = "llama", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first = RMSNorm(d, 1e-6, spec=spec, dtype=dtype)
        self.second = RMSNorm(d, 1e-6, dtype=dtype)
        self.third = GatedRMSNorm(d, dtype=dtype)
        for i, p in enumerate(self.parameters()):
            nn.init.normal_(p, 1.0, 0.1, generator=torch.Generator().manual_seed(i))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.first(x)
        y, h = add_rms_norm(y, residual, self.second.weight, 1e-6, alpha=0.5)
        return self.third(y, h) + h


def _train(f: Function, module: nn.Module, x: Tensor, residual: Tensor) -> list[Tensor]:
    module.zero_grad()
    leaves = _leaves([x, residual])
    y = f(*leaves)
    y.backward(x.flip(0))
    return [y.detach(), *(t.grad.clone() for t in (*leaves, *module.parameters()))]


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("dtype", "lengths"), [(torch.float32, (6, 9, 13, 7)), (torch.bfloat16, (6,))], ids=str
    )
    def test_training_has_the_bits_of_eager(
        self, dtype: torch.dtype, lengths: tuple[int, ...]
    ) -> None:
        module = Mixer(dtype=dtype)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for rows in lengths:
            wide = rows_of(dtype, rows, 32, rows)
            x, residual = wide[:, ::2], wide[:, 16:]
            for a, b in zip(
                _train(module, module, x, residual),
                _train(compiled, module, x, residual),
                strict=True,
            ):
                assert same_bits(a, b)
        # The second length makes the length a variable; no other makes anything.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2

    def test_inference_and_one_operation_each(self) -> None:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            graphs.append(graph)
            return graph

        module = Mixer()
        x, residual = torch.randn(6, 16), torch.randn(6, 16)
        with torch.no_grad():
            y = torch.compile(module, fullgraph=True, backend=backend)(x, residual)
            assert same_bits(y, module(x, residual))
        names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
        assert [name.split(".")[1] for name in names if name.startswith("rmsnorm")] == [
            "rms_norm",
            "add_rms_norm",
            "gated_rms_norm",
        ]

    @pytest.mark.skipif(not KERNELS, reason="inductor fuses the roundings of plain operations away")
    def test_inductor(self) -> None:
        module = Mixer(dtype=torch.bfloat16)
        compiled = torch.compile(module, fullgraph=True)
        x, residual = rows_of(torch.bfloat16, 6, 16, 0), rows_of(torch.bfloat16, 6, 16, 1)
        try:
            found = _train(compiled, module, x, residual)
        except torch._inductor.exc.InductorError as error:
            pytest.skip(f"inductor has no working compiler here: {error}")
        for a, b in zip(found, _train(module, module, x, residual), strict=True):
            assert same_bits(a, b)

    def test_export_and_aoti(self, tmp_path: Path) -> None:
        module = Mixer(dtype=torch.bfloat16).requires_grad_(False)
        rows = torch.export.Dim("rows", min=2, max=64)
        x, residual = rows_of(torch.bfloat16, 6, 16, 0), rows_of(torch.bfloat16, 6, 16, 1)
        shapes = ({0: rows}, {0: rows})
        program = torch.export.export(module, (x, residual), dynamic_shapes=shapes)
        other = rows_of(torch.bfloat16, 9, 16, 2), rows_of(torch.bfloat16, 9, 16, 3)
        for exported in (program, program.run_decompositions()):
            assert same_bits(exported.module()(*other), module(*other))
        try:
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(tmp_path / "mixer.pt2")
            )
            loaded = torch._inductor.aoti_load_package(package)
        except torch._inductor.exc.InductorError as error:
            pytest.skip(f"inductor has no working compiler here: {error}")
        torch.testing.assert_close(loaded(*other), module(*other))


def test_parametrized_weights() -> None:
    class Exponential(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.exp()

    for make, inputs in (
        (lambda: RMSNorm(8, 1e-6), 1),
        (lambda: RMSNorm(8, spec="gemma"), 1),
        (lambda: GatedRMSNorm(8), 2),
    ):
        tensors = [torch.randn(3, 8) for _ in range(inputs)]
        norm, plain, stored = make(), make(), torch.randn(8)
        parametrize.register_parametrization(norm, "weight", Exponential())
        original = norm.parametrizations.weight.original
        with torch.no_grad():
            original.copy_(stored)
            plain.weight.copy_(stored.exp())
        results = [module(*tensors) for module in (norm, plain)]
        assert same_bits(*results)
        for y in results:
            y.sum().backward()
        torch.testing.assert_close(original.grad, plain.weight.grad * stored.exp())


class Composite(nn.Module):
    """The formula in plain torch, with the weight of a norm of this package."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.spec = norm.weight, norm.spec

    def forward(self, x: Tensor) -> Tensor:
        return _plain(x, self.weight, self.spec)


def _norm(d: int, spec: str = "llama") -> RMSNorm:
    norm = RMSNorm(d, EPS, spec=replace(specs[spec], accumulate="input"), dtype=torch.float64)
    nn.init.normal_(norm.weight, 1.0 - norm.spec.offset, 0.3)
    return norm


class Sandwich(nn.Module):
    """A Gemma 2 block: a norm before and after each part, all with zero-centred weights."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm(d, "gemma") for _ in range(4))
        self.heads = nn.ModuleList(_norm(d // 2, "gemma") for _ in range(2))
        self.qkv, self.out = _linear(d, 3 * d), _linear(d, d)
        self.up, self.down = _linear(d, 2 * d), _linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(self.heads[0](q), self.heads[1](k), v)
        x = x + self.norms[1](self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.norms[3](self.down(F.gelu(self.up(self.norms[2](x)))))


class Twice(nn.Module):
    """The gradient that reaches a norm reaches its input directly as well."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([_norm(d), _norm(d, "torch"), _norm(d, "original")])
        self.linear = _linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y + self.norms[0](y)
        y = y * self.norms[1](y)
        return y - self.norms[2](y) + self.norms[2](y)


class Lora(nn.Module):
    """Frozen weights, norms among them; what is trained lies before the norm and after it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.base = _norm(d).requires_grad_(False), _linear(d, d).requires_grad_(False)
        self.down, self.up = _linear(d, 2), _linear(2, d)
        self.last = _norm(d, "torch").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.last(x + self.base(h) + self.up(self.down(h)))


def _linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, dtype=torch.float64)


def _with_composites(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose norms are the formula."""
    other = copy.deepcopy(module)
    for name, part in list(other.named_modules()):
        if isinstance(part, RMSNorm):
            other.set_submodule(name, Composite(part))
    return other


@pytest.mark.parametrize("block", [Sandwich, Twice, Lora])
def test_blocks_train_as_with_the_formula(block: type[nn.Module]) -> None:
    ours = nn.Sequential(block(8), block(8))
    plain = _with_composites(ours)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for module in (ours, plain):
        for _ in range(2):  # gradients accumulate
            module(x).sin().sum().backward()
    compared = 0
    for (name, a), (other, b) in zip(
        ours.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        assert (a.grad is None) == (b.grad is None) == (not a.requires_grad)
        if a.grad is not None:
            _close(a.grad, b.grad)
            compared += 1
    assert compared
    if block is Lora:
        assert all(p.grad is None for name, p in ours.named_parameters() if "norm" in name)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_optimizers(options: dict[str, bool]) -> None:
    ours = nn.Sequential(Sandwich(8), Twice(8))
    plain = _with_composites(ours)
    for module in (ours, plain):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
        for step in range(3):
            x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(step)).double()
            optimizer.zero_grad()
            module(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
            optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_grad_scaler() -> None:
    norm, linear = RMSNorm(8), nn.Linear(8, 8)
    x = torch.randn(3, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    optimizer = torch.optim.SGD([*norm.parameters(), *linear.parameters()], lr=1.0)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return norm(linear(x)).float().square().mean()

    (expected,) = torch.autograd.grad(loss(), [norm.weight])
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(norm.weight.grad, expected)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = norm.weight.detach().clone()
    scaler.scale(loss() * torch.inf).backward()
    scaler.step(optimizer)  # is skipped
    scaler.update()
    assert torch.equal(norm.weight, before)
    assert scaler.get_scale() == 2.0**5


def test_functional_call_and_hooks() -> None:
    norm = RMSNorm(8, EPS).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    other = torch.randn(8, dtype=torch.float64)
    found = grad(lambda w: functional_call(norm, {"weight": w}, (x,)).sin().sum())(other)
    right = grad(lambda w: _plain(x, w, norm.spec).sin().sum())(other)
    _close(found, right)
    seen: list[Tensor] = []
    norm.weight.register_hook(seen.append)
    norm.register_full_backward_hook(lambda module, dx, dy: seen.extend((*dx, *dy)))
    norm(x.requires_grad_()).sum().backward()
    assert len(seen) == 3
    assert same_bits(seen[-1], torch.ones_like(x)) or same_bits(seen[-2], torch.ones_like(x))


def test_retained_graphs_and_freed_ones() -> None:
    for case in (CASES[name] for name in FEW):
        leaves = _leaves(case.tensors(3))
        y = _tuple(case.f(*leaves))[0]
        y.sum().backward(retain_graph=True)
        once = [t.grad.clone() for t in leaves]
        y.sum().backward()
        for leaf, gradient in zip(leaves, once, strict=True):
            assert same_bits(leaf.grad, 2 * gradient)
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


def test_an_input_that_has_changed_is_noticed() -> None:
    for spec in (ALL_SPECS["torch"], ALL_SPECS["llama"]):
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
        for changed in (x, weight):
            y = rms_norm(x, weight, spec=replace(spec, accumulate="input"))
            with torch.no_grad():
                changed.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
