"""What happens to a module after it was swapped, and what asking it must leave alone."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rmsnorm import identify, patch, unpatch
from rmsnorm.rewrite.swap import plan_of

D = 32


def rows() -> Tensor:
    return torch.randn(3, 4, D, generator=torch.Generator().manual_seed(5))


class Config:
    """A config as users write them."""

    def __init__(self) -> None:
        self.eps = 1e-5
        self.scale = 1.0
        self.unread = [object()]


class Scaled(nn.Module):
    """A norm whose scale may be kept in many places."""

    shadowed = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.eps = 1e-5
        self._scale = 1.0

    def factor(self) -> Any:
        return self._scale * self.shadowed * getattr(self, "late", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype) * self.factor()


class WithConfig(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def factor(self) -> Any:
        return self.config.scale


class EpsInConfig(WithConfig):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (self.weight * wide).to(x.dtype) * self.config.scale


class WithNamespace(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=1.0)

    def factor(self) -> Any:
        return self.config.scale


class WithContainers(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]
        self.named = {"scales": [1.0]}

    def factor(self) -> Any:
        return self.scales[0] * self.named["scales"][0]


class WithFunction(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[Tensor], Tensor] = torch.clone

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class WithChild(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.drop: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(super().forward(x))
        return y


class WithBuffers(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("times", torch.tensor([1]))

    def factor(self) -> Any:
        return self.times * (3.0 if self.flag else 1.0)


class WithNone(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.bias is None else y + self.bias


def _assign(**values: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return change


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.full((D,), 2.0))


def _other_config(module: Any) -> None:
    module.config = Config()
    module.config.scale = 2.0


class AffineLess(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(D, eps=1e-5, elementwise_affine=False)


CHANGES: list[tuple[type[nn.Module], Callable[[Any], Any]]] = [
    (Scaled, _assign(_scale=2.0)),
    (Scaled, _assign(shadowed=2.0)),
    (Scaled, _assign(late=2.0)),
    (Scaled, _assign(factor=lambda: 2.0)),
    (Scaled, lambda m: m.register_buffer("late", torch.tensor(2.0))),
    (Scaled, lambda m: m.register_parameter("late", _parameter())),
    (WithConfig, _other_config),
    (WithConfig, lambda m: setattr(m.config, "scale", 2.0)),
    (EpsInConfig, _other_config),
    (EpsInConfig, lambda m: setattr(m.config, "scale", 2.0)),
    (EpsInConfig, lambda m: setattr(m.config, "eps", 2.0)),
    (WithNamespace, lambda m: setattr(m.config, "scale", 2.0)),
    (WithContainers, lambda m: m.scales.__setitem__(0, 2.0)),
    (WithContainers, lambda m: m.named["scales"].__setitem__(0, 2.0)),
    (WithFunction, _assign(act=torch.neg)),
    (WithChild, _assign(drop=nn.Softmax(-1))),
    (WithChild, lambda m: m.add_module("drop", nn.Softmax(-1))),
    (WithChild, lambda m: m.drop.register_forward_hook(lambda m, args, y: y * 2.0)),
    (WithChild, lambda m: m.drop.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))),
    (WithBuffers, lambda m: m.flag.fill_(True)),
    (WithBuffers, lambda m: m.times.mul_(2)),
    (WithBuffers, _assign(times=torch.tensor([2]))),
    (WithNone, lambda m: setattr(m, "bias", _parameter())),
    (WithNone, lambda m: m.register_parameter("bias", _parameter())),
    (AffineLess, lambda m: setattr(m, "weight", _parameter())),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
@torch.no_grad()
def test_whatever_changes_is_seen(make: type[nn.Module], change: Callable[[Any], Any]) -> None:
    norm, plain = make(), make()
    before = plain(rows())
    (entry,) = patch(norm).swapped
    assert entry.bit_identical
    again = copy.deepcopy(norm)
    loaded = pickle.loads(pickle.dumps(norm))
    assert torch.equal(norm(rows()), before)
    change(plain)
    expected = plain(rows())
    assert not torch.equal(expected, before)
    for module in (norm, again, loaded):
        assert torch.equal(module(rows()), before)
        change(module)
        assert torch.equal(module(rows()), expected)
        assert unpatch(module) == 1
        assert type(module) is make
        assert torch.equal(module(rows()), expected)


def test_a_deleted_attribute_is_missed() -> None:
    norm = Scaled()
    patch(norm)
    del norm._scale
    with pytest.raises(AttributeError, match="_scale"):
        norm(rows())
    norm = Scaled()
    norm.late = 2.0
    patch(norm)
    del norm.late
    assert torch.equal(norm(rows()), Scaled()(rows()))


def test_what_changes_nothing_keeps_the_proof() -> None:
    for make in (Scaled, WithConfig, WithContainers, WithBuffers, WithChild):
        norm = make()
        patch(norm)
        plan = plan_of(norm)
        assert plan is not None
        norm.train().eval().requires_grad_(False)
        norm.register_full_backward_hook(lambda *_: None)
        norm._scale = 1.0
        norm.eps = 1e-3
        norm.weight = nn.Parameter(torch.ones(D))
        norm.load_state_dict(norm.state_dict())
        torch.compile(norm, backend="eager")(rows())
        assert plan_of(norm) is plan
        operands = plan.operands(norm, rows())
        assert operands is not None
        assert operands[0] is norm.weight


def test_ordinary_norms_compare_nothing_at_a_call() -> None:
    for norm in (Scaled(), nn.RMSNorm(D), WithFunction(), WithNone()):
        patch(norm)
        plan = plan_of(norm)
        assert plan is not None
        assert plan.guards is None


def test_what_cannot_be_watched_is_left() -> None:
    class Nested(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))

        def factor(self) -> Any:
            return self.config.inner.scale

    class OnClass(Scaled):
        config = Config()

        def factor(self) -> Any:
            return self.config.scale

    class Ordered(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.config = collections.OrderedDict(scale=1.0)

        def factor(self) -> Any:
            return self.config["scale"]

    class Partial(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.config = functools.partial(float, 1.0)

        def factor(self) -> Any:
            return self.config()

    reads = {"Nested": "config.inner", "OnClass": "config"}
    for make in (Nested, OnClass, Ordered, Partial):
        (entry,) = patch(make()).left
        name = reads.get(make.__name__, "config")
        assert entry.reason == f"it reads {name}, which may change unseen"


class Counts(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return super().forward(x)


class KeepsRms(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self._rms = x.pow(2).mean(-1).sqrt()
        return super().forward(x)


class Collects(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self._seen.append(x.shape)
        return super().forward(x)


class Running(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.data.add_(x.detach().float().mean((0, 1)))
        return super().forward(x)


@pytest.mark.parametrize("make", [Counts, KeepsRms, Collects, Running])
def test_modules_that_keep_state_are_left(make: type[nn.Module]) -> None:
    model = nn.ModuleDict({"norm": make()})
    assert identify(model["norm"]) is None
    (entry,) = patch(model).left
    assert entry.reason == "it keeps state between calls"


def test_a_nan_is_asked() -> None:
    class NoNan(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.nan_to_num(x, posinf=float("inf"), neginf=float("-inf"))
            return super().forward(x)

    assert not patch(NoNan()).swapped


def test_asking_does_not_use_up_recompilations() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Compiled(Scaled):
        @torch.compile(backend=backend)
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return (self.weight * wide).to(x.dtype)

    norm = Compiled()
    assert identify(norm) is not None
    assert not compiled
    norm(rows())
    assert len(compiled) == 1


def test_global_states_are_restored() -> None:
    class Draws(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            np.random.rand()  # noqa: NPY002
            random.random()
            torch.rand(1)
            torch.use_deterministic_algorithms(True)
            return super().forward(x)

    np.random.seed(3)  # noqa: NPY002
    expected = np.random.rand(4)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    assert identify(Draws()) is not None
    assert np.array_equal(np.random.rand(4), expected)  # noqa: NPY002
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_forward_that_exits_is_left() -> None:
    class Exits(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(1)

    class Interrupted(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    assert identify(Exits()) is None
    with pytest.raises(KeyboardInterrupt):
        identify(Interrupted())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": 5}, "include=5; expected a pattern"),
        ({"exclude": ["a", 5]}, r"exclude=\['a', 5\]; expected a pattern"),
        ({"dtypes": "float32"}, "dtypes='float32'; expected a floating-point torch dtype"),
        ({"dtypes": 5}, "dtypes=5; expected a floating-point torch dtype"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        patch(Scaled(), **arguments)
