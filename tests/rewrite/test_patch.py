from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from rewrite import norms
from rmsnorm import GatedRMSNorm, PatchReport, RMSNorm, identify, patch, specs, unpatch
from rmsnorm.ops.rms_norm import has_kernels
from rmsnorm.rewrite import swap
from rmsnorm.rewrite.swap import Swapped

D = 48


class Block(nn.Module):
    """Norms of several classes around a linear layer, two of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.first_norm = norms.CastThenWeight(D)
        self.linear = nn.Linear(D, D)
        self.second_norm = norms.Gamma(D)
        self.again = self.first_norm
        self.out_norm = nn.RMSNorm(D, eps=1e-5)
        self.layer_norm = nn.LayerNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.again(self.linear(self.first_norm(x)))
        return self.layer_norm(self.out_norm(self.second_norm(x)))


def block(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    made = Block()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


IDS = torch.arange(10).reshape(2, 5)
SWAPPED = ["first_norm", "second_norm", "out_norm"]


def rows(dtype: torch.dtype = torch.float32, d: int = D) -> Tensor:
    return torch.randn(3, 4, d, generator=torch.Generator().manual_seed(5)).to(dtype)


def is_swapped(module: nn.Module, x: Tensor | None = None) -> bool:
    """Whether a call of ``module`` reaches this package's operation."""
    seen: list[str] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        module(rows() if x is None else x)
    return any(name.startswith("rmsnorm.") for name in seen)


def test_a_model_is_patched_and_computes_the_same_bits() -> None:
    model = block()
    before = model(IDS)
    report = patch(model)
    assert [entry.name for entry in report.swapped] == SWAPPED
    assert all(entry.bit_identical for entry in report.swapped)
    assert [(e.name, e.reason) for e in report.left] == [("layer_norm", "it subtracts the mean")]
    assert torch.equal(model(IDS), before)
    with torch.no_grad():
        assert torch.equal(model(IDS), before)
    assert is_swapped(model.first_norm)


def test_what_the_report_says() -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.RMSNorm(D, eps=1e-5) for _ in range(3)),
            "odd": norms.DropoutInside(D),
            "norm": norms.DropoutInside(D),
        }
    )
    report = patch(model)
    assert len(report.swapped) == 3
    entry = report.swapped[0]
    assert (entry.name, entry.cls, entry.eps, entry.shape, entry.dtype) == (
        "layers.0",
        "RMSNorm",
        1e-5,
        (D,),
        torch.float32,
    )
    assert entry.spec == replace(specs.torch, eps=1e-5)
    table = str(report)
    assert "3 norms swapped" in table
    assert "layers.*" in table
    assert [entry.name for entry in report.left] == ["norm"]
    assert "dropout" in report.left[0].reason
    assert json.loads(json.dumps(report.to_dict()))["swapped"] == 3
    assert str(PatchReport()) == "0 norms swapped, 0 left"


def test_a_module_that_is_a_norm_itself() -> None:
    norm = norms.WeightThenCast(D)
    report = patch(norm)
    assert [entry.name for entry in report.swapped] == [""]
    assert "(the model)" in str(report)
    assert is_swapped(norm)


def test_patching_again_changes_nothing() -> None:
    model = block()
    first = patch(model)
    classes = [type(module) for module in model.modules()]
    assert patch(model) == first
    assert [type(module) for module in model.modules()] == classes
    assert unpatch(model) == 3
    assert unpatch(model) == 0


def test_unpatch_restores_everything() -> None:
    model = block()
    before, attributes = model(IDS), dict(model.first_norm.__dict__)
    classes = [type(module) for module in model.modules()]
    patch(model)
    assert unpatch(model) == 3
    assert [type(module) for module in model.modules()] == classes
    assert model.first_norm.__dict__ == attributes
    assert torch.equal(model(IDS), before)
    assert not is_swapped(model.first_norm)


