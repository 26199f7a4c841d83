"""gated_rms_norm: the oracle's values and gradients, transformers' classes, and what torch asks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import oracle
from calls import FLOATS, HALVES, KERNELS, gradients, same_bits
from ops import gated_oracle
from ops.gated_oracle import draw, relative_error, ulp
from rmsnorm import NormSpec, gated_rms_norm, rms_norm, specs
from rmsnorm.ops import gated_composite
from rmsnorm.ops.gated_rms_norm import op, op_bwd, op_fwd

NAMED = {name: specs[name] for name in specs if specs[name].gate is not None}
# The named conventions, and what else a NormSpec with a gate can say.
SPECS: dict[str, NormSpec] = {
    **NAMED,
    "sigmoid_before": replace(specs.mamba2, gate="sigmoid"),
    "silu_after_once": replace(specs.kimi_linear, gate="silu"),
    "promoted_after": replace(specs.qwen3_next, output="promote", gate="sigmoid"),
    "t5_before": replace(specs.t5, gate="silu"),
    "t5_after": replace(specs.t5, gate="silu", gate_order="after"),
    "torch_after": replace(specs.torch, gate="sigmoid", gate_order="after"),
    "torch_before": replace(specs.torch, gate="silu", eps=1e-3),
    "centred_after": replace(specs.qwen3_next, offset=1.0),
    "centred_before": replace(specs.gemma, gate="sigmoid"),
    "root_before": replace(specs.original, gate="silu"),
    "root_after": replace(specs.original, gate="silu", gate_order="after", eps=1e-2),
    "clamp_before": replace(specs.l2, gate="silu"),
    "clamp_after": replace(specs.l2, gate="sigmoid", gate_order="after", eps=5.0),
    "sum_before": replace(specs.l2_sum, gate="sigmoid"),
    "partial_before": replace(specs.torch, gate="silu", partial=0.3, eps=1e-5),
    "partial_after": replace(specs.llama, gate="silu", gate_order="after", partial=0.3),
}
# The same, computing in float64 what they are given in float64.
WIDE = {name: replace(spec, accumulate="input") for name, spec in SPECS.items()}


def with_groups(spec: NormSpec, groups: int) -> NormSpec:
    return spec if spec.partial < 1.0 else replace(spec, groups=groups)


def roundings(spec: NormSpec, x: torch.dtype, weight: torch.dtype | None) -> int:
    """How often the spec rounds to a half type."""
    steps = [_output(spec, x, weight)]
    normed = torch.float32
    if spec.rounding == "before_weight":
        normed = x
    elif spec.rounding == "weight_dtype" and weight in HALVES:
        normed = weight
    steps.append(normed)
    if spec.gate_order == "after" and weight is not None and spec.rounding != "after_weight":
        steps.append(torch.promote_types(normed, weight))
    return sum(step in HALVES for step in steps)


def _output(spec: NormSpec, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
    if weight is None or spec.output == "input":
        return x
    return weight if spec.output == "weight" else torch.promote_types(x, weight)


def assert_right(
    y: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float | None, spec: NormSpec
) -> None:
    """Within the limits of exactness of the oracle."""
    exact = gated_oracle.gated_rms_norm(x, gate, weight, eps, spec=spec)
    assert (y.dtype, y.shape) == (exact.dtype, exact.shape)
    assert y.is_contiguous()
    if not y.numel():
        return
    count = roundings(spec, x.dtype, None if weight is None else weight.dtype)
    distance = oracle.ulp_distance(y, exact)
    in_float64 = x.dtype == torch.float64 and spec.accumulate == "input"
    where = (spec, x.dtype, gate.dtype, None if weight is None else weight.dtype)
    if count and y.dtype in HALVES:
        assert int(distance.max()) <= count, where
        assert float((distance != 0).double().mean()) < 2e-3 * count + 2 / y.numel(), where
        return
    error, size = (y - exact).double().abs(), exact.double().abs()
    if count:
        # xhat has the bits of a half type, and now and then the next ones.
        assert bool((error <= 2 * count * max(map(ulp, HALVES)) * size).all()), where
        apart = error > 4 * ulp(torch.float32) * size
        assert float(apart.double().mean()) < 2e-3 * count + 2 / y.numel(), where
    elif y.dtype == torch.float64 and not in_float64:
        # Computed in float32.
        assert bool((error <= 4 * ulp(torch.float32) * size).all()), where
    else:
        # The gate adds two roundings to those of the norm.
        assert int(distance.max()) <= (8 if in_float64 else 5), where
        assert float((distance > 4).double().mean()) < 1e-3 + 2 / y.numel(), where


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, dtype: torch.dtype) -> None:
    for groups, d, eps, weighted in (
        (1, 40, None, True),
        (2, 128, 0.1, True),
        (8, 8, None, False),
        (8, 104, None, True),
    ):
        spec = with_groups(SPECS[name], groups)
        x, gate = draw(40, d, dtype=dtype, seed=d), draw(40, d, dtype=dtype, seed=d + 1)
        weight = draw(d, dtype=dtype, seed=d + 2) if weighted else None
        y = gated_rms_norm(x, gate, weight, eps, spec=spec)
        assert_right(y, x, gate, weight, eps, spec)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "qwen3_next", "kimi_linear"])
def test_forward_of_every_width(name: str) -> None:
    for d in (*range(1, 35), 63, 64, 65, 100, 127, 129, 255, 257, 511, 513, 1000, 1025, 4097):
        for dtype in (torch.float32, torch.bfloat16):
            x, gate = draw(3, d, dtype=dtype, seed=d), draw(3, d, dtype=dtype, seed=d + 1)
            weight = draw(d, dtype=dtype, seed=d + 2)
            y = gated_rms_norm(x, gate, weight, spec=name)
            assert_right(y, x, gate, weight, None, specs[name])


@pytest.mark.parametrize("name", SPECS)
def test_forward_of_mixed_dtypes(name: str) -> None:
    for x_dtype in FLOATS:
        for number, weight_dtype in enumerate((None, *FLOATS)):
            for gate_dtype in (x_dtype, FLOATS[number % 4]):
                x, gate = draw(9, 24, dtype=x_dtype, seed=1), draw(9, 24, dtype=gate_dtype, seed=2)
                weight = None if weight_dtype is None else draw(24, dtype=weight_dtype, seed=3)
                for chosen in (SPECS, WIDE) if x_dtype == torch.float64 else (SPECS,):
                    spec = chosen[name]
                    y = gated_rms_norm(x, gate, weight, spec=spec)
                    assert y.dtype == _output(spec, x_dtype, weight_dtype)
                    assert_right(y, x, gate, weight, None, spec)


def test_forward_of_one_group_to_d_groups() -> None:
    for name, spec in NAMED.items():
        for dtype in FLOATS:
            x, gate = draw(7, 24, dtype=dtype, seed=1), draw(7, 24, dtype=dtype, seed=2)
            weight = draw(24, dtype=dtype, seed=3)
            for size in (1, 2, 3, 4, 6, 8, 12, 24):
                y = gated_rms_norm(x, gate, weight, spec=name, group_size=size)
                grouped = replace(spec, groups=24 // size)
                assert_right(y, x, gate, weight, None, grouped)
                assert same_bits(y, gated_rms_norm(x, gate, weight, spec=grouped))


def test_numbers() -> None:
    x, weight = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.ones(4)
    one, zero = torch.ones(4), torch.zeros(4)
    silu = 0.731058579
    row = torch.tensor([0.447213595, 0.447213595, 1.34164079, 1.34164079])
    for size, xhat in ((2, one), (None, row), (4, row)):
        for eps in (0.0, 1e-12):
            kw: dict[str, Any] = {"eps": eps, "group_size": size}
            y = gated_rms_norm(x, one, weight, spec="qwen3_next", **kw)
            torch.testing.assert_close(y, xhat * silu, rtol=4e-7, atol=0.0)
            y = gated_rms_norm(x, one, weight, spec="mamba2", **kw)
            torch.testing.assert_close(y, xhat, rtol=4e-7, atol=0.0)
            y = gated_rms_norm(x, zero, weight, spec="kimi_linear", **kw)
            torch.testing.assert_close(y, xhat / 2, rtol=4e-7, atol=0.0)
        assert torch.equal(gated_rms_norm(x, zero, weight, 0.0, spec="qwen3_next"), zero)
        assert torch.equal(gated_rms_norm(x, zero, weight, 1e-5, spec="mamba2"), zero)
        gate = zero.clone().requires_grad_()
        y = gated_rms_norm(x, gate, weight, 0.0, spec="qwen3_next", group_size=size)
        (dgate,) = torch.autograd.grad(y.sum(), gate)
        torch.testing.assert_close(dgate, xhat / 2, rtol=4e-7, atol=0.0)


def test_a_single_row_and_many_dimensions() -> None:
    x, gate, weight = (draw(*s, dtype=torch.float32, seed=1) for s in ((2, 3, 4, 8),) * 2 + ((8,),))
    for name in NAMED:
        y = gated_rms_norm(x, gate, weight, spec=name)
        flat = gated_rms_norm(x.view(24, 8), gate.view(24, 8), weight, spec=name)
        assert same_bits(y.view(24, 8), flat)
        for row in range(24):
            one = gated_rms_norm(x.view(24, 8)[row], gate.view(24, 8)[row], weight, spec=name)
            assert same_bits(one, flat[row])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0,), (3, 0)])
@pytest.mark.parametrize("name", SPECS)
def test_nothing(name: str, shape: tuple[int, ...]) -> None:
    for dtype in FLOATS:
        x, gate = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        weight = torch.ones(shape[-1], dtype=dtype)
        y = gated_rms_norm(x, gate, weight, spec=SPECS[name])
        assert (y.shape, y.dtype) == (shape, dtype)
        dx, dgate, dweight = gated_gradients(x, gate, weight, y, spec=SPECS[name])
        assert dx is not None
        assert dgate is not None
        assert dweight is not None
        assert (dx.shape, dgate.shape) == (shape, shape)
        assert torch.equal(dweight, torch.zeros_like(weight))


# -- the classes of transformers ------------------------------------------------------------------


def _grouped(model: str, name: str) -> tuple[str, str, Callable[..., Any], dict[str, NormSpec]]:
    def make(cls: Any, groups: int) -> Any:
        return cls(64, 64 // groups)

    return model, name, make, {"": replace(specs.mamba2, eps=1e-6)}


def _plain(
    model: str, name: str, spec: NormSpec
) -> tuple[str, str, Callable[..., Any], dict[str, NormSpec]]:
    return model, name, lambda cls, groups: cls(64), {"": spec}


CLASSES = [
    _grouped("bamba", "BambaRMSNormGated"),
    _grouped("granitemoehybrid", "GraniteMoeHybridRMSNormGated"),
    _grouped("mamba2", "MambaRMSNormGated"),
    _grouped("nemotron_h", "NemotronHRMSNormGated"),
    _grouped("zamba2", "Zamba2RMSNormGated"),
    _plain("olmo_hybrid", "OlmoHybridRMSNormGated", specs.qwen3_next),
    _plain("qwen3_5", "Qwen3_5RMSNormGated", specs.qwen3_next),
    _plain("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", specs.qwen3_next),
    _plain("qwen3_next", "Qwen3NextRMSNormGated", specs.qwen3_next),
    _plain("qwen4_exp", "Qwen4ExpTextRMSNormGated", specs.qwen3_next),
    _plain("bailing_hybrid", "BailingHybridRMSNormGated", specs.kimi_linear),
    _plain("glm5_next", "Glm5NextTextRMSNormGated", specs.kimi_linear),
    _plain("kimi_linear", "KimiLinearRMSNormGated", specs.kimi_linear),
    _plain("lara_mini", "LaraMiniRMSNormGated", replace(specs.kimi_linear, gate="silu")),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        lambda cls, groups: cls(64, n_groups=groups, norm_before_gate=False),
        {"": specs.falcon_h1},
    ),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        lambda cls, groups: cls(64, n_groups=groups),
        {"": replace(specs.falcon_h1, gate_order="after")},
    ),
]


@pytest.mark.parametrize(
    ("model", "name", "make", "found"), CLASSES, ids=[f"{c[1]}-{i}" for i, c in enumerate(CLASSES)]
)
def test_transformers(
    model: str, name: str, make: Callable[..., Any], found: dict[str, NormSpec]
) -> None:
    """Not bit for bit, because torch's silu is not; but two units apart, and seldom."""
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    if not hasattr(modeling, name):
        pytest.skip(f"this version of transformers has no {name}")
    for groups in (1, 4):
        module = make(getattr(modeling, name), groups)
        spec = found[""]
        if "n_groups" in vars(module) or "group_size" in vars(module):
            spec = replace(spec, groups=groups)
        for x_dtype in (torch.float32, *HALVES):
            for weight_dtype in (torch.float32, *HALVES):
                weight = draw(64, dtype=weight_dtype, seed=3)
                module.weight = torch.nn.Parameter(weight)
                leaves = [draw(50, 64, dtype=x_dtype, seed=s).requires_grad_() for s in (1, 2)]
                expected = module(*leaves)
                dy = draw(50, 64, dtype=expected.dtype, seed=4)
                theirs = torch.autograd.grad(expected, [*leaves, module.weight], dy)
                eps = module.variance_epsilon
                y = gated_rms_norm(*leaves, weight, eps, spec=spec)
                where = (x_dtype, weight_dtype, groups)
                assert y.dtype == expected.dtype, where
                count = roundings(spec, x_dtype, weight_dtype)
                coarse = max(ulp(t) for t in (x_dtype, weight_dtype)) if count else 2**-23
                limit = (2 * count if count else 8) * coarse * expected.abs() + 1e-37
                assert bool(((y - expected).abs() <= limit).all()), where
                if count and y.dtype in HALVES:
                    assert oracle.fraction_differing(y, expected) < 5e-3, where
                ours = gated_gradients(
                    leaves[0], leaves[1], weight, dy, spec=replace(spec, eps=eps)
                )
                for a, b in zip(ours, theirs, strict=True):
                    assert a is not None
                    assert a.dtype == b.dtype, where
                    worst = 4 * max(coarse, ulp(a.dtype))
                    assert relative_error(a, b.double()) <= worst, where


