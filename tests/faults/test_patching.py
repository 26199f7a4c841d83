"""Known faults of code that swaps norms in a model; the numbers are those of cases.json."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rmsnorm
from rmsnorm import RMSNorm, identify, patch, specs, unpatch

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))
}
D = 8


class UserNorm(nn.Module):
    """A norm derived from no other, its parameter and eps under any name."""

    def __init__(self, d: int, eps: float = 1e-6, weight: str = "weight", eps_name: str = "eps"):
        super().__init__()
        self.names = (weight, eps_name)
        setattr(self, eps_name, eps)
        setattr(self, weight, nn.Parameter(torch.ones(d)))

    def forward(self, x: Tensor) -> Tensor:
        weight, eps = (getattr(self, name) for name in self.names)
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * rstd).to(x.dtype)


class LiteralEps(nn.Module):
    """eps is in the code; the one that is given is ignored."""

    used = 1e-6

    def __init__(self, d: int, eps: float = 0.5) -> None:
        super().__init__()
        self.given = eps
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * wide).to(x.dtype)


class Extra(UserNorm):
    """A class with attributes that have nothing to do with the norm."""

    def __init__(self, d: int) -> None:
        super().__init__(d, 1e-5)
        self.layer_idx = 3
        self.tags = ["a", {"b": 1}]
        self.register_buffer("steps", torch.tensor(7))


class Model(nn.Module):
    """Three kinds of norm, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.user = UserNorm(D, 1e-5, "gamma", "variance_epsilon")
        self.torch = nn.RMSNorm(D, eps=1e-6)
        self.extra = Extra(D)
        self.shared = self.user

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.torch(self.user(x))) + self.shared(x)


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    made = Model()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def number_of_norms(graph: torch.fx.Graph) -> int:
    """Norm operations in an exported graph: this package's, or torch's reciprocal square roots."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return sum("rms_norm" in name or "rsqrt" in name for name in names)


def test_A20_every_norm_keeps_the_eps_it_computed_with() -> None:
    expected = CASES["A20"]["expected"]
    both = nn.ModuleList([UserNorm(D, 1e-5), UserNorm(D, eps_name="variance_epsilon")])
    report = patch(both)
    assert [entry.eps for entry in report.swapped] == [1e-5, 1e-6]
    x = torch.full((2, D), 0.01)
    high, low = (float(norm(x)[0, 0].detach()) for norm in both)
    assert high == pytest.approx(expected["|y| at eps 1e-5"], rel=1e-6)
    assert low == pytest.approx(expected["|y| at eps 1e-6"], rel=1e-6)
    assert low / high == pytest.approx(expected["ratio"], rel=1e-6)


@pytest.mark.parametrize("name", ["eps", "variance_epsilon", "epsilon", "_eps", "norm_eps"])
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-6, 9.999999747378752e-06, 1e-2])
def test_A20_under_any_name_and_changed_after_construction(name: str, eps: float) -> None:
    norm = UserNorm(D, eps, eps_name=name)
    plain = copy.deepcopy(norm)
    (entry,) = patch(norm).swapped
    assert entry.eps == eps
    for value in (eps, eps * 3.0, 1e-3):
        for module in (norm, plain):
            setattr(module, name, value)
        for scale in (1.0, 1e-2, max(eps, 1e-10) ** 0.5):
            x = torch.randn(3, D) * scale
            assert torch.equal(norm(x), plain(x))


def test_A20_hard_coded_and_given_then_ignored() -> None:
    norm, plain = LiteralEps(D, eps=0.5), LiteralEps(D, eps=0.5)
    (entry,) = patch(norm).swapped
    assert entry.eps == 1e-6
    norm.given = plain.given = 0.25
    x = torch.full((2, D), 0.01)
    assert torch.equal(norm(x), plain(x))


def through_pickle(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
}


def test_A21_every_step_of_the_life_of_a_patched_model() -> None:
    patched, other = model(), model()
    x = torch.randn(4, D)
    before, keys = patched(x), list(patched.state_dict())
    types = [type(module) for module in patched.modules()]
    parameters = list(patched.parameters())
    optimizer = torch.optim.AdamW(patched.parameters())

    assert len(patch(patched).swapped) == 3
    assert "rmsnorm" in repr(patched)
    assert torch.equal(patched(x), before)
    assert list(patched.state_dict()) == keys
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, patched.parameters(), strict=True))
    assert patched.user is patched.shared

    for make in COPIES.values():
        made = make(patched)
        assert torch.equal(made(x), before)
        with torch.no_grad():
            made.user.gamma.mul_(2.0)
        assert not torch.equal(made(x), before)
        assert torch.equal(patched(x), before)

    fresh = model(1)
    fresh.load_state_dict(patched.state_dict(), strict=True)
    assert torch.equal(fresh(x), before)

    assert type(other.user) is UserNorm
    assert UserNorm.__name__ == "UserNorm"
    assert type(patched.user).__name__ == "UserNorm"
    assert torch.equal(other(x), before)

    assert unpatch(patched) == 3
    assert [type(module) for module in patched.modules()] == types
    assert torch.equal(patched(x), before)
    assert all(a is b for a, b in zip(parameters, patched.parameters(), strict=True))


STEPS: dict[str, Callable[[Any], Any]] = {
    "patch": lambda m: (patch(m), m)[1],
    "unpatch": lambda m: (unpatch(m), m)[1],
    "bfloat16": lambda m: m.bfloat16().float(),
    "copy": copy.deepcopy,
    "pickle": through_pickle,
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS, 3)), ids="-".join)
def test_A21_in_any_order(order: tuple[str, ...]) -> None:
    made, plain = model(), model()
    if "bfloat16" in order:
        plain = plain.bfloat16().float()
    made.torch.weight.requires_grad_(False)
    x = torch.randn(4, D)
    for step in order:
        made = STEPS[step](made)
    assert torch.equal(made(x), plain(x))
    assert not made.torch.weight.requires_grad
    assert made.user is made.shared
    unpatch(made)
    assert torch.equal(made(x), plain(x))
    assert type(made.user) is UserNorm


def test_P28_a_graph_has_one_operation_for_each_norm() -> None:
    expected = CASES["P28"]["expected"]
    x = torch.full((1, D), 1e-3)
    net = nn.Sequential(*(nn.RMSNorm(D, eps=1e-6) for _ in range(3)))
    assert number_of_norms(torch.export.export(net, (x,)).graph) == 3
    patch(net)
    patch(net)
    with torch.no_grad():
        assert number_of_norms(torch.export.export(net, (x,)).graph) == 3
        traced = torch.jit.trace(net, x)
        assert str(traced.inlined_graph).count("aten::rms_norm") == 3
    once = RMSNorm(D, eps=1e-6, elementwise_affine=False)
    for norm in (once, net[0]):
        assert float(norm(x)[0, 0].detach()) == pytest.approx(expected["norm once"], rel=1e-6)
    assert float(once(once(x))[0, 0]) != pytest.approx(expected["norm once"], rel=1e-3)
    with torch.no_grad():
        assert number_of_norms(torch.export.export(once, (x,)).graph) == 1


@pytest.mark.parametrize("name", ["weight", "gamma", "scale", "g"])
@pytest.mark.parametrize("prefix", ["", "layers.0.norm"])
def test_P38_keys_stay_and_are_all_consumed(name: str, prefix: str) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        norm = UserNorm(D, weight=name)
        nn.init.normal_(getattr(norm, name))
        if not prefix:
            return norm
        layer = nn.ModuleDict({"norm": norm})
        return nn.ModuleDict({"layers": nn.ModuleList([layer])})

    def norm_of(module: nn.Module) -> nn.Module:
        return module.get_submodule(prefix)

    source, plain, patched = made(0), made(1), made(2)
    keys = [f"{prefix}.{name}" if prefix else name]
    x = torch.randn(4, D)
    expected = norm_of(source)(x)
    report = patch(source)
    patch(patched)
    assert report.parameter_names() == keys
    assert list(source.state_dict()) == keys
    for target in (plain, patched):
        result = target.load_state_dict(source.state_dict(), strict=True)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.equal(norm_of(target)(x), expected)
    renamed = {key.replace(name, "weight"): value for key, value in source.state_dict().items()}
    if not prefix:
        own = RMSNorm(D, eps=1e-6, spec="llama")
        own.load_state_dict(renamed, strict=True)
        assert torch.equal(own(x), expected)


@pytest.mark.parametrize("spec", [name for name in specs if specs[name].gate is None])
@pytest.mark.parametrize("affine", [True, False])
def test_P40_modules_of_this_package_save_and_load(spec: str, affine: bool) -> None:
    norm = RMSNorm(D, elementwise_affine=affine, spec=spec)
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
    x = torch.randn(4, D)
    assert list(norm.state_dict()) == (["weight"] if affine else [])
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    fresh = RMSNorm(D, elementwise_affine=affine, spec=spec)
    fresh.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(fresh(x), norm(x))
    for make in COPIES.values():
        assert torch.equal(make(norm)(x), norm(x))
        nested = nn.Sequential(norm)
        patch(nested)
        assert torch.equal(make(nested)(x), norm(x))


@pytest.mark.parametrize("affine", [True, False])
def test_P40_patched_modules_save_and_load(affine: bool) -> None:
    norm = nn.RMSNorm(D, elementwise_affine=affine)
    x = torch.randn(4, D)
    expected = norm(x)
    patch(norm)
    assert list(norm.state_dict()) == (["weight"] if affine else [])
    for make in COPIES.values():
        made = make(norm)
        assert torch.equal(made(x), expected)
        assert list(made.state_dict()) == list(norm.state_dict())


def test_P42_the_report_names_every_norm_weight() -> None:
    net = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, D),
            "linear": nn.Linear(D, D),
            "first": UserNorm(D, weight="gamma"),
            "second": nn.RMSNorm(D),
            "own": rmsnorm.RMSNorm(D),
        }
    )
    objects = dict(net.named_parameters())
    report = patch(net)
    swapped = {entry.name for entry in report.swapped}
    found = {
        f"{name}.{parameter}": value
        for name, module in net.named_modules()
        if name in swapped or isinstance(module, rmsnorm.RMSNorm)
        for parameter, value in module.named_parameters(recurse=False)
    }
    assert set(found) == {"first.gamma", "second.weight", "own.weight"}
    assert set(report.parameter_names()) == {"first.gamma", "second.weight"}
    for name, value in found.items():
        assert value is objects[name]
        assert value.dim() == 1
    assert identify(net["first"]) is not None