def test_another_model_of_the_same_classes_is_untouched() -> None:
    model, other = block(), block()
    name, forward = norms.CastThenWeight.__name__, norms.CastThenWeight.forward
    patch(model)
    assert type(other.first_norm) is norms.CastThenWeight
    assert not is_swapped(other.first_norm)
    assert norms.CastThenWeight.__name__ == name
    assert norms.CastThenWeight.forward is forward
    assert type(model.first_norm).__name__ == name
    assert isinstance(model.first_norm, norms.CastThenWeight)


def test_repr_shows_the_spec() -> None:
    model = block()
    patch(model)
    assert "CastThenWeight(rmsnorm: llama in bfloat16, float16, float32)" in repr(model)
    assert "RMSNorm((48,), eps=1e-05, elementwise_affine=True, rmsnorm: torch in" in repr(model)
    unpatch(model)
    assert "rmsnorm" not in repr(model)


def test_parameters_keys_and_ties_stay() -> None:
    model = block()
    model.second_norm.gamma = model.out_norm.weight
    parameters = dict(model.named_parameters(remove_duplicate=False))
    keys = list(model.state_dict())
    report = patch(model)
    assert list(model.state_dict()) == keys
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in parameters)
    assert model.second_norm.gamma is model.out_norm.weight
    assert report.parameter_names() == [
        "first_norm.weight",
        "second_norm.gamma",
        "out_norm.weight",
    ]


def test_weight_and_eps_are_read_at_each_call() -> None:
    for norm, owner, name in (
        (norms.WeightThenCast(D), lambda m: m, "eps"),
        (norms.Gamma(D), lambda m: m, "epsilon"),
        (norms.ConfigEps(D), lambda m: m.config, "rms_norm_eps"),
        (norms.ClassEps(D), lambda m: m, "eps"),
        (nn.RMSNorm(D, eps=1e-5), lambda m: m, "eps"),
    ):
        plain = copy.deepcopy(norm)
        patch(norm)
        for module in (norm, plain):
            setattr(owner(module), name, 0.25)
            next(module.parameters()).data.mul_(3.0)
        x = rows()
        assert is_swapped(norm)
        assert torch.equal(norm(x), plain(x))
        for module in (norm, plain):
            parameter = next(iter(module._parameters))
            setattr(module, parameter, nn.Parameter(torch.full((D,), 2.0)))
        assert torch.equal(norm(x), plain(x))


def test_an_eps_that_the_proof_does_not_cover_takes_the_own_code() -> None:
    norm = nn.RMSNorm(D, eps=1e-5)
    patch(norm)
    norm.eps = None
    assert torch.equal(norm(rows()), nn.RMSNorm(D)(rows()))
    assert not is_swapped(norm)
    machine = nn.RMSNorm(D)
    patch(machine)
    assert is_swapped(machine)
    machine.eps = 1e-3
    assert is_swapped(machine)
    assert torch.equal(machine(rows()), nn.RMSNorm(D, eps=1e-3)(rows()))