# -- gradients ------------------------------------------------------------------------------------


def gated_gradients(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    *,
    spec: NormSpec,
    needs: Sequence[bool] | None = None,
) -> tuple[Tensor | None, ...]:
    """dx, dgate and dweight."""
    return gradients(
        lambda x, gate, weight: gated_rms_norm(x, gate, weight, spec=spec),
        (x, gate, weight),
        (dy,),
        needs,
    )


def assert_gradients(
    found: Sequence[Tensor | None],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    spec: NormSpec,
) -> None:
    """Two units of the gradient's dtype in the norm, or of the type that computes; and what a wider
    type loses where the two terms of dx cancel, or a float32 sum where those of dweight do.
    """
    exact = gated_oracle.gated_rms_norm_backward(dy, x, gate, weight, spec=spec)
    in_float64 = x.dtype == torch.float64 and spec.accumulate == "input"
    compute = ulp(torch.float64 if in_float64 else torch.float32)
    if not KERNELS:
        # There the gradient goes back through the roundings of the forward.
        halves = [t.dtype for t in (x, weight, dy) if t is not None and t.dtype in HALVES]
        compute = max([compute, *(2 * ulp(half) for half in halves)])
    wider = 2.0**-50 if KERNELS else 8 * compute
    for gradient, right, size, of in zip(
        found, exact[:3], exact[3:], (x, gate, weight), strict=True
    ):
        if of is None:
            assert gradient is None
            continue
        assert gradient is not None
        assert (gradient.dtype, gradient.shape) == (of.dtype, of.shape)
        error = float((gradient.double() - right).norm())
        limit = 2 * max(ulp(of.dtype), compute) * float(right.norm())
        limit += (compute if of is weight else wider) * float(size.norm())
        assert error <= limit, (spec, x.dtype, gate.dtype, of.shape, error, limit)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    for groups, d, weighted in ((1, 40, True), (2, 104, True), (8, 8, False), (8, 24, True)):
        for chosen in (SPECS, WIDE) if dtype == torch.float64 else (SPECS,):
            spec = with_groups(chosen[name], groups)
            x, gate = draw(40, d, dtype=dtype, seed=d), draw(40, d, dtype=dtype, seed=d + 1)
            weight = draw(d, dtype=dtype, seed=d + 2) if weighted else None
            dy = draw(40, d, dtype=dtype, seed=d + 3)
            found = gated_gradients(x, gate, weight, dy, spec=spec)
            assert_gradients(found, x, gate, weight, dy, spec)


