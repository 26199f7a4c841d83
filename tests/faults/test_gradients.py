"""Known faults of gradients, as far as one input and one output go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from calls import FLOATS, HALVES, rows_of, same_bits, weight_of
from faults.cases import condition, expected, near, numbers
from rmsnorm import NormSpec, rms_norm, specs


def _gradients(
    x: Tensor, weight: Tensor | None, dy: Tensor, eps: float, spec: NormSpec | str = "torch"
) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    w = None if weight is None else weight.detach().requires_grad_()
    y = rms_norm(x, w, eps, spec=spec)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    if w is None:
        return x.grad, torch.empty(0)
    assert w.grad is not None
    return x.grad, w.grad


def test_A2_strides_of_the_incoming_gradient() -> None:
    given, right = condition("A2"), expected("A2")
    for dtype in (torch.float32, *HALVES):
        x, dense = numbers(given["x"], dtype), numbers(given["weight"], dtype)
        rtol = 5e-7 if dtype == torch.float32 else 2e-2
        for weight in (dense, torch.stack([dense, -dense], -1)[:, 0]):
            leaf, w = x.clone().requires_grad_(), weight.detach().requires_grad_()
            rms_norm(leaf, w, 0.0).sum().backward()
            assert leaf.grad is not None
            assert w.grad is not None
            tolerance = {"rtol": rtol, "atol": 5e-7 if dtype == torch.float32 else 4e-3}
            torch.testing.assert_close(
                leaf.grad.double(), numbers(right["dx for y.sum()"]), **tolerance
            )
            torch.testing.assert_close(
                w.grad.double(), numbers(right["dw for y.sum()"]), **tolerance
            )
            for dy in (
                torch.randn(3, 2).t(),
                torch.randn(2, 6)[..., ::2],
                torch.randn(1, 3).expand(2, 3),
            ):
                found = _gradients(x, weight, dy.to(dtype), 0.0)
                plain = _gradients(x, dense, dy.to(dtype).contiguous(), 0.0)
                assert all(same_bits(a, b) for a, b in zip(found, plain, strict=True))


def test_A4_rows_of_zeros() -> None:
    right = expected("A4")
    x, weight = torch.zeros(1, 10).half(), torch.ones(10).half()
    for eps in condition("A4")["eps"]:
        leaf = x.clone().requires_grad_()
        y = rms_norm(leaf, weight, eps)
        assert bool((y == right["y"]).all())
        dx, dw = _gradients(x, weight, torch.full((1, 10), 0.0625), eps)
        assert bool((dw == right["dw"]).all())
        named = {1e-6: "1e-6", 1e-8: "1e-8", 1e-12: "1e-12"}[eps]
        assert near(dx, right["dx"][named])
    dx, _ = _gradients(x, weight, torch.ones(1, 10), 1e-12)
    assert bool(dx.isinf().all())
    for dtype in FLOATS:
        for eps in (1e-45, 1e-38, 1e-30, 1e-20, 1e-12, 1e-5, 1.0, 1e30):
            padded = rows_of(dtype, 4, 10, 0)
            padded[[1, 3]] = 0
            for w in (None, torch.ones(10, dtype=dtype), torch.ones(10)):
                dx, dw = _gradients(padded, w, torch.full((4, 10), 1e-3, dtype=dtype), eps)
                assert not dx.isnan().any()
                assert not dw.isnan().any()
                compute = torch.float64 if dtype == torch.float64 else torch.float32
                root = torch.tensor(eps, dtype=compute).double().sqrt()
                exact = torch.tensor(1e-3, dtype=dtype).double() / root
                assert near(dx[1], float(exact.to(dtype)), 1e-2 if dtype in HALVES else 1e-6)


def test_A11_the_incoming_gradient_is_not_written() -> None:
    for dtype in FLOATS:
        g = rows_of(dtype, 3, 8, 0)
        before = g.clone()
        grads = []
        leaves = [rows_of(dtype, 3, 8, seed).requires_grad_() for seed in (1, 2)]
        for leaf in leaves:
            rms_norm(leaf).backward(g)
            assert leaf.grad is not None
            assert leaf.grad.data_ptr() != g.data_ptr()
            grads.append(leaf.grad)
        assert same_bits(g, before)
        for leaf, grad in zip(leaves, grads, strict=True):
            assert same_bits(
                _gradients(leaf, None, g.clone(), 2.0**-23 if dtype != torch.float64 else 2.0**-52)[
                    0
                ],
                grad,
            )
        leaf = leaves[0].detach().requires_grad_()
        y = leaf * 2
        z = y + rms_norm(y)
        z.backward(g, retain_graph=True)
        assert leaf.grad is not None
        once = leaf.grad.clone()
        z.backward(g)
        assert same_bits(leaf.grad, once * 2)
        assert same_bits(g, before)


def test_A13_many_rows_in_a_half_type() -> None:
    right = expected("A13")
    for dtype in HALVES:
        ones = torch.ones(4096, 8, dtype=dtype)
        for w_dtype in (dtype, torch.float32):
            _, dw = _gradients(ones, torch.ones(8, dtype=w_dtype), ones, 0.0)
            assert near(dw, right["dw"])
            assert float(right["wrong"].split(",")[0]) != float(dw[0])
        for rows in (1, 255, 257, 2049, 20_000):
            x, dy = rows_of(dtype, rows, 8, rows), rows_of(dtype, rows, 8, rows + 1).clamp(-4, 4)
            _, dw = _gradients(x, torch.ones(8, dtype=dtype), dy, 0.0)
            wide = x.double()
            products = dy.double() * wide / wide.pow(2).mean(-1, keepdim=True).sqrt()
            unit = torch.finfo(dtype).eps * products.sum(0).abs() + 1e-6 * products.abs().sum(0)
            assert bool(((dw.double() - products.sum(0)).abs() <= unit).all())


def test_A14_row_counts_around_every_split() -> None:
    shapes = [(1025, 32), (2049, 16), (2048, 2), (49, 7), (3, 5)]
    shapes += [(2**k + r, d) for k in (1, 3, 5, 8) for r in (-1, 0, 1) for d in (1, 3, 33)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows, d in shapes:
                ones = torch.ones(rows, d)
                dx, dw = _gradients(ones, torch.ones(d), ones, 0.0)
                assert near(dw, float(rows))
                assert bool((dx.abs() < 1e-6).all())
                x, dy = torch.randn(rows, d), torch.randn(rows, d)
                dx, _ = _gradients(x, torch.ones(d), dy, 1e-6)
                for row in {0, rows // 2, rows - 1}:
                    alone, _ = _gradients(x[row : row + 1], torch.ones(d), dy[row : row + 1], 1e-6)
                    assert same_bits(alone[0], dx[row])
    finally:
        torch.set_num_threads(threads)


def test_P20_the_weight_that_is_stored_less_one() -> None:
    given, right = condition("P20"), expected("P20")
    x, weight, dy = (numbers(given[key]) for key in ("x", "stored weight", "dy"))
    gemma64 = NormSpec(offset=1.0)
    dx, dw = _gradients(x, weight, dy, 0.0, gemma64)
    assert near(dx, right["dx"], 1e-8)
    assert near(dw, right["dw"], 1e-8)
    assert not near(dx, right["dx if the 1 is forgotten (wrong)"], 1e-2)
    forgotten, _ = _gradients(x, weight, dy, 0.0)
    assert near(forgotten, right["dx if the 1 is forgotten (wrong)"], 1e-8)
    # The named spec computes in float32, as the classes do.
    dx, dw = _gradients(x, weight, dy, 0.0, "gemma")
    assert near(dx, right["dx"], 1e-6)
    assert near(dw, right["dw"], 1e-6)
    for stored in (0.0, -1.0, 0.5):
        w = torch.full((5,), stored, dtype=torch.float64, requires_grad=True)
        leaf = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6, spec=gemma64), (leaf, w))
        single = leaf.detach().float()
        dx, _ = _gradients(single, w.float(), torch.ones(3, 5), 1e-6, "gemma")
        exact, _ = _gradients(single.double(), w, torch.ones(3, 5), 1e-6, gemma64)
        torch.testing.assert_close(dx.double(), exact, rtol=1e-5, atol=1e-6)


def test_P34_every_rank_and_both_weight_dtypes() -> None:
    base = rows_of(torch.bfloat16, 24, 8, 0)
    dy = rows_of(torch.bfloat16, 24, 8, 1)
    for w_dtype in (torch.bfloat16, torch.float32):
        weight = weight_of(w_dtype, 8, 0)
        first = _gradients(base, weight, dy, 1e-6)
        assert first[1].dtype == w_dtype
        for shape in ((2, 12, 8), (2, 3, 4, 8), (2, 3, 2, 2, 8), (2, 1, 3, 2, 2, 8)):
            y = rms_norm(base.view(shape), weight, 1e-6)
            assert same_bits(y.view(24, 8), rms_norm(base, weight, 1e-6))
            dx, dw = _gradients(base.view(shape), weight, dy.view(shape), 1e-6)
            assert same_bits(dx.view(24, 8), first[0])
            wide = base.double()
            xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            exact = (dy.double() * xhat).sum(0)
            unit = torch.finfo(w_dtype).eps * exact.abs() + 1e-6 * (dy.double() * xhat).abs().sum(0)
            assert bool(((dw.double() - exact).abs() <= unit).all())
        dx, dw = _gradients(base[0], weight, dy[0], 1e-6)
        assert same_bits(dx, first[0][0])


@pytest.mark.parametrize(
    "spec",
    [specs.torch, specs.original, specs.l2, specs.l2_sum, NormSpec(offset=1.0), NormSpec(groups=5)],
    ids=repr,
)
def test_P44_second_derivatives(spec: NormSpec) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 0.01, spec=spec)

    assert torch.autograd.gradgradcheck(f, (x, weight))
    if spec is specs.torch:
        penalties = []
        for g in (f, lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * w):
            leaf = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(g(leaf, weight).sum(), leaf, create_graph=True)
            grad.pow(2).sum().backward()
            penalties.append(leaf.grad)
        torch.testing.assert_close(*penalties, rtol=1e-10, atol=1e-10)


def test_P46_vmap_of_a_jacobian() -> None:
    right = expected("P46")["J at x = [1,2,2], w = [1,2,3], eps 0"]
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    at = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert near(jacobian(lambda x: rms_norm(x, w, 0.0))(at), right, 1e-8)
        x = torch.randn(4, 3, dtype=torch.float64)
        found = torch.func.vmap(jacobian(lambda x: rms_norm(x, w, 1e-6)))(x)
        r = torch.rsqrt(x.pow(2).mean(-1) + 1e-6)
        xhat = x * r[:, None]
        exact = r[:, None, None] * (
            torch.diag(w) - w[:, None] * xhat[:, :, None] * xhat[:, None, :] / 3
        )
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    hessian = torch.func.hessian(lambda x: rms_norm(x, w, 0.01).sum())(at)
    torch.testing.assert_close(hessian, hessian.t())
    assert bool(hessian.abs().sum() > 0)


def test_P66_a_weight_gradient_that_cancels() -> None:
    n = torch.arange(4096.0, dtype=torch.float64)
    x, dy = n.sin().view(512, 8).bfloat16(), (3 * n).cos().view(512, 8).bfloat16()
    _, dw = _gradients(x, torch.ones(8), dy, 1e-6)
    wide = x.double()
    products = dy.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    right = numbers(expected("P66")["dw"])
    assert near(products.sum(0), expected("P66")["dw"], 1e-7)
    assert bool(((dw.double() - right).abs() <= 1e-6 * products.abs().sum(0)).all())