def test_a_changed_attribute_voids_the_proof() -> None:
    norm = norms.Grouped(D, 4)
    plain = copy.deepcopy(norm)
    patch(norm)
    assert is_swapped(norm)
    norm.groups = plain.groups = 2
    assert torch.equal(norm(rows()), plain(rows()))
    assert not is_swapped(norm)
    assert "own code" in repr(norm)
    assert patch(norm).swapped[0].spec == replace(specs.olmo2, eps=1e-5, groups=2)
    assert is_swapped(norm)
    assert torch.equal(norm(rows()), plain(rows()))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.double(),
        lambda m: m.to(torch.float8_e4m3fn),
        lambda m: m.to("meta"),
    ],
    ids=["double", "float8", "meta"],
)
def test_a_dtype_or_device_without_proof_takes_the_own_code(
    move: Callable[[nn.Module], nn.Module],
) -> None:
    norm = norms.WeightThenCast(D)
    patch(norm)
    plain = move(norms.WeightThenCast(D))
    moved = move(norm)
    x = rows().to(next(plain.parameters()).device)
    x = x.double() if next(plain.parameters()).dtype == torch.float64 else x
    try:
        expected = plain(x)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            moved(x)
        return
    assert moved(x).dtype == expected.dtype
    assert expected.is_meta or torch.equal(moved(x), expected)
    assert not is_swapped(moved, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moving_between_proven_dtypes_keeps_the_bits(dtype: torch.dtype) -> None:
    model = block()
    plain = copy.deepcopy(model).to(dtype)
    patch(model)
    model.to(dtype)
    assert torch.equal(model(IDS), plain(IDS))
    assert is_swapped(model.first_norm, rows(dtype))
    assert torch.equal(model.first_norm(rows()), plain.first_norm(rows()))


def test_double_is_proven_when_it_is_asked_for() -> None:
    norm = norms.WeightThenCast(D)
    assert patch(norm, dtypes=[torch.float32, torch.float64]).swapped
    norm.double()
    assert is_swapped(norm, rows(torch.float64))
    norm = nn.RMSNorm(D).double()
    plain = copy.deepcopy(norm)
    assert patch(norm).swapped[0].dtype == torch.float64
    assert torch.equal(norm(rows(torch.float64)), plain(rows(torch.float64)))


@pytest.mark.parametrize("make", [norms.NoCast, norms.L2Scaled, norms.Original])
def test_the_same_formula_with_other_last_bits(make: type[nn.Module]) -> None:
    norm = make(D)
    nn.init.normal_(next(norm.parameters()))
    plain = copy.deepcopy(norm)
    entry = patch(norm).swapped[0]
    assert not entry.bit_identical
    assert "within tolerance" in str(PatchReport((entry,)))
    assert is_swapped(norm)
    torch.testing.assert_close(norm(rows()), plain(rows()), rtol=4 * 2**-23, atol=0.0)

    exact = patch(norm, exact=True)
    assert not exact.swapped
    assert "differ" in exact.left[0].reason
    assert type(norm) is make
    assert torch.equal(norm(rows()), plain(rows()))

    half = patch(norm.bfloat16())
    assert not half.swapped
    assert "bfloat16" in half.left[0].reason


def test_half_types_that_round_elsewhere_are_not_claimed() -> None:
    class HalfOffset(norms.ZeroCentred):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return (wide * (1.0 + self.weight).float()).type_as(x)

    norm = HalfOffset(D)
    assert patch(norm).swapped[0].bit_identical
    assert "gemma in float32, bfloat16 with float32 weight" in repr(norm)
    assert not is_swapped(norm.bfloat16(), rows(torch.bfloat16))


def test_whatever_goes_wrong_in_a_module_is_a_reason() -> None:
    class Hostile(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training" and "training" in self.__dict__:
                raise KeyError(name)
            super().__setattr__(name, value)

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Unfinished(nn.Module):
        def __init__(self) -> None:
            pass

    report = patch(nn.ModuleDict({"norm": Hostile()}))
    assert "KeyError" in report.left[0].reason
    assert identify(Unfinished()) is None


def test_exact_swaps_what_is_bit_identical() -> None:
    model = block()
    assert len(patch(model, exact=True).swapped) == 3


@pytest.mark.parametrize("dtypes", [[torch.int8], ["float32"], [torch.float32, None]])
def test_bad_dtypes_are_refused(dtypes: Any) -> None:
    with pytest.raises(TypeError, match="expected floating-point"):
        patch(block(), dtypes=dtypes)


def test_what_is_no_module_is_refused() -> None:
    for function in (patch, unpatch):
        with pytest.raises(TypeError, match="expected a torch module"):
            function([nn.RMSNorm(D)])  # type: ignore[operator]


def test_include_and_exclude() -> None:
    assert [e.name for e in patch(block(), include="*_norm").entries] == [
        *SWAPPED,
        "layer_norm",
    ]
    assert [e.name for e in patch(block(), include=["first*", "out*"]).swapped] == [
        "first_norm",
        "out_norm",
    ]
    chosen = patch(block(), exclude=lambda name, module: isinstance(module, nn.RMSNorm))
    assert [e.name for e in chosen.swapped] == SWAPPED[:2]


def test_hooks_fire() -> None:
    model = block()
    fired: list[str] = []
    model.first_norm.register_forward_pre_hook(lambda m, a: fired.append("pre"))
    model.first_norm.register_forward_hook(lambda m, a, y: y * 2.0)
    before = model(IDS)
    fired.clear()
    patch(model)
    assert fired == []
    model.out_norm.register_forward_hook(lambda m, a, y: fired.append("post"))
    assert torch.equal(model(IDS), before)
    assert fired == ["pre", "pre", "post"]


def test_calls_by_keyword() -> None:
    norm = norms.WeightThenCast(D)
    expected = norm(rows())
    patch(norm)
    assert torch.equal(norm(x=rows()), expected)
    assert torch.equal(norm.forward(rows()), expected)
    for arguments, keywords in (((), {}), ((rows(), 1), {}), ((), {"y": rows()})):
        with pytest.raises(TypeError):
            norm(*arguments, **keywords)


def test_a_bad_row_gives_the_modules_own_error() -> None:
    norm, plain = nn.RMSNorm(D), nn.RMSNorm(D)
    patch(norm)
    for x in (rows(d=D + 1), torch.tensor(1.0)):
        with pytest.raises((RuntimeError, ValueError)) as own:
            plain(x)
        with pytest.raises(type(own.value)) as error:
            norm(x)
        assert str(error.value) == str(own.value)


def test_rows_that_broadcast_take_the_own_code() -> None:
    norm = norms.WeightThenCast(D)
    patch(norm)
    assert norm(torch.ones(2, 1)).shape == (2, D)
    leading = norms.LeadingOnes(D)
    patch(leading)
    assert leading(torch.ones(2, D)).shape == (1, 2, D)
    assert is_swapped(leading)


def test_a_weightless_norm_takes_rows_of_any_width() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

    norm, plain = Llama4TextL2Norm(1e-6), Llama4TextL2Norm(1e-6)
    report = patch(nn.ModuleList([nn.Linear(2, 2), norm]))
    assert report.swapped[0].shape is None
    for d in (1, 3, 64, 577):
        x = rows(torch.bfloat16, d)
        assert is_swapped(norm, x)
        assert torch.equal(norm(x), plain(x))
    fixed = nn.RMSNorm((4, 12), elementwise_affine=False)
    assert patch(fixed).swapped[0].shape == (4, 12)
    assert is_swapped(fixed, rows(d=12))
    with pytest.raises(RuntimeError):
        fixed(rows())


def test_gradients_reach_the_same_parameters() -> None:
    model, plain = block(), block()
    patch(model)
    model(IDS).pow(2).sum().backward()
    plain(IDS).pow(2).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_an_optimizer_and_frozen_parameters_go_on() -> None:
    model = block()
    model.out_norm.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patch(model)
    assert not model.out_norm.weight.requires_grad
    frozen, moving = model.out_norm.weight.clone(), model.first_norm.weight.clone()
    before = model(IDS)
    before.sum().backward()
    optimizer.step()
    assert torch.equal(model.out_norm.weight, frozen)
    assert not torch.equal(model.first_norm.weight, moving)
    after = model(IDS)
    unpatch(model)
    assert torch.equal(model(IDS), after)


def test_a_copy_computes_with_its_own_weight() -> None:
    model = block()
    before = model(IDS)
    patch(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
        assert torch.equal(made(IDS), before)
        assert isinstance(made.first_norm, Swapped)
        assert type(made.first_norm) is type(model.first_norm)
        assert made.again is made.first_norm
        with torch.no_grad():
            made.first_norm.weight.zero_()
            made.second_norm.gamma.zero_()
        assert not torch.equal(made(IDS), before)
        assert torch.equal(model(IDS), before)
        assert unpatch(made) == 3
        assert type(made.first_norm) is norms.CastThenWeight
        assert isinstance(model.first_norm, Swapped)


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_saved_model_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D, eps=1e-5))
    patch(model)
    with torch.no_grad():
        torch.save((model, rows(), model(rows())), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, x, y = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad(): assert torch.equal(model(x), y)\n"
        "from rmsnorm import unpatch\n"
        "assert unpatch(model) == 1 and type(model[1]) is torch.nn.RMSNorm\n"
    )
    source = Path(__file__).parents[2] / "src"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")],
        check=True,
        env={"PYTHONPATH": str(source), "PATH": ""},
        timeout=60,
    )