@pytest.mark.parametrize("name", NAMED)
def test_gradients_of_mixed_dtypes(name: str) -> None:
    for x_dtype in FLOATS:
        for gate_dtype in FLOATS:
            for weight_dtype in FLOATS:
                x, gate = draw(9, 24, dtype=x_dtype, seed=1), draw(9, 24, dtype=gate_dtype, seed=2)
                weight = draw(24, dtype=weight_dtype, seed=3)
                dy = draw(9, 24, dtype=_output(SPECS[name], x_dtype, weight_dtype), seed=4)
                for chosen in (SPECS, WIDE) if x_dtype == torch.float64 else (SPECS,):
                    found = gated_gradients(x, gate, weight, dy, spec=chosen[name])
                    assert_gradients(found, x, gate, weight, dy, chosen[name])


@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_some_inputs_only(name: str) -> None:
    x, gate, dy = (draw(12, 24, dtype=torch.float32, seed=s) for s in (1, 2, 3))
    weight = draw(24, dtype=torch.float32, seed=4)
    spec = SPECS[name]
    everything = gated_gradients(x, gate, weight, dy, spec=spec)
    for number in range(1, 8):
        needs = [bool(number & bit) for bit in (1, 2, 4)]
        some = gated_gradients(x, gate, weight, dy, spec=spec, needs=needs)
        for need, one, same in zip(needs, some, everything, strict=True):
            assert (one is not None) == need
            assert one is None or same is None or same_bits(one, same)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_rows_of_one_element(name: str) -> None:
    for spec in (SPECS[name], WIDE[name]):
        for dtype in (torch.float32, torch.float64):
            x, gate, dy = (draw(50, 1, dtype=dtype, seed=s) for s in (1, 2, 3))
            weight = draw(1, dtype=dtype, seed=4)
            found = gated_gradients(x, gate, weight, dy, spec=spec)
            assert_gradients(found, x, gate, weight, dy, spec)


@pytest.mark.parametrize("rows", [1, 7, 4096])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_weight_gradient_of_many_rows_is_not_summed_in_a_half_type(
    dtype: torch.dtype, rows: int
) -> None:
    x, weight, dy = torch.ones(rows, 8), torch.ones(8, dtype=dtype), torch.ones(rows, 8)
    gate = torch.zeros(rows, 8)
    inputs = (x.to(dtype), gate.to(dtype), weight, dy.to(dtype))
    spec = replace(specs.kimi_linear, eps=0.0)
    _, _, dweight = gated_gradients(*inputs, spec=spec)
    assert dweight is not None
    assert torch.equal(dweight, torch.full((8,), rows / 2, dtype=dtype))


