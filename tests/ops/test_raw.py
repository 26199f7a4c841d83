"""What the raw operations and their callers owe autograd, beyond the right numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rmsnorm
from calls import KERNELS, same_bits
from rmsnorm import add_rms_norm, gated_rms_norm, rms_norm, specs
from rmsnorm.ops import rms_norm as operation

raw = torch.ops.rmsnorm


def test_what_is_written_counts_a_version() -> None:
    out, h, residual = (torch.randn(3, 8) for _ in range(3))
    raw.rms_norm.out(torch.randn(3, 8), out=out)
    add_rms_norm(h, residual, inplace=True)
    assert out._version == 1
    # Without kernels each is also copied to, which counts once more.
    assert h._version > 0
    assert residual._version > 0
    base = torch.randn(3, 8, requires_grad=True)
    leaf = base * 1
    squared = leaf.square()
    add_rms_norm(leaf.detach(), torch.randn(3, 8), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_the_operation_in_place_counts_versions() -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    raw.add_rms_norm_(x, residual)
    assert x._version > 0
    assert residual._version > 0
    leaf = torch.randn(3, 8, requires_grad=True) * 1
    squared = leaf.square()
    raw.add_rms_norm_(leaf.detach(), residual)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    with torch.inference_mode():
        frozen = torch.randn(3, 8)
        raw.add_rms_norm_(frozen, torch.randn(3, 8))
    before = frozen.clone()
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        raw.add_rms_norm_(frozen, residual)
    assert same_bits(frozen, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gate_belongs_to_a_gated_norm(device: str) -> None:
    x, rstd = torch.randn(4, 8, device=device), torch.ones(4, 1, device=device)
    gated, plain = specs.mamba2.encode(), specs.llama.encode()
    out, weights = torch.full_like(x, torch.nan), torch.ones(2, 8, device=device)

    def weighted_bwd(weight: Tensor) -> Tensor:
        dx: Tensor = raw.rms_norm_bwd(x, x, weight, rstd, None, None, gated, 1, True, False, False)[
            0
        ]
        return dx

    def weighted_gated_bwd(weight: Tensor) -> Tensor:
        needs = (True, False, False)
        dx: Tensor = raw.gated_rms_norm_bwd(x, x, x, weight, rstd, None, plain, *needs)[0]
        return dx

    calls = [
        lambda: raw.rms_norm(x, spec=gated),
        lambda: raw.rms_norm(x, spec=gated, out=out),
        lambda: raw.rms_norm_fwd(x, spec=gated),
        lambda: raw.rms_norm_bwd(x, x, None, rstd, None, None, gated, 1, True, False, False),
        lambda: raw.rms_norm_gradients(x, x, None, rstd, None, None, gated, 1, True, False),
        lambda: torch.func.vmap(weighted_bwd)(weights),
        lambda: raw.add_rms_norm(x, x, spec=gated),
        lambda: raw.add_rms_norm_fwd(x, x, spec=gated),
        lambda: raw.add_rms_norm_(out, x, spec=gated),
        lambda: raw.gated_rms_norm(x, x, spec=plain),
        lambda: raw.gated_rms_norm_fwd(x, x, spec=plain),
        lambda: raw.gated_rms_norm_bwd(x, x, x, None, rstd, None, plain, True, False, False),
        lambda: torch.func.vmap(weighted_gated_bwd)(weights),
    ]
    for number, call in enumerate(calls):
        with pytest.raises((RuntimeError, ValueError), match=r"has (a|no) gate"):
            pytest.fail(f"call {number} returned {call()}")
    assert device == "meta" or bool(out.isnan().all())


@pytest.mark.parametrize("gated", [False, True])
def test_rstd_is_checked(gated: bool) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    gate = (torch.randn(4, 8),) if gated else ()
    spec = specs.mamba2.encode() if gated else ""
    rest = (None, spec, True, True, True) if gated else (None, None, spec, 1, True, True, True)
    backward = raw.gated_rms_norm_bwd if gated else raw.rms_norm_bwd
    rstd = torch.ones(4, 1)
    for wrong in (rstd.to("meta"), rstd.double(), torch.ones(3, 1)):
        with pytest.raises((RuntimeError, TypeError, ValueError), match="rstd"):
            backward(x, x, *gate, weight, wrong, *rest)


@pytest.mark.skipif(not KERNELS, reason="without kernels a gradient needs no operation")
def test_a_level_of_forward_mode_that_opens_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level is the whole process', so another thread may open it behind the check."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    right = rms_norm(x, weight)
    (dx,) = torch.autograd.grad(right.sum(), x)
    modules = [operation, rmsnorm.ops.add_rms_norm, rmsnorm.ops.gated_rms_norm]
    for module in modules:
        monkeypatch.setattr(module, "needs_composite", lambda *tensors: False)
    y = rms_norm(x, weight)
    with torch.autograd.forward_ad.dual_level():
        assert same_bits(rms_norm(x, weight), right)
        assert same_bits(rms_norm(x.detach(), weight), right)
        assert same_bits(add_rms_norm(torch.zeros(4, 8), x.detach(), weight)[0], right)
        assert gated_rms_norm(x, x, weight).shape == x.shape
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], dx)
        with pytest.raises(RuntimeError, match="no forward mode"):
            raw.rms_norm(x.detach(), weight)


def test_one_tensor_in_two_places_compiles() -> None:
    v = torch.randn(8, requires_grad=True)
    calls = [
        lambda v: rms_norm(v, v),
        lambda v: add_rms_norm(v, v)[0],
        lambda v: gated_rms_norm(v, v),
    ]
    for call in calls:

        def step(v: Tensor, call: object = call) -> Tensor:
            return call(v)  # type: ignore[operator,no-any-return]

        compiled = torch.compile(step, fullgraph=True, backend="eager")
        (right,) = torch.autograd.grad(step(v).sum(), v)
        (found,) = torch.autograd.grad(compiled(v).sum(), v)
        torch.testing.assert_close(found, right)


def test_an_eps_that_float32_has_not() -> None:
    for x in (torch.randn(2, 8), torch.randn(2, 8, requires_grad=True)):
        with pytest.raises(ValueError, match="eps is 1e"):
            rms_norm(x, None, 1e39)
    assert bool((rms_norm(torch.randn(2, 8).double(), None, 1e39) != 0).all())


def test_in_place_on_a_negative_view() -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    y, h = add_rms_norm(x, -residual)
    negated = torch._neg_view(residual)
    add_rms_norm(x, negated, inplace=True)
    assert same_bits(x, y)
    assert same_bits(negated.resolve_neg(), h)


def test_a_subnormal_eps_where_subnormals_are_flushed() -> None:
    x = torch.full((2, 8), 1e-41)
    right = rms_norm(x, None, 1e-44)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = rms_norm(x, None, 1e-44)
    finally:
        torch.set_flush_denormal(False)
    assert not KERNELS or same_bits(found, right)