def test_a_state_dict_travels_between_patched_and_plain() -> None:
    model, plain, fresh = block(1), block(2), block(3)
    patch(model)
    patch(fresh)
    plain.load_state_dict(model.state_dict())
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(plain(IDS), model(IDS))
    assert torch.equal(fresh(IDS), model(IDS))


def test_a_forward_set_on_the_instance_is_respected() -> None:
    norm = norms.WeightThenCast(D)
    norm.forward = lambda x: x * 0.0  # type: ignore[method-assign]
    report = patch(nn.ModuleDict({"norm": norm}))
    assert [entry.reason for entry in report.left] == ["its forward is overridden on the instance"]
    assert torch.equal(norm(rows()), rows() * 0.0)


def test_the_classes_own_forward_on_the_instance_is_no_override() -> None:
    norm = norms.WeightThenCast(D)
    norm.forward = types.MethodType(norms.WeightThenCast.forward, norm)  # type: ignore[method-assign]
    assert patch(norm).swapped
    assert is_swapped(norm)
    assert patch(norm).swapped
    unpatch(norm)
    assert norm.__dict__["forward"] == types.MethodType(norms.WeightThenCast.forward, norm)


def test_a_wrapper_put_around_the_swapped_forward() -> None:
    norm = norms.WeightThenCast(D)
    expected = norm(rows())
    patch(norm)
    norm._old_forward = norm.forward
    norm.forward = lambda x: norm._old_forward(x) + 1.0  # type: ignore[method-assign]
    assert torch.equal(norm(rows()), expected + 1.0)
    assert is_swapped(norm)
    assert patch(norm).swapped
    bound = type(norm).forward.__get__(norm)
    unpatch(norm)
    assert torch.equal(norm(rows()), expected + 1.0)
    assert torch.equal(bound(rows()), expected)
    assert not is_swapped(norm)