# -- layout ---------------------------------------------------------------------------------------


def layouts() -> dict[str, Tensor]:
    x = draw(24, 80, dtype=torch.float32, seed=5)
    return {
        "transposed": x.t(),
        "every other element": x[:, ::2],
        "every third row": x[::3],
        "heads": x.view(4, 6, 5, 16).transpose(1, 2),
        "unaligned": x.flatten()[3 : 3 + 23 * 80].view(23, 80),
        "expanded rows": x[0].expand(7, 80),
        "expanded elements": x[:, :1].expand(24, 32),
        "split": x.split(32, -1)[1].view(24, 2, 16),
        "channels last": x.view(2, 4, 6, 40).contiguous(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "falcon_h1", "t5_after"])
def test_layout_changes_nothing(name: str, layout: str) -> None:
    for dtype in FLOATS:
        x = layouts()[layout].to(dtype)
        # .to keeps the strides only where it converts; what is dense comes out dense
        x = x if x.stride() == layouts()[layout].stride() else layouts()[layout].to(dtype)
        weight = draw(2 * x.shape[-1], dtype=dtype, seed=1)[::2]
        dense = x.clone(memory_format=torch.contiguous_format)
        other = draw(*x.shape, dtype=dtype, seed=2)
        for inputs, plain in (
            ((x, other, other), (dense, other, other)),
            ((other, x, other), (other, dense, other)),
            ((other, other, x), (other, other, dense)),
            ((x, x, x), (dense, dense, dense)),
        ):
            spec = with_groups(SPECS[name], 2)
            before = [t.clone() for t in inputs]
            y = gated_rms_norm(*inputs[:2], weight, spec=spec)
            assert y.is_contiguous()
            expected = gated_rms_norm(*plain[:2], weight.clone(), spec=spec)
            assert same_bits(y, expected)
            dy = inputs[2].to(y.dtype)
            found = gated_gradients(*inputs[:2], weight, dy, spec=spec)
            right = gated_gradients(*plain[:2], weight.clone(), dy.clone(), spec=spec)
            for a, b in zip(found, right, strict=True):
                assert a is not None
                assert b is not None
                assert same_bits(a.contiguous(), b.contiguous())
            assert all(torch.equal(t, b) for t, b in zip(inputs, before, strict=True))


# -- rows out of range ----------------------------------------------------------------------------


def extreme_rows(dtype: torch.dtype, d: int = 16) -> tuple[Tensor, Tensor]:
    """x and gate: each row on another scale."""
    top = 1e4 if dtype == torch.float16 else 1e30
    low = 1e-7 if dtype == torch.float16 else 1e-30
    scales = [(1.0, 1.0), (top, 1.0), (1.0, top), (top, top), (low, 1.0), (1.0, low), (low, low)]
    scales += [(top, low), (low, top), (1.0, 1.0)]
    x, gate = (draw(len(scales), d, dtype=torch.float64, seed=s) for s in (1, 2))
    factors = torch.tensor(scales, dtype=torch.float64)
    # Positive gates: a large negative one is 0 whatever the scale.
    return (x * factors[:, :1]).to(dtype), (gate.abs() * factors[:, 1:]).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("name", NAMED)
def test_extreme_rows(name: str, eps: float, dtype: torch.dtype) -> None:
    for groups in (1, 4):
        spec = replace(NAMED[name], groups=groups, eps=eps)
        x, gate = extreme_rows(dtype)
        weight = draw(16, dtype=dtype, seed=3)
        y = gated_rms_norm(x, gate, weight, spec=spec)
        exact = gated_oracle.gated_rms_norm(x, gate, weight, spec=spec)
        if y.dtype == torch.float64:
            y, exact = y.float(), exact.float()
        # Results below the normal range of the type that computes have fewer bits.
        count = roundings(spec, dtype, dtype)
        near = (y.double() - exact.double()).abs() <= 1e-37
        assert bool(((oracle.ulp_distance(y, exact) <= (count or 4)) | near).all())
        if dtype in HALVES and not KERNELS:
            continue  # gradients are rounded to half types on their way back, and vanish there
        dy = draw(*x.shape, dtype=dtype, seed=4)
        found = gated_gradients(x, gate, weight, dy, spec=spec)
        right = gated_oracle.gated_rms_norm_backward(dy, x, gate, weight, spec=spec)
        # float64 is computed in float32 here, with its range.
        info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
        unit = info.eps if KERNELS else 4 * info.eps
        for gradient, rows in zip(found[:2], right[:2], strict=True):
            assert gradient is not None
            for row, (given, values) in enumerate(zip(gradient.double(), rows, strict=True)):
                inside = values.abs() < info.max
                if dtype != torch.float64:
                    assert bool(torch.isinf(given[~inside]).all())
                size = float(values.clamp(-info.max, info.max).norm())
                error = float((given - values)[inside].norm())
                # In a single row of float32 the roundings of the gate come on top.
                assert error <= 3 * unit * size + 4 * info.tiny, (row, error, size)


@pytest.mark.parametrize("name", NAMED)
def test_gates_far_below_zero(name: str) -> None:
    """SiLU is tiny there, and 0 where exp(-gate) leaves the range: the norm brings it back."""
    x, weight = draw(6, 16, dtype=torch.float32, seed=1), draw(16, dtype=torch.float32, seed=2)
    depth = torch.tensor([[-20.0], [-60.0], [-80.0], [-95.0], [-110.0], [-300.0]])
    gate = depth + draw(6, 16, dtype=torch.float32, seed=3)
    for eps in (0.0, 1e-5):
        y = gated_rms_norm(x, gate, weight, eps, spec=name)
        exact = gated_oracle.gated_rms_norm(x, gate, weight, eps, spec=name)
        near = (y - exact).abs() <= 1e-36
        assert bool(((oracle.ulp_distance(y, exact) <= 4) | near).all())


