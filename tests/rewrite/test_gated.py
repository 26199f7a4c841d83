"""Gated norms, and norms whose weight comes first: identified, swapped, and put back."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm import NormSpec, identify, patch, specs, unpatch
from rmsnorm.ops.rms_norm import has_kernels
from rmsnorm.rewrite import swap
from rmsnorm.rewrite.plan import Plan
from rmsnorm.rewrite.swap import plan_of

D, GROUP, EPS = 32, 8, 1e-5


class Gated(nn.Module):
    """Every order, activation and rounding of the gated classes, in plain torch."""

    def __init__(
        self,
        d: int = D,
        *,
        before: bool,
        activation: str = "silu",
        group: int | None = None,
        rounds_first: bool = False,
        optional: bool = False,
        affine: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d)) if affine else None
        self.tiny = EPS
        self.before, self.activation, self.group = before, activation, group or d
        self.rounds_first, self.optional = rounds_first, optional

    def forward(self, row: Tensor, z: Tensor | None = None) -> Tensor:
        if z is None and not self.optional:
            raise ValueError("no gate")
        h = row.float()
        act = torch.ones(()) if z is None else getattr(F, self.activation)(z.float())
        if self.before:
            h = h * act
        h = h.unflatten(-1, (-1, self.group))
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.tiny)).flatten(-2)
        if self.rounds_first:
            h = h.to(row.dtype)
        if self.weight is not None:
            h = self.weight * h
        if not self.before:
            h = h * act
        return h if self.before and self.rounds_first else h.to(row.dtype)


class GateRequired(nn.Module):
    """A gate without a default, through a function that is no gate of ours in one case."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * self.weight.float()
        return (h * self.activation(gate.float())).to(x.dtype)


class WeightFirst(nn.Module):
    """The weight counts towards the mean square."""

    def __init__(self, offset: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        h = (x.float() * (self.offset + self.weight).float()).type_as(x).float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x)