def test_meta_modules_are_left() -> None:
    with torch.device("meta"):
        model = block_on_meta = Block()
    report = patch(block_on_meta)
    assert not report.swapped
    assert {e.name: e.reason for e in report.left}["first_norm"] == "no data"
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert len(patch(model).swapped) == 3


def test_parametrized_weights_are_left_or_composed() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2.0

    norm = norms.WeightThenCast(D)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    report = patch(nn.ModuleDict({"norm": norm}))
    assert "parametrized" in report.left[0].reason

    norm = norms.WeightThenCast(D)
    patch(norm)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    assert torch.equal(norm(rows()), norms.WeightThenCast(D)(rows()) * 2.0)
    assert unpatch(norm) == 1
    assert not isinstance(norm, Swapped)
    assert torch.equal(norm(rows()), norms.WeightThenCast(D)(rows()) * 2.0)
    torch.nn.utils.parametrize.remove_parametrizations(norm, "weight", leave_parametrized=False)
    assert type(norm) is norms.WeightThenCast


def test_peft_wrappers() -> None:
    peft = pytest.importorskip("peft")
    model = block()
    config = peft.LoraConfig(
        target_modules=["linear"], modules_to_save=["second_norm"], init_lora_weights=False
    )
    wrapped = peft.get_peft_model(model, config)
    before = wrapped(IDS)
    report = patch(wrapped)
    names = [entry.name for entry in report.swapped]
    assert "base_model.model.second_norm.modules_to_save.default" in names
    assert "base_model.model.first_norm" in names
    assert torch.equal(wrapped(IDS), before)
    assert unpatch(wrapped) == len(names)
    patch(model)
    assert torch.equal(wrapped(IDS), before)


