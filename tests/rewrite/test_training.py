"""A patched module where a gradient is needed: this package's backward, if it was proven."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

from rewrite import norms
from rmsnorm import PatchReport, identify, patch, unpatch
from rmsnorm.ops.rms_norm import has_kernels
from rmsnorm.rewrite import swap
from rmsnorm.rewrite.swap import plan_of

pytestmark = pytest.mark.skipif(not has_kernels, reason="needs the kernels")

D = 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a gradient's norm: a module in a half type rounds at every step of its own backward.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}

BITWISE: list[Callable[[], nn.Module]] = [
    lambda: norms.CastThenWeight(D),
    lambda: norms.WeightThenCast(D),
    lambda: norms.ZeroCentred(D),
    lambda: norms.Grouped(D, 4),
    lambda: norms.ConfigEps(D),
    lambda: norms.LeadingOnes(D),
    lambda: norms.BufferWeight(D),
    lambda: nn.RMSNorm(D, eps=1e-5),
    lambda: nn.RMSNorm((4, 12), eps=1e-5),
    lambda: nn.RMSNorm(D, elementwise_affine=False),
]
NARROW: list[Callable[[], nn.Module]] = [
    lambda: nn.RMSNorm(1, eps=1e-5),
    lambda: nn.RMSNorm(1, eps=1e-5, elementwise_affine=False),
    lambda: norms.CastThenWeight(2),
    lambda: norms.Grouped(6, 3),
]
CLOSE: list[Callable[[], nn.Module]] = [
    lambda: norms.NoCast(D),
    lambda: norms.L2Scaled(D),
    lambda: norms.Original(D),
]


def rows(dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, D, generator=generator).to(dtype)


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    module = make()
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.normal_(tensor)
    return module.to(dtype)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of this package's operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rmsnorm":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def differentiate(
    module: nn.Module, x: Tensor, dy: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """y and the gradients, of x under the name ``""``."""
    leaf = x.detach().requires_grad_()
    module.zero_grad()
    y = module(leaf)
    y.backward(dy.to(y.dtype))
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return y.detach(), {"": leaf.grad, **found}


def assert_near(ours: Tensor | None, theirs: Tensor | None, tolerance: float) -> None:
    assert ours is not None
    assert theirs is not None
    assert ours.dtype == theirs.dtype
    difference = (ours.double() - theirs.double()).norm()
    assert difference <= tolerance * theirs.double().norm()


def used(module: nn.Module, x: Tensor) -> list[str]:
    """This package's operations in a forward and backward of ``module``."""
    leaf = x.detach().requires_grad_()
    with Recorder() as seen:
        module(leaf).sum().backward()
    return seen.names


BOTH = ["rms_norm_fwd", "rms_norm_bwd"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", BITWISE)
def test_the_same_bits_forward_and_the_same_gradients(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    module = made(make, dtype)
    plain = copy.deepcopy(module)
    (entry,) = patch(module).swapped
    assert entry.training
    assert entry.reason == ""
    x, dy = rows(dtype), rows(seed=6)
    if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 2:
        x, dy = x.reshape(3, 4, 4, 12), dy.reshape(3, 4, 4, 12)
    y, gradients = differentiate(module, x, dy)
    expected_y, expected = differentiate(plain, x, dy)
    assert torch.equal(y, expected_y)
    with torch.no_grad():
        assert torch.equal(module(x), y)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], TOLERANCE[dtype])
    assert used(module, x) == BOTH


@pytest.mark.parametrize("make", CLOSE)
def test_formulas_whose_forward_is_close(make: Callable[[], nn.Module]) -> None:
    module = made(make)
    plain = copy.deepcopy(module)
    (entry,) = patch(module).swapped
    assert entry.training
    x, dy = rows(), rows(seed=6)
    y, gradients = differentiate(module, x, dy)
    with torch.no_grad():
        assert torch.equal(module(x), y)
    _, expected = differentiate(plain, x, dy)
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], 1e-5)
    assert used(module, x) == BOTH


@pytest.mark.parametrize("make", NARROW)
def test_rows_of_which_little_is_left_after_the_subtraction(
    make: Callable[[], nn.Module],
) -> None:
    module = made(make)
    (entry,) = patch(module).swapped
    assert entry.training
    assert identify(module) == entry.spec


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [BITWISE[0], BITWISE[1]])
def test_mixed_dtypes(
    make: Callable[[], nn.Module], dtype: torch.dtype, weight: torch.dtype
) -> None:
    module = made(make)
    patch(module)
    module.to(weight)
    plain = copy.deepcopy(module)
    unpatch(plain)
    x, dy = rows(dtype), rows(seed=6)
    y, gradients = differentiate(module, x, dy)
    expected_y, expected = differentiate(plain, x, dy)
    assert torch.equal(y, expected_y)
    assert y.dtype == expected_y.dtype
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], max(TOLERANCE[dtype], TOLERANCE[weight]))
    assert used(module, x) == BOTH


