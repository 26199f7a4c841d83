"""What happens to a module after it was swapped, and what asking it must leave alone."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calls import same_bits
from rewrite import norms
from rmsnorm import identify, patch, unpatch
from rmsnorm.ops.direct import entry
from rmsnorm.ops.rms_norm import has_kernels
from rmsnorm.rewrite import swap
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


class Watched:
    """Stands for the direct call, and remembers which calls of norms it computed."""

    def __init__(self) -> None:
        self.computed: list[bool] = []

    def proven(self, *arguments: Any) -> Any:
        y = entry.proven(*arguments)
        self.computed.append(isinstance(y, Tensor))
        return y


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    if entry is None:
        pytest.skip("the direct call was not built")
    made = Watched()
    monkeypatch.setattr(swap, "entry", made)
    return made


def pair_of(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A patched module that was called before, and one like it with its own code."""
    plain = make()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    norm = copy.deepcopy(plain)
    assert patch(norm).swapped
    with torch.no_grad():
        norm(rows())
    return norm, plain


def outcome(module: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """The result, or what is known of the error."""
    try:
        return module(x)
    except Exception as error:
        return type(error), str(error)


def same_outcome(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other) and one.requires_grad is other.requires_grad
    return bool(one == other)


def _as_buffer(module: Any) -> None:
    weight = module.weight.detach().mul(2)
    del module.weight
    module.register_buffer("weight", weight)


def _as_attribute(module: Any) -> None:
    weight = module.weight.detach().mul(2)
    del module.weight
    module.weight = weight


def _eps(value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, "eps", value)


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        weight = torch.linspace(-1.0, 3.0, torch.Size(shape).numel()).view(shape)
        module.weight = nn.Parameter(weight.to(dtype))

    return change


# Whether the proof still covers a call, so that it need not take the module's own code.
AFTERWARDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda module: None, True),
    "eps": (_eps(0.25), True),
    "eps 0": (_eps(0.0), True),
    "eps of the class": (lambda module: delattr(module, "eps"), False),
    "whole eps": (_eps(1), False),
    "whole eps 0": (_eps(0), False),
    "no eps": (_eps(None), False),
    "negative eps": (_eps(-0.001), False),
    "nan": (_eps(float("nan")), False),
    "infinite eps": (_eps(float("inf")), False),
    "eps beyond float32": (_eps(1e300), False),
    "eps true": (_eps(True), False),
    "tensor eps": (_eps(torch.tensor(0.25)), False),
    "weight": (_weight(D), True),
    "frozen weight": (lambda module: module.weight.requires_grad_(False), True),
    "written weight": (lambda module: module.weight.data.fill_(0.5), True),
    "half weight": (_weight(D, dtype=torch.float16), True),
    "double weight": (_weight(D, dtype=torch.float64), False),
    "wider weight": (_weight(D + 1), False),
    "one number": (_weight(1), False),
    "number": (_weight(), False),
    "row": (_weight(1, D), False),
    "rows": (_weight(4, D), False),
    "no weight": (lambda module: setattr(module, "weight", None), False),
    "buffer": (_as_buffer, False),
    "attribute": (_as_attribute, False),
    "deleted weight": (lambda module: delattr(module, "weight"), False),
    "hidden parameter": (lambda module: module._parameters.pop("weight"), False),
}


@pytest.mark.parametrize("name", AFTERWARDS)
@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(D, eps=1e-5), lambda: norms.WeightThenCast(D)])
def test_a_call_after_a_change(make: Callable[[], nn.Module], name: str, watched: Watched) -> None:
    norm, plain = pair_of(make)
    assert watched.computed == [True]
    change, covered = AFTERWARDS[name]
    change(norm)
    change(plain)
    for tracked in False, True:
        x = rows().requires_grad_(tracked)
        watched.computed.clear()
        with torch.set_grad_enabled(tracked):
            found, expected = outcome(norm, x), outcome(plain, x)
        assert same_outcome(found, expected), (found, expected)
        trains = not tracked or getattr(found, "requires_grad", False)
        assert any(watched.computed) is (covered and trains)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, D + 1),
        torch.randn(3, D - 1),
        torch.randn(3, 1),
        torch.randn(3, 0),
        torch.tensor(1.0),
        torch.randn(3, D).double(),
        torch.ones(3, D).long(),
        torch.randn(3, D, dtype=torch.complex64),
        torch.randn(3, D, device="meta"),
        None,
        [1.0],
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else str(x),
)
@pytest.mark.parametrize("affine", [True, False])
def test_rows_without_proof_have_the_own_outcome(x: Any, affine: bool, watched: Watched) -> None:
    norm, plain = pair_of(lambda: nn.RMSNorm(D, eps=1e-5, elementwise_affine=affine))
    assert watched.computed == [True]
    found, expected = outcome(norm, x), outcome(plain, x)
    if isinstance(x, Tensor) and x.is_meta and isinstance(expected, Tensor):
        assert found.shape == expected.shape
    else:
        assert same_outcome(found, expected)
    assert watched.computed == [True, False]