def test_a_second_input_that_is_no_gate_is_left() -> None:
    norm = norms.AddsOptionally(D)
    report = patch(norm)
    assert not report.swapped
    assert report.left[0].reason == "its output depends on a second input"


def test_rmsnorm_modules_of_this_package_are_left_as_they_are() -> None:
    model = nn.Sequential(RMSNorm(D), nn.RMSNorm(D), GatedRMSNorm(D))
    report = patch(model)
    assert [entry.name for entry in report.swapped] == ["1"]
    assert all("already" in entry.reason for entry in report.left)


def test_state_and_guards_are_left() -> None:
    model = nn.ModuleDict(
        {
            "counting": norms.Counting(D),
            "guarded_norm": norms.NonFiniteGuard(D),
        }
    )
    reasons = {entry.name: entry.reason for entry in patch(model).left}
    assert "state" in reasons["counting"]
    assert "float32" in reasons["guarded_norm"]


def test_a_class_that_registers_its_subclasses_does_not_see_this_one() -> None:
    seen: list[type] = []

    class Registering(norms.WeightThenCast):
        def __init_subclass__(cls, *, required: str) -> None:
            seen.append(cls)

    norm = Registering(D)
    assert patch(norm).swapped
    assert seen == []
    assert is_swapped(norm)


def test_a_class_with_slots_is_left_or_swapped_whole() -> None:
    class Slotted(norms.WeightThenCast):
        __slots__ = ("extra",)

    norm = Slotted(D)
    expected = norm(rows())
    report = patch(norm)
    assert len(report.entries) == 1
    assert torch.equal(norm(rows()), expected)
    assert copy.deepcopy(norm)(rows()).shape == expected.shape
    unpatch(norm)
    assert type(norm) is Slotted


def test_autocast_takes_the_own_code() -> None:
    norm, plain = norms.NoCast(D), norms.NoCast(D)
    patch(norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(rows()), plain(rows()))
        assert not is_swapped(norm)


EITHER_WAY = pytest.mark.parametrize("least", [0, swap.LEAST_COMPILED])


@EITHER_WAY
def test_compile_export_and_trace(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "LEAST_COMPILED", least)
    model = nn.Sequential(nn.Linear(D, D), norms.WeightThenCast(D), nn.RMSNorm(D, eps=1e-5))
    before = model(rows())
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows()), before)
    with torch.no_grad():
        assert torch.equal(compiled(rows()), before)
        exported = torch.export.export(model, (rows(),))
        traced = torch.jit.trace(model, rows())
    targets = [str(node.target) for node in exported.graph.nodes]
    assert sum(target.startswith("rmsnorm.") for target in targets) == 2
    assert torch.equal(exported.module()(rows()), before)
    assert torch.equal(traced(rows()), before)
    assert not any(node.kind().startswith("rmsnorm::") for node in traced.inlined_graph.nodes())
    symbolic = torch.fx.symbolic_trace(model)
    assert torch.equal(symbolic(rows()), before)