def llama(dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 2.0)
    return model.to(dtype).train()


IDS = torch.arange(24).reshape(2, 12)


def step(model: Any, **arguments: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, **arguments).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_training_step_of_a_llama(dtype: torch.dtype) -> None:
    model = llama(dtype)
    expected_loss, expected = step(model)
    report = patch(model)
    assert len(report.swapped) == 5
    assert all(entry.training for entry in report.entries)
    with Recorder() as seen:
        loss, gradients = step(model)
    assert seen.names == [BOTH[0]] * 5 + [BOTH[1]] * 5
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], 2 * TOLERANCE[dtype])
    unpatch(model)
    assert torch.equal(step(model)[0], loss)


def test_training_goes_the_same_way() -> None:
    losses = []
    for patched in (False, True):
        model = llama()
        if patched:
            patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(5):
            losses[-1].append(float(step(model)[0]))
            optimizer.step()
    assert losses[0][0] == losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    model = llama(torch.bfloat16)
    patch(model)
    loss, expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with Recorder() as seen:
        again, gradients = step(model)
    assert seen.names.count(BOTH[1]) == 5
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert torch.equal(gradient, expected[name])

    norm = made(BITWISE[0])
    patch(norm)
    x, dy = rows(), rows(seed=6)
    _, without = differentiate(norm, x, dy)
    leaf = x.clone().requires_grad_()
    norm.zero_grad()
    checkpoint(norm, leaf, use_reentrant=use_reentrant).backward(dy)
    assert torch.equal(leaf.grad, without[""])
    assert torch.equal(norm.weight.grad, without["weight"])


def test_a_lora_run_leaves_frozen_norms_alone() -> None:
    peft = pytest.importorskip("peft")
    results = []
    for patched in (False, True):
        model = llama()
        torch.manual_seed(1)
        config = peft.LoraConfig(
            target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False
        )
        wrapped = peft.get_peft_model(model, config)
        if patched:
            patch(wrapped)
        with Recorder() as seen:
            results.append(step(wrapped))
        assert len(seen.names) == (9 if patched else 0)  # nothing before the first adapter
    (expected_loss, expected), (loss, gradients) = results
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        if "lora" in name:
            assert_near(gradient, expected[name], 1e-5)
        else:
            assert gradient is None


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True), (False, False)])
def test_only_what_is_needed_is_computed(needed: tuple[bool, bool]) -> None:
    norm = made(BITWISE[0])
    patch(norm)
    full = differentiate(norm, rows(), rows(seed=6))[1]
    norm.zero_grad()
    norm.weight.requires_grad_(needed[1])  # after patch
    x = rows().requires_grad_(needed[0])
    with Recorder() as seen:
        y = norm(x)
        if any(needed):
            y.backward(rows(seed=6))
    assert seen.names == (BOTH if any(needed) else ["rms_norm"])
    assert y.requires_grad is any(needed)
    for gradient, right, wanted in zip(
        (x.grad, norm.weight.grad), full.values(), needed, strict=True
    ):
        assert torch.equal(gradient, right) if wanted else gradient is None


def test_no_grad_and_inference_mode_take_the_plain_operation() -> None:
    norm = made(BITWISE[0])
    patch(norm)
    y = norm(rows())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Recorder() as seen:
            assert torch.equal(norm(rows()), y)
        assert seen.names == ["rms_norm"]


def test_double_backward() -> None:
    norm = made(BITWISE[1])
    plain = copy.deepcopy(norm)
    patch(norm)

    def penalty(module: nn.Module) -> list[Tensor]:
        x = rows().requires_grad_()
        (dx,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.pow(2).sum(), [x, *module.parameters()]))

    for ours, theirs in zip(penalty(norm), penalty(plain), strict=True):
        assert_near(ours, theirs, 1e-5)