KINDS = [
    (
        {"before": True, "group": GROUP, "rounds_first": True},
        replace(specs.mamba2, groups=D // GROUP),
    ),
    ({"before": True, "optional": True}, specs.falcon_h1),
    ({"before": False, "rounds_first": True}, specs.qwen3_next),
    ({"before": False, "activation": "sigmoid"}, specs.kimi_linear),
    ({"before": False, "group": GROUP}, replace(specs.falcon_h1, groups=4, gate_order="after")),
    ({"before": True, "activation": "sigmoid", "affine": False}, None),
]


def the_plan(module: nn.Module) -> Plan:
    plan = plan_of(module)
    assert plan is not None
    return plan


def inputs(dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, *lead, D, generator=generator)
    return [(x * 3.0).to(dtype), (gate * 2.0).to(dtype)]


def operations(run: Any) -> set[str]:
    """The operations of this package that ``run`` runs."""
    with torch.profiler.profile() as profile:
        run()
    return {event.name for event in profile.events() if event.name.startswith("rmsnorm::")}


def close(a: Tensor, b: Tensor) -> bool:
    """Within the units that torch's own activations are off by."""
    assert a.dtype == b.dtype
    if a.dtype == torch.float32:
        return torch.allclose(a, b, rtol=2e-6, atol=1e-7)
    return bool((a != b).float().mean() < 1e-2) and torch.allclose(a, b, rtol=2.0**-7)


@pytest.mark.parametrize(("arguments", "spec"), KINDS)
def test_a_gate_is_found_and_swapped(arguments: dict[str, Any], spec: NormSpec | None) -> None:
    norm = Gated(**arguments)
    found = identify(norm)
    assert found is not None
    if spec is not None:
        assert found == replace(spec, eps=EPS)
    assert found.eps == EPS
    assert (found.gate, found.gate_order) == (
        arguments.get("activation", "silu"),
        "before" if arguments["before"] else "after",
    )
    own = copy.deepcopy(norm)
    entry = patch(norm).swapped[0]
    assert entry.spec == found
    assert not entry.bit_identical  # whatever the probes gave
    assert entry.training is has_kernels
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own, norm = own.to(dtype), norm.to(dtype)
        x, gate = inputs(dtype)
        with torch.no_grad():
            ran = operations(functools.partial(norm, x, gate))
            assert ran == {"rmsnorm::gated_rms_norm"}
            assert close(norm(x, gate), own(x, gate))
            assert close(norm(x, z=gate), own(x, gate))
            assert close(norm(z=gate, row=x), own(x, gate))
    own, norm = own.float(), norm.float()
    for a, b in zip(gradients(own), gradients(norm), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    ran = operations(lambda: gradients(norm))
    # Without the kernels a gradient takes the module's own code.
    trained = {"rmsnorm::gated_rms_norm_fwd", "rmsnorm::gated_rms_norm_bwd"}
    assert ran == (trained if has_kernels else set())
    assert unpatch(norm) == 1
    x, gate = inputs()
    assert torch.equal(norm(x, gate), own(x, gate))


def gradients(norm: nn.Module) -> tuple[Tensor, ...]:
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    dy = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(norm(*leaves), [*leaves, *norm.parameters()], dy)


def test_a_state_in_float32_beside_half_a_gate_and_weight_is_computed() -> None:
    """What Mamba2 gives its norm: the scan is in float32."""
    norm = Gated(before=True, group=GROUP, rounds_first=True).bfloat16()
    own = copy.deepcopy(norm)
    patch(norm)
    (x, _), (_, gate) = inputs(), inputs(torch.bfloat16)
    with torch.no_grad():
        assert operations(lambda: norm(x, gate)) == {"rmsnorm::gated_rms_norm"}
        assert norm(x, gate).dtype == torch.float32
        assert close(norm(x, gate), own(x, gate))


def test_exact_leaves_gated_norms() -> None:
    report = patch(Gated(before=False), exact=True)
    assert "silu has other last bits" in report.left[0].reason


@pytest.mark.parametrize(
    "activation", [F.gelu, F.relu, torch.tanh, lambda z: z, lambda z: F.silu(2 * z)], ids=str
)
def test_another_activation_is_left(activation: Any) -> None:
    assert identify(GateRequired(F.silu)) is not None
    norm = nn.ModuleDict({"norm": GateRequired(activation)})
    assert identify(norm["norm"]) is None
    report = patch(norm)
    assert not report.swapped
    assert report.left[0].reason


@pytest.mark.parametrize(
    "call",
    [
        lambda norm, x, gate: norm(x),
        lambda norm, x, gate: norm(x, None),
        lambda norm, x, gate: norm(x, gate[:1]),
        lambda norm, x, gate: norm(x, gate[..., :1]),
        lambda norm, x, gate: norm(x, gate.double()),
    ],
)
def test_other_calls_take_the_own_code(call: Any) -> None:
    norm = Gated(before=True, optional=True)
    own = copy.deepcopy(norm)
    patch(norm)
    x, gate = inputs()
    assert the_plan(norm).spec.gate == "silu"
    with torch.no_grad():
        assert not operations(lambda: call(norm, x, gate))
        assert torch.equal(call(norm, x, gate), call(own, x, gate))
    with pytest.raises(TypeError, match="argument"):
        norm(x, gate, gate)
    with pytest.raises(TypeError, match="argument"):
        norm(x, row=x)


def test_what_is_changed_later_counts() -> None:
    norm = Gated(before=True, group=GROUP, optional=True)
    x, gate = inputs()
    patch(norm)
    norm.tiny = 1e-3  # eps is read at each call
    own = copy.deepcopy(norm)
    unpatch(own)
    with torch.no_grad():
        assert operations(lambda: norm(x, gate)) == {"rmsnorm::gated_rms_norm"}
        assert close(norm(x, gate), own(x, gate))
        norm.before = own.before = False
        assert not operations(lambda: norm(x, gate))
        assert torch.equal(norm(x, gate), own(x, gate))
        assert patch(norm).swapped[0].spec == replace(
            specs.falcon_h1, eps=1e-3, groups=4, gate_order="after"
        )
        assert close(norm(x, gate), own(x, gate))


def test_copies_pickles_hooks_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Gated(before=False)
    patch(norm)
    x, gate = inputs()
    seen: list[int] = []
    norm.register_forward_hook(lambda module, args, y: seen.append(len(args)))
    with torch.no_grad():
        y = norm(x, gate)
        assert torch.equal(copy.deepcopy(norm)(x, gate), y)
        norm._forward_hooks.clear()
        assert torch.equal(pickle.loads(pickle.dumps(norm))(x, gate), y)
        with torch.autocast("cpu", torch.bfloat16):
            assert not operations(lambda: norm(x, gate))
    assert seen == [2, 2]
    own = copy.deepcopy(norm)
    unpatch(own)
    # A small norm is left to the compiler, which has the module's own code.
    for least, expected in ((0, y), (swap.LEAST_COMPILED, own(x, gate))):
        monkeypatch.setattr(swap, "LEAST_COMPILED", least)
        torch._dynamo.reset()  # or sizes that vary among tests would be unknown
        compiled = torch.compile(norm, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x, gate), expected)
    assert close(torch.func.vmap(norm)(x, gate), y)


def test_an_input_that_is_written_into_is_left() -> None:
    class WritesIntoTheGate(GateRequired):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            y = super().forward(x, gate)
            gate.mul_(2.0)
            return y

    report = patch(nn.ModuleDict({"norm": WritesIntoTheGate(F.silu)}))
    assert "writes into its input" in report.left[0].reason


@pytest.mark.skipif(not has_kernels, reason="without the kernels no gradient is asked for")
def test_a_gradient_that_stops_at_the_gate_is_the_modules_own() -> None:
    class Stops(Gated):
        def forward(self, row: Tensor, z: Tensor | None = None) -> Tensor:
            return super().forward(row, None if z is None else z.detach())

    norm = Stops(before=True)
    entry = patch(norm).swapped[0]
    assert not entry.training
    assert "gradient of the gate" in entry.reason
    assert identify(norm) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_weight_inside_the_mean_square(offset: float, dtype: torch.dtype) -> None:
    norm = WeightFirst(offset).to(dtype)
    assert identify(norm) is None  # no spec says it
    own = copy.deepcopy(norm)
    report = patch(norm)
    entry = report.swapped[0]
    assert entry.bit_identical
    assert entry.training is has_kernels
    assert entry.weight_inside
    assert entry.convention == "olmo2 of the weighted row"
    assert report.parameter_names() == ["weight"]
    assert "of the weighted row" in repr(norm)
    assert "of the weighted row" in str(report)
    x, dy = inputs(dtype)
    with torch.no_grad():
        assert operations(lambda: norm(x)) == {"rmsnorm::rms_norm"}
        assert torch.equal(norm(x), own(x))
        norm.weight.mul_(2.0)
        own.weight.mul_(2.0)
        assert torch.equal(norm(x), own(x))
    given = []
    for module in (own, norm):
        leaf = x.clone().requires_grad_()
        given.append(torch.autograd.grad(module(leaf), [leaf, module.weight], dy))
    for a, b in zip(*given, strict=True):
        tolerance = {torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}[dtype]
        assert float((a.double() - b.double()).norm() / a.double().norm()) < tolerance
    assert unpatch(norm) == 1


MODELS = {
    "Mamba2": {
        "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2,
    },
    "Qwen3Next": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 64, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "FalconH1": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 64, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_models(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, **MODELS[name]
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    tokens = torch.randint(64, (2, 12))
    with torch.no_grad():
        before = model(tokens).logits
        report = patch(model)
        gated = [e for e in report.swapped if e.spec is not None and e.spec.gate is not None]
        assert gated
        assert not report.left
        assert "rmsnorm::gated_rms_norm" in operations(lambda: model(tokens))
        after = model(tokens).logits
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert float((after - before).float().norm() / before.float().norm()) < limit
    ran = operations(lambda: model(tokens, labels=tokens).loss.backward())
    assert ("rmsnorm::gated_rms_norm_bwd" in ran) is has_kernels
    assert unpatch(model) == len(report.swapped)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)
