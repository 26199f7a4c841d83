"""add_rms_norm: the bits of two operations in one, its gradients, and its in-place form."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from calls import (
    ALL_SPECS,
    FLOATS,
    HALVES,
    KERNELS,
    assert_close_rows,
    assert_sums,
    compute_dtype,
    gradients,
    row_norms,
    rows_of,
    same_bits,
    weight_of,
)
from rmsnorm import add_rms_norm, rms_norm, specs

SPECS = {**ALL_SPECS, "groups": replace(specs.torch, groups=3)}
PAIRS = list(itertools.product(FLOATS, FLOATS))
ALPHAS = (1.0, 0.5, 0.22, -3.7)


def _drawn(x_dtype: torch.dtype, r_dtype: torch.dtype, rows: int, d: int) -> tuple[Tensor, Tensor]:
    return rows_of(x_dtype, rows, d, d), rows_of(r_dtype, rows, d, d + 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_bits_of_add_and_norm(name: str, dtype: torch.dtype) -> None:
    for d in (3, 9, 24, 48, 195, 1032):
        x, residual = _drawn(dtype, dtype, 5, d)
        for weight in (None, weight_of(dtype, d, d), weight_of(torch.float32, d, d)):
            # torch.add rounds alpha to a half type, but not for the last elements of a tensor.
            for alpha in ALPHAS[:2] if dtype in HALVES else ALPHAS:
                y, h = add_rms_norm(x, residual, weight, spec=SPECS[name], alpha=alpha)
                expected = torch.add(residual, x, alpha=alpha)
                assert same_bits(h, expected)
                assert same_bits(y, rms_norm(expected, weight, spec=SPECS[name]))


@pytest.mark.parametrize(("x_dtype", "r_dtype"), PAIRS, ids=str)
def test_the_sum_is_rounded_once(x_dtype: torch.dtype, r_dtype: torch.dtype) -> None:
    for d in (1, 7, 40, 133):
        x, residual = _drawn(x_dtype, r_dtype, 4, d)
        for alpha in ALPHAS:
            for h_dtype in (None, *FLOATS):
                options = {"alpha": alpha, "residual_dtype": h_dtype}
                y, h = add_rms_norm(x, residual, **options)
                exact_y, exact_h = oracle.add_rms_norm(x, residual, **options)
                assert same_bits(h, exact_h), (d, alpha, h_dtype)
                in_float32 = y.dtype == torch.float64 and h.dtype != torch.float64
                limit = 1 if x_dtype in HALVES else 2**31 if in_float32 else 4
                assert oracle.max_ulp(y, exact_y) <= limit


@pytest.mark.parametrize("x_dtype", HALVES, ids=str)
def test_a_residual_kept_in_float32(x_dtype: torch.dtype) -> None:
    """What the spec calls x's dtype is that of x, not that of the residual."""
    for r_dtype in (x_dtype, torch.float32):
        x, residual = _drawn(x_dtype, r_dtype, 6, 96)
        weight = weight_of(x_dtype, 96, 0)
        wide = torch.add(residual.float(), x.float(), alpha=0.22)
        options: dict[str, Any] = {"alpha": 0.22, "residual_dtype": torch.float32}
        y, h = add_rms_norm(x, residual, weight, **options)
        assert same_bits(h, wide)
        assert same_bits(y, rms_norm(wide, weight).to(x_dtype))
        y, h = add_rms_norm(x, residual, weight, spec="llama", **options)
        assert same_bits(h, wide)
        xhat = rms_norm(wide, spec="llama").to(x_dtype)
        assert same_bits(y, xhat * weight)


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    dy: Tensor | None,
    dh: Tensor | None,
    *,
    needs: tuple[bool, ...] = (True, True, True),
    **options: Any,
) -> None:
    """The gradients that are needed, against the oracle's of the norm of the sum."""
    spec = SPECS[options.pop("spec", "torch")]
    alpha = options.get("alpha", 1.0)

    def f(x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, spec=spec, **options)

    with torch.no_grad():
        y, h = f(x, residual, weight)
    found = gradients(f, (x, residual, weight), (dy, dh), needs)
    compute = compute_dtype(h.dtype, spec)
    coarse = max(torch.finfo(t.dtype).eps for t in (x, residual, h, y, weight) if t is not None)
    exact = oracle.rms_norm_backward(
        torch.zeros_like(y) if dy is None else dy.to(y.dtype), h, weight, spec=spec
    )
    total = exact.dx if dh is None else exact.dx + oracle.to_array(dh.to(h.dtype))
    parts = exact.dx_size if dh is None else exact.dx_size + abs(oracle.to_array(dh))
    for gradient, given, need, factor in zip(
        found[:2], (x, residual), needs, (alpha, 1.0), strict=False
    ):
        assert (gradient is not None) == need
        if gradient is not None:
            assert (gradient.dtype, gradient.shape) == (given.dtype, given.shape)
            unit = max(torch.finfo(t).eps for t in (given.dtype, h.dtype, compute))
            wider = unit if KERNELS else 4 * max(unit, coarse)
            slack = wider * row_norms(parts * factor)
            assert_close_rows(gradient, total * factor, unit, slack)
    dweight = found[2]
    if weight is not None and dy is not None and needs[2]:
        assert dweight is not None
        assert dweight.dtype == weight.dtype
        relative = 1e-6 if compute == torch.float32 else 1e-14
        if not KERNELS and spec.rounding != "after_weight":
            relative = max(relative, coarse)
        assert_sums(dweight, exact.dweight, exact.dweight_size, relative)
    else:
        assert dweight is None or not dweight.any()