def test_hooks_see_what_they_saw() -> None:
    norm = made(BITWISE[0])
    plain = copy.deepcopy(norm)
    patch(norm)
    x, dy = rows(), rows(seed=6)

    def watched(module: nn.Module) -> tuple[list[str], dict[str, Tensor | None]]:
        fired: list[str] = []
        module.register_full_backward_pre_hook(lambda *_: fired.append("before"))
        module.register_full_backward_hook(lambda *_: fired.append("after"))
        module.register_forward_hook(lambda m, a, y: (fired.append("forward"), y * 2.0)[1])
        module.weight.register_hook(lambda g: (fired.append("weight"), g * 3.0)[1])
        module.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
        return fired, differentiate(module, x, dy)[1]

    fired, gradients = watched(norm)
    own_fired, expected = watched(plain)
    assert fired == own_fired
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], 1e-5)


def test_gradients_add_up_in_shared_and_replaced_weights() -> None:
    norm = made(BITWISE[1])
    plain = copy.deepcopy(norm)
    patch(norm)
    for module in (norm, plain):
        module.weight = nn.Parameter(torch.linspace(-1.0, 2.0, D))
        for seed in (1, 2):
            module(rows(seed=seed)).backward(rows(seed=seed + 10))
        (module(module(rows())) * 2.0).sum().backward()
    assert_near(norm.weight.grad, plain.weight.grad, 1e-5)
    optimizer = torch.optim.SGD([norm.weight], lr=0.1)
    before = norm.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(norm.weight.detach(), before - 0.1 * norm.weight.grad)


def test_a_parametrized_weight_gets_its_gradient() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2.0

    norm = made(BITWISE[0])
    plain = copy.deepcopy(norm)
    patch(norm)
    for module in (norm, plain):
        nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    assert used(norm, rows()) == []  # a child was added, so the proof is void
    _, gradients = differentiate(norm, rows(), rows(seed=6))
    _, expected = differentiate(plain, rows(), rows(seed=6))
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], 1e-5)


def test_copies_and_pickles_train_on() -> None:
    norm = made(BITWISE[0])
    patch(norm)
    _, expected = differentiate(norm, rows(), rows(seed=6))
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert used(twin, rows()) == BOTH
        norm.zero_grad()
        _, gradients = differentiate(twin, rows(), rows(seed=6))
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert norm.weight.grad is None


def test_dy_is_not_written_and_may_be_a_view() -> None:
    norm = made(BITWISE[0])
    plain = copy.deepcopy(norm)
    patch(norm)
    x = rows()
    for dy in (
        torch.ones(()).expand(3, 4, D),
        rows(seed=6).transpose(0, 1).contiguous().transpose(0, 1),
    ):
        before = dy.clone()
        _, gradients = differentiate(norm, x, dy)
        _, expected = differentiate(plain, x, dy)
        assert torch.equal(dy, before)
        for name, gradient in gradients.items():
            assert_near(gradient, expected[name], 1e-5)


def test_compiled_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "LEAST_COMPILED", 0)
    model = nn.Sequential(nn.Linear(D, D), made(BITWISE[0]), made(BITWISE[1]))
    plain = copy.deepcopy(model)
    patch(model)
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    y, gradients = differentiate(compiled, rows(), rows(seed=6))
    for graphs, name in ((backend.fw_graphs, BOTH[0]), (backend.bw_graphs, BOTH[1])):
        (graph,) = graphs
        assert [str(node.target) for node in graph.graph.nodes].count(
            f"rmsnorm.{name}.default"
        ) == 2
    expected_y, expected = differentiate(plain, rows(), rows(seed=6))
    assert torch.equal(y, expected_y)
    for gradient, right in zip(gradients.values(), expected.values(), strict=True):
        assert_near(gradient, right, 1e-5)


# Modules that differentiate something else ------------------------------------------------------


class StraightThrough(norms.WeightThenCast):
    """As if the division were not there."""

    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x).detach() + (x - x.detach())


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 0.999


class OwnBackward(norms.WeightThenCast):
    """A backward that is off by a thousandth."""

    def scaled(self, x: Tensor) -> Tensor:
        halved: Tensor = _Halved.apply(super().scaled(x))
        return halved


class FrozenInside(norms.WeightThenCast):
    """The weight gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.detach() * self.scaled(x.float())).type_as(x)


class NoGradient(norms.WeightThenCast):
    """Nothing gets a gradient."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise NotImplementedError("no backward")


class NoBackward(norms.WeightThenCast):
    """Has no backward at all."""

    def scaled(self, x: Tensor) -> Tensor:
        y: Tensor = _Raises.apply(super().scaled(x))
        return y


class OtherWhereNeeded(norms.WeightThenCast):
    """Computes something else where a gradient is needed."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2.0 if torch.is_grad_enabled() else y


class OtherInHalf(norms.WeightThenCast):
    """Detaches the root mean square of half types only."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        rstd = rstd if x.dtype == torch.float32 else rstd.detach()
        return (self.weight * (wide * rstd)).type_as(x)


