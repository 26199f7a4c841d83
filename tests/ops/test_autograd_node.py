"""The node in C++ that records a direct call: it is to autograd what an autograd.Function is."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rmsnorm
from calls import FLOATS, UNGATED, rows_of, same_bits, weight_of, without_direct_call
from rmsnorm import add_rms_norm, rms_norm, specs
from rmsnorm.ops import direct, extension

pytestmark = pytest.mark.skipif(
    direct.entry is None or not extension.autograd_table(),
    reason="the node was not built, or is switched off",
)
NODE = "RMSNormBackward"


def leaves(dtype: torch.dtype = torch.float32, rows: int = 6, d: int = 16) -> list[Tensor]:
    """x, residual and weight."""
    tensors = [rows_of(dtype, rows, d, 0), rows_of(dtype, rows, d, 1), weight_of(dtype, d, 2)]
    return [tensor.requires_grad_() for tensor in tensors]


def test_it_is_there() -> None:
    x, residual, weight = leaves()
    assert rms_norm(x, weight).grad_fn.name() == NODE
    assert rmsnorm.RMSNorm(16)(x).grad_fn.name() == NODE
    y, h = add_rms_norm(x, residual, weight)
    assert y.grad_fn is h.grad_fn
    assert y.grad_fn.name() == NODE
    assert [edge[0].name() for edge in y.grad_fn.next_functions] == [
        "torch::autograd::AccumulateGrad"
    ] * 3


@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_gradients_are_those_of_the_function(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients() -> list[Tensor]:
        found = []
        for rows, d in (1, 1), (5, 40), (300, 128):
            x, residual, weight = leaves(dtype, rows, d)
            other = weight_of(torch.float32, d, 3).requires_grad_()
            dy = rows_of(dtype, rows, d, 4)
            for w in (None, weight, other):
                wanted = [x] if w is None else [x, w]
                y = rms_norm(x, w, spec=specs[name])
                found += torch.autograd.grad(y, wanted, dy.to(y.dtype))
                y, h = add_rms_norm(x, residual, w, spec=specs[name])
                given = (dy.to(y.dtype), 2 * dy)
                found += torch.autograd.grad((y, h), [residual, *wanted], given)
        return found

    recorded = gradients()
    without_direct_call(monkeypatch)
    assert all(map(same_bits, recorded, gradients()))


def test_any_of_the_gradients_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        found = []
        for wanted in (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2):
            for used in (0,), (1,), (0, 1):  # y, h
                if wanted == (2,) and used == (1,):
                    continue  # h does not depend on the weight
                tensors = leaves()
                for index, tensor in enumerate(tensors):
                    tensor.requires_grad_(index in wanted)
                results = add_rms_norm(*tensors)
                torch.stack([results[i].sin().sum() for i in used]).sum().backward()
                assert all((tensors[i].grad is None) is (i not in wanted) for i in range(2))
                found += [t.grad for t in tensors if t.grad is not None]
        return found

    recorded = gradients()
    assert len(recorded) > 20
    without_direct_call(monkeypatch)
    assert all(map(same_bits, recorded, gradients()))


def test_what_nobody_asks_for_is_not_computed() -> None:
    asked = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "rms_norm_bwd" in str(func):
                asked.append(args[8:10])  # need_dx, need_dweight
            return func(*args, **(kwargs or {}))

    x, _, weight = leaves()
    y = rms_norm(x, weight)
    for wanted in (x,), (weight,), (x, weight):
        with Seen():
            torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
    assert asked == [(True, False), (False, True), (True, True)]


def test_one_tensor_in_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        x = torch.linspace(-1, 2, 8, requires_grad=True)
        square = rms_norm(x, x)
        y, h = add_rms_norm(x, x, x)
        return [
            *torch.autograd.grad(square.sum(), x),
            *torch.autograd.grad((y * h).sum(), x),
        ]

    recorded = gradients()
    without_direct_call(monkeypatch)
    assert all(torch.allclose(*pair) for pair in zip(recorded, gradients(), strict=True))


def test_gradients_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        found = []
        for loss in (lambda y: y.sum(), lambda y: y.T[3:9].sin().sum(), lambda y: y[::2].sum()):
            x, residual, weight = leaves()
            y, h = add_rms_norm(x, residual, weight)
            (loss(y) + loss(h)).backward()
            loss(rms_norm(x, weight)).backward()
            found += [x.grad, residual.grad, weight.grad]
        return found

    recorded = gradients()
    without_direct_call(monkeypatch)
    assert all(map(same_bits, recorded, gradients()))


def test_a_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        x, residual, weight = leaves(torch.float64)
        y, h = add_rms_norm(x, residual, weight, 1e-6)
        first = torch.autograd.grad(
            y.sin().sum() + h.square().sum(), (x, residual, weight), create_graph=True
        )
        loss = sum(gradient.sin().sum() for gradient in first)
        return list(torch.autograd.grad(loss, (x, residual, weight)))

    recorded = gradients()
    without_direct_call(monkeypatch)
    assert all(map(same_bits, recorded, gradients()))


def test_a_batch_of_gradients() -> None:
    x, residual, weight = leaves()
    tensors = x, residual, weight
    y, h = add_rms_norm(x, residual, weight, 1e-6)
    dys, dhs = torch.randn(5, 6, 16), torch.randn(5, 6, 16)
    for graph in False, True:
        batched = torch.autograd.grad(
            (y, h), tensors, (dys, dhs), is_grads_batched=True, retain_graph=True,
            create_graph=graph,
        )  # fmt: skip
        single = [
            torch.autograd.grad((y, h), tensors, pair, retain_graph=True)
            for pair in zip(dys, dhs, strict=True)
        ]
        for together, each in zip(batched, zip(*single, strict=True), strict=True):
            torch.testing.assert_close(together, torch.stack(each))


@pytest.mark.parametrize("graph", [False, True])
def test_vmap_over_the_backward(graph: bool) -> None:
    """As torch.func writes it; is_grads_batched takes an older vmap."""
    x, residual, weight = leaves(torch.float64)
    dys, dhs = torch.randn(2, 5, 6, 16, dtype=torch.float64)
    for scale in None, weight:
        tensors = [x, residual] if scale is None else [x, residual, scale]
        y, h = add_rms_norm(x, residual, scale, 1e-6)
        for wanted in tensors, tensors[:1], tensors[-1:]:

            def gradients(
                dy: Tensor, dh: Tensor, results: Any = (y, h), wanted: Any = wanted
            ) -> tuple[Tensor, ...]:
                return torch.autograd.grad(
                    results, wanted, (dy, dh), retain_graph=True, create_graph=graph
                )

            pairs = list(zip(dys, dhs, strict=True))
            single = [torch.stack(g) for g in zip(*(gradients(*p) for p in pairs), strict=True)]
            together = torch.vmap(gradients)(dys, dhs)
            nested = torch.vmap(torch.vmap(gradients))(dys[None], dhs[None])
            for one, two, right in zip(together, nested, single, strict=True):
                torch.testing.assert_close(one, right)
                torch.testing.assert_close(two[0], right)
            some = torch.vmap(gradients, in_dims=(1, None))(dys.movedim(0, 1), dhs[0])
            torch.testing.assert_close(some[0][0], single[0][0])
            if graph:
                second = [
                    torch.autograd.grad(
                        sum(g.sin().sum() for g in found),
                        tensors,
                        retain_graph=True,
                        materialize_grads=True,
                    )
                    for found in (together, single)
                ]
                for one, right in zip(*second, strict=True):
                    torch.testing.assert_close(one, right)


def test_forward_mode_is_open_during_the_backward() -> None:
    x, _, weight = leaves(torch.float64)
    y = rms_norm(x, weight, 1e-6)
    dy, tangent = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = torch.autograd.grad(y, x, tangent, retain_graph=True)[0]
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent))
        found = forward_ad.unpack_dual(dx).tangent
    torch.testing.assert_close(found, expected)  # dx is linear in dy


def test_modes_see_the_operation_of_the_backward() -> None:
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, _, weight = leaves()
    y = rms_norm(x, weight)
    right = torch.autograd.grad(y, (x, weight), torch.ones_like(y), retain_graph=True)
    with Seen():
        found = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert all(map(same_bits, found, right))
    assert "rmsnorm.rms_norm_bwd.default" in seen


def test_an_error_in_a_mode_keeps_its_type() -> None:
    class Broken(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "rms_norm_bwd" in str(func):
                raise LookupError("not today")
            return func(*args, **(kwargs or {}))

    x, _, weight = leaves()
    y = rms_norm(x, weight)
    with Broken(), pytest.raises(LookupError, match="not today"):
        y.sum().backward()


def test_the_profiler_sees_both_directions() -> None:
    x, _, weight = leaves()
    y = rms_norm(x, weight)
    with torch.profiler.profile() as profile:
        y.sum().backward()
    names = {event.name for event in profile.events()}
    assert {NODE, "rmsnorm::rms_norm_bwd"} <= names


def test_hooks_on_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        x, residual, weight = leaves()
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t.shape) or t.clone(), lambda t: t
        ):
            y, h = add_rms_norm(x, residual, weight)
            z = rms_norm(x, weight)
        assert len(packed) == 6
        return list(torch.autograd.grad((y * h + z).sum(), (x, residual, weight)))

    recorded = gradients()
    without_direct_call(monkeypatch)
    assert all(map(same_bits, recorded, gradients()))


def test_an_error_of_a_hook_on_saved_tensors_reaches_the_caller() -> None:
    def pack(tensor: Tensor) -> Tensor:
        raise LookupError("no place")

    x, _, weight = leaves()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        pytest.raises(LookupError, match="no place"),
    ):
        rms_norm(x, weight)


@pytest.mark.parametrize("which", ["x", "weight", "h"])
def test_what_was_saved_must_not_change(which: str) -> None:
    x, residual, weight = leaves()
    moved = x * 1
    y, h = add_rms_norm(moved, residual, weight)
    z = rms_norm(moved, weight)
    with torch.no_grad():
        {"x": moved, "weight": weight, "h": h}[which].mul_(2)
    outputs = {"x": z, "weight": y, "h": y}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[which].sum().backward()


def test_a_sum_may_change_where_only_its_gradient_is_asked_for() -> None:
    """It is passed on: nothing that was saved is needed."""
    x, residual, weight = leaves()
    _, h = add_rms_norm(x, residual, weight)
    h.mul_(3)
    h.sum().backward()
    assert same_bits(x.grad, torch.full_like(x, 3.0))
    assert same_bits(residual.grad, x.grad)


@pytest.mark.parametrize("around", ["inference", "fake", "grad"])
def test_the_first_backward_may_run_in_any_mode(around: str) -> None:
    """What a plain tensor is like must not be learnt there: later calls would not be plain."""
    code = (
        "import contextlib, sys, torch\n"
        "from rmsnorm import rms_norm\n"
        "from rmsnorm.ops import rms_norm as operation\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "x = torch.ones(3, 8, requires_grad=True)\n"
        "y = rms_norm(x)\n"
        "def backward(dy):\n"
        "    return torch.autograd.grad(y, x, dy, retain_graph=True)[0].sum()\n"
        "dy = torch.ones(3, 8)\n"
        "if sys.argv[1] == 'inference':\n"
        "    with torch.inference_mode():\n"
        "        backward(dy)\n"
        "elif sys.argv[1] == 'grad':\n"
        "    torch.func.grad(backward)(dy)\n"
        "else:\n"
        "    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):\n"
        "        backward(dy)\n"
        "called = []\n"
        "operation.gradients = lambda *arguments: called.append(arguments)\n"
        "backward(dy)\n"
        "assert not called\n"
    )
    subprocess.run([sys.executable, "-c", code, around], check=True)


def test_a_mode_may_run_the_backward_that_it_sees() -> None:
    """The node is not locked while it computes."""
    code = (
        "import torch\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "from rmsnorm import rms_norm\n"
        "x = torch.ones(3, 8, requires_grad=True)\n"
        "y = rms_norm(x)\n"
        "found = []\n"
        "def backward():\n"
        "    return torch.autograd.grad(y, x, torch.ones(3, 8), retain_graph=True)[0]\n"
        "class Again(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        if 'rms_norm_bwd' in str(func):\n"
        "            found.append(backward())\n"
        "        return func(*args, **(kwargs or {}))\n"
        "with Again():\n"
        "    found.append(backward())\n"
        "assert torch.equal(*found)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_results_may_change() -> None:
    x, residual, weight = leaves()
    y = rms_norm(x, weight, 1e-6)
    (right,) = torch.autograd.grad(3 * y.sum(), x)
    y = rms_norm(x, weight, 1e-6)
    y.mul_(3)
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], right)
    y, h = add_rms_norm(x, residual, weight)
    y.add_(h)
    y.sum().backward()


def test_a_graph_is_used_up() -> None:
    x, _, weight = leaves()
    y = rms_norm(x, weight).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_memory_is_freed() -> None:
    x, residual, weight = leaves()
    moved = x * 1
    y, h = add_rms_norm(moved, residual, weight)
    z = rms_norm(moved, weight)
    gone = [weakref.ref(tensor) for tensor in (moved, y, h, z)]
    total = (y * h * z).sum()
    del moved, y, h, z
    total.backward()
    del total
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_a_long_graph_ends_quietly() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(100_000):
        y = rms_norm(y)
    del y
    gc.collect()


def test_hooks_of_a_graph() -> None:
    x, _, weight = leaves()
    y = rms_norm(x, weight)
    y.retain_grad()
    seen: list[Any] = []
    y.grad_fn.register_prehook(lambda grads: seen.append(("before", len(grads))))
    y.grad_fn.register_hook(lambda found, given: seen.append((len(found), len(given))))
    x.register_hook(lambda gradient: 2 * gradient)
    y.sum().backward()
    assert seen == [("before", 1), (2, 1)]
    assert same_bits(y.grad, torch.ones_like(y))
    once = torch.autograd.grad(rms_norm(x.detach().requires_grad_(), weight).sum(), weight)
    assert same_bits(weight.grad, once[0])


def test_anomalies_are_traced() -> None:
    x, _, weight = leaves()
    with (
        pytest.warns(UserWarning, match="Error detected in RMSNormBackward"),
        pytest.raises(RuntimeError, match="returned nan values"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        rms_norm(x, weight).backward(torch.full_like(x, torch.nan))


def test_an_inference_tensor_cannot_be_saved() -> None:
    x, _, _ = leaves()
    with torch.inference_mode():
        weight = torch.ones(16)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        rms_norm(x, weight)
    assert rms_norm(x.detach(), weight).grad_fn is None


def test_threads_share_a_graph() -> None:
    x, _, weight = leaves(rows=300, d=256)
    y = rms_norm(x, weight).sum()
    right = torch.autograd.grad(y, (x, weight), retain_graph=True)
    found: list[bool] = []

    def work() -> None:
        for _ in range(20):
            gradients = torch.autograd.grad(y, (x, weight), retain_graph=True)
            found.append(all(map(same_bits, gradients, right)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def in_model(x: Tensor, layers: nn.ModuleList) -> Tensor:
    h = x
    for norm, linear in layers:
        y, h = norm(linear(norm(h)), h)
        h = h + y
    return h.square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd(backend: str) -> None:
    from torch._dynamo import compiled_autograd

    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.ModuleList([rmsnorm.RMSNorm(16, eps=eps), nn.Linear(16, 16)]) for eps in (1e-6, 0.1)
    )

    def gradients(around: Callable[[], Any]) -> list[Tensor]:
        layers.zero_grad()
        loss = in_model(torch.linspace(-1, 1, 96).view(6, 16), layers)
        with around():
            loss.backward()
        return [parameter.grad for parameter in layers.parameters()]

    right = gradients(contextlib.nullcontext)
    torch._dynamo.reset()

    def compiled() -> Any:
        return compiled_autograd._enable(
            lambda graph: torch.compile(graph, backend=backend), dynamic=False
        )

    for _ in range(2):
        for found, expected in zip(gradients(compiled), right, strict=True):
            torch.testing.assert_close(found, expected)


def test_a_checkpointed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        x, residual, weight = leaves()

        def block(x: Tensor, residual: Tensor) -> Tensor:
            y, h = add_rms_norm(x, residual, weight)
            return rms_norm(y.sin() + h, weight)

        y = torch.utils.checkpoint.checkpoint(block, x, residual, use_reentrant=False)
        return list(torch.autograd.grad(y.sum(), (x, residual, weight)))

    recorded = gradients()
    without_direct_call(monkeypatch)
    assert all(map(same_bits, recorded, gradients()))


def test_it_can_be_switched_off() -> None:
    code = (
        "import torch\n"
        "from rmsnorm import rms_norm\n"
        "x = torch.tensor([3.0, 4.0], requires_grad=True)\n"
        "y = rms_norm(x)\n"
        "y[0].backward()\n"
        "print(y.grad_fn.name(), x.grad)"
    )
    names = {}
    for off in "0", "1":
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RMSNORM_DISABLE_AUTOGRAD": off},
            capture_output=True,
            text=True,
            check=True,
        )
        names[off], _, values = done.stdout.partition(" ")
        assert values == "tensor([ 0.1810, -0.1358])\n"
    assert names == {"0": NODE, "1": "_RMSNormBackward"}


def test_another_torch_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
    assert extension.autograd_table.__wrapped__() == 0