def test_rows_of_zeros() -> None:
    zero, one = torch.zeros(3, 8), torch.ones(3, 8)
    for name in NAMED:
        for x, gate in ((zero, one), (zero, zero)):
            y = gated_rms_norm(x, gate, torch.ones(8), spec=name)
            assert torch.equal(y, zero)
            for gradient in gated_gradients(x, gate, torch.ones(8), one, spec=NAMED[name]):
                assert gradient is not None
                assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_a_row_with_inf_or_nan_spoils_no_other(name: str, dtype: torch.dtype) -> None:
    clean_x, clean_gate, dy = (draw(11, 16, dtype=dtype, seed=s) for s in (1, 2, 3))
    weight = draw(16, dtype=dtype, seed=4)
    spec = SPECS[name]
    expected = gated_rms_norm(clean_x, clean_gate, weight, spec=spec)
    right = gated_gradients(clean_x, clean_gate, weight, dy, spec=spec)
    x, gate = clean_x.clone(), clean_gate.clone()
    bad = torch.tensor([1, 4, 5, 9])
    x[1, 3], x[4, 0], gate[5, 15], gate[9, 7] = torch.inf, torch.nan, torch.nan, torch.inf
    kept = torch.ones(11, dtype=torch.bool)
    kept[bad] = False
    y = gated_rms_norm(x, gate, weight, spec=spec)
    assert same_bits(y[kept], expected[kept])
    assert bool(y[4].isnan().any())
    assert bool(y[5].isnan().any())
    found = gated_gradients(x, gate, weight, dy, spec=spec)
    for a, b in zip(found[:2], right[:2], strict=True):
        assert a is not None
        assert b is not None
        assert same_bits(a[kept], b[kept])


# -- derivatives of any order and mode ------------------------------------------------------------


def plain(x: Tensor, gate: Tensor, weight: Tensor, eps: float, spec: NormSpec) -> Tensor:
    """The formula of a mean square, in a line or two."""
    act = F.silu(gate) if spec.gate == "silu" else torch.sigmoid(gate)
    row = x * act if spec.gate_order == "before" else x
    parts = row.unflatten(-1, (spec.groups, -1))
    y = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight
    return y if spec.gate_order == "before" else y * act


def in_float64(*shape: int, seed: int) -> Tensor:
    return draw(*shape, dtype=torch.float64, seed=seed)


@pytest.mark.parametrize("name", WIDE)
def test_gradcheck(name: str) -> None:
    spec = with_groups(WIDE[name], 2)
    if name == "clamp_after":
        spec = replace(spec, eps=0.5)  # not where |x| may cross it
    inputs = [in_float64(2, 4, seed=1), in_float64(2, 4, seed=2), in_float64(4, seed=3)]

    def f(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, weight, spec=spec)

    for some in (7, 1, 2, 4) if name in NAMED else (7,):
        leaves = [t.clone().requires_grad_(bool(some & 1 << i)) for i, t in enumerate(inputs)]
        every = some == 7
        assert torch.autograd.gradcheck(f, leaves, check_forward_ad=every, check_batched_grad=every)
        assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("name", NAMED)
def test_a_gradient_penalty_is_that_of_the_formula(name: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-4)):
        spec = replace(WIDE[name], groups=2, eps=1e-3)
        inputs = [in_float64(6, 4, seed=1).t().to(dtype), in_float64(4, 6, seed=2).to(dtype)]
        inputs.append(in_float64(6, seed=3).to(dtype))
        results = []
        for f in (
            lambda *a, s=spec: gated_rms_norm(*a, spec=s),
            lambda *a, s=spec: plain(*a, 1e-3, s),
        ):
            leaves = [t.clone().requires_grad_() for t in inputs]
            first = torch.autograd.grad(f(*leaves).sin().sum(), leaves, create_graph=True)
            penalty = sum((g.pow(2).sum() for g in first), torch.zeros((), dtype=dtype))
            results.append(torch.autograd.grad(penalty, leaves))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMED)
def test_transforms(name: str) -> None:
    spec = replace(WIDE[name], groups=2, eps=1e-3)
    x, gate, w = in_float64(5, 3, 6, seed=1), in_float64(5, 3, 6, seed=2), in_float64(6, seed=3)

    def f(x: Tensor, gate: Tensor, weight: Tensor = w) -> Tensor:
        return gated_rms_norm(x, gate, weight, spec=spec)

    def formula(x: Tensor, gate: Tensor, weight: Tensor = w) -> Tensor:
        return plain(x, gate, weight, 1e-3, spec)

    calls: list[Callable[[Callable[..., Tensor]], Any]] = [
        lambda g: vmap(g)(x, gate),
        lambda g: vmap(vmap(g))(x, gate),
        lambda g: vmap(g, in_dims=(1, 0), out_dims=1)(x.transpose(0, 1), gate),
        lambda g: vmap(g, in_dims=(0, None))(x, gate[0]),
        lambda g: vmap(g, in_dims=(None, 0))(x[0], gate),
        lambda g: vmap(g, in_dims=(None, None, 0))(x, gate, torch.stack([w, -w])),
        lambda g: vmap(g, in_dims=(0, 0, 0))(x, gate, w.expand(5, 6).clone()),
        lambda g: vmap(g, in_dims=(0, None, 1))(x, gate[1], w.expand(5, 6).clone().t()),
        lambda g: jacrev(g, argnums=(0, 1, 2))(x[0], gate[0], w),
        lambda g: jacfwd(g, argnums=(0, 1, 2))(x[0], gate[0], w),
        lambda g: vmap(jacrev(g))(x[:2], gate[:2]),
        lambda g: hessian(lambda t: g(t, gate[0, 0]).pow(3).sum())(x[0, 0]),
        lambda g: hessian(lambda t: g(x[0, 0], t).pow(3).sum())(gate[0, 0]),
        lambda g: grad(lambda t: vmap(g)(t, gate).sin().sum())(x),
        lambda g: vmap(grad(lambda t, z: g(t, z).sin().sum()))(x, gate),
        lambda g: jvp(g, (x, gate, w), (x.cos(), gate.sin(), w.sin()))[1],
        lambda g: vjp(g, x, gate, w)[1](x.cos()),
    ]
    for number, call in enumerate(calls):
        a, b = call(f), call(formula)
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=f"call {number}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_vmap_has_the_bits_of_a_loop(dtype: torch.dtype) -> None:
    x, gate = draw(4, 3, 40, dtype=dtype, seed=1), draw(3, 4, 40, dtype=dtype, seed=2)
    weight = draw(40, dtype=dtype, seed=3)
    for name in NAMED:
        y = vmap(lambda x, z, s=name: gated_rms_norm(x, z, weight, spec=s), in_dims=(0, 1))(x, gate)
        rows = [gated_rms_norm(x[i], gate[:, i], weight, spec=name) for i in range(4)]
        assert same_bits(y, torch.stack(rows))