USED = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("used", USED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_every_spec(name: str, dtype: torch.dtype, used: tuple[bool, bool]) -> None:
    for d in (3, 24, 99):
        x, residual = _drawn(dtype, dtype, 4, d)
        dy, dh = (rows_of(torch.float32, 4, d, d + 2 + i) if used[i] else None for i in range(2))
        for weight in (weight_of(dtype, d, d), None):
            _check(x, residual, weight, dy, dh, spec=name)


@pytest.mark.parametrize(("x_dtype", "r_dtype"), PAIRS, ids=str)
def test_gradients_of_mixed_dtypes(x_dtype: torch.dtype, r_dtype: torch.dtype) -> None:
    x, residual = _drawn(x_dtype, r_dtype, 5, 33)
    weight = weight_of(torch.float32, 33, 0)
    dy, dh = rows_of(torch.float32, 5, 33, 1), rows_of(torch.float32, 5, 33, 2)
    for name in ("torch", "llama"):
        for alpha in (1.0, 0.22):
            for h_dtype in (None, torch.float32, torch.bfloat16):
                options = {"spec": name, "alpha": alpha, "residual_dtype": h_dtype}
                _check(x, residual, weight, dy, dh, **options)
                _check(x, residual, weight, None, dh, **options)


@pytest.mark.parametrize("used", USED, ids=str)
def test_frozen_inputs(used: tuple[bool, bool]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = _drawn(dtype, dtype, 5, 33)
        weight = weight_of(dtype, 33, 0)
        dy, dh = (rows_of(dtype, 5, 33, i) if used[i] else None for i in range(2))
        inputs, dys = (x, residual, weight), (dy, dh)
        whole = gradients(add_rms_norm, inputs, dys)
        for needs in itertools.product((True, False), repeat=3):
            if not any(needs) or (needs == (False, False, True) and dy is None):
                continue
            _check(x, residual, weight, dy, dh, needs=needs)
            for one, other in zip(gradients(add_rms_norm, inputs, dys, needs), whole, strict=True):
                assert one is None or same_bits(one, other)


def test_the_gradient_of_the_sum_alone_is_passed_on() -> None:
    for dtype in FLOATS:
        x, residual = _drawn(dtype, dtype, 5, 33)
        dh = rows_of(dtype, 5, 33, 0)
        before = dh.clone()
        for alpha in (1.0, 0.5):

            def f(x: Tensor, residual: Tensor, alpha: float = alpha) -> tuple[Tensor, Tensor]:
                return add_rms_norm(x, residual, alpha=alpha)

            dx, dresidual = gradients(f, (x, residual), (None, dh))
            assert same_bits(dx, alpha * dh)
            assert same_bits(dresidual, dh)
        assert same_bits(dh, before)


def test_gradients_share_no_memory_that_is_written() -> None:
    x, residual = _drawn(torch.float32, torch.float32, 4, 16)
    dy, dh = rows_of(torch.float32, 4, 16, 0), rows_of(torch.float32, 4, 16, 1)
    leaves = [t.clone().requires_grad_() for t in (x, residual)]
    before = dy.clone(), dh.clone()
    torch.autograd.backward(add_rms_norm(*leaves), (dy, dh))
    kept = leaves[1].grad.clone()
    with torch.no_grad():
        leaves[0].grad.zero_()
    assert same_bits(leaves[1].grad, kept)
    assert same_bits(dy, before[0])
    assert same_bits(dh, before[1])


def _layouts(t: Tensor) -> list[Tensor]:
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), torch.nan, dtype=t.dtype)
    shifted = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype)[1:].view(t.shape)
    return [
        t,
        t.transpose(0, -1).contiguous().transpose(0, -1),
        wide[..., 3::2].copy_(t),
        wide.clone()[..., 1 : t.shape[-1] + 1].copy_(t),
        shifted.copy_(t),
        t[:1].expand(t.shape),
        t.flatten()[0].expand(t.shape),
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layouts_change_no_bit(dtype: torch.dtype) -> None:
    for shape in ((17,), (4, 9), (3, 2, 16)):
        count, d = torch.Size(shape).numel() // shape[-1], shape[-1]
        drawn = [rows_of(dtype, count, d, seed).view(shape) for seed in range(4)]
        weight = weight_of(dtype, d, 0)
        stepped = torch.stack([weight, -weight], -1)[:, 0]
        for x, residual in itertools.product(*map(_layouts, drawn[:2])):
            y, h = add_rms_norm(x, residual, stepped)
            expected = add_rms_norm(x.contiguous(), residual.contiguous(), weight)
            assert y.is_contiguous()
            assert h.is_contiguous()
            assert same_bits(y, expected[0])
            assert same_bits(h, expected[1])
        if not KERNELS:
            continue  # torch sums a permuted tensor in another order
        inputs = (*drawn[:2], weight)
        for dy, dh in itertools.product(*map(_layouts, drawn[2:])):
            views = [_layouts(t)[2] for t in drawn[:2]]
            found = gradients(add_rms_norm, (*views, stepped), (dy, dh))
            dense = gradients(add_rms_norm, inputs, (dy.contiguous(), dh.contiguous()))
            for a, b in zip(found, dense, strict=True):
                assert same_bits(a, b)


class TestInPlace:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("name", ["torch", "llama", "gemma", "l2", "groups"])
    def test_the_bits_of_the_other_form(self, name: str, dtype: torch.dtype) -> None:
        for d in (3, 24, 129):
            x, residual = _drawn(dtype, dtype, 5, d)
            weight = weight_of(dtype, d, 0)
            for alpha in (1.0, 0.22):
                options = {"spec": SPECS[name], "alpha": alpha}
                expected = add_rms_norm(x, residual, weight, **options)
                for layout in range(5):  # the others are expanded
                    a, b = _layouts(x)[layout].clone(), _layouts(residual)[layout].clone()
                    versions = a._version, b._version
                    y, h = add_rms_norm(a, b, weight, inplace=True, **options)
                    assert y is a
                    assert h is b
                    assert a._version > versions[0]
                    assert b._version > versions[1]
                    assert same_bits(a, expected[0])
                    assert same_bits(b, expected[1])

    def test_only_the_views_are_written(self) -> None:
        buffers = [torch.full((5, 20), 7.0) for _ in range(2)]
        x, residual = (b[:, 3:16:2].normal_() for b in buffers)
        expected = add_rms_norm(x.clone(), residual.clone())
        assert add_rms_norm(x, residual, inplace=True)[0] is x
        assert same_bits(x, expected[0])
        assert same_bits(residual, expected[1])
        for buffer in buffers:
            buffer[:, 3:16:2] = 7.0
            assert bool((buffer == 7.0).all())

    def test_a_wider_residual(self) -> None:
        x, residual = _drawn(torch.bfloat16, torch.float32, 5, 24)
        expected = add_rms_norm(x, residual, residual_dtype=torch.float32)
        y, h = add_rms_norm(x, residual, residual_dtype=torch.float32, inplace=True)
        assert same_bits(y, expected[0])
        assert same_bits(h, expected[1])

    def test_refused(self) -> None:
        x, residual = torch.ones(4, 8), torch.ones(4, 8)
        half = torch.ones(4, 8, dtype=torch.bfloat16)
        memory = torch.ones(64)
        for error, words, arguments, options in (
            # llama with a float32 weight has a float32 result: that does not fit into x.
            (TypeError, "bfloat16", (half, half.clone(), torch.ones(8)), {"spec": "llama"}),
            (TypeError, "bfloat16", (x, half), {"residual_dtype": torch.float32}),
            (RuntimeError, "overlap", (x, x), {}),
            (RuntimeError, "overlap", (memory[:32].view(4, 8), memory[8:40].view(4, 8)), {}),
            (RuntimeError, "expanded", (torch.ones(8).expand(4, 8), residual), {}),
            (RuntimeError, "expanded", (x, torch.ones(4, 1).expand(4, 8)), {}),
            (RuntimeError, "gradient|derivative", (x.clone().requires_grad_(), residual), {}),
            (RuntimeError, "gradient|derivative", (x, residual.clone().requires_grad_()), {}),
            (
                RuntimeError,
                "gradient|derivative",
                (x, residual, torch.ones(8, requires_grad=True)),
                {},
            ),
        ):
            before = [t.clone() for t in arguments]
            with pytest.raises(error, match=words):
                add_rms_norm(*arguments, **options, inplace=True)
            assert all(same_bits(a, b) for a, b in zip(arguments, before, strict=True))
        with torch.no_grad():
            weight = torch.ones(8, requires_grad=True)
            assert add_rms_norm(x, residual, weight, inplace=True)[0] is x


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_refused(needs_gradient: bool) -> None:
    x = torch.ones(2, 3, 8, requires_grad=needs_gradient)
    for error, words, arguments in (
        (ValueError, r"(?s)\(2, 3, 8\).*\(2, 3, 4\)", (x, torch.ones(2, 3, 4))),
        (ValueError, r"(?s)\(2, 3, 8\).*\(8,\)", (x, torch.ones(8))),
        (ValueError, r"(?s)\(2, 3, 8\).*\(1, 3, 8\)", (x, torch.ones(1, 3, 8))),
        (ValueError, r"(?s)\(7,\).*\(8,\)", (x, x, torch.ones(7))),
        (ValueError, r"\(\)", (torch.tensor(1.0), torch.tensor(1.0))),
        (ValueError, "eps is -1", (x, x, None, -1.0)),
        (TypeError, "residual is torch.int64", (x, torch.ones(2, 3, 8).long())),
        (TypeError, "weight is torch.int64", (x, x, torch.ones(8).long())),
        (TypeError, "residual is a list", (x, [1.0])),
        (TypeError, "x is a list", ([1.0], x)),
        (RuntimeError, "(?s)meta.*cpu|cpu.*meta", (x, torch.ones(2, 3, 8, device="meta"))),
        (RuntimeError, "(?s)meta.*cpu|cpu.*meta", (x, x, torch.ones(8, device="meta"))),
    ):
        with pytest.raises(error, match=words):
            add_rms_norm(*arguments)
    for error, words, options in (
        (ValueError, "lamma", {"spec": "lamma"}),
        (ValueError, "gate", {"spec": "mamba2"}),
        (ValueError, "3 equal groups", {"spec": replace(specs.torch, groups=3)}),
        (TypeError, "int64", {"residual_dtype": torch.int64}),
    ):
        with pytest.raises(error, match=words):
            add_rms_norm(x, x, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_empty_and_other_shapes(dtype: torch.dtype) -> None:
    for shape in ((0,), (0, 8), (3, 0), (2, 0, 4), (8,), (1, 8), (2, 1, 3, 1, 8)):
        x = rows_of(dtype, torch.Size(shape[:-1]).numel(), shape[-1], 0).view(shape)
        residual = torch.ones_like(x)
        weight = weight_of(dtype, shape[-1], 0)
        y, h = add_rms_norm(x, residual, weight)
        assert same_bits(h, x + residual)
        assert same_bits(y, rms_norm(h, weight))
        found = gradients(add_rms_norm, (x, residual, weight), (torch.ones_like(y), x))
        assert [t.shape for t in found] == [x.shape, x.shape, weight.shape]
        assert not found[2].isnan().any()
    x = rows_of(dtype, 6, 12, 0).view(6, 3, 4)
    weight = weight_of(dtype, 12, 0).view(3, 4)
    y, h = add_rms_norm(x, x, weight)
    assert same_bits(y, rms_norm(x + x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_out_of_range(dtype: torch.dtype) -> None:
    scales = torch.tensor([1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 1e38])[:, None]
    for d in (1, 8, 33):
        x = ((1.0 + torch.rand(7, d)) * scales).to(dtype)
        residual = ((1.0 + torch.rand(7, d)) * scales).to(dtype)
        for eps in (0.0, 1e-6):
            y, h = add_rms_norm(x, residual, None, eps)
            exact, exact_h = oracle.add_rms_norm(x, residual, None, eps)
            assert same_bits(h, exact_h)
            assert oracle.max_ulp(y, exact) <= 4
    cancelling = rows_of(dtype, 5, 17, 0)
    y, h = add_rms_norm(cancelling, -cancelling, None, 1e-6)
    assert not h.any()
    assert not y.any()
    top = torch.full((2, 4), torch.finfo(dtype).max, dtype=dtype)
    y, h = add_rms_norm(top, top)
    assert h.isinf().all()
    assert y.isnan().all()


def test_what_is_saved() -> None:
    x, residual = (t.requires_grad_() for t in _drawn(torch.bfloat16, torch.bfloat16, 5, 24))
    weight = torch.ones(24, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, h = add_rms_norm(x, residual, weight)
    if KERNELS:
        rest = [t for t in saved if t.data_ptr() not in (h.data_ptr(), weight.data_ptr())]
        assert [tuple(t.shape) for t in rest] == [(5, 1)]
        assert len(saved) == 3
        y, h = add_rms_norm(x, residual, weight)  # the hooks above look away
        h.detach().add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    saved.clear()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        add_rms_norm(x, residual, weight)
    assert not saved
