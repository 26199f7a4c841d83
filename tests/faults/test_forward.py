"""Known faults of forward passes: layout, rounding, overflow, epsilon, formula, tails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import oracle
import rmsnorm
from calls import FLOATS, HALVES, UNGATED, normalise, rows_of, same_bits, weight_of
from faults.cases import condition, expected, near, numbers
from rmsnorm import RMSNorm, rms_norm, specs

SINGLE_AND_HALVES = (torch.float32, *HALVES)


def test_A1_strides_of_x_and_weight() -> None:
    right = expected("A1")["y"]
    x = torch.arange(6.0).view(2, 3).t()
    assert x.stride() == (1, 3)
    for weight in (torch.ones(2), torch.tensor([1.0, 9.0, 1.0, 9.0])[::2]):
        y = normalise(x, weight, 0.0)
        assert near(y, right)
        assert same_bits(y, normalise(x.contiguous(), weight.contiguous(), 0.0))
        as_if_dense = normalise(torch.arange(6.0).view(3, 2), torch.ones(2), 0.0)
        assert not near(as_if_dense, right)
    qkv = torch.randn(5, 24)
    for part in qkv.split(8, -1):
        heads = part.view(5, 2, 4)
        assert heads.stride() == (24, 4, 1)
        assert same_bits(normalise(heads, None, 0.0), normalise(heads.contiguous(), None, 0.0))


def test_A3_squares_that_float16_cannot_hold() -> None:
    for name in condition("A3")["spec"]:
        for row in ([300.0] * 4, [8.0] * 4096, [888.0, -888.0, 888.0, -888.0], [65504.0] * 7):
            x = torch.tensor([row], dtype=torch.float16)
            weight = torch.ones(len(row), dtype=torch.float16)
            y = normalise(x, weight, condition("A3")["eps"], spec=name)
            assert torch.equal(y, x.sign())
            # Squared in float16 the mean is infinite, and the row vanishes.
            assert (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).abs().max() < 0.999 or (
                x.pow(2).sum() == 4 * 888**2
            )


def test_A5_eps_none_is_that_of_float32() -> None:
    right = expected("A5")
    x = torch.tensor([[0.058] * 16 + [-0.058] * 16]).bfloat16()
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 2.0**-23).sqrt()
    assert near(exact.abs(), right["|y|"], 1e-8)
    coarse = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 2.0**-7).sqrt()
    wrong = next(value for key, value in right.items() if "wrong" in key)
    assert near(coarse.abs(), wrong, 1e-8)
    for y in (normalise(x), RMSNorm(32, elementwise_affine=False)(x), RMSNorm(32)(x)):
        assert near(y.abs(), right["|y| in bf16"])
        assert not near(y.abs(), wrong, 1e-2)
    for dtype in FLOATS:
        for scale in (1e-4, 1e-3, 1e-2, 1e-1):
            small = rows_of(dtype, 4, 64, 0).clamp(-1, 1) * scale
            eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23
            assert same_bits(normalise(small), normalise(small, None, eps))
            assert same_bits(RMSNorm(64, dtype=dtype)(small), normalise(small, None, eps))


def test_A7_the_place_of_the_rounding() -> None:
    x = numbers(condition("A7")["x"], torch.bfloat16)
    weight = numbers(condition("A7")["weight"], torch.bfloat16)
    right = expected("A7")
    eps = condition("A7")["eps"]
    for name in ("llama", "torch", "t5"):
        assert normalise(x, weight, eps, spec=name).tolist() == right[name]
    stored = normalise(x, weight - 1, eps, spec="gemma")
    assert stored.tolist() == right["gemma with stored weight 1.5"]
    assert right["llama"] != right["torch"]
    for dtype in HALVES:
        x, weight = rows_of(dtype, 50, 64, 0), weight_of(dtype, 64, 0)
        once, twice = normalise(x, weight), normalise(x, weight, 2.0**-23, spec="llama")
        assert not torch.equal(once, twice)
        assert oracle.max_ulp(once, oracle.rms_norm(x, weight)) <= 1
        assert oracle.max_ulp(twice, oracle.rms_norm(x, weight, 2.0**-23, spec="llama")) <= 2


def test_A8_dtypes_that_differ() -> None:
    rule = expected("A8")["output dtype"]
    named = {"x's": None, "float32 (promoted)": torch.float32}
    kinds = {
        "torch": specs.torch,
        "gemma": specs.gemma,
        "llama": specs.llama,
        "t5": specs.t5,
        "llama with output='input'": replace(specs.llama, output="input"),
    }
    for key, spec in kinds.items():
        for dtype in HALVES:
            x, weight = torch.randn(2, 4).to(dtype).requires_grad_(), torch.ones(4).requires_grad_()
            y = rms_norm(x, weight, spec=spec)
            assert y.dtype == (named[rule[key]] or dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert same_bits(rms_norm(x, weight, spec=spec), y)
                assert same_bits(normalise(x, weight, spec=spec), y)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.dtype == dtype
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
    linear = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    for name in ("torch", "gemma"):
        assert linear(rms_norm(torch.randn(2, 4).bfloat16(), torch.ones(4), spec=name)).shape == (
            2,
            4,
        )
    for x_dtype in FLOATS:
        for w_dtype in FLOATS:
            for spec in UNGATED.values():
                y = normalise(
                    torch.ones(2, 4, dtype=x_dtype), torch.ones(4, dtype=w_dtype), spec=spec
                )
                by = {
                    "input": x_dtype,
                    "promote": torch.promote_types(x_dtype, w_dtype),
                    "weight": w_dtype,
                }
                assert y.dtype == by[spec.output]


def test_A17_tails_and_alignment() -> None:
    for dtype in SINGLE_AND_HALVES:
        for d in condition("A17")["d"]:
            for k in range(4):
                flat = torch.full((k + 7 * d + 8,), 7.0, dtype=dtype)
                target = flat.clone()
                x, out = flat[k : k + 7 * d].view(7, d), target[k : k + 7 * d].view(7, d)
                x.copy_(rows_of(dtype, 7, d, d))
                guards = torch.cat([target[:k], target[k + 7 * d :]])
                with torch.no_grad():
                    rms_norm(x, out=out)
                assert torch.equal(torch.cat([target[:k], target[k + 7 * d :]]), guards)
                limit = 4 if dtype == torch.float32 else 1
                assert oracle.max_ulp(out, oracle.rms_norm(x)) <= limit
                for row in range(7):
                    assert same_bits(normalise(x[row]), out[row])


def test_P4_an_eps_below_float16() -> None:
    right = expected("P4")
    x = torch.full((1, 4), 1e-4, dtype=torch.float16)
    eps = condition("P4")["eps"]
    wrong = right["with eps raised to 1e-7 (wrong)"]
    norm = RMSNorm(4, eps, dtype=torch.float16)
    for y in (normalise(x, None, eps), normalise(x, torch.ones(4).half(), eps), norm(x)):
        assert near(y, right["y in fp16"])
        assert not near(y, wrong, 1e-2)
    assert near(normalise(x, None, 1e-7), wrong, 1e-3)
    assert near(normalise(x.float(), None, eps), right["y before rounding"])
    for exponent in range(5, 13):
        value = 10.0**-exponent
        for small in (1e-6, 1e-5, 1e-4, 1e-3):
            row = torch.full((1, 8), small, dtype=torch.float16)
            for y in (normalise(row, None, value), RMSNorm(8, value).half()(row)):
                assert oracle.max_ulp(y, oracle.rms_norm(row, None, value)) <= 1


def test_P6_squares_that_vanish_in_float16() -> None:
    right = expected("P6")
    x = torch.full((1, 4), 1e-4, dtype=torch.float16)
    assert bool((x * x == 0).all())
    for name in condition("P6")["spec"]:
        for index, eps in enumerate(condition("P6")["eps"]):
            assert near(normalise(x, None, eps, spec=name), right["y in fp16"][index])
            assert near(
                normalise(x.float(), None, eps, spec=name), right["y before rounding"][index]
            )
            decimal = torch.full((1, 4), 1e-4)
            third = right["exact decimal 1e-4 in fp32"][index]
            assert near(normalise(decimal, None, eps, spec=name), third)
            assert not near(normalise(x.float(), None, eps, spec=name), third)


def test_P8_one_rounding_in_float16() -> None:
    elements = different = eager_different = 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = (0.1 * torch.rand(1, 5, 128, generator=generator)).half()
        for weight in (torch.rand(128, generator=generator).half(), None):
            y = normalise(x, weight, 1e-5)
            exact = oracle.rms_norm(x, weight, 1e-5)
            assert oracle.max_ulp(y, exact) <= 1
            elements += y.numel()
            different += int((oracle.ulp_distance(y, exact) != 0).sum())
            eager = F.rms_norm(x, (128,), weight, 1e-5)
            eager_different += int((oracle.ulp_distance(eager, exact) != 0).sum())
    assert different < 0.002 * elements
    assert different <= eager_different


def test_P10_a_sum_that_float16_cannot_hold() -> None:
    right = expected("P10")
    x = torch.full((1, 9), 100.0, dtype=torch.float16, requires_grad=True)
    y = rms_norm(x, torch.ones(9).half(), 0.0)
    assert near(y, right["y"])
    y.backward(torch.eye(9)[:1].half())
    assert x.grad is not None
    first, others = (torch.tensor(v).half() for v in right["dx before rounding"])
    assert torch.equal(x.grad[0], torch.stack([first] + [others] * 8))
    assert bool((x.grad != 0).all())
    assert float(x.detach().float().norm()) == right["vector norm"]


def test_P12_rounding_is_to_nearest_even() -> None:
    right = expected("P12")
    x = torch.sin(torch.arange(1.0, 65537.0, dtype=torch.float64)).view(64, 1024).bfloat16()
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def measure(y: torch.Tensor) -> float:
        return float(((y.double().abs() - exact.abs()) / exact.abs()).mean())

    found = measure(normalise(x, None, 1e-6))
    assert found == pytest.approx(right["nearest even"], abs=2e-6)
    assert abs(found) < 1e-4
    bits = exact.float().view(torch.int32) & ~0xFFFF
    assert measure(bits.view(torch.float32)) == pytest.approx(right["truncation (wrong)"], rel=0.01)


def test_P12_every_class_of_pattern() -> None:
    """A row of ones has xhat 1, so the weight alone is rounded: ties, subnormals, the largest."""
    for dtype in HALVES:
        info = torch.finfo(dtype)
        halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        halves = halves[halves.isfinite() & (halves != 0)].float()
        up = torch.nextafter(halves, torch.full_like(halves, torch.inf))
        down = torch.nextafter(halves, torch.full_like(halves, -torch.inf))
        steps = halves.double().abs() * info.eps
        ties = (halves.double() + torch.cat([steps[1:], steps[:1]]) / 2).float()
        following = torch.cat([halves[1:], halves[:1]])
        middle = ((halves.double() + following.double()) / 2).float()
        top = torch.tensor([info.max, info.max * (1 + info.eps / 4), 3.4e38, 1e-45, 1e-40, -1e-42])
        for weight in (halves, up, down, ties, middle, top):
            weight = weight[weight.isfinite()]
            y = normalise(torch.ones(2, weight.numel(), dtype=dtype), weight, 0.0)
            assert same_bits(y[0], weight.to(dtype))
            assert same_bits(y[1], weight.to(dtype))


def test_P14_mean_squares_that_are_subnormal() -> None:
    right = expected("P14")
    x = torch.full((2, 8), 1e-20)
    assert near(normalise(x, None, 1e-6), right["y, eps 1e-6"], 1e-6)
    assert float(normalise(x, None, 1e-6)[0, 0]) == pytest.approx(right["y, eps 1e-6"], rel=1e-6)
    assert near(normalise(x, None, 0.0), right["y, eps 0"])
    for exponent in range(17, 39):
        for eps in (0.0, 1e-45, 1e-42, 1e-39):
            row = rows_of(torch.float32, 3, 33, exponent).clamp(-1, 1) * 10.0**-exponent
            y = normalise(row, None, eps)
            assert torch.isfinite(y).all()
            assert oracle.max_ulp(y, oracle.rms_norm(row, None, eps)) <= 2


def test_P16_one_large_element_among_many() -> None:
    right = expected("P16")
    x = torch.ones(2, 4096, dtype=torch.bfloat16)
    x[:, 0] = 16
    for name in condition("P16")["spec"]:
        y = normalise(x, torch.ones(4096).bfloat16(), 0.0, spec=name)
        assert bool((y[:, 1:] == right["y of the ones in bf16"]).all())
        assert not bool((y[:, 1:] == right["wrong, bf16 sum"]).any())
    assert near(normalise(x.float(), None, 0.0)[:, 1:], right["1/rms"])
    outliers = rows_of(torch.bfloat16, 4, 2048, 3)
    outliers[:, 7] *= 1e4
    exact, y = outliers.double(), outliers
    weight = weight_of(torch.bfloat16, 2048, 0).abs() + 0.1
    for _ in range(60):
        y = normalise(y, weight)
        exact = exact / exact.pow(2).mean(-1, keepdim=True).sqrt() * weight.double()
        assert float(F.cosine_similarity(y.double(), exact).min()) >= 0.9999


def test_P18_no_seed_is_worse_than_one_unit() -> None:
    for seed in range(200):
        for d in (8, 100, 4096) if seed < 5 else (8, 100):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(16, d, generator=generator).half()
            weight = torch.randn(d, generator=generator).half()
            assert oracle.max_ulp(normalise(x, weight), oracle.rms_norm(x, weight)) <= 1
            once = normalise(x, None, 1e-6, spec="llama")
            assert oracle.max_ulp(once, oracle.rms_norm(x, None, 1e-6, spec="llama")) <= 1
            y = normalise(x, weight, 1e-6, spec="llama")
            assert (
                oracle.max_ulp(
                    y, oracle.to_tensor(oracle.to_array(once) * oracle.to_array(weight), y.dtype)
                )
                <= 1
            )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_P22_nothing_is_subtracted(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 3.0]], dtype=dtype)
    y = normalise(x, None, 0.0)
    rtol = 1e-2 if dtype in HALVES else 2e-7
    assert near(y[0], expected("P22")["y"], rtol)
    assert not near(y[0], expected("P22")["wrong, mean removed from the statistic"], rtol)
    shifted = (1000 + torch.randn(4, 300)).to(dtype)
    assert near(normalise(shifted), 1.0, 1e-2)
    lists = rms_norm([1.0, 3.0], eps=0.0)
    assert lists == pytest.approx(expected("P22")["y"])


def test_P24_multiplied_by_the_reciprocal() -> None:
    right = expected("P24")
    x = torch.tensor([[1.0, 3.0]])
    y = normalise(x, None, 0.0)[0]
    assert near(y, right["y"])
    assert not near(y, right["wrong, divided by the reciprocal"])
    base = torch.randn(3, 40)
    expected_y = normalise(base, None, 0.0)
    assert near(expected_y.double().pow(2).mean(-1), 1.0, 1e-6)
    for exponent in range(-15, 16):
        for sign in (1.0, -1.0):
            y = normalise(base * (sign * 10.0**exponent), None, 0.0)
            torch.testing.assert_close(y, sign * expected_y, rtol=1e-6, atol=1e-7)
    for exponent in range(-80, 60):  # exact, so the bits stay
        assert same_bits(normalise(base * 2.0**exponent, None, 0.0), expected_y) or exponent < -40


def test_P26_the_last_dimensions_only() -> None:
    right = expected("P26")
    x = torch.tensor([[[1.0, 1.0], [3.0, 3.0]]])
    assert near(normalise(x, torch.ones(2), 0.0), right["y"])
    assert near(normalise(x, torch.tensor([1.0, 2.0]), 0.0), right["y, weight [1,2]"])
    assert not near(normalise(x, torch.ones(2), 0.0), right["wrong, reduced over T"])
    for shape in ((2, 3), (2, 3, 4), (2, 3, 4, 5), (6, 2, 3, 4, 5), (3,) * 2, (3,) * 3, (3,) * 5):
        x = torch.randn(shape)
        for ndim in range(1, len(shape) + 1):
            weight = torch.randn(shape[-ndim:])
            dims = tuple(range(-ndim, 0))
            plain = x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + 1e-6) * weight
            torch.testing.assert_close(normalise(x, weight, 1e-6), plain)
            y = normalise(x, None, 1e-6, normalized_shape=shape[-ndim:])
            torch.testing.assert_close(y * weight, plain)


def test_P32_mixed_dtypes_on_every_rank() -> None:
    right = expected("P32")
    x = torch.sin(torch.arange(24.0)).view(2, 3, 4).bfloat16()
    weight = torch.tensor([0.5, 1.0, 1.5, 2.0])
    once = normalise(x, weight, 1e-6)
    twice = normalise(x, weight, 1e-6, spec="llama")
    assert once[0, 0].tolist() == right["torch, first row (bf16)"]
    assert twice[0, 0].tolist() == right["llama, first row (fp32)"]
    assert twice.dtype == torch.float32
    for name in ("torch", "llama", "gemma", "t5"):
        for x_dtype in FLOATS:
            for w_dtype in FLOATS:
                flat = rows_of(x_dtype, 24, 8, 0)
                w = weight_of(w_dtype, 8, 0)
                y = normalise(flat, w, 1e-6, spec=name)
                assert torch.isfinite(y).all()
                for shape in ((2, 12, 8), (2, 3, 4, 8), (2, 3, 2, 2, 8)):
                    assert same_bits(normalise(flat.view(shape), w, 1e-6, spec=name).view(24, 8), y)
                heads = flat.view(2, 4, 3, 8).transpose(1, 2)
                again = normalise(heads, w, 1e-6, spec=name).transpose(1, 2)
                assert same_bits(again.reshape(24, 8), y)
                assert same_bits(normalise(flat[0], w, 1e-6, spec=name), y[0])


def test_P36_rotations_of_a_head() -> None:
    right = expected("P36")
    c, s = math.cos(0.7), math.sin(0.7)
    rotation = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    v = numbers(condition("P36")["v"])
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert near(normalise(rotation @ v, None, 0.0), right["norm(Rv) = R norm(v)"], 1e-8)
    assert near(rotation @ normalise(v, None, 0.0), right["norm(Rv) = R norm(v)"], 1e-8)
    assert near(normalise(rotation @ v, weight, 0.0), right["with weight: w*norm(Rv)"], 1e-8)
    assert near(rotation @ normalise(v, weight, 0.0), right["with weight: R(w*norm(v))"], 1e-8)
    for pairs in (1, 4, 32, 64):
        angles = torch.rand(pairs, dtype=torch.float64)
        turn = torch.block_diag(
            *(
                torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])])
                for a in angles
            )
        )
        head = torch.randn(5, 2 * pairs, dtype=torch.float64)
        equal = torch.rand(pairs, dtype=torch.float64).repeat_interleave(2)
        for w in (None, equal):
            torch.testing.assert_close(normalise(head @ turn, w), normalise(head, w) @ turn)
        unequal = torch.rand(2 * pairs, dtype=torch.float64)
        assert not torch.allclose(normalise(head @ turn, unequal), normalise(head, unequal) @ turn)


def test_P54_the_place_of_eps_in_formula_and_documentation() -> None:
    right = expected("P54")
    x = numbers(condition("P54")["x"])
    under, beside = (
        right["y, eps under the root (torch)"],
        right["y, eps beside the root (original)"],
    )
    for values, lists in (
        (normalise(x, None, 1.0), rms_norm(x.tolist(), eps=1.0)),
        (normalise(x.float(), None, 1.0), rmsnorm.reference.rms_norm(x.tolist(), eps=1.0)),
    ):
        assert near(values, under)
        assert lists == pytest.approx(under)
        assert not near(values, right["wrong, second root"], 1e-2)
    assert near(normalise(x, None, 1.0, spec="original"), beside)
    assert rms_norm(x.tolist(), eps=1.0, spec="original") == pytest.approx(beside)
    # The formula of the docstring, executed.
    formula = "x / sqrt(mean(x^2) + eps) * weight"
    documented = rms_norm.__doc__
    assert documented is not None
    assert formula in documented
    scope = {"x": x, "eps": 1.0, "weight": torch.ones(2), "sqrt": torch.sqrt, "mean": torch.mean}
    assert near(eval(formula.replace("^", "**"), scope), under)


def test_P62_rows_that_are_not_finite() -> None:
    right = expected("P62")["y"]
    inf, nan = math.inf, math.nan
    for dtype in SINGLE_AND_HALVES:
        x = torch.tensor([[inf, 1.0], [3.0, 4.0], [nan, 1.0], [-inf, 2.0]]).to(dtype)
        y = normalise(x, None, 1e-6)
        assert near(y, right, 2e-7 if dtype == torch.float32 else 1e-2)
        assert same_bits(y[1], normalise(x[1], None, 1e-6))
        leaf, weight = x.clone().requires_grad_(), torch.ones(2).requires_grad_()
        rms_norm(leaf, weight, 1e-6).sum().backward()
        assert leaf.grad is not None
        alone = x[1:2].clone().requires_grad_()
        rms_norm(alone, weight, 1e-6).sum().backward()
        assert alone.grad is not None
        assert same_bits(leaf.grad[1], alone.grad[0])
    for dtype in SINGLE_AND_HALVES:
        for d in (1, 5, 8, 31, 64, 100):
            clean = rows_of(dtype, 5, d, d)
            y = normalise(clean)
            for position in range(d):
                for bad in (inf, -inf, nan):
                    x = clean.clone()
                    x[2, position] = bad
                    found = normalise(x) if position % 8 == 0 else rms_norm(x)
                    assert same_bits(found[[0, 1, 3, 4]], y[[0, 1, 3, 4]])
                    assert found[2, position].isnan()
                    others = torch.cat([found[2, :position], found[2, position + 1 :]])
                    assert bool(others.isnan().all() if math.isnan(bad) else (others == 0).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_P64_the_weight_of_the_row_in_its_last_element(dtype: torch.dtype) -> None:
    right = expected("P64")
    widths = [8, 9, 16, 17, 64, 65, 1024, 1025, 2048, 4096, 4097, 8193, 65537]
    widths += [k * b + r for b in (4, 8, 32, 64, 128, 256, 512) for k in (1, 3) for r in (-1, 0, 1)]
    for d in widths:
        last = math.sqrt(d + 1)
        if dtype in HALVES:
            last = float(torch.tensor(last).to(dtype))
        x = torch.ones(2, d, dtype=dtype)
        x[:, -1] = last
        y = normalise(x, None, 0.0)
        mean = (d - 1 + last * last) / d
        assert near(y[:, :-1], 1 / math.sqrt(mean), 5e-3 if dtype in HALVES else 4e-7)
        assert near(y[:, :-1], right["1/sqrt(2)"], 1e-2 if dtype in HALVES else 1e-6) or d < 20
        assert not near(y[:, :-1], 1.0, 0.1)
        assert near(y[:, -1], last / math.sqrt(mean), 5e-3 if dtype in HALVES else 4e-7)


def test_P68_the_output_is_contiguous() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    weight = torch.ones(8)
    assert x.stride() == (120, 8, 24, 1)
    y = normalise(x, weight)
    assert same_bits(y, normalise(x.contiguous(), weight))
    assert y.stride() == (120, 40, 8, 1)
    assert y.view(2, 3, 40).shape == (2, 3, 40)
    with FakeTensorMode() as mode:
        fake = rms_norm(mode.from_tensor(x), mode.from_tensor(weight))
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    leaf = x.detach().requires_grad_()
    for other in (
        fake,
        rms_norm(x.to("meta"), weight.to("meta")),
        compiled(x, weight),
        rms_norm(leaf, weight),
    ):
        assert other.stride() == y.stride()
    out = torch.empty(2, 5, 3, 8).transpose(1, 2)
    assert rms_norm(x, weight, out=out).stride() == (120, 8, 24, 1)
    assert same_bits(out.contiguous(), y)
