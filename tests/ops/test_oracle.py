"""Against an oracle in higher precision that rounds where the spec rounds, and nowhere else.

Half types: at most 1 unit in the last place at each rounding of the spec; float32 and float64: at
most 4 on random rows, 2 on rows that are computed again because their squares left the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from calls import ALL_SPECS, FLOATS, HALVES, normalise, rows_of, same_bits, weight_of
from rmsnorm import NormSpec, cpu_isa, rms_norm, specs

SPEC_NAMES = tuple(ALL_SPECS)


def _allowed(y: torch.dtype, x: torch.dtype, spec: NormSpec) -> int:
    """Units of ``y`` in the last place."""
    if y in HALVES:
        return 1
    in_float32 = x != torch.float64 or spec.accumulate == "float32"
    return 4 * 2**29 if y == torch.float64 and in_float32 else 4


def _multiply_ulps(y: torch.dtype, x: torch.dtype, w: torch.dtype | None, spec: NormSpec) -> int:
    """As above for one step after xhat, which is taken in float32 or in float64."""
    in_float64 = (
        (x == torch.float64 and spec.accumulate == "input")
        or (w == torch.float64 and spec.offset == 0.0)
        or (x == torch.float64 and spec.rounding == "before_weight")
    )
    return 2**29 if y == torch.float64 and not in_float64 else 1


def _rounded_first(spec: NormSpec, x: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """The half type to which the spec rounds xhat before it meets the weight."""
    if weight is None or spec.rounding == "after_weight":
        return None
    first = x.dtype if spec.rounding == "before_weight" else weight.dtype
    return first if first in HALVES else None


class Checker:
    """Compares with the oracle, and counts what differs by more than 1 after two roundings."""

    def __init__(self) -> None:
        self.elements = 0
        self.beyond_one = 0

    def __call__(
        self, x: Tensor, weight: Tensor | None, spec: NormSpec, eps: float | None = None
    ) -> None:
        y = rms_norm(x, weight, eps, spec=spec)
        exact = oracle.rms_norm(x, weight, eps, spec=spec)
        what = (x.dtype, None if weight is None else weight.dtype, tuple(x.shape), spec)
        first = _rounded_first(spec, x, weight)
        if first is None:
            assert oracle.max_ulp(y, exact) <= _allowed(y.dtype, x.dtype, spec), what
            return
        # The first rounding shows through a weight that changes nothing.
        assert weight is not None
        neutral = torch.full_like(weight, 1.0 - spec.offset)
        wide = rms_norm(x, neutral, eps, spec=spec)
        xhat = wide.to(first)
        assert same_bits(xhat.to(wide.dtype), wide), what
        exact_xhat = oracle.rms_norm(x, neutral, eps, spec=spec).to(first)
        assert oracle.max_ulp(xhat, exact_xhat) <= 1, what
        # The second, from there.
        factor = weight.float() + spec.offset if spec.offset else weight
        product = oracle.to_array(xhat) * oracle.to_array(factor)
        limit = _multiply_ulps(y.dtype, x.dtype, weight.dtype, spec)
        assert oracle.max_ulp(y, oracle.to_tensor(product, y.dtype)) <= limit, what
        if y.dtype in HALVES:
            far = oracle.ulp_distance(y, exact)
            assert int(far.max()) <= 2, what
            self.elements += far.numel()
            self.beyond_one += int((far > 1).sum())


@contextmanager
def checker() -> Iterator[Checker]:
    check = Checker()
    with torch.no_grad():
        yield check
    assert check.beyond_one <= check.elements / 10_000


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_width(dtype: torch.dtype, part: int) -> None:
    """Widths 1 to 4099, with the specs in turn; the weight has x's dtype or float32."""
    longest = {w: weight_of(w, 4099, 1) for w in {dtype, torch.float32}}
    # Oracle rows of float64 are slow: two rows there, and a sixth of the wide ones.
    with checker() as check:
        for d in range(1 + part, 4100, 4):
            if dtype == torch.float64 and d > 600 and d // 4 % 6:
                continue
            spec = ALL_SPECS[SPEC_NAMES[d // 4 % len(SPEC_NAMES)]]
            x = rows_of(dtype, 2, d, d)
            check(x, longest[dtype if d // 4 % 3 else torch.float32][:d], spec)


@pytest.mark.parametrize("name", SPEC_NAMES)
def test_every_spec_and_dtype(name: str) -> None:
    with checker() as check:
        for x_dtype in FLOATS:
            for w_dtype in (None, *FLOATS):
                for d in (1, 2, 7, 8, 31, 33, 100, 513):
                    x = rows_of(x_dtype, 4, d, d)
                    check(x, None if w_dtype is None else weight_of(w_dtype, d, d), ALL_SPECS[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groups_and_partial(dtype: torch.dtype) -> None:
    with checker() as check:
        for base in (specs.torch, specs.llama, specs.original, specs.l2):
            for groups in (2, 3, 8, 24):
                for part in (1, 5, 8, 65):
                    d = groups * part
                    spec = replace(base, groups=groups)
                    check(rows_of(dtype, 3, d, d), weight_of(dtype, d, d), spec)
            for partial in (0.01, 0.0625, 0.5, 0.999):
                for d in (1, 9, 64, 257):
                    spec = replace(base, partial=partial)
                    check(rows_of(dtype, 3, d, d), weight_of(dtype, d, d), spec)


@pytest.mark.parametrize("name", SPEC_NAMES)
@pytest.mark.parametrize("weighted", [True, False])
def test_bias(name: str, weighted: bool) -> None:
    spec = ALL_SPECS[name]
    for x_dtype in FLOATS:
        for other in FLOATS:
            x, bias = rows_of(x_dtype, 4, 77, 3), weight_of(other, 77, 9)
            weight = weight_of(other, 77, 5) if weighted else None
            y = normalise(x, weight, spec=spec, bias=bias)
            before = normalise(x, weight, spec=spec)
            assert y.dtype == before.dtype
            if spec.rounding == "after_weight":
                # One rounding of a sum in which terms may cancel: units of the larger term.
                exact = oracle.to_array(oracle.rms_norm(x, weight, spec=spec, bias=bias))
                narrower = torch.finfo(y.dtype).eps
                if x_dtype != torch.float64 or spec.accumulate == "float32":
                    narrower = max(narrower, 2.0**-23)
                unit = 2 * narrower * (abs(oracle.to_array(before)) + abs(oracle.to_array(bias)))
                assert (abs(oracle.to_array(y) - exact) <= unit).all()
            else:
                total = oracle.to_array(before) + oracle.to_array(bias)
                limit = _multiply_ulps(y.dtype, x_dtype, other if weighted else None, spec)
                assert oracle.max_ulp(y, oracle.to_tensor(total, y.dtype)) <= limit


@pytest.mark.parametrize("d", [65_537, 1_000_003])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_very_wide_rows(dtype: torch.dtype, d: int) -> None:
    names = ("torch", "llama", "original", "partial") if d < 10**6 else ("torch", "llama")
    with checker() as check:
        for name in names if dtype != torch.float64 else names[:1]:
            check(rows_of(dtype, 2, d, d), weight_of(dtype, d, d), ALL_SPECS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_very_wide_single_row_has_the_bits_it_has_in_a_batch(dtype: torch.dtype) -> None:
    for d in (2**15, 65_537, 1_000_003):
        x, weight = rows_of(dtype, 2, d, d), weight_of(dtype, d, d)
        assert same_bits(normalise(x[:1], weight), normalise(x, weight)[:1])


# From the smallest subnormal up, past the range in which squares are finite and normal.
SCALES = (1e-45, 3e-42, 1e-38, 1e-30, 1e-23, 1e-20, 1e-17, 1e-12, 1e-5, 1e5, 1e18, 2e19, 1e30, 3e37)
REDO_SPECS = ("torch", "llama", "gemma", "olmo2", "original", "l2", "l2_sum", "partial")


@pytest.mark.parametrize("name", REDO_SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_out_of_range(dtype: torch.dtype, name: str) -> None:
    spec = ALL_SPECS[name]
    for eps in (0.0, 1e-45, 1e-38, 1e-30, 1e-12):
        for d in (1, 2, 8, 17, 130):
            numbers = oracle.to_array(rows_of(torch.float32, len(SCALES), d, d).clamp(-2, 2))
            x = oracle.to_tensor(numbers * torch.tensor(SCALES).double().numpy()[:, None], dtype)
            x[:, 0] = torch.where(x[:, 0] == 0, torch.finfo(dtype).smallest_normal, x[:, 0])
            for weight in (None, torch.ones(d), weight_of(torch.float32, d, d)):
                y = normalise(x, weight, eps, spec=spec)
                exact = oracle.rms_norm(x, weight, eps, spec=spec)
                assert not y.isnan().any()
                limit = 4 if y.dtype == torch.float32 else 2
                if dtype == torch.bfloat16 and y.dtype == torch.float32:
                    limit = 2**16 + 4  # llama: xhat may round to the neighbour in bfloat16
                assert oracle.max_ulp(y, exact) <= limit, (eps, d)


@pytest.mark.parametrize("name", ["torch", "original", "l2", "l2_sum"])
def test_float64_rows_out_of_range(name: str) -> None:
    scales = torch.tensor(
        [5e-324, 1e-310, 1e-300, 1e-170, 1e-140, 1.0, 1e150, 1e160, 8e307], dtype=torch.float64
    )
    for eps in (0.0, 5e-324, 1e-300, 1e-12):
        for d in (1, 5, 64):
            x = (1.0 + torch.rand(len(scales), d, dtype=torch.float64)) * scales[:, None]
            y = normalise(x, None, eps, spec=ALL_SPECS[name])
            exact = oracle.rms_norm(x, None, eps, spec=ALL_SPECS[name])
            assert oracle.max_ulp(y, exact) <= 4, (eps, d)


@pytest.mark.skipif(cpu_isa() is None, reason="torch's own operations flush what they are told to")
def test_rows_out_of_range_while_subnormals_are_flushed() -> None:
    scales = torch.tensor([1e-44, 1e-40, 1e-38, 1e-37, 1e-30, 1e-22, 1e-20, 1e30])
    for d in (1, 8, 33):
        x = (1.0 + torch.rand(len(scales), d)) * scales[:, None]
        exact = oracle.rms_norm(x, None, 0.0)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush subnormals")
        try:
            y = rms_norm(x, None, 0.0)
        finally:
            torch.set_flush_denormal(False)
        assert oracle.max_ulp(y, exact) <= 2


@pytest.mark.parametrize("name", REDO_SPECS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_are_not_finite_stay_alone(dtype: torch.dtype, name: str) -> None:
    spec = ALL_SPECS[name]
    for d in (1, 2, 7, 8, 9, 33, 64):
        clean = rows_of(dtype, 8, d, d)
        weight = weight_of(dtype, d, d)
        expected = normalise(clean, weight, spec=spec)
        for position in {0, d // 2, d - 1}:
            x = clean.clone()
            x[1, position] = torch.inf
            x[3, position] = -torch.inf
            x[4, position] = torch.nan
            x[6, 0], x[6, position] = torch.inf, torch.nan
            y = normalise(x, weight, spec=spec)
            for row in (0, 2, 5, 7):
                assert same_bits(y[row], expected[row])
            exact = oracle.rms_norm(x, weight, spec=spec)
            assert torch.equal(y.isnan(), exact.isnan()), (d, position)
            assert torch.equal(y.isinf(), exact.isinf()), (d, position)


@pytest.mark.parametrize("name", ["torch", "llama", "original", "l2", "l2_sum"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_zeros(dtype: torch.dtype, name: str) -> None:
    x = torch.zeros(3, 20, dtype=dtype)
    x[1] = 1.0
    weight = weight_of(dtype, 20, 0)
    for eps in (2.0**-149, 1e-30, 1e-12, 1e-5):
        y = normalise(x, weight, eps, spec=ALL_SPECS[name])
        assert torch.equal(y[0], torch.zeros_like(y[0])), eps
        assert torch.isfinite(y).all()
    y = normalise(x, weight, 0.0, spec=ALL_SPECS[name])
    assert y[0].isnan().all()
    assert torch.isfinite(y[1]).all()