@pytest.mark.parametrize(
    ("shape", "dynamic", "operations"),
    [
        ((1, 1), False, 0),
        ((1, swap.LEAST_COMPILED // D - 1), False, 0),
        ((1, -(-swap.LEAST_COMPILED // D)), False, 2),
        ((3, 5), True, 2),  # how many there will be is not known
    ],
)
@pytest.mark.parametrize("tracked", [False, True])
def test_a_small_norm_is_left_to_the_compiler(
    shape: tuple[int, ...], dynamic: bool, operations: int, tracked: bool
) -> None:
    model = nn.Sequential(norms.WeightThenCast(D), nn.RMSNorm(D, eps=1e-5))
    x = torch.randn(*shape, D)
    expected = model(x)
    patch(model)
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    with torch.set_grad_enabled(tracked):
        assert torch.equal(compiled(x), expected)
        if dynamic:  # it is one graph for all
            more = torch.randn(7, 90, D)
            assert torch.equal(compiled(more), model(more))
    (graph,) = backend.fw_graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    if tracked and not has_kernels:  # then a norm in training is left as it is
        operations = 0
    assert sum(target.startswith("rmsnorm.") for target in targets) == operations


def test_a_small_norm_called_by_keyword_is_left_to_the_compiler() -> None:
    norm = norms.WeightThenCast(D)
    patch(norm)
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(x=rows()), norm(rows()))
    (graph,) = backend.fw_graphs
    assert not any("rmsnorm." in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_graph_holds_the_operation(strict: bool, dynamic: bool) -> None:
    model = nn.Sequential(norms.WeightThenCast(D), nn.RMSNorm(D, eps=1e-5))
    patch(model)
    x = torch.randn(4, D)
    shapes = ({0: torch.export.Dim("rows")},) if dynamic else None
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)
        assert torch.equal(exported.module()(x), model(x))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert sum(target.startswith("rmsnorm.") for target in targets) == 2


@EITHER_WAY
def test_a_model_compiled_before_it_is_patched(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "LEAST_COMPILED", least)
    model = nn.Sequential(norms.WeightThenCast(D))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = compiled(rows())
        patch(model)
        assert torch.equal(compiled(rows()), before)
        model[0].eps = 0.5
        expected = norms.WeightThenCast(D, eps=0.5)(rows())
        assert torch.equal(compiled(rows()), expected)
        unpatch(model)
        assert torch.equal(compiled(rows()), expected)


def test_func_transforms() -> None:
    norm, plain = norms.WeightThenCast(D), norms.WeightThenCast(D)
    patch(norm)
    x = rows()
    assert torch.equal(torch.func.vmap(norm)(x), torch.func.vmap(plain)(x))
    tangent = torch.ones_like(x)
    ours = torch.func.jvp(norm, (x,), (tangent,))[1]
    torch.testing.assert_close(ours, torch.func.jvp(plain, (x,), (tangent,))[1])
    weights = {"weight": torch.full((D,), 3.0)}
    assert torch.equal(
        torch.func.functional_call(norm, weights, (x,)),
        torch.func.functional_call(plain, weights, (x,)),
    )


def test_data_parallel_replicas_compute() -> None:
    norm = norms.WeightThenCast(D)
    expected = norm(rows())
    patch(norm)
    replica = norm._replicate_for_data_parallel()
    replica.weight = norm.weight.detach().clone()
    assert torch.equal(replica(rows()), expected)


def test_many_equal_norms_are_proven_once() -> None:
    model = nn.ModuleList(nn.RMSNorm(576, eps=1e-5) for _ in range(61))
    for norm in model:
        nn.init.normal_(norm.weight)
    begin = time.perf_counter()
    report = patch(model)
    seconds = time.perf_counter() - begin
    assert len(report.swapped) == 61
    assert seconds < 3.0


def test_every_norm_is_checked_with_its_own_weight() -> None:
    class Picky(norms.WeightThenCast):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + 1.0 if bool((self.weight == 7.0).all()) else y

    model = nn.ModuleList([Picky(D), Picky(D), Picky(D)])
    nn.init.constant_(model[1].weight, 7.0)
    report = patch(model)
    assert [entry.name for entry in report.swapped] == ["0", "2"]
    assert "own weight" in report.left[0].reason