@pytest.mark.parametrize("name", NAMED)
def test_forward_mode(name: str) -> None:
    spec = replace(WIDE[name], eps=1e-3)
    inputs = [in_float64(3, 6, seed=1), in_float64(3, 6, seed=2), in_float64(6, seed=3)]
    tangents = [t.cos() for t in inputs]
    _, expected = jvp(lambda *a: plain(*a, 1e-3, spec), tuple(inputs), tuple(tangents))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(inputs, tangents, strict=True)]
        tangent = forward_ad.unpack_dual(gated_rms_norm(*duals, spec=spec)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, expected, rtol=1e-11, atol=1e-11)


def test_gradients_of_many_results_at_once() -> None:
    x, gate, w = (in_float64(*s, seed=1).requires_grad_() for s in ((3, 6), (3, 6), (6,)))
    for spec in (WIDE["mamba2"], WIDE["qwen3_next"]):
        y = gated_rms_norm(x, gate, w, spec=spec)
        dys = in_float64(4, 3, 6, seed=5)
        batched = torch.autograd.grad(
            y, (x, gate, w), dys, is_grads_batched=True, retain_graph=True
        )
        for i, dy in enumerate(dys):
            one = torch.autograd.grad(y, (x, gate, w), dy, retain_graph=True)
            for a, b in zip(batched, one, strict=True):
                torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_value_does_not_depend_on_who_asks_for_a_gradient(
    name: str, dtype: torch.dtype
) -> None:
    x, gate = draw(5, 40, dtype=dtype, seed=1), draw(5, 40, dtype=dtype, seed=2)
    weight = draw(40, dtype=torch.float32, seed=3)
    expected = gated_rms_norm(x, gate, weight, spec=SPECS[name])
    for number in range(1, 8):
        leaves = [
            t.clone().requires_grad_(bool(number & 1 << i)) for i, t in enumerate((x, gate, weight))
        ]
        y = gated_rms_norm(*leaves, spec=SPECS[name])
        assert y.requires_grad
        assert same_bits(y, expected)


# -- the operations -------------------------------------------------------------------------------


def test_opcheck() -> None:
    # What AOTAutograd makes of an operation does not depend on the arguments.
    quick = ("test_schema", "test_faketensor")
    for number, name in enumerate(NAMED):
        for dtype in (torch.float32, torch.bfloat16):
            spec = replace(specs[name], groups=2).encode()
            gate, dy = draw(3, 8, dtype=dtype, seed=2), draw(3, 8, dtype=dtype, seed=3)
            for x in (draw(3, 8, dtype=dtype, seed=1), draw(8, 3, dtype=dtype, seed=1).t()):
                for weight in (None, draw(8, dtype=dtype, seed=4)):
                    _, rstd = op_fwd(x, gate, weight, None, spec)
                    backward = (dy, x, gate, weight, rstd, None, spec, True, weight is None, True)
                    torch.library.opcheck(op, (x, gate, weight, 1e-6, spec), test_utils=quick)
                    torch.library.opcheck(op_fwd, (x, gate, weight, None, spec), test_utils=quick)
                    torch.library.opcheck(op_bwd, backward, test_utils=quick)
        if number == 0:
            torch.library.opcheck(op, (x, gate, weight, 1e-6, spec))
            torch.library.opcheck(op_fwd, (x, gate, weight, None, spec))
            torch.library.opcheck(op_bwd, backward)


