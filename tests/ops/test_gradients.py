"""The gradients of rms_norm against the oracle, and what they must not depend on or touch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
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
    check_gradients,
    compute_dtype,
    grid_hashes,
    needs_kernels,
    norm_gradients,
    other_isas,
    rows_of,
    same_bits,
    weight_of,
)
from rmsnorm import rms_norm, specs

SPECS = {
    **ALL_SPECS,
    "groups": replace(specs.torch, groups=4),
    "groups_llama": replace(specs.llama, groups=2),
    "groups_original": replace(specs.original, groups=3, offset=1.0),
}


def _drawn(dtype: torch.dtype, rows: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x and dy."""
    return rows_of(dtype, rows, d, seed + d), rows_of(dtype, rows, d, seed + d + 1)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_and_pair_of_dtypes(name: str, x_dtype: torch.dtype) -> None:
    spec = SPECS[name]
    for w_dtype in (None, *FLOATS):
        for d in (1, 5, 8, 16, 33, 70, 260) if spec.groups == 1 else (12, 24, 132, 768):
            for rows in (1, 4):
                x, dy = _drawn(x_dtype, rows, d)
                weight = None if w_dtype is None else weight_of(w_dtype, d, d)
                bias = weight_of(w_dtype or x_dtype, d, 1) if rows == 4 else None
                dy = dy.to(rms_norm(x[:0], weight, spec=spec).dtype)
                check_gradients(x, weight, dy, spec=spec, bias=bias)


LONGER = (127, 128, 129, 255, 257, 511, 513, 1023, 1025, 2048, 4099)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["torch", "llama", "gemma", "original", "partial"])
def test_every_width(name: str, dtype: torch.dtype) -> None:
    for d in (*range(1, 71), *LONGER):
        if dtype == torch.float64 and d > 1025:
            continue
        x, dy = _drawn(dtype, 3, d)
        check_gradients(x, weight_of(dtype, d, d), dy, spec=SPECS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["torch", "llama"])
