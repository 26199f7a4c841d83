"""Known faults as add_rms_norm and gated_rms_norm show them, and those that only they can have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from calls import FLOATS, HALVES, KERNELS, gradients, rows_of, same_bits, weight_of
from faults.cases import condition, expected, near, numbers
from rmsnorm import NormSpec, add_rms_norm, gated_rms_norm, rms_norm, specs

Operation = Callable[[Tensor, Tensor, Tensor | None], Any]


def _add(spec: str, eps: float | None = None, **options: Any) -> Operation:
    return lambda x, residual, w: add_rms_norm(x, residual, w, eps, spec=spec, **options)


def _gated(spec: str, eps: float | None = None) -> Operation:
    return lambda x, gate, w: gated_rms_norm(x, gate, w, eps, spec=spec)


# Each takes x, what stands beside it (residual or gate), and the weight.
OPERATIONS: dict[str, Operation] = {
    "add torch": _add("torch"),
    "add llama": _add("llama", alpha=0.5),
    **{f"gated {name}": _gated(name) for name in specs if specs[name].gate is not None},
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


def _inputs(dtype: torch.dtype, rows: int, d: int, w_dtype: torch.dtype | None = None) -> Any:
    x, other = rows_of(dtype, rows, d, d), rows_of(dtype, rows, d, d + 1).clamp(-4, 4)
    return x, other, weight_of(w_dtype or dtype, d, d)


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _dys(f: Operation, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        results = _tuple(f(*inputs))
    d = inputs[0].shape[-1]
    rows = inputs[0].numel() // d
    return [
        rows_of(y.dtype, rows, d, d + 2 + i).clamp(-4, 4).view(y.shape)
        for i, y in enumerate(results)
    ]


def _everything(f: Operation, inputs: Sequence[Tensor], dys: Sequence[Tensor]) -> list[Tensor]:
    """The results and the gradients."""
    with torch.no_grad():
        results = _tuple(f(*inputs))
    found = gradients(f, inputs, dys)
    return [*results, *(t for t in found if t is not None)]


def _equal(found: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, right, strict=True))


def _views(t: Tensor) -> list[Tensor]:
    wide = torch.full((*t.shape, 2), torch.nan, dtype=t.dtype)
    wide[..., 1] = t
    order = list(reversed(range(t.dim())))
    return [
        wide[..., 1],
        t.permute(order).contiguous().permute(order),
        t[:1].expand(t.shape),
        t.flatten()[0].expand(t.shape),
    ]


@every_operation
def test_A2_strides_of_everything(name: str) -> None:
    f = OPERATIONS[name]
    for dtype in FLOATS:
        for shape in ((12,), (5, 9), (2, 3, 16), (2, 1, 3, 7)):
            *pair, weight = _inputs(dtype, torch.Size(shape[:-1]).numel(), shape[-1])
            dense = [t.view(shape) for t in pair] + [weight]
            dys = _dys(f, dense)
            for views in zip(*map(_views, dense), strict=True):
                for incoming in zip(*map(_views, dys), strict=True):
                    found = _everything(f, views, incoming)
                    right = _everything(
                        f, [t.contiguous() for t in views], [t.contiguous() for t in incoming]
                    )
                    # Without kernels torch sums a permuted tensor in another order.
                    count = len(found) if KERNELS else len(dys)
                    assert _equal(found[:count], right[:count]), (dtype, shape)


def test_A3_squares_that_float16_cannot_hold() -> None:
    for row in ([300.0] * 4, [8.0] * 4096, [888.0, -888.0, 888.0, -888.0], [65504.0] * 7):
        x = torch.tensor([row]).half()
        weight = torch.ones(len(row)).half()
        half, gate = x / 2, torch.ones_like(x)
        for name in condition("A3")["spec"]:
            f = _add(name, 1e-6)
            y, h = f(half, half, weight)
            assert torch.equal(y, x.sign())
            assert torch.equal(h, x)
            assert all(t.isfinite().all() for t in gradients(f, (half, half, weight), (y, y)))
        for name in ("mamba2", "falcon_h1"):  # the gate before the norm cancels
            y = gated_rms_norm(x, gate, weight, 1e-6, spec=name)
            assert torch.equal(y, x.sign())
        for name in ("qwen3_next", "kimi_linear"):
            y = gated_rms_norm(x, gate, weight, 1e-6, spec=name)
            assert near(y.abs(), float(F.sigmoid(torch.ones(())).half()), 1e-3)  # is silu(1)
        for name, f in OPERATIONS.items():
            if "gated" in name:
                found = gradients(f, (x, gate, weight), (torch.ones_like(x),))
                assert all(t.isfinite().all() for t in found)


def test_A4_rows_of_zeros() -> None:
    one = torch.ones((), dtype=torch.float64)
    for dtype, eps in itertools.product(FLOATS, (1e-45, 1e-38, 1e-30, 1e-12, 1e-6, 1.0, 1e30)):
        x, weight = rows_of(dtype, 4, 10, 0), weight_of(dtype, 10, 0)
        x[[1, 3]] = 0
        dy = torch.full((4, 10), 1e-3, dtype=dtype)
        for f, beside, factor, keeps_float64 in (
            (_add("torch", eps), torch.zeros_like(x), one, True),
            (_gated("falcon_h1", eps), torch.ones_like(x), F.silu(one), False),
            (_gated("kimi_linear", eps), torch.ones_like(x), F.sigmoid(one), False),
        ):
            dys = [dy, torch.zeros_like(dy)][: len(_tuple(f(x, beside, weight)))]
            found = gradients(f, (x, beside, weight), dys)
            assert not any(t.isnan().any() for t in found)
            in_float64 = keeps_float64 and dtype == torch.float64
            e = torch.tensor(eps, dtype=torch.float64 if in_float64 else torch.float32).double()
            right = factor * dy[0].double() * weight.double() / e.sqrt()
            inside = right.abs() < torch.finfo(dtype).max
            rtol = 1e-2 if dtype in HALVES else 1e-6
            torch.testing.assert_close(
                found[0][1][inside].double(), right[inside], rtol=rtol, atol=1e-7
            )


def test_A5_eps_none_is_that_of_float32() -> None:
    for dtype in FLOATS:
        eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23
        for scale in (1e-4, 1e-3, 1e-2):
            x = rows_of(dtype, 4, 64, 0).clamp(-1, 1) * scale
            zeros, ones = torch.zeros_like(x), torch.ones_like(x)
            found, right = add_rms_norm(x, zeros), add_rms_norm(x, zeros, None, eps)
            assert same_bits(found[0], rms_norm(x, None, eps))
            assert _equal(found, right)
            for order in ("before", "after"):
                spec = NormSpec(gate="sigmoid", gate_order=order)
                y = gated_rms_norm(x, ones, spec=spec)
                assert same_bits(y, gated_rms_norm(x, ones, None, eps, spec=spec))
                coarse = gated_rms_norm(x, ones, None, 2.0**-7, spec=spec)
                assert not torch.allclose(y.float(), coarse.float(), rtol=0.1)


def test_A7_the_place_of_the_rounding() -> None:
    x = numbers(condition("A7")["x"], torch.bfloat16)
    weight = numbers(condition("A7")["weight"], torch.bfloat16)
    right, eps = expected("A7"), condition("A7")["eps"]
    for name in ("llama", "torch", "t5"):
        y, h = add_rms_norm(x, torch.zeros_like(x), weight, eps, spec=name)
        assert y.tolist() == right[name]
        assert torch.equal(h, x)
    # A gate of infinity lets everything through a sigmoid.
    wide_open = torch.full_like(x, torch.inf)
    for order in ("before", "after"):
        for name in ("llama", "torch", "t5"):
            spec = replace(specs[name], gate="sigmoid", gate_order=order)
            assert gated_rms_norm(x, wide_open, weight, eps, spec=spec).tolist() == right[name]


def test_A8_dtypes_that_differ() -> None:
    for x_dtype, w_dtype, other in itertools.product(FLOATS, FLOATS, FLOATS):
        x, weight = torch.ones(2, 4, dtype=x_dtype), torch.ones(4, dtype=w_dtype)
        beside = torch.ones(2, 4, dtype=other)
        for name in specs:
            spec = specs[name]
            by = {
                "input": x_dtype,
                "promote": torch.promote_types(x_dtype, w_dtype),
                "weight": w_dtype,
            }
            f = _add(name) if spec.gate is None else _gated(name)
            results = _tuple(f(x, beside, weight))
            assert results[0].dtype == by[spec.output]
            if spec.gate is None:
                assert results[1].dtype == torch.promote_types(x_dtype, other)
            if w_dtype == torch.float32:
                found = gradients(f, (x, beside, weight), [torch.ones_like(y) for y in results])
                assert [t.dtype for t in found] == [x_dtype, other, w_dtype]


def test_A10_the_gradient_of_the_residual_is_added_after_the_norm() -> None:
    given, right = condition("A10"), expected("A10")
    x, residual, weight, dy = (numbers(given[key]) for key in ("x", "residual", "weight", "dy"))
    dh = numbers([0, 1, 0])
    for dtype in (torch.float64, torch.float32):
        inputs = [t.to(dtype) for t in (x, residual, weight)]
        rtol = 1e-8 if dtype == torch.float64 else 5e-7
        f = _add("torch", given["eps"])
        for needs in itertools.product((True, False), repeat=3):
            if not any(needs[:2]):
                continue
            for incoming, key in (
                ((dy, dh), "x.grad and residual.grad"),
                ((dy, None), "when new_residual is unused"),
            ):
                found = gradients(f, inputs, incoming, needs)
                for gradient, need in zip(found[:2], needs, strict=False):
                    assert (gradient is not None) == need
                    assert gradient is None or near(gradient, right[key], rtol)
                assert (found[2] is not None) == needs[2]
            found = gradients(f, inputs, (None, dh), needs)
            for gradient, need in zip(found[:2], needs, strict=False):
                assert (gradient is not None) == need
                assert gradient is None or torch.equal(gradient, dh.to(dtype))
    # What goes wrong: the gradient of the residual sent through the norm as well.
    through = gradients(f, inputs, (dy + dh, None))[0]
    assert not near(through, right["x.grad and residual.grad"], 1e-2)


@every_operation
def test_A11_the_incoming_gradient_is_not_written(name: str) -> None:
    f = OPERATIONS[name]
    for dtype in FLOATS:
        for shift in (0, 1):  # as it was allocated, and a view into something larger
            inputs = _inputs(dtype, 3, 8)
            buffers = [torch.cat([g.flatten(), g.flatten()]) for g in _dys(f, inputs)]
            dys = [b[shift : shift + 24].view(3, 8) for b in buffers]
            given = [*inputs, *buffers]
            before = [t.clone() for t in given]
            leaves = [t.clone().requires_grad_() for t in inputs]
            results = _tuple(f(*leaves))
            copies = [y.detach().clone() for y in results]
            torch.autograd.backward(results, dys, retain_graph=True)
            once = [t.grad.clone() for t in leaves]
            memory = {t.grad.untyped_storage().data_ptr() for t in leaves}
            memory |= {t.untyped_storage().data_ptr() for t in (*buffers, *leaves, *results)}
            assert len(memory) == 2 * len(leaves) + len(buffers) + len(results)
            torch.autograd.backward(results, dys)
            for leaf, gradient in zip(leaves, once, strict=True):
                assert same_bits(leaf.grad, 2 * gradient)
            assert _equal(given, before)
            assert _equal([y.detach() for y in results], copies)
            assert _equal(once, gradients(f, inputs, [g.clone() for g in dys]))


def test_A13_many_rows_in_a_half_type() -> None:
    right = expected("A13")["dw"]
    for dtype in HALVES:
        ones, zeros = torch.ones(4096, 8, dtype=dtype), torch.zeros(4096, 8, dtype=dtype)
        for w_dtype in (dtype, torch.float32):
            weight = torch.ones(8, dtype=w_dtype)
            dw = gradients(_add("torch", 0.0), (ones, zeros, weight), (ones, zeros))[2]
            assert near(dw, right)
            for name, gate, factor in (
                ("falcon_h1", ones, 1.0),  # a constant gate before the norm cancels
                ("kimi_linear", zeros, 0.5),
            ):
                dw = gradients(_gated(name, 0.0), (ones, gate, weight), (ones,))[2]
                assert near(dw, factor * right)
        for rows in (1, 257, 20_000):
            x, dy = rows_of(dtype, rows, 8, rows), rows_of(dtype, rows, 8, rows + 1).clamp(-4, 4)
            gate = rows_of(dtype, rows, 8, rows + 2).clamp(-4, 4)
            wide = x.double()
            products = dy.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            products = products * gate.double().sigmoid()
            f = _gated("kimi_linear")
            dw = gradients(f, (x, gate, torch.ones(8, dtype=dtype)), (dy,))[2]
            unit = torch.finfo(dtype).eps * products.sum(0).abs() + 1e-6 * products.abs().sum(0)
            assert bool(((dw.double() - products.sum(0)).abs() <= unit).all())


@every_operation
def test_A14_row_counts_around_every_split(name: str) -> None:
    f = OPERATIONS[name]
    threads = torch.get_num_threads()
    try:
        for rows, d in ((1025, 32), (2048, 3), (49, 7), (3, 5), (255, 33), (257, 1)):
            inputs = _inputs(torch.float32, rows, d)
            dys = _dys(f, inputs)
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(_everything(f, inputs, dys))
            if KERNELS:
                assert _equal(results[0], results[1])
                assert _equal(results[0], results[2])
            for row in {0, rows // 2, rows - 1}:
                part = slice(row, row + 1)
                alone = _everything(
                    f, [inputs[0][part], inputs[1][part], inputs[2]], [g[part] for g in dys]
                )
                whole = [t[part] for t in results[0][:-1]]
                assert _equal(alone[:-1], whole), (rows, d, row)
    finally:
        torch.set_num_threads(threads)


@every_operation
def test_A17_tails_and_alignment(name: str) -> None:
    f = OPERATIONS[name]
    for dtype in (torch.float32, *HALVES):
        for d in condition("A17")["d"]:
            if d > 1000:
                continue
            inputs = _inputs(dtype, 7, d)
            dys = _dys(f, inputs)
            right = _everything(f, inputs, dys)
            for k in (1, 2, 3):
                given = [*inputs, *dys]
                buffers = [torch.full((t.numel() + 8,), torch.nan, dtype=t.dtype) for t in given]
                views = [
                    b[k : k + t.numel()].view(t.shape).copy_(t)
                    for b, t in zip(buffers, given, strict=True)
                ]
                before = [b.clone() for b in buffers]
                assert _equal(_everything(f, views[:3], views[3:]), right), (dtype, d, k)
                assert _equal(buffers, before)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_A23_gates_and_groups(gate: Any, order: Any) -> None:
    act = F.silu if gate == "silu" else torch.sigmoid

    def plain(x: Tensor, g: Tensor, w: Tensor, groups: int, eps: float) -> Tensor:
        t = x * act(g) if order == "before" else x
        parts = t.unflatten(-1, (groups, -1))
        y = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * w
        return y if order == "before" else y * act(g)

    d = 12
    for dtype in (torch.float32, *HALVES, torch.float64):
        unit = torch.finfo(dtype).eps
        # The gradients of small groups nearly vanish, which only the kernels compute in a wider
        # type; the formula here has none that is wider than float64.
        limit = 4 * unit if KERNELS and dtype != torch.float64 else 64 * unit
        for groups in (1, 2, 3, 4, 6, 12):
            spec = NormSpec(eps=1e-5, gate=gate, gate_order=order, groups=groups)
            x, g, w = _inputs(dtype, 5, d)
            dy = rows_of(dtype, 5, d, 9).clamp(-4, 4)
            f = lambda x, g, w, spec=spec: gated_rms_norm(x, g, w, spec=spec)  # noqa: E731
            by_size = gated_rms_norm(x, g, w, spec=replace(spec, groups=1), group_size=d // groups)
            assert same_bits(by_size, f(x, g, w))
            found = _everything(f, (x, g, w), (dy,))
            leaves = [t.double().requires_grad_() for t in (x, g, w)]
            y = plain(*leaves, groups, float(torch.tensor(1e-5, dtype=torch.float32)))
            if dtype == torch.float64:
                y = plain(*leaves, groups, 1e-5)
            y.backward(dy.double())
            for a, b in zip(found, (y.detach(), *(t.grad for t in leaves)), strict=True):
                assert a.dtype == dtype
                error = (a.double() - b).norm(dim=-1)
                assert bool((error <= limit * (b.norm(dim=-1) + 2)).all())


def test_A23_the_handed_numbers() -> None:
    given, right = condition("A23"), expected("A23")
    x, weight = numbers(given["x"], torch.float32), torch.ones(4)
    zero, one = torch.zeros(4), torch.ones(4)
    before, after = (NormSpec(gate="silu", gate_order=order) for order in ("before", "after"))
    for size, key in ((2, "norm alone, group_size 2"), (None, "norm alone, whole row")):
        y = gated_rms_norm(x, one, weight, 0.0, spec=before, group_size=size)
        assert near(y, right[key])  # a constant factor cancels
        y = gated_rms_norm(x, one, weight, 0.0, spec=after, group_size=size)
        assert near(y, [right["silu(1)"] * v for v in right[key]])
    y = gated_rms_norm(x, one, weight, 0.0, spec=after, group_size=2)
    assert near(y, right["gate 1 after the norm, group_size 2"])
    assert not gated_rms_norm(x, zero, weight, 0.0, spec=after).any()
    assert not gated_rms_norm(x, zero, weight, 1e-5, spec=before).any()
    f = lambda x, g, w: gated_rms_norm(x, g, w, 0.0, spec=after)  # noqa: E731
    dgate = gradients(f, (x, zero, weight), (one,))[1]
    assert near(dgate, [0.5 * v for v in right["norm alone, whole row"]])


@pytest.mark.parametrize("reentrant", [True, False])
def test_A23_what_the_next_layer_receives(reentrant: bool) -> None:
    """Recomputed under checkpointing, the layer behind the norm sees its y, not an older one."""
    linear = torch.nn.Linear(8, 3, bias=False)
    for order in ("before", "after"):
        spec = NormSpec(eps=1e-5, gate="silu", gate_order=order)
        x, gate = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
        weight = torch.randn(8, requires_grad=True)

        def block(*a: Tensor, spec: NormSpec = spec) -> Tensor:
            return linear(gated_rms_norm(*a, spec=spec))

        y = gated_rms_norm(x, gate, weight, spec=spec).detach()
        linear.zero_grad()
        checkpoint(block, x, gate, weight, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(linear.weight.grad, y.sum(0).expand(3, 8))
        linear.zero_grad()
        shut = torch.zeros_like(gate).requires_grad_()
        checkpoint(block, x, shut, weight, use_reentrant=reentrant).sum().backward()
        assert not linear.weight.grad.any()


def test_P6_squares_that_vanish_in_float16() -> None:
    right = expected("P6")["y in fp16"]
    x = torch.full((1, 4), 1e-4, dtype=torch.float16)
    for name in condition("P6")["spec"]:
        for value, eps in zip(right, condition("P6")["eps"], strict=True):
            assert near(add_rms_norm(x, torch.zeros_like(x), None, eps, spec=name)[0], value)
            for order in ("before", "after"):
                spec = replace(specs[name], gate="sigmoid", gate_order=order)
                wide_open = torch.full_like(x, torch.inf)
                assert near(gated_rms_norm(x, wide_open, None, eps, spec=spec), value)


def test_P20_the_weight_that_is_stored_less_one() -> None:
    x, other = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for stored in (0.0, -1.0, 0.5):
        w = torch.full((5,), stored, dtype=torch.float64, requires_grad=True)
        spec = NormSpec(offset=1.0, eps=1e-3)
        y, _ = add_rms_norm(x, other, w, spec=spec)
        assert same_bits(y, rms_norm(other + x, w + 1.0, 1e-3))
        assert torch.autograd.gradcheck(
            lambda *a, spec=spec: add_rms_norm(*a, spec=spec), (x, other, w)
        )
        for order in ("before", "after"):
            gated = replace(spec, gate="silu", gate_order=order)
            y = gated_rms_norm(x, other, w, spec=gated)
            right = gated_rms_norm(x, other, w + 1.0, spec=replace(gated, offset=0.0))
            torch.testing.assert_close(y, right, rtol=1e-14, atol=0.0)
            f = lambda *a, spec=gated: gated_rms_norm(*a, spec=spec)  # noqa: E731
            assert torch.autograd.gradcheck(f, (x, other, w))


def test_P30_shapes_that_do_not_fit() -> None:
    wide = torch.ones(128, 32)
    for other in (torch.ones(128, 16), torch.ones(64, 32), torch.ones(32), torch.ones(1, 128, 32)):
        words = "(?s)" + "".join(f"(?=.*\\({', '.join(map(str, s))},?\\))" for s in (
            wide.shape, other.shape))  # fmt: skip
        for call in (add_rms_norm, gated_rms_norm):
            for a, b in ((wide, other), (wide.clone().requires_grad_(), other)):
                with pytest.raises(ValueError, match=words):
                    call(a, b)
    for call in (add_rms_norm, gated_rms_norm):
        for weight in (torch.ones(16), torch.ones(33), torch.ones(())):
            with pytest.raises(ValueError, match=r"(?s)weight.*\(32,\)"):
                call(wide, wide, weight)
        with pytest.raises(TypeError, match="int64"):
            call(wide, wide.long())
        with pytest.raises(TypeError, match="int64"):
            call(wide, wide, torch.ones(32).long())
        with pytest.raises(RuntimeError, match="meta"):
            call(wide, wide.to("meta"))
        with pytest.raises(RuntimeError, match="meta"):
            call(wide, wide, torch.ones(32, device="meta"))
    with pytest.raises(ValueError, match="gate"):
        add_rms_norm(wide, wide, spec="mamba2")
    with pytest.raises(ValueError, match="gate"):
        gated_rms_norm(wide, wide, spec="llama")
    with pytest.raises(ValueError, match="5"):
        gated_rms_norm(wide, wide, group_size=5)
    # Mixed dtypes are not refused: they are right.
    y, h = add_rms_norm(wide.double(), wide)
    assert (y.dtype, h.dtype) == (torch.float64, torch.float64)
    assert near(h, 2.0)


@every_operation
def test_P34_every_rank_and_both_weight_dtypes(name: str) -> None:
    f = OPERATIONS[name]
    for w_dtype in (torch.bfloat16, torch.float32):
        x, other, weight = _inputs(torch.bfloat16, 24, 8, w_dtype)
        dys = _dys(f, (x, other, weight))
        first = _everything(f, (x, other, weight), dys)
        assert first[-1].dtype == w_dtype
        for shape in ((2, 12, 8), (2, 3, 4, 8), (2, 3, 2, 2, 8), (2, 1, 3, 2, 2, 8)):
            found = _everything(
                f, (x.view(shape), other.view(shape), weight), [g.view(shape) for g in dys]
            )
            flat = [t.view(24, 8) for t in found[:-1]]
            assert _equal(flat, first[:-1])
            assert not KERNELS or same_bits(found[-1], first[-1])
        alone = _everything(f, (x[0], other[0], weight), [g[0] for g in dys])
        assert _equal(alone[:-1], [t[0] for t in first[:-1]])


def _formula(name: str, eps: float) -> Operation:
    """The same in plain torch, of float64."""

    def norm(x: Tensor, w: Tensor | None) -> Tensor:
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return y if w is None else y * w

    if name.startswith("add"):
        return lambda x, r, w: (norm(r + x, w), r + x)
    spec = specs[name.split()[1]]
    act = F.silu if spec.gate == "silu" else torch.sigmoid
    if spec.gate_order == "before":
        return lambda x, g, w: norm(x * act(g), w)
    return lambda x, g, w: norm(x, w) * act(g)


def _in_float64(name: str, eps: float) -> Operation:
    if name.startswith("add"):
        return lambda x, r, w: add_rms_norm(x, r, w, eps)
    spec = replace(specs[name.split()[1]], accumulate="input")
    return lambda x, g, w: gated_rms_norm(x, g, w, eps, spec=spec)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "add llama"])
def test_P44_second_derivatives(name: str) -> None:
    inputs = [torch.randn(3, 10, dtype=torch.float64)[:, ::2] for _ in range(2)]
    inputs.append(torch.randn(5, dtype=torch.float64))
    for frozen in (None, 0, 1, 2):
        penalties = []
        for f in (_in_float64(name, 0.01), _formula(name, 0.01)):
            leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(inputs)]
            wanted = [t for t in leaves if t.requires_grad]
            total = sum(y.sum() for y in _tuple(f(*leaves)))
            first = torch.autograd.grad(total, wanted, create_graph=True)
            penalty = sum(g.square().sum() for g in first)
            penalties.append(torch.autograd.grad(penalty, wanted))
        torch.testing.assert_close(*penalties, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "add llama"])
def test_P46_vmap_of_a_jacobian(name: str) -> None:
    from torch.func import jacfwd, jacrev, vmap

    inputs = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    ours, plain = _in_float64(name, 1e-6), _formula(name, 1e-6)
    for jacobian, in_dims in itertools.product((jacrev, jacfwd), ((0, 0, 0), (0, 0, None))):
        given = [*inputs[:2], inputs[2] if in_dims[2] == 0 else inputs[2][0]]
        torch.testing.assert_close(
            vmap(jacobian(ours, argnums=(0, 1, 2)), in_dims)(*given),
            vmap(jacobian(plain, argnums=(0, 1, 2)), in_dims)(*given),
            rtol=1e-10,
            atol=1e-12,
        )


@every_operation
def test_P52_the_same_bits_every_time(name: str) -> None:
    f = OPERATIONS[name]
    inputs = _inputs(torch.float16, 64, 1000)
    dys = _dys(f, inputs)
    first = _everything(f, inputs, dys)
    assert all(t.isfinite().all() for t in first)
    for turn in range(3):
        poison = [torch.full((64, 1000), torch.nan).half() for _ in range(1 + turn)]
        poison += [torch.full((64 * k,), torch.nan) for k in (1, 1000)]
        del poison
        assert _equal(_everything(f, inputs, dys), first)
        torch.randn(200 + turn, 300).matmul(torch.randn(300, 100))


@every_operation
def test_P62_rows_that_are_not_finite(name: str) -> None:
    f = OPERATIONS[name]
    for dtype in FLOATS:
        for d in (1, 5, 8, 31, 64):
            clean = _inputs(dtype, 5, d)
            dys = _dys(f, clean)
            right = _everything(f, clean, dys)
            for position, bad, which in itertools.product(
                {0, d // 2, d - 1}, (torch.inf, -torch.inf, torch.nan), (0, 1)
            ):
                inputs = [t.clone() for t in clean]
                inputs[which][2, position] = bad
                found = _everything(f, inputs, dys)
                rows = [0, 1, 3, 4]
                assert _equal([t[rows] for t in found[:-1]], [t[rows] for t in right[:-1]])
                if which == 0 or name.startswith("add"):
                    assert not found[0][2].isfinite().all()


def test_P66_a_weight_gradient_that_cancels() -> None:
    n = torch.arange(4096.0, dtype=torch.float64)
    x, dy = n.sin().view(512, 8).bfloat16(), (3 * n).cos().view(512, 8).bfloat16()
    wide = x.double()
    products = dy.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    right, limit = numbers(expected("P66")["dw"]), 1e-6 * products.abs().sum(0)
    zeros = torch.zeros_like(x)
    for f, beside, factor in (
        (_add("torch", 1e-6), zeros, 1.0),
        (_gated("kimi_linear", 1e-6), zeros, 0.5),
    ):
        results = _tuple(f(x, beside, torch.ones(8)))
        dw = gradients(f, (x, beside, torch.ones(8)), [dy, zeros][: len(results)])[2]
        assert bool(((dw.double() / factor - right).abs() <= limit).all())