def test_schemas() -> None:
    arguments = '(Tensor x, Tensor gate, Tensor? weight=None, float? eps=None, str spec="")'
    assert str(op._schema) == f"rmsnorm::gated_rms_norm{arguments} -> Tensor"
    assert str(op_fwd._schema) == (
        f"rmsnorm::gated_rms_norm_fwd{arguments} -> (Tensor y, Tensor rstd)"
    )
    assert str(op_bwd._schema) == (
        "rmsnorm::gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, "
        "Tensor rstd, float? eps, str spec, bool need_dx, bool need_dgate, bool need_dweight) -> "
        "(Tensor dx, Tensor dgate, Tensor dweight)"
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_raw_operations(name: str, dtype: torch.dtype) -> None:
    for spec in (with_groups(SPECS[name], 4), with_groups(WIDE[name], 4)):
        x, gate, dy = (draw(2, 7, 24, dtype=dtype, seed=s) for s in (1, 2, 3))
        weight = draw(24, dtype=dtype, seed=4)
        encoded = spec.encode()
        y, rstd = op_fwd(x, gate, weight, None, encoded)
        assert same_bits(y, op(x, gate, weight, None, encoded))
        assert same_bits(y, gated_rms_norm(x, gate, weight, spec=spec))
        wide = dtype == torch.float64 and spec.accumulate == "input"
        assert rstd.dtype == (torch.float64 if wide else torch.float32)
        assert rstd.shape == (2, 7, spec.groups)
        assert rstd.is_contiguous()
        row = x.double() * gated_composite._activation(gate.double(), spec)
        row = (row if spec.gate_order == "before" else x.double()).unflatten(-1, (spec.groups, -1))
        xhat = rms_norm(row, None, spec.eps or float(ulp(rstd.dtype)), spec=_ungated(spec))
        torch.testing.assert_close(
            (xhat / row)[..., 0], rstd.double(), rtol=2e-12 if wide else 1e-6, atol=0.0
        )
        expected = gated_gradients(x, gate, weight, dy, spec=spec)
        for number in range(8):
            needs = [bool(number & 1 << i) for i in range(3)]
            found = op_bwd(dy.to(y.dtype), x, gate, weight, rstd, None, encoded, *needs)
            for need, a, b, of in zip(needs, found, expected, (x, gate, weight), strict=True):
                assert a.dtype == of.dtype if need else a.dtype == dtype
                assert a.shape == (of.shape if need else (0,))
                assert a.is_contiguous()
                assert b is not None
                assert not (need and KERNELS) or same_bits(a, b.contiguous())
        no_weight = op_bwd(dy, x, gate, None, rstd, None, encoded, True, True, True)
        assert [t.shape for t in no_weight] == [x.shape, x.shape, (0,)]


def _ungated(spec: NormSpec) -> NormSpec:
    """The norm of one group, in float64."""
    return replace(spec, gate=None, groups=1, accumulate="input", rounding="after_weight")


def test_the_raw_operations_under_vmap() -> None:
    x, gate, dy = (in_float64(4, 3, 8, seed=s) for s in (1, 2, 3))
    weights = in_float64(4, 8, seed=4)
    needs = (True, True, True)
    for name in NAMED:
        spec = replace(WIDE[name], groups=2).encode()
        y, rstd = vmap(lambda *a, s=spec: op_fwd(*a, None, s))(x, gate, weights)
        shared = vmap(lambda *a, s=spec: op_fwd(*a, weights[0], None, s))(x, gate)
        found = vmap(lambda *a, s=spec: op_bwd(*a, None, s, *needs))(dy, x, gate, weights, rstd)
        one = (x[0], gate[0], None, rstd[0], None, spec, *needs)
        alone = vmap(lambda a, one=one: op_bwd(a, *one)[0])(dy)
        for i in range(4):
            expected = op_fwd(x[i], gate[i], weights[i], None, spec)
            torch.testing.assert_close((y[i], rstd[i]), expected, rtol=1e-13, atol=1e-13)
            expected = op_fwd(x[i], gate[i], weights[0], None, spec)
            assert same_bits(shared[0][i], expected[0])
            assert same_bits(shared[1][i], expected[1])
            right = op_bwd(dy[i], x[i], gate[i], weights[i], rstd[i], None, spec, *needs)
            for a, b in zip(found, right, strict=True):
                torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(alone[i], op_bwd(dy[i], *one)[0], rtol=1e-12, atol=1e-12)


def test_the_raw_operations_refuse_tangents() -> None:
    x, gate, w = in_float64(3, 8, seed=1), in_float64(3, 8, seed=2), in_float64(8, seed=3)
    encoded = WIDE["mamba2"].encode()
    for i in range(3):
        with forward_ad.dual_level():
            inputs = [x, gate, w]
            inputs[i] = forward_ad.make_dual(inputs[i], torch.ones_like(inputs[i]))
            for operation in (op, op_fwd):
                with pytest.raises(RuntimeError, match="forward mode"):
                    operation(*inputs, None, encoded)


# -- torch's other questions ----------------------------------------------------------------------


def test_meta_and_fake_tensors() -> None:
    for name, spec in SPECS.items():
        for x in (torch.randn(3, 4, 8), torch.randn(4, 8, 3).transpose(1, 2).bfloat16()):
            gate, weight = torch.randn(x.shape), torch.ones(8, dtype=torch.bfloat16)
            real = gated_rms_norm(x, gate, weight, spec=spec)
            meta = gated_rms_norm(x.to("meta"), gate.to("meta"), weight.to("meta"), spec=spec)
            with FakeTensorMode() as mode:
                inputs = [mode.from_tensor(t) for t in (x, gate, weight)]
                fake = gated_rms_norm(*inputs, spec=spec)
            for other in (meta, fake):
                assert other.shape == real.shape, name
                assert other.dtype == real.dtype, name
                assert other.stride() == real.stride(), name


def step(x: Tensor, gate: Tensor, weight: Tensor, spec: str, group_size: int | None) -> Tensor:
    return gated_rms_norm(x * 2, gate, weight, spec=spec, group_size=group_size) + 1


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_compile(name: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    group_size = 4 if name == "mamba2" else None
    for rows in (3, 5, 9):
        inputs = [draw(rows, 8, dtype=torch.float32, seed=s) for s in (1, 2)]
        inputs.append(draw(8, dtype=torch.float32, seed=3))
        results = []
        for f in (compiled, step):
            leaves = [t.clone().requires_grad_() for t in inputs]
            y = f(*leaves, name, group_size)
            results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    assert counter.frame_count <= 2  # one more for a new length
    with torch.no_grad():
        y = compiled(*inputs, name, group_size)
        torch.testing.assert_close(y, step(*inputs, name, group_size), rtol=1e-6, atol=1e-6)


def test_compile_with_the_default_backend() -> None:
    torch._dynamo.reset()
    inputs = [draw(3, 8, dtype=torch.float32, seed=s).requires_grad_() for s in (1, 2)]
    inputs.append(draw(8, dtype=torch.float32, seed=3).requires_grad_())
    y = torch.compile(step, fullgraph=True)(*inputs, "kimi_linear", None)
    expected = step(*inputs, "kimi_linear", None)
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=2e-6)
    for a, b in zip(
        torch.autograd.grad(y.sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return gated_rms_norm(x, gate, spec="mamba2", group_size=4)

    x, gate = draw(3, 8, dtype=torch.float32, seed=1), draw(3, 8, dtype=torch.float32, seed=2)
    rows = torch.export.Dim("rows", min=2)
    with torch.no_grad():
        program = torch.export.export(Model(), (x, gate), dynamic_shapes=({0: rows}, {0: rows}))
        assert same_bits(program.module()(x, gate), Model()(x, gate))
        more = torch.cat([x, gate]), torch.cat([gate, x])
        assert same_bits(program.module()(*more), Model()(*more))
    assert "rmsnorm.gated_rms_norm" in str(program.graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return gated_rms_norm(x, gate, spec="qwen3_next")

    x, gate = draw(3, 8, dtype=torch.float32, seed=1), draw(3, 8, dtype=torch.float32, seed=2)
    assert torch.equal(torch.jit.trace(Model(), (x, gate))(x, gate), Model()(x, gate))


def test_autocast_checkpoint_and_saved_tensors() -> None:
    x, gate = (draw(3, 8, dtype=torch.bfloat16, seed=s).requires_grad_() for s in (1, 2))
    weight = draw(8, dtype=torch.float32, seed=3).requires_grad_()
    for name, spec in NAMED.items():
        expected = gated_rms_norm(x, gate, weight, spec=name)
        right = torch.autograd.grad(expected.float().sin().sum(), (x, gate, weight))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = gated_rms_norm(x, gate, weight, spec=name)
        assert y.dtype == _output(spec, torch.bfloat16, torch.float32)
        again = torch.utils.checkpoint.checkpoint(
            lambda *a, s=name: gated_rms_norm(*a, spec=s), x, gate, weight, use_reentrant=False
        )
        for result in (y, again):
            assert same_bits(result, expected)
            found = torch.autograd.grad(result.float().sin().sum(), (x, gate, weight))
            assert all(same_bits(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.skipif(not KERNELS, reason="plain torch expressions keep what they need")
def test_training_saves_the_inputs_and_rstd() -> None:
    x, gate, weight = (draw(*s, dtype=torch.float32, seed=1) for s in ((4, 64), (4, 64), (64,)))
    leaves = [t.requires_grad_() for t in (x, gate, weight)]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gated_rms_norm(*leaves, spec="mamba2", group_size=16)
    assert [t.shape for t in saved] == [(4, 64), (4, 64), (64,), (4, 4)]
    assert [t.data_ptr() for t in saved[:3]] == [t.data_ptr() for t in leaves]


def test_the_gradient_that_comes_in_is_not_written_to() -> None:
    for name in NAMED:
        leaves = [draw(4, 8, dtype=torch.float32, seed=s).requires_grad_() for s in (1, 2)]
        dy = draw(4, 8, dtype=torch.float32, seed=3)
        kept = dy.clone()
        y = gated_rms_norm(*leaves, spec=name)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        second = torch.autograd.grad(y, leaves, dy)
        assert torch.equal(dy, kept)
        for a, b in zip(first, second, strict=True):
            assert same_bits(a, b)
            assert a.data_ptr() not in (b.data_ptr(), dy.data_ptr())


@pytest.mark.skipif(not KERNELS, reason="plain torch expressions may have saved a copy")
def test_a_changed_input_is_noticed() -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    for position in (0, 1):
        changed = leaf * 1
        inputs = [torch.randn(4, 8), torch.randn(4, 8)]
        inputs[position] = changed
        y = gated_rms_norm(*inputs, spec="mamba2")
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# -- what is refused ------------------------------------------------------------------------------

X = torch.ones(2, 3, 8)
W = torch.ones(8)


@pytest.mark.parametrize(
    ("arguments", "kw", "error", "words"),
    [
        ((X, torch.ones(2, 3, 4)), {}, ValueError, [r"\(2, 3, 4\)", r"\(2, 3, 8\)", "gate"]),
        ((X, torch.ones(8)), {}, ValueError, [r"\(8,\)", r"\(2, 3, 8\)", "gate"]),
        ((X, torch.ones(3, 2, 8)), {}, ValueError, [r"\(3, 2, 8\)", r"\(2, 3, 8\)"]),
        ((X, X, torch.ones(7)), {}, ValueError, [r"\(7,\)", r"\(8,\)", "weight"]),
        ((X, X, torch.ones(3, 8)), {}, ValueError, [r"\(3, 8\)", r"\(8,\)", "weight"]),
        ((torch.tensor(1.0), torch.tensor(1.0)), {}, ValueError, ["at least 1 dimension"]),
        ((X, X), {"spec": "torch"}, ValueError, ["no gate"]),
        ((X, X), {"spec": "nope"}, ValueError, ["nope"]),
        ((X, X), {"spec": 3}, TypeError, ["int"]),
        ((X, X), {"group_size": 3}, ValueError, ["group_size is 3", r"\(2, 3, 8\)"]),
        ((X, X), {"group_size": 0}, ValueError, ["group_size is 0"]),
        ((X, X), {"group_size": -8}, ValueError, ["group_size is -8"]),
        ((X, X), {"group_size": 16}, ValueError, ["group_size is 16"]),
        ((X, X), {"group_size": 2.0}, TypeError, ["group_size is 2.0"]),
        ((X, X), {"spec": replace(specs.mamba2, groups=3)}, ValueError, ["3 equal groups"]),
        ((X, X, None, -1.0), {}, ValueError, ["eps is -1.0"]),
        ((X, X, None, float("nan")), {}, ValueError, ["eps is nan"]),
        ((X, X, None, "1"), {}, TypeError, ["eps"]),
        ((X.int(), X), {}, TypeError, [r"x is torch\.int32"]),
        ((X, X.int()), {}, TypeError, [r"gate is torch\.int32"]),
        ((X, X, W.int()), {}, TypeError, [r"weight is torch\.int32"]),
        ((X.to(torch.complex64), X), {}, TypeError, ["x is torch.complex64"]),
        (([1.0, 2.0], X), {}, TypeError, ["x is a list"]),
        ((X, [1.0]), {}, TypeError, ["gate is a list"]),
        ((X, None), {}, TypeError, ["gate is a NoneType"]),
        ((X, X, [1.0]), {}, TypeError, ["weight is a list"]),
        ((X, X.numpy()), {}, TypeError, ["gate is a ndarray"]),
        ((X, X.to("meta")), {}, RuntimeError, ["gate is on meta", "x is on cpu"]),
        ((X, X, W.to("meta")), {}, RuntimeError, ["weight is on meta", "x is on cpu"]),
    ],
)
@pytest.mark.parametrize("needs", [False, True])
def test_refused(
    arguments: tuple[Any, ...],
    kw: dict[str, Any],
    error: type[Exception],
    words: list[str],
    needs: bool,
) -> None:
    arguments = tuple(copy.copy(a) for a in arguments)
    if needs and isinstance(arguments[0], Tensor) and arguments[0].is_floating_point():
        arguments = (arguments[0].clone().requires_grad_(), *arguments[1:])
    with pytest.raises(error) as caught:
        gated_rms_norm(*arguments, **kw)
    for word in words:
        caught.match(word)


def test_raw_operations_are_checked() -> None:
    errors = (RuntimeError, TypeError, ValueError)
    encoded = specs.mamba2.encode()
    rstd = torch.ones(2, 3, 1)
    needs = (True, True, True)
    for arguments in (
        (X, torch.ones(2, 3, 4), W, None, encoded),
        (X, X, torch.ones(7), None, encoded),
        (X, X, W, -1.0, encoded),
        (X, X, W, None, ""),
        (X, X, W, None, "nonsense"),
        (X, X, W, None, "gate=silu;groups=3"),
        (X.int(), X, W, None, encoded),
        (X, X.int(), W, None, encoded),
        (X, X, W.int(), None, encoded),
    ):
        for operation in (op, op_fwd):
            with pytest.raises(errors):
                operation(*arguments)
        x, gate, weight, eps, spec = arguments
        with pytest.raises(errors):
            op_bwd(X, x, gate, weight, rstd, eps, spec, *needs)
    with pytest.raises(errors):
        op_bwd(torch.ones(2, 3, 4), X, X, W, rstd, None, encoded, *needs)