def test_very_wide_rows(name: str, dtype: torch.dtype) -> None:
    x, dy = _drawn(dtype, 3, 65_537)
    check_gradients(x, weight_of(torch.float32, 65_537, 0), dy, spec=SPECS[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_number_of_rows(dtype: torch.dtype) -> None:
    step = 7 if dtype == torch.float64 else 1  # the oracle takes its time for float64
    for rows in (*range(0, 101, step), 127, 128, 129, 255, 257, 1025, 4097):
        for d in (1, 33) if rows < 18 else (8,):
            x, dy = _drawn(dtype, rows, d)
            weight, bias = weight_of(dtype, d, d), weight_of(torch.float32, d, 1)
            check_gradients(x, weight, dy, spec=specs.torch, bias=bias)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_several_dimensions(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (2, 3, 8), (16, 16)):
        d = math.prod(shape)
        x, dy = (t.view(6, *shape) for t in _drawn(dtype, 6, d))
        for weight in (weight_of(dtype, d, 2).view(shape), None):
            check_gradients(x, weight, dy, spec=specs.torch, ndim=len(shape))
        flat = norm_gradients(x.view(6, d), weight_of(dtype, d, 2), dy.view(6, d))
        found = norm_gradients(x, weight_of(dtype, d, 2).view(shape), dy)
        assert same_bits(flat[0], found[0].view(6, d))
        assert same_bits(flat[1], found[1].view(d))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["torch", "llama", "gemma", "original", "l2", "l2_sum", "partial"])
def test_rows_of_every_kind(name: str, dtype: torch.dtype) -> None:
    """Zeros in x or dy, and values so large or small that squares and cubes leave the range."""
    top = 65504.0 if dtype == torch.float16 else 1e30
    for d in (1, 2, 7, 8, 33, 130):
        x, dy = (t.clamp(-4, 4) for t in _drawn(dtype, 12, d))
        one = x.sign() + (x == 0)
        x[0] = 0.0
        dy[1] = 0.0
        x[2], dy[2] = 0.0, 0.0
        x[3] = one[3] * top
        x[4] = one[4] / top
        x[5] = x[5] / 4 * top
        x[6] = x[6] / top
        dy[7] = dy[7] / 4 * (1000.0 if dtype == torch.float16 else top)
        dy[8] = dy[8] / top
        x[9], dy[9] = x[9] / 4 * top, dy[9] / 4 * (1.0 if dtype == torch.float16 else top)
        x[10, d // 2] = top
        dy[10] *= 2.0
        for weight in (None, torch.ones(d, dtype=dtype), weight_of(dtype, d, d)):
            for eps in (1e-6, 1e-12, 1.0):
                check_gradients(x, weight, dy, eps, spec=SPECS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["torch", "original", "l2", "l2_sum"])
def test_rows_out_of_range_without_eps(name: str, dtype: torch.dtype) -> None:
    scales = (1e-38, 1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30, 1e38)
    for d in (1, 2, 8, 33):
        numbers, dy = (t.clamp(-2, 2) for t in _drawn(dtype, len(scales), d))
        x = (numbers.double() * torch.tensor(scales).double()[:, None]).to(dtype)
        for factor in (1.0, 1e-3, 1e3):
            check_gradients(x, weight_of(dtype, d, d), dy * factor, 0.0, spec=SPECS[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_width_one(dtype: torch.dtype) -> None:
    """dx = w dy eps / (x^2 + eps)^1.5, which the usual formula loses when x is large."""
    x = torch.logspace(-4, 4, 33, dtype=torch.float64).to(dtype)[:, None]
    dy = torch.linspace(1, 2, 33).to(dtype)[:, None]
    weight = torch.tensor([1.5], dtype=dtype)
    for eps in (1e-12, 1e-6, 1e-2, 1.0):
        found = check_gradients(x, weight, dy, eps, spec=specs.torch)[0]
        assert found is not None
        e = float(torch.tensor(eps, dtype=compute_dtype(dtype, specs.torch)))
        wide = x.double()
        exact = 1.5 * dy.double() * e / (wide.square() + e) ** 1.5
        if KERNELS:
            unit = max(torch.finfo(dtype).eps, torch.finfo(compute_dtype(dtype, specs.torch)).eps)
            assert_close_rows(found, exact.numpy(), unit)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["torch", "gemma", "original", "l2", "l2_sum", "groups"])
def test_rows_whose_gradient_cancels(name: str, dtype: torch.dtype) -> None:
    """dy * w along x: what reaches the row directly and through its norm is nearly the same."""
    spec = SPECS[name]
    for d in (4, 8, 32, 100, 1024):
        x = rows_of(dtype, 5, d, d)
        weight = 2.0 ** torch.randint(-1, 2, (d,)).to(dtype) - spec.offset
        along = (x.double() / (weight.double() + spec.offset)).to(dtype)
        tiny = rows_of(dtype, 5, d, 3)
        for amount in (0.0, 2.0**-24, 2.0**-20, 2.0**-12, 2.0**-6):
            dy = (along.double() + amount * tiny.double()).to(dtype)
            # To what it computes in: the rounding of dy itself would be what is left.
            x, dy = (t.to(compute_dtype(dtype, spec)).to(dtype) for t in (x, dy))
            for eps in (1e-6, 1e-2):
                check_gradients(x, weight, dy, eps, spec=spec)


def test_the_weight_gradient_of_many_equal_rows_is_exact() -> None:
    for dtype in FLOATS:
        ones = torch.ones(4096, 8, dtype=dtype)
        _, dweight, dbias = norm_gradients(ones, ones[0], ones, 0.0, bias=ones[0])
        assert torch.equal(dweight, torch.full((8,), 4096.0, dtype=dtype))
        assert torch.equal(dbias, dweight)


# Each gives a tensor of the shape asked for, in a layout of its own.
def _dense(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _transposed(t: Tensor) -> Tensor:
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def _stepped(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]


def _sliced(t: Tensor) -> Tensor:
    buffer = torch.full((*t.shape[:-1], t.shape[-1] + 5), torch.nan, dtype=t.dtype)
    return buffer[..., 3:-2].copy_(t)


def _shifted(t: Tensor) -> Tensor:
    return torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def _odd_stride_of_size_one(t: Tensor) -> Tensor:
    strides = [7 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.clone().as_strided(t.shape, strides)


def _expanded_rows(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def _expanded_columns(t: Tensor) -> Tensor:
    return t[..., :1].expand(t.shape)


def _one_number(t: Tensor) -> Tensor:
    return t.flatten()[0].expand(t.shape)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(_dense, _transposed, _stepped, _sliced, _shifted, _odd_stride_of_size_one),
    *(_expanded_rows, _expanded_columns, _one_number),
)
WEIGHT_LAYOUTS = (_dense, _stepped, _shifted, _one_number)
SHAPES = ((37,), (5, 16), (6, 1), (1, 21), (1, 4, 9), (3, 2, 33), (2, 1, 3, 8))


@pytest.mark.skipif(not KERNELS, reason="torch sums a permuted tensor in another order")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["torch", "llama", "original"])
def test_layouts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        d = shape[-1]
        x, dy = (t.view(shape) for t in _drawn(dtype, math.prod(shape[:-1]), d))
        weight = weight_of(dtype, d, d)
        for x_layout in LAYOUTS:
            for dy_layout in LAYOUTS:
                for w_layout in WEIGHT_LAYOUTS if dy_layout is _transposed else (_dense,):
                    views = x_layout(x), w_layout(weight), dy_layout(dy)
                    found = norm_gradients(*views, spec=name)
                    expected = norm_gradients(*map(_dense, views), spec=name)
                    for a, b in zip(found[:2], expected[:2], strict=True):
                        assert same_bits(a, b), (shape, x_layout, dy_layout, w_layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_incoming_gradient_at_any_element(dtype: torch.dtype) -> None:
    for d in (1, 3, 8, 17, 64, 129):
        x, dy = _drawn(dtype, 5, d)
        weight = weight_of(dtype, d, d)
        expected = norm_gradients(x, weight, dy)
        for offset in range(1, 8):
            buffers = [torch.full((t.numel() + 16,), torch.nan, dtype=dtype) for t in (x, dy)]
            views = [
                b[k : k + t.numel()].view(t.shape).copy_(t)
                for b, t, k in zip(buffers, (x, dy), (3 * offset % 8, offset), strict=True)
            ]
            before = [b.clone() for b in buffers]
            found = norm_gradients(views[0], weight, views[1])
            assert all(same_bits(a, b) for a, b in zip(found[:2], expected[:2], strict=True))
            assert all(same_bits(a, b) for a, b in zip(buffers, before, strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_only_what_is_needed_and_always_the_same_bits(dtype: torch.dtype) -> None:
    for name in ("torch", "llama", "l2"):
        for rows, d in ((1, 8), (5, 33), (300, 16)):
            x, dy = _drawn(dtype, rows, d)
            weight, bias = weight_of(dtype, d, d), weight_of(torch.float32, d, 1)
            whole = norm_gradients(x, weight, dy, bias=bias, spec=name)
            for mask in range(1, 7):
                needs = [bool(mask & 1), bool(mask & 2), bool(mask & 4)]
                found = norm_gradients(x, weight, dy, bias=bias, spec=name, needs=needs)
                for need, one, other in zip(needs, found, whole, strict=True):
                    assert (one is not None) == need
                    assert one is None or same_bits(one, other)


def _split_cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for rows, d in ((4097, 33), (1025, 512), (2049, 1), (300, 70), (7, 4099), (2, 65_537)):
            yield (*_drawn(dtype, rows, d), weight_of(dtype, d, d))


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    threads = torch.get_num_threads()
    try:
        for x, dy, weight in _split_cases():
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(norm_gradients(x, weight, dy, bias=weight))
            for other in results[1:]:
                assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_a_row_does_not_know_its_batch() -> None:
    for dtype in FLOATS:
        for name in ("torch", "llama", "original"):
            for d in (1, 3, 8, 17, 64, 129, 576):
                x, dy = _drawn(dtype, 600, d)
                weight = weight_of(dtype, d, d)
                whole = norm_gradients(x, weight, dy, spec=name)[0]
                for start, rows in ((0, 1), (341, 1), (599, 1), (100, 7), (512, 64)):
                    part = slice(start, start + rows)
                    alone = norm_gradients(x[part], weight, dy[part], spec=name)[0]
                    assert same_bits(alone, whole[part]), (dtype, name, d, start)


@needs_kernels
def test_the_weight_gradient_depends_on_the_rows_alone() -> None:
    """The bits of a column do not change with the columns beside it or how they are laid out."""
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = _drawn(dtype, 777, 8)
        expected = norm_gradients(x, torch.ones(8), dy, 0.0)[1]
        # Twice the row has the mean square of the row itself.
        found = norm_gradients(x.repeat(1, 2), torch.ones(16), dy.repeat(1, 2), 0.0)[1]
        assert same_bits(found, expected.repeat(2))
        deep = norm_gradients(x.view(7, 3, 37, 8), torch.ones(8), dy.view(7, 3, 37, 8), 0.0)[1]
        assert same_bits(deep, expected)


@needs_kernels
def test_instruction_sets_and_threads() -> None:
    grid = Path(__file__).with_name("gradient_grid.py")
    usual = grid_hashes(grid, None, 2)
    assert len(usual) > 60
    others = {"1 thread": grid_hashes(grid, None, 1)}
    others |= {isa: grid_hashes(grid, isa, 2) for isa in other_isas()}
    for name, other in others.items():
        assert other.keys() == usual.keys()
        assert not [case for case in usual if usual[case] != other[case]], name


def test_nothing_that_is_not_an_output_is_written() -> None:
    for dtype in FLOATS:
        for d in (1, 8, 100):
            x, dy = _drawn(dtype, 6, d)
            weight, bias = weight_of(dtype, d, d), weight_of(dtype, d, 1)
            given = (x, weight, dy, bias)
            before = [t.clone() for t in given]
            found = norm_gradients(x, weight, dy, bias=bias)
            assert all(same_bits(a, b) for a, b in zip(given, before, strict=True))
            storages = {t.untyped_storage().data_ptr() for t in given}
            mine = [t.untyped_storage().data_ptr() for t in found]
            assert len({*mine, *storages}) == len(mine) + len(storages)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_are_not_finite_stay_alone(dtype: torch.dtype) -> None:
    for name in ("torch", "llama", "original", "l2", "l2_sum"):
        for d in (1, 2, 7, 8, 33):
            clean, dy = _drawn(dtype, 9, d)
            weight = weight_of(dtype, d, d)
            expected = norm_gradients(clean, weight, dy, spec=name)[0]
            for position in {0, d // 2, d - 1}:
                x, incoming = clean.clone(), dy.clone()
                x[1, position], x[3, position], x[4, position] = torch.nan, torch.inf, -torch.inf
                incoming[6, position] = torch.nan
                dx, dweight, _ = norm_gradients(x, weight, incoming, spec=name)
                for row in (0, 2, 5, 7, 8):
                    assert same_bits(dx[row], expected[row])
                assert dx[[1, 6]].isnan().all()
                assert dx[[3, 4]].isnan().any(-1).all()
                assert dweight.isnan().any()


def _saved(f: Callable[[], Tensor]) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f()
    return saved


@needs_kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_saved(dtype: torch.dtype) -> None:
    for name, spec in SPECS.items():
        x = rows_of(dtype, 5, 24, 0).view(5, 1, 24).requires_grad_()
        weight, bias = (weight_of(torch.float32, 24, s).requires_grad_() for s in (0, 1))
        saved = _saved(lambda x=x, w=weight, b=bias, s=spec: rms_norm(x, w, spec=s, bias=b))
        (rstd,) = [t for t in saved if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
        assert len(saved) == 3, name
        assert rstd.shape == (5, 1, spec.groups)
        assert rstd.dtype == compute_dtype(dtype, spec)


def test_nothing_is_saved_without_a_gradient() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8, requires_grad=True)
    with torch.no_grad():
        assert not _saved(lambda: rms_norm(x, weight))
    assert not _saved(lambda: rms_norm(x, weight.detach()))
    assert _saved(lambda: rms_norm(x, weight))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_half_gradient_is_rounded_once(dtype: torch.dtype) -> None:
    """Element by element, where dy lies across x and so nothing cancels."""
    x = torch.ones(8, 64, dtype=dtype)
    x[:, 32:] = -1.0
    dy = rows_of(dtype, 8, 32, 0).clamp(-4, 4).repeat(1, 2)
    for name in ("torch", "gemma"):
        weight = weight_of(dtype, 32, 0).repeat(2)
        dx = norm_gradients(x, weight, dy, spec=name)[0]
        exact = oracle.rms_norm_backward(dy, x, weight, spec=name).dx
        assert oracle.max_ulp(dx, oracle.to_tensor(exact, dtype)) <= 1
        assert np.isfinite(exact).all()