def test_calls_that_c_declines(watched: Watched) -> None:
    norm, plain = pair_of(lambda: norms.WeightThenCast(D))
    x = rows()
    assert watched.computed == [True]
    assert same_outcome(norm(x=x), plain(x=x))
    for arguments, keywords in (((), {}), ((x, x), {}), ((x,), {"x": x}), ((), {"y": x})):
        with pytest.raises(TypeError) as own:
            plain(*arguments, **keywords)
        with pytest.raises(TypeError) as error:
            norm(*arguments, **keywords)
        assert str(error.value) == str(own.value)
    assert watched.computed == [True, *[False] * 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_after_a_proven_call(dtype: torch.dtype, watched: Watched) -> None:
    norm, plain = pair_of(lambda: norms.NoCast(D))
    with torch.autocast("cpu", dtype):
        for x in rows(), rows().to(dtype), rows().requires_grad_():
            assert same_outcome(norm(x), plain(x))
    assert watched.computed == [True, False, False, False]


def test_a_trace_after_a_proven_call(watched: Watched) -> None:
    norm, plain = pair_of(lambda: norms.WeightThenCast(D))
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(norm, (rows(),), check_trace=False)
    assert "rmsnorm::" not in str(traced.inlined_graph)
    assert watched.computed == [True, False]
    x = rows() * 3 + 1
    assert same_outcome(traced(x), plain(x))


@pytest.mark.skipif(not has_kernels, reason="needs the kernels")
def test_training_takes_it_only_where_gradients_are_proven(watched: Watched) -> None:
    for make, trains in (
        (lambda: norms.WeightThenCast(D), True),
        (lambda: norms.Detached(D), False),
    ):
        norm, plain = pair_of(make)
        watched.computed.clear()
        gradients = []
        for module in norm, plain:
            x = rows().requires_grad_()
            module(x).sin().sum().backward()
            gradients.append((x.grad, module.weight.grad))
        for found, expected in zip(*gradients, strict=True):
            if trains:
                torch.testing.assert_close(found, expected)
            else:
                assert same_bits(found, expected)
        with torch.no_grad():
            assert same_outcome(norm(rows()), plain(rows()))
        if not trains:
            assert watched.computed == [False, True]


@pytest.mark.parametrize("least", [0, swap.LEAST_COMPILED])
def test_the_compiler_may_be_the_first_to_call(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared in C++ is worked out at the first call, which the compiler cannot trace."""
    monkeypatch.setattr(swap, "LEAST_COMPILED", least)
    plain = norms.WeightThenCast(D)
    norm = copy.deepcopy(plain)
    assert patch(norm).swapped
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    for tracked in False, True:
        x = rows().requires_grad_(tracked)
        with torch.set_grad_enabled(tracked):
            assert same_outcome(compiled(x), plain(x))


def test_copies_after_a_proven_call(watched: Watched) -> None:
    """What is compared is kept with the plan, and goes with it."""
    norm, plain = pair_of(lambda: norms.WeightThenCast(D))
    expected = plain(rows())
    for twin in copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)):
        watched.computed.clear()
        with torch.no_grad():
            assert same_bits(twin(rows()), expected)
        assert watched.computed == [True]
        twin.eps = 0.25
        twin.weight = nn.Parameter(torch.full((D,), 2.0))
        with torch.no_grad():
            assert same_bits(twin(rows()), 2 * norms.WeightThenCast(D, 0.25)(rows()))
            assert same_bits(norm(rows()), expected)


def test_a_proof_renewed_for_other_dtypes_is_compared_anew(watched: Watched) -> None:
    norm, plain = pair_of(lambda: norms.WeightThenCast(D))
    norm.double(), plain.double()
    x = rows().double()
    assert same_outcome(norm(x), plain(x))
    assert watched.computed == [True, False]
    assert patch(norm, dtypes=torch.float64).swapped
    with torch.no_grad():
        assert same_outcome(norm(x), plain(x))
    assert watched.computed[-1]
    assert unpatch(norm)
    watched.computed.clear()
    assert same_outcome(norm(x), plain(x))
    assert watched.computed == []
