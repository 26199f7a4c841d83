"""The composite: eager PyTorch's bits, the oracle's values, and every transform of torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import oracle
from rmsnorm import reference
from rmsnorm.ops import composite
from rmsnorm.spec import NormSpec, specs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(x, w) for x in DTYPES for w in DTYPES]
WIDTHS = [*range(1, 71), 96, 128, 255, 333, 576, 1000, 1023, 4096, 8191]
NAMES = list(specs)
SHAPES: list[dict[str, Any]] = [{}, {"groups": 2}, {"partial": 0.3}]
EXTREMES = [1e-45, 1e-40, 1e-30, 1e-20, 1e-17, 1e20, 3e38]

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    spec: NormSpec | str = "torch",
    bias: Tensor | None = None,
    ndim: int = 1,
) -> Tensor:
    spec = specs[spec] if isinstance(spec, str) else spec
    return composite.rms_norm(x, weight, bias, eps, spec, ndim)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return oracle.random(*shape, dtype=dtype, seed=seed)


def assert_same_bits(y: Tensor, expected: Tensor, where: object = None) -> None:
    assert y.dtype == expected.dtype, where
    assert y.shape == expected.shape, where
    assert torch.equal(y, expected), where


# -- the bits of eager PyTorch --------------------------------------------------------------------


@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
def test_the_bits_of_torch(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for d in WIDTHS:
        x, w = drawn(3, d, dtype=x_dtype, seed=d), drawn(d, dtype=w_dtype, seed=d + 1)
        assert_same_bits(norm(x, w), F.rms_norm(x, (d,), w), d)
        assert_same_bits(norm(x, None, 1e-5), F.rms_norm(x, (d,), None, 1e-5), d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_torch_at_every_width(dtype: torch.dtype) -> None:
    flat, scale = drawn(2, 1100, dtype=dtype), drawn(1100, dtype=dtype, seed=1)
    different = [
        d
        for d in range(1, 1101)
        if not torch.equal(norm(flat[:, :d], scale[:d]), F.rms_norm(flat[:, :d], (d,), scale[:d]))
    ]
    assert different == []


def hugging_face(name: str) -> Callable[[int], torch.nn.Module]:
    """A norm class of transformers, made for rows of d elements."""
    module, cls, positional = {
        "llama": ("llama.modeling_llama", "LlamaRMSNorm", True),
        "gemma": ("gemma3.modeling_gemma3", "Gemma3RMSNorm", True),
        "t5": ("t5.modeling_t5", "T5LayerNorm", True),
        "olmo2": ("olmo2.modeling_olmo2", "Olmo2RMSNorm", True),
        "gpt_oss": ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm", True),
        "weightless": ("llama4.modeling_llama4", "Llama4TextL2Norm", False),
    }[name]
    found = pytest.importorskip(f"transformers.models.{module}")
    return lambda d: getattr(found, cls)(*([d] if positional else []))


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "olmo2", "gpt_oss"])
def test_the_bits_of_transformers(name: str) -> None:
    make = hugging_face(name)
    spec = "olmo2" if name == "gpt_oss" else name
    for d in WIDTHS[::2]:
        module = make(d)
        for x_dtype, w_dtype in PAIRS:
            if name == "t5" and x_dtype == torch.float64:
                continue  # T5LayerNorm takes its mean in float32, but multiplies in float64.
            x, w = drawn(3, d, dtype=x_dtype, seed=d), drawn(d, dtype=w_dtype, seed=d + 1)
            module.weight = torch.nn.Parameter(w, requires_grad=False)
            assert_same_bits(norm(x, w, 1e-6, spec), module(x), (d, x_dtype, w_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_weightless_class(dtype: torch.dtype) -> None:
    module = hugging_face("weightless")(0)
    for d in WIDTHS:
        x = drawn(3, d, dtype=dtype, seed=d)
        for spec in ("olmo2", "llama", "t5"):
            assert_same_bits(norm(x, None, 1e-6, spec), module(x), d)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_the_plain_expressions_with_groups_partial_and_sum(dtype: torch.dtype) -> None:
    x = drawn(5, 96, dtype=dtype)
    wide = x if dtype == torch.float64 else x.float()
    parts = wide.view(5, 4, 24)
    grouped = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert_same_bits(norm(x, None, 1e-6, NormSpec(groups=4)), grouped.view(5, 96).to(dtype))
    partial = wide * torch.rsqrt(wide[:, :29].pow(2).mean(-1, keepdim=True) + 1e-6)
    assert_same_bits(norm(x, None, 1e-6, NormSpec(partial=0.3)), partial.to(dtype))
    summed = wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)
    assert_same_bits(norm(x, None, 1e-6, "l2_sum"), summed.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [32769, 65537, 100_000])
def test_a_single_row_has_the_bits_it_has_in_a_batch(dtype: torch.dtype, d: int) -> None:
    x = drawn(3, d, dtype=dtype)
    batch = norm(x)
    assert_same_bits(batch, F.rms_norm(x, (d,)))
    for row in range(3):
        assert_same_bits(norm(x[row]), batch[row])
        assert_same_bits(norm(x[row : row + 1]), batch[row : row + 1])


# -- layout ---------------------------------------------------------------------------------------


def layouts() -> dict[str, Tensor]:
    x = drawn(24, 80)
    return {
        "transposed": x.t(),
        "every other element": x[:, ::2],
        "every third row": x[::3],
        "heads": x.view(4, 6, 5, 16).transpose(1, 2),
        "unaligned": x.flatten()[3 : 3 + 23 * 80].view(23, 80),
        "expanded rows": x[0].expand(7, 80),
        "expanded elements": x[:, :1].expand(24, 33),
        "split": x.split(32, -1)[1].view(24, 2, 16),
        "channels last": x.view(2, 4, 6, 40).contiguous(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", list(layouts()))
def test_the_layout_of_x_and_weight_changes_nothing(name: str) -> None:
    x = layouts()[name]
    d = x.shape[-1]
    w = drawn(2 * d, seed=1)[::2]
    for dtype in DTYPES:
        for spec in ("torch", "llama"):
            y = norm(x.to(dtype), w, None, spec)
            assert y.is_contiguous()
            assert_same_bits(y, norm(x.to(dtype).contiguous(), w.contiguous(), None, spec))
    before = x.clone()
    assert norm(x).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


def test_several_dimensions_are_one_row() -> None:
    x, w, b = drawn(3, 4, 5, 6), drawn(5, 6, seed=1), drawn(5, 6, seed=2)
    y = norm(x, w, None, "torch", b, ndim=2)
    assert_same_bits(y, norm(x.reshape(3, 4, 30), w.flatten(), bias=b.flatten()).view(3, 4, 5, 6))
    assert_same_bits(norm(x, ndim=4), F.rms_norm(x, x.shape))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0,), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["torch", "llama", "original", "l2"])
def test_empty_rows_and_empty_batches(
    shape: tuple[int, ...], dtype: torch.dtype, spec: str
) -> None:
    y = norm(torch.empty(shape, dtype=dtype), torch.ones(shape[-1], dtype=dtype), 0.0, spec)
    assert y.shape == shape
    assert y.dtype == dtype
    assert y.is_contiguous()


def test_the_dtype_that_comes_out() -> None:
    for x_dtype, w_dtype in PAIRS:
        x, w, b = drawn(2, 4, dtype=x_dtype), drawn(4, dtype=w_dtype), drawn(4, dtype=torch.float64)
        for output, expected in [
            ("input", x_dtype),
            ("promote", torch.promote_types(x_dtype, w_dtype)),
            ("weight", w_dtype),
        ]:
            for rounding in ("before_weight", "after_weight", "weight_dtype"):
                spec = NormSpec(rounding=rounding, output=output)
                assert norm(x, w, None, spec, b).dtype == expected
                assert norm(x, None, None, spec, b).dtype == x_dtype


# -- the values -----------------------------------------------------------------------------------


def test_check_values() -> None:
    y = norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0)
    assert y.tolist() == pytest.approx([0.84852814, 1.13137085], rel=1e-7)
    y = norm(torch.tensor([3.0, 4.0]), None, 1.0)
    assert y.tolist() == pytest.approx([0.816496581, 1.08866211], rel=1e-7)
    y = norm(torch.tensor([3.0, 4.0]), None, 1.0, "original")
    assert y.tolist() == pytest.approx([0.661443628, 0.881924837], rel=1e-7)


@pytest.mark.parametrize(
    ("spec", "weight", "expected"),
    [
        ("llama", 2.5, [1.9609375, 2.953125]),
        ("t5", 2.5, [1.9609375, 2.953125]),
        ("torch", 2.5, [1.9609375, 2.9375]),
        ("gemma", 1.5, [1.9609375, 2.9375]),
    ],
)
def test_where_it_rounds(spec: str, weight: float, expected: list[float]) -> None:
    x = torch.tensor([1.0, 1.5], dtype=torch.bfloat16)
    w = torch.full((2,), weight, dtype=torch.bfloat16)
    assert norm(x, w, 1e-6, spec).tolist() == expected


def test_where_the_bias_rounds() -> None:
    x = torch.tensor([1.0, 1.5], dtype=torch.bfloat16)
    w, b = (torch.full((2,), v, dtype=torch.bfloat16) for v in (2.5, 0.0038))
    # The product rounds to 1.9609375, too low to reach the midpoint 1.96484375 with the bias.
    assert norm(x, w, 1e-6, "llama", b)[0].item() == 1.9609375
    assert norm(x, w, 1e-6, "torch", b)[0].item() == 1.96875


def test_no_eps_is_the_epsilon_of_the_accumulating_dtype() -> None:
    x = torch.tensor([2.0**-12, -(2.0**-12)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Mean square 2**-24, eps 2**-23: 1/sqrt(3).
        assert norm(x.to(dtype)).float().tolist() == pytest.approx(
            [3**-0.5, -(3**-0.5)], rel=torch.finfo(dtype).eps
        )
    assert norm(x.double())[0].item() == pytest.approx(1 / math.sqrt(1 + 2.0**-28), rel=1e-15)
    reduced = NormSpec(accumulate="float32")
    assert norm(x.double(), spec=reduced)[0].item() == pytest.approx(3**-0.5, rel=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_rounding_of_the_oracle(name: str, shape: dict[str, Any]) -> None:
    spec = replace(specs[name], **shape)
    for d in (2, 30, 1000):
        for x_dtype in DTYPES:
            for w_dtype in (*DTYPES, None):
                x = drawn(3, d, dtype=x_dtype, seed=d)
                w = None if w_dtype is None else drawn(d, dtype=w_dtype, seed=d + 1)
                assert_exact(x, w, None, spec)
        # The bias has the sign of the product, so that no cancellation magnifies an ulp.
        x = drawn(3, d, dtype=torch.bfloat16, seed=d).abs()
        for dtype in DTYPES:
            assert_exact(x.to(dtype), torch.ones(d), torch.ones(d), spec)


def assert_exact(x: Tensor, w: Tensor | None, b: Tensor | None, spec: NormSpec) -> None:
    y, exact = norm(x, w, None, spec, b), oracle.rms_norm(x, w, spec=spec, bias=b)
    assert y.dtype == exact.dtype
    in_float32 = x.dtype != torch.float64 or spec.accumulate == "float32"
    if in_float32 and y.dtype == torch.float64:
        y, exact = y.float(), exact.float()
    twice = spec.rounding != "after_weight" and (w is not None or b is not None)
    if y.dtype in (torch.float32, torch.float64):
        # xhat has been rounded to a half type on the way: where that goes the other way, one unit
        # of it is many of the result.
        first = w.dtype if w is not None and spec.rounding == "weight_dtype" else x.dtype
        if twice and first in (torch.bfloat16, torch.float16):
            assert oracle.fraction_differing(y, exact) < (0.005 if y.numel() > 1000 else 0.05)
            assert torch.allclose(y, exact, rtol=torch.finfo(first).eps)
        else:
            assert oracle.max_ulp(y, exact) <= 5
    else:
        distance = oracle.ulp_distance(y, exact)
        assert int(distance.max()) <= (2 if twice else 1)
        assert float((distance > 0).double().mean()) < (0.005 if y.numel() > 1000 else 0.05)


@pytest.mark.parametrize("d", [65_537, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_rounding_of_the_oracle_in_wide_rows(d: int, dtype: torch.dtype) -> None:
    x, w = drawn(1, d, dtype=dtype), drawn(d, dtype=dtype, seed=1)
    for spec in (specs.torch, specs.llama) if d < 100_000 else (specs.torch,):
        assert_exact(x, w, None, spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_the_definition_s(dtype: torch.dtype) -> None:
    for name in NAMES:
        for shape in SHAPES:
            spec = replace(specs[name], **shape)
            for eps in (1e-12, 1e-3, 2.0):
                x, w, b = (
                    drawn(*size, dtype=dtype, seed=seed).requires_grad_()
                    for seed, size in enumerate([(2, 3, 6), (6,), (6,)])
                )
                dy = drawn(2, 3, 6, dtype=dtype, seed=3)
                y = norm(x, w, eps, spec, b)
                got = torch.autograd.grad(y, (x, w, b), dy.to(y.dtype))
                wanted = reference.rms_norm_backward(
                    dy.tolist(), x.tolist(), w.tolist(), eps, spec=spec
                )
                exact = dtype == torch.float64 and spec.accumulate == "input"
                unit = torch.finfo(dtype if exact or dtype != torch.float64 else torch.float32).eps
                for mine, want in zip(got, wanted, strict=True):
                    expected = torch.tensor(want, dtype=torch.float64)
                    close = {"rtol": 8 * unit, "atol": 16 * unit * float(expected.abs().max())}
                    torch.testing.assert_close(mine.double(), expected, **close)


def test_a_zero_row() -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    w, dy = torch.tensor([1.0, 2.0, -1.0, 0.5]), torch.tensor([[1.0, 1.0, 3.0, 2.0]])
    for spec, factor in [("torch", 1e2), ("original", 1e4), ("l2", 2e4), ("l2_sum", 1e2)]:
        y = norm(x, w, 1e-4, spec)
        assert torch.equal(y, torch.zeros(1, 4))
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(dx, dy * w * factor)
    assert norm(x.detach(), None, 0.0).isnan().all()


def test_infinite_and_nan_elements_stay_in_their_row() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[inf, 1.0], [3.0, 4.0], [nan, 1.0], [-inf, 2.0], [1e30, 1e30]])
    for dtype in DTYPES:
        y = norm(x.to(dtype), None, 1e-6)
        assert_same_bits(y[1], norm(x[1].to(dtype), None, 1e-6))
        assert y[[0, 3], 0].isnan().all()
        assert torch.equal(y[[0, 3], 1], torch.zeros(2, dtype=dtype))
        assert y[2].isnan().all()
        if dtype != torch.float16:
            assert torch.equal(y[4], torch.ones(2, dtype=dtype))


# -- rows whose squares leave the range -----------------------------------------------------------


@pytest.mark.parametrize("scale", EXTREMES)
@pytest.mark.parametrize("name", ["torch", "llama", "original", "l2", "l2_sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_out_of_range_is_redone(scale: float, name: str, shape: dict[str, Any]) -> None:
    spec = replace(specs[name], **shape)
    x = torch.stack([drawn(64), drawn(64, seed=1).clamp(-1, 1) * scale, drawn(64, seed=2)])
    w = drawn(64, seed=3)
    for dtype in (torch.float32, torch.bfloat16):
        for eps in (0.0, 1e-40, 1e-20, 1e-6):
            rows = x.to(dtype)
            y = norm(rows, w, eps, spec)
            exact = oracle.rms_norm(rows, w, eps, spec=spec)
            assert_same_bits(y[::2], norm(rows[::2], w, eps, spec))
            if y.dtype == torch.float32 and dtype == torch.bfloat16:
                assert torch.allclose(y[1], exact[1], rtol=2.0**-7, equal_nan=True)
            else:
                assert oracle.max_ulp(y[1], exact[1]) <= 2


def test_an_eager_row_out_of_range_is_not_what_it_should_be() -> None:
    """What the redo is for: without it these rows are 0 or far off, and no error is raised."""
    x = drawn(1, 64).clamp(-1, 1)
    for scale in (1e-22, 1e20):
        plain = F.rms_norm(x * scale, (64,), None, 0.0)
        exact = oracle.rms_norm(x * scale, None, 0.0)
        assert oracle.max_ulp(plain, exact) > 1000
        assert oracle.max_ulp(norm(x * scale, None, 0.0), exact) <= 2


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-150, 1e155, 1e200, 1e308])
@pytest.mark.parametrize("name", ["torch", "original", "l2", "l2_sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_float64_row_out_of_range_is_redone(
    scale: float, name: str, shape: dict[str, Any]
) -> None:
    spec = replace(specs[name], **shape)
    x = torch.stack([drawn(64), drawn(64, seed=1), drawn(64, seed=2)]).double().clamp(-1, 1)
    x[1] *= scale
    if scale < 1e-300:
        x[1, 0] = 3 * scale
    for eps in (0.0, 1e-310, 1e-300, 1e-6):
        y, exact = norm(x, None, eps, spec), oracle.rms_norm(x, None, eps, spec=spec)
        assert_same_bits(y[::2], norm(x[::2], None, eps, spec))
        assert oracle.max_ulp(y[1], exact[1]) <= 3


def test_the_extremes_of_a_row_may_lie_outside_its_mean_square() -> None:
    x = torch.tensor([[2.0**-490, 2.0**-490, 2.0**430, 2.0**-700]], dtype=torch.float64)
    y = norm(x, None, 0.0, NormSpec(partial=0.5))
    assert y.tolist() == [[1.0, 1.0, 2.0**920, 2.0**-210]]
    large = torch.tensor([[2.0**600, 2.0**600, 2.0**-400]], dtype=torch.float64)
    assert norm(large, None, 0.0, NormSpec(partial=0.6)).tolist() == [[1.0, 1.0, 2.0**-1000]]


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-15, 1e-12, 1e12, 1e15, 1e18, 1e20, 1e30])
@pytest.mark.parametrize("name", ["torch", "original", "l2", "l2_sum"])
def test_gradients_at_every_scale(scale: float, name: str) -> None:
    """Also where the squares are in range: there 1/sqrt has a cube in its derivative."""
    x = torch.stack([drawn(8), drawn(8, seed=1) * scale, drawn(8, seed=2)]).requires_grad_()
    dy = drawn(3, 8, seed=3)

    def f(x: Tensor) -> Tensor:
        return norm(x, None, 0.0, name)

    (dx,) = torch.autograd.grad(f(x), x, dy)
    wanted, _, _ = reference.rms_norm_backward(dy.tolist(), x.tolist(), None, 0.0, spec=name)
    assert dx.isfinite().all()
    expected = torch.tensor(wanted, dtype=torch.float64)
    error = (dx.double() - expected).abs() / expected.abs().amax(1, keepdim=True)
    assert float(error.max()) < 1e-6
    # Under a transform the redo is there for every row; it must not leak into the others.
    _, pull = torch.func.vjp(f, x.detach())
    torch.testing.assert_close(pull(dy)[0], dx, rtol=1e-6, atol=1e-6 * float(dx[1].abs().max()))


def test_a_device_without_float64_redoes_rows_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composite, "_has_float64", lambda device: False)
    for scale in EXTREMES:
        for name in ("torch", "original", "l2", "l2_sum"):
            for eps in (0.0, 1e-40, 1e-6):
                x = drawn(2, 64).clamp(-1, 1) * scale
                y = norm(x, None, eps, name)
                assert oracle.max_ulp(y, oracle.rms_norm(x, None, eps, spec=name)) <= 4


# -- autograd and the transforms ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "gemma", "original", "l2", "l2_sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradcheck(name: str, shape: dict[str, Any]) -> None:
    spec = replace(specs[name], accumulate="input", **shape)
    arguments = [
        drawn(*size, dtype=torch.float64, seed=seed).requires_grad_()
        for seed, size in enumerate([(2, 4), (4,), (4,)])
    ]

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return norm(x, w, 1e-3, spec, b)

    assert torch.autograd.gradcheck(f, arguments, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_vmap_has_the_bits_of_the_batch(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w = drawn(4, 5, 6, dtype=dtype), drawn(4, 6, dtype=dtype, seed=1)

        def f(x: Tensor, w: Tensor) -> Tensor:
            return norm(x, w, None, name)

        assert_same_bits(torch.func.vmap(f, (0, None))(x, w[0]), f(x, w[0]))
        assert_same_bits(torch.func.vmap(f, (1, None))(x, w[0]), f(x, w[0]).transpose(0, 1))
        each = torch.stack([f(x[i], w[i]) for i in range(4)])
        assert_same_bits(torch.func.vmap(f)(x, w), each)


def test_vmap_redoes_rows_too() -> None:
    x = torch.stack([drawn(8), drawn(8, seed=1) * 1e-30, drawn(8, seed=2) * 1e30])
    assert_same_bits(torch.func.vmap(lambda row: norm(row, None, 0.0))(x), norm(x, None, 0.0))


def test_jacobian() -> None:
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 4.0]], dtype=torch.float64)
    r = x.pow(2).mean(-1).rsqrt()
    xhat = x * r[:, None]
    expected = r[:, None, None] * (torch.diag(w) - (w * xhat)[:, :, None] * xhat[:, None, :] / 3.0)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        got = torch.func.vmap(jacobian(lambda row: norm(row, w, 0.0)))(x)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_forward_mode_gives_the_directional_derivative() -> None:
    x, t = drawn(3, 6, dtype=torch.float64), drawn(3, 6, dtype=torch.float64, seed=1)
    y, slope = torch.func.jvp(lambda x: norm(x, None, 1e-6), (x,), (t,))
    h = 1e-6
    numeric = (norm(x + h * t, None, 1e-6) - norm(x - h * t, None, 1e-6)) / (2 * h)
    assert_same_bits(y, norm(x, None, 1e-6))
    torch.testing.assert_close(slope, numeric, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["torch", "t5", "original", "l2"])
def test_compiles_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    x, w = drawn(4, 6).requires_grad_(), drawn(6, seed=1).requires_grad_()

    def f(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, w, None, name)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x, w), f(x, w)
    assert_same_bits(y, expected)
    for got, want in zip(
        torch.autograd.grad(y.sum(), (x, w)),
        torch.autograd.grad(expected.sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_one_compiled_graph_serves_every_batch_and_redoes_rows() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: norm(x, None, 0.0), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows, d in [(3, 6), (5, 40)]:
        x = drawn(rows, d)
        x[1] *= 1e-30
        x[2] *= 1e30
        assert_same_bits(compiled(x), norm(x, None, 0.0))


def test_inductor() -> None:
    torch._dynamo.reset()
    x, w = drawn(4, 64, dtype=torch.bfloat16), drawn(64, dtype=torch.bfloat16, seed=1)
    x[1] *= 1e-30
    compiled = torch.compile(lambda x, w: norm(x, w, 1e-40, "llama"), fullgraph=True)
    y, exact = compiled(x, w), oracle.rms_norm(x, w, 1e-40, spec="llama")
    assert oracle.max_ulp(y, exact) <= 2


def test_export_keeps_the_redo() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return norm(x, None, 0.0)

    program = torch.export.export(Norm(), (drawn(3, 8),)).run_decompositions()
    x = drawn(3, 8, seed=1)
    x[0] *= 1e-30
    assert_same_bits(program.module()(x), norm(x, None, 0.0))


@pytest.mark.parametrize("name", ["torch", "llama", "t5", "gemma", "l2"])
def test_meta_and_fake_tensors(name: str) -> None:
    for x_dtype, w_dtype in PAIRS[::3]:
        x, w = drawn(2, 3, 6, dtype=x_dtype).transpose(0, 1), drawn(6, dtype=w_dtype)
        real = norm(x, w, 0.0, name)
        with FakeTensorMode() as mode:
            fake = norm(mode.from_tensor(x), mode.from_tensor(w), 0.0, name)
        for y in (norm(x.to("meta"), w.to("meta"), 0.0, name), fake):
            assert (y.shape, y.dtype, y.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_keeps_the_redo() -> None:
    traced = torch.jit.trace(lambda x: norm(x, None, 0.0), (drawn(3, 8),), check_trace=False)
    x = drawn(3, 8, seed=1)
    x[0] *= 1e-30
    assert_same_bits(traced(x), norm(x, None, 0.0))


def test_a_graph_made_of_real_tensors_keeps_the_redo() -> None:
    graph = make_fx(lambda x: norm(x, None, 0.0))(drawn(3, 8))
    x = drawn(3, 8, seed=1)
    x[0] *= 1e-30
    assert_same_bits(graph(x), norm(x, None, 0.0))


def test_autocast_changes_nothing() -> None:
    for x_dtype, w_dtype in PAIRS:
        x, w = drawn(3, 33, dtype=x_dtype), drawn(33, dtype=w_dtype, seed=1)
        for name in NAMES:
            expected = norm(x, w, None, name)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert_same_bits(norm(x, w, None, name), expected)


def test_nothing_is_written_but_the_result() -> None:
    x, w, b = drawn(3, 8).requires_grad_(), drawn(8).requires_grad_(), drawn(8).requires_grad_()
    dy = drawn(3, 8, seed=4)
    before = copy.deepcopy([t.detach() for t in (x, w, b, dy)])
    norm(x, w, None, "torch", b).backward(dy)
    for tensor, kept in zip((x, w, b, dy), before, strict=True):
        assert torch.equal(tensor.detach(), kept)


# -- the oracle itself ----------------------------------------------------------------------------


def test_the_oracle_rounds_once() -> None:
    # A hair above the tie between 1 and 1 + 2**-7: float32 on the way would drop the hair.
    hair = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8], dtype=torch.float64)
    assert oracle.to_tensor(oracle.to_array(hair), torch.bfloat16).tolist() == [
        1 + 2.0**-7,
        1.0,
        1 + 2.0**-6,
    ]

    # Where NumPy or torch round in one step, over the whole range with its subnormal ends.
    power = drawn(20_000, dtype=torch.float64, seed=1) * 60
    values = drawn(20_000, dtype=torch.float64) * 2.0**power
    for dtype, name in [(torch.float32, "f4"), (torch.float16, "f2")]:
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(values.numpy().astype(name))
        assert_same_bits(oracle.to_tensor(values.numpy(), dtype), expected)
    single = values.float()
    assert_same_bits(oracle.to_tensor(oracle.to_array(single), torch.bfloat16), single.bfloat16())


def test_the_oracle_s_distances() -> None:
    for dtype in DTYPES:
        one = torch.ones(2, dtype=dtype)
        above = torch.nextafter(one, 2 * one) if dtype != torch.float16 else one + 2.0**-10
        assert oracle.ulp_distance(one, above).tolist() == [1, 1]
        assert oracle.max_ulp(one * 0.0, -one * 0.0) == 0
        assert oracle.max_ulp(one * math.nan, one * math.nan) == 0
        assert oracle.max_ulp(one * math.nan, one) == 2**62
        assert oracle.max_ulp(one, -one) > 2**14
        assert oracle.fraction_differing(one, torch.tensor([1.0, 2.0], dtype=dtype)) == 0.5


def test_the_oracle_s_float64_rows_are_exact() -> None:
    x = drawn(2, 17, dtype=torch.float64)
    y = oracle.rms_norm(x, None, 1e-6)
    for row, out in zip(x.tolist(), y.tolist(), strict=True):
        mean = sum(Fraction(v) ** 2 for v in row) / 17 + Fraction(1e-6)
        for v, result in zip(row, out, strict=True):
            exact = Fraction(v) ** 2 / mean
            half = Fraction(math.ulp(result)) / 2
            # |result| - half an ulp <= sqrt(exact) <= |result| + half an ulp
            assert (abs(Fraction(result)) - half) ** 2 <= exact
            assert exact <= (abs(Fraction(result)) + half) ** 2