OTHERS: list[tuple[type[nn.Module], str]] = [
    (norms.Detached, "its gradient is not the formula's"),
    (StraightThrough, "its gradient is not the formula's"),
    (OwnBackward, "its gradient is not the formula's"),
    (FrozenInside, "its gradient of weight is not the formula's"),
    (NoGradient, "it lets no gradient through"),
    (NoBackward, "its backward raises NotImplementedError"),
    (OtherWhereNeeded, "its values differ where a gradient is needed"),
]


@pytest.mark.parametrize(("make", "reason"), OTHERS)
def test_another_gradient_is_kept(make: type[nn.Module], reason: str) -> None:
    norm = made(lambda: make(D))
    plain = copy.deepcopy(norm)
    assert identify(norm) is None
    report = patch(norm)
    (entry,) = report.swapped
    assert entry.bit_identical
    assert not entry.training
    assert entry.reason == reason
    assert f"own code for gradients: {reason}" in str(report)
    assert "own gradients" in repr(norm)
    with torch.no_grad(), Recorder() as seen:
        assert torch.equal(norm(rows()), plain(rows()))
    assert seen.names == ["rms_norm"]
    x = rows().requires_grad_()
    with Recorder() as seen:
        y = norm(x)
        assert torch.equal(y, plain(x))
    assert seen.names == []
    if make not in (NoGradient, NoBackward):
        _, gradients = differentiate(norm, rows(), rows(seed=6))
        _, expected = differentiate(plain, rows(), rows(seed=6))
        for name, gradient in gradients.items():
            right = expected[name]
            assert gradient is right is None or torch.equal(gradient, right)


def test_another_gradient_in_half_types_only() -> None:
    norm = made(lambda: OtherInHalf(D))
    plan = None
    for required, trains in ((torch.float32, True), (torch.bfloat16, False)):
        (entry,) = patch(norm, dtypes=required).swapped
        assert entry.training is trains
        plan = plan_of(norm)
        assert plan is not None
        assert (torch.float32, torch.float32) in plan.training
        assert (torch.bfloat16, torch.bfloat16) not in plan.training
    assert used(norm, rows()) == BOTH
    assert used(norm.bfloat16(), rows(torch.bfloat16)) == []


def test_a_gradient_that_differs_in_float32_is_nowhere_taken_over() -> None:
    norm = made(lambda: OwnBackward(D), torch.bfloat16)
    (entry,) = patch(norm).swapped
    assert not entry.training  # a thousandth is less than bfloat16 can tell
    assert used(norm, rows(torch.bfloat16)) == []


def test_the_report_says_who_trains() -> None:
    model = nn.ModuleDict({"a": nn.RMSNorm(D), "b": norms.Detached(D), "c": nn.LayerNorm(D)})
    report = patch(model)
    assert [(e.name, e.swapped, e.training) for e in report.entries] == [
        ("a", True, True),
        ("b", True, False),
        ("c", False, False),
    ]
    entries = json.loads(json.dumps(report.to_dict()))["entries"]
    assert [entry["training"] for entry in entries] == [True, False, False]
    assert PatchReport(report.entries) == patch(model)


@pytest.mark.parametrize("name", ["autocast", "func", "dual"])
def test_the_own_code_runs_in_transforms(name: str) -> None:
    norm = made(BITWISE[0])
    patch(norm)
    x = rows().requires_grad_()
    with Recorder() as seen:
        if name == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                norm(x).sum().backward()
        elif name == "func":
            torch.func.grad(lambda x: norm(x).sum())(rows())
        else:
            with torch.autograd.forward_ad.dual_level():
                norm(torch.autograd.forward_ad.make_dual(rows(), rows()))
    assert seen.names == []


def test_without_the_kernels_the_own_code_computes_gradients() -> None:
    code = (
        "import torch\n"
        "from rmsnorm import patch\n"
        "from rmsnorm.rewrite.swap import plan_of\n"
        "norm = torch.nn.RMSNorm(8)\n"
        "(entry,) = patch(norm).swapped\n"
        "assert not entry.training and entry.reason == '' and not plan_of(norm).training\n"
        "y = norm(torch.randn(2, 8, requires_grad=True))\n"
        "assert 'RmsNorm' in type(y.grad_fn).__name__ or 'Mul' in type(y.grad_fn).__name__\n"
        "y.sum().backward()\n"
        "assert norm.weight.grad is not None\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"RMSNORM_DISABLE_EXT": "1", "PATH": ""},
        timeout=60,
    )
