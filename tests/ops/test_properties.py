"""Whole kinds of inputs, drawn by hypothesis: what holds for each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from calls import ALL_SPECS, FLOATS, HALVES, normalise, same_bits
from rmsnorm import NormSpec, reference, rms_norm, specs
from rmsnorm.ops import composite

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)
dtypes = st.sampled_from(FLOATS)
seeds = st.integers(0, 2**20)
named_specs = st.sampled_from(sorted(ALL_SPECS)).map(ALL_SPECS.__getitem__)
epsilons = st.one_of(st.none(), st.sampled_from([0.0, 1e-45, 1e-12, 1e-6, 1e-5, 0.5, 1e4]))


@st.composite
def any_spec(draw: st.DrawFn) -> NormSpec:
    """Any spec without a gate, groups of 1."""
    eps_in = draw(st.sampled_from(["mean_square", "root", "clamp"]))
    return NormSpec(
        eps=draw(st.sampled_from([None, 1e-12, 1e-6, 1e-3])),
        eps_in=eps_in,
        reduce="mean" if eps_in == "clamp" else draw(st.sampled_from(["mean", "sum"])),
        offset=draw(st.sampled_from([0.0, 1.0])),
        accumulate=draw(st.sampled_from(["float32", "input"])),
        rounding=draw(st.sampled_from(["before_weight", "after_weight", "weight_dtype"])),
        output=draw(st.sampled_from(["input", "promote", "weight"])),
        partial=draw(st.sampled_from([1.0, 1.0, 0.0625, 0.4])),
    )


@dataclass
class View:
    """A tensor of any layout, and the steps that made it, for the report."""

    x: Tensor
    steps: list[str]


@st.composite
def views(draw: st.DrawFn, dtype: torch.dtype) -> View:
    """Rank 1 to 5, permuted, stepped, sliced, expanded, shifted, on any scale."""
    rank = draw(st.integers(1, 5))
    sizes = [draw(st.sampled_from([0, 1, 1, 2, 3, 4, 5])) for _ in range(rank - 1)]
    sizes.append(draw(st.integers(1, 70)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in sizes]
    stored = [size * step for size, step in zip(sizes, steps, strict=True)]
    order = draw(st.permutations(range(rank)))
    shift = draw(st.integers(0, 3))
    count = torch.Size(stored).numel()
    scale = draw(st.sampled_from([1.0, 1e-3, 1e3] if dtype in HALVES else [1.0, 1e-30, 1e30]))
    numbers = oracle.random(count + shift, dtype=dtype, seed=draw(seeds), scale=scale)
    x = numbers[shift:].view([stored[i] for i in order])
    back = [order.index(i) for i in range(rank)]
    x = x.permute(back)[tuple(slice(None, None, step) for step in steps)]
    made = [f"sizes {sizes}", f"steps {steps}", f"order {order}", f"shift {shift}"]
    if rank > 1 and draw(st.booleans()):
        dim = draw(st.integers(0, rank - 2))
        if x.shape[dim]:
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], 4, *x.shape[dim + 1 :])
            made.append(f"expanded {dim}")
    return View(x, made)


@BOUNDED
@given(st.data(), dtypes, any_spec(), st.booleans())
def test_a_layout_changes_no_bit(
    data: st.DataObject, dtype: torch.dtype, spec: NormSpec, weighted: bool
) -> None:
    view = data.draw(views(dtype))
    d = view.x.shape[-1]
    weight = oracle.random(d, dtype=data.draw(dtypes), seed=1) if weighted else None
    expected = normalise(view.x.clone(memory_format=torch.contiguous_format), weight, spec=spec)
    assert same_bits(normalise(view.x, weight, spec=spec), expected)


@BOUNDED
@given(dtypes, dtypes, any_spec(), epsilons, st.integers(1, 200), st.booleans(), seeds)
def test_the_kernels_and_the_composite_agree(
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    spec: NormSpec,
    eps: float | None,
    d: int,
    biased: bool,
    seed: int,
) -> None:
    x = oracle.random(3, d, dtype=x_dtype, seed=seed)
    weight = oracle.random(d, dtype=w_dtype, seed=seed + 1)
    bias = oracle.random(d, dtype=w_dtype, seed=seed + 2) if biased else None
    for w in (weight, None):
        ours = normalise(x, w, eps, spec=spec, bias=bias)
        theirs = composite.rms_norm(x, w, bias, eps, spec, 1)
        assert ours.dtype == theirs.dtype
        if spec.eps_in == "mean_square":
            assert same_bits(ours, theirs)
        else:  # torch.sqrt is not correctly rounded, and a half type may round the other way
            coarse = max(torch.finfo(t).eps for t in (ours.dtype, x_dtype, w_dtype, torch.float32))
            torch.testing.assert_close(ours, theirs, rtol=4 * coarse, atol=16 * coarse)


@BOUNDED
@given(dtypes, any_spec(), epsilons, st.integers(1, 300), seeds)
def test_one_rounding_is_within_one_unit_of_the_oracle(
    dtype: torch.dtype, spec: NormSpec, eps: float | None, d: int, seed: int
) -> None:
    x = oracle.random(3, d, dtype=dtype, seed=seed)
    y = normalise(x, None, eps, spec=spec)
    exact = oracle.rms_norm(x, None, eps, spec=spec)
    in_float32 = dtype == torch.float64 and spec.accumulate == "float32"
    limit = 1 if dtype in HALVES else 2**31 if in_float32 else 4
    assert oracle.max_ulp(y, exact) <= limit


@BOUNDED
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(-149, 127),
    st.sampled_from([0.0, 1e-45, 1e-38, 1e-30]),
    st.integers(1, 80),
    seeds,
)
def test_a_row_of_any_scale_follows_the_oracle(
    dtype: torch.dtype, exponent: int, eps: float, d: int, seed: int
) -> None:
    drawn = oracle.to_array(oracle.random(2, d, dtype=torch.float32, seed=seed))
    mantissas = drawn / abs(drawn) * (1.0 + abs(drawn) % 1.0)
    x = oracle.to_tensor(mantissas * 2.0**exponent, dtype)
    x = torch.where(x.isfinite(), x, torch.finfo(dtype).max)
    if bool((x == 0).any()):
        return
    y = normalise(x, None, eps)
    assert oracle.max_ulp(y, oracle.rms_norm(x, None, eps)) <= (4 if dtype == torch.float32 else 1)


@BOUNDED
@given(dtypes, st.integers(1, 64), st.integers(2, 9), st.data())
def test_bad_values_stay_in_their_row(
    dtype: torch.dtype, d: int, rows: int, data: st.DataObject
) -> None:
    clean = oracle.random(rows, d, dtype=dtype, seed=rows * d)
    spec = data.draw(named_specs)
    expected = normalise(clean, spec=spec)
    x = clean.clone()
    row = data.draw(st.integers(0, rows - 1))
    for value in data.draw(
        st.lists(st.sampled_from([torch.inf, -torch.inf, torch.nan]), min_size=1)
    ):
        x[row, data.draw(st.integers(0, d - 1))] = value
    y = normalise(x, spec=spec)
    others = [i for i in range(rows) if i != row]
    assert same_bits(y[others], expected[others])
    assert torch.equal(y.isnan(), oracle.rms_norm(x, spec=spec).isnan())


@BOUNDED
@given(st.integers(1, 40), st.integers(1, 6), st.sampled_from([0.0, 1e-6, 0.5]), any_spec(), seeds)
def test_float64_agrees_with_the_definition(
    d: int, groups: int, eps: float, spec: NormSpec, seed: int
) -> None:
    if spec.partial == 1.0:
        spec = replace(spec, groups=groups)
        d *= groups
    spec = replace(spec, accumulate="input")
    x = oracle.random(2, d, dtype=torch.float64, seed=seed)
    weight = oracle.random(d, dtype=torch.float64, seed=seed + 1)
    found = normalise(x, weight, eps, spec=spec, bias=weight)
    defined = reference.rms_norm(x.tolist(), weight.tolist(), eps, spec=spec, bias=weight.tolist())
    torch.testing.assert_close(
        found, torch.tensor(defined, dtype=torch.float64), rtol=1e-13, atol=1e-13
    )


@BOUNDED
@given(st.integers(1, 24), st.sampled_from([1e-3, 0.5]), any_spec(), seeds)
def test_gradients_agree_with_the_definition(d: int, eps: float, spec: NormSpec, seed: int) -> None:
    spec = replace(spec, accumulate="input")
    x = oracle.random(3, d, dtype=torch.float64, seed=seed).requires_grad_()
    weight = oracle.random(d, dtype=torch.float64, seed=seed + 1).requires_grad_()
    bias = torch.zeros(d, dtype=torch.float64, requires_grad=True)
    dy = oracle.random(3, d, dtype=torch.float64, seed=seed + 2)
    rms_norm(x, weight, eps, spec=spec, bias=bias).backward(dy)
    defined = reference.rms_norm_backward(dy.tolist(), x.tolist(), weight.tolist(), eps, spec=spec)
    for found, right in zip((x.grad, weight.grad, bias.grad), defined, strict=True):
        assert found is not None
        torch.testing.assert_close(
            found, torch.tensor(right, dtype=torch.float64), rtol=1e-10, atol=1e-10
        )


@BOUNDED
@given(dtypes, st.integers(1, 100), st.integers(1, 40), named_specs, seeds)
def test_rows_are_independent(
    dtype: torch.dtype, d: int, rows: int, spec: NormSpec, seed: int
) -> None:
    x = oracle.random(rows, d, dtype=dtype, seed=seed)
    weight = oracle.random(d, dtype=dtype, seed=seed + 1)
    y = normalise(x, weight, spec=spec)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert same_bits(normalise(x[order], weight, spec=spec), y[order])
    assert same_bits(normalise(x[-1], weight, spec=spec), y[-1])


@BOUNDED
@given(dtypes, st.integers(1, 100), st.integers(-8, 8), seeds)
def test_powers_of_two_cancel_without_eps(
    dtype: torch.dtype, d: int, exponent: int, seed: int
) -> None:
    x = (1.0 + torch.rand(3, d, generator=torch.Generator().manual_seed(seed))).to(dtype)
    y = normalise(x, None, 0.0, spec=specs.torch)
    assert same_bits(normalise(x * 2.0**exponent, None, 0.0), y)
    assert same_bits(normalise(-x, None, 0.0), -y)
