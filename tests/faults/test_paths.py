"""Known faults that show on some paths only: export, compile, allocator reuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from calls import HALVES, normalise, rows_of, same_bits, weight_of
from faults.cases import condition, expected, near
from rmsnorm import RMSNorm, rms_norm, specs
from rmsnorm.ops.rms_norm import op


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class _Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, 1e-6)


def _paths(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """The module itself, compiled, exported, and exported with its parts spelled out."""
    program = torch.export.export(module, (x,))
    return {
        "eager": module,
        "compiled": torch.compile(module, fullgraph=True, backend="aot_eager"),
        "exported": program.module(),
        "decomposed": program.run_decompositions().module(),
    }


def test_P2_overflow_and_padding_after_export() -> None:
    for dtype in HALVES:
        x = torch.tensor([[300.0] * 4, [0.0] * 4]).to(dtype)
        for training in (False, True) if dtype == torch.float16 else (False,):
            norm = RMSNorm(4, 1e-6, dtype=dtype).requires_grad_(training)
            for path in _paths(norm, x).values():
                y = path(x)
                assert torch.equal(y, torch.tensor([[1.0] * 4, [0.0] * 4]).to(dtype))
    assert expected("P2")["y"] == "[[1]*4, [0]*4]"


def test_P48_compile_and_opcheck() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for make in (
            lambda dtype=dtype: RMSNorm(16, 1e-6, dtype=dtype),
            lambda: RMSNorm(16, 1e-6, spec="llama"),
            lambda: RMSNorm(16, 1e-6, spec="gemma"),
            lambda: RMSNorm(16, elementwise_affine=False),
        ):
            eager = make()
            compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
            results = []
            for call in (eager, compiled):
                eager.zero_grad()
                x = rows_of(dtype, 6, 32, 0)[:, ::2].detach().requires_grad_()
                y = call(x)
                y.backward(rows_of(dtype, 6, 16, 1).to(y.dtype))
                results.append([y, x.grad, *(p.grad.clone() for p in eager.parameters())])
            for a, b in zip(*results, strict=True):
                assert same_bits(a, b)
                assert a.stride() == b.stride()
    x, weight, bias = torch.randn(3, 8), torch.ones(8), torch.ones(8)
    for arguments in ((x, None, None), (x, weight, None), (x.bfloat16(), weight, bias)):
        torch.library.opcheck(op, (*arguments, None, specs.llama.encode()))
    grad = x.clone().requires_grad_()
    torch.library.opcheck(
        op,
        (grad, weight, None, None, specs.llama.encode()),
        test_utils=("test_schema", "test_faketensor"),
    )
    meta = rms_norm(x.t().to("meta"), torch.ones(3, device="meta"))
    assert (meta.shape, meta.dtype, meta.stride()) == ((8, 3), torch.float32, (3, 1))


def test_P50_without_a_weight_on_every_path() -> None:
    right = expected("P50")
    x = torch.full((2, 64), 0.01).bfloat16()
    x[:, 0] = 3
    expected_y = normalise(x, None, 1e-6)
    assert near(expected_y[0, :2], right["y in bf16, first two"])
    assert near(normalise(x.float(), None, 1e-6)[:, 0] / 3, right["1/rms"])
    for path in _paths(_Function(), x).values():
        assert same_bits(path(x), expected_y)
    for dtype in HALVES:
        for d in (1, 8, 33, 100):
            outliers = rows_of(dtype, 4, d, d)
            outliers[:, d // 2] = 3000
            y = normalise(outliers, None, 1e-6)
            assert oracle.max_ulp(y, oracle.rms_norm(outliers, None, 1e-6)) <= 1


def test_P52_the_same_bits_every_time() -> None:
    assert condition("P52")["dtype"] == "float16"
    x, weight = torch.randn(64, 1000).half(), weight_of(torch.float16, 1000, 0)
    results: list[Tensor] = []
    gradients: list[Tensor] = []
    compiled = torch.compile(lambda x, w: rms_norm(x, w), fullgraph=True, backend="aot_eager")
    for turn in range(3):
        for call in (rms_norm, compiled):
            poison = [torch.full((64, 1000), torch.nan).half() for _ in range(1 + turn)]
            del poison
            results.append(call(x, weight))
            torch.randn(200 + turn, 300).matmul(torch.randn(300, 100))
        out = torch.full((64, 1000), torch.nan).half()
        results.append(rms_norm(x, weight, out=out))
        leaf = x.clone().requires_grad_()
        y = rms_norm(leaf, weight)
        y.backward(x)
        results.append(y.detach())
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert all(same_bits(y, results[0]) for y in results)
    assert all(same_bits(g, gradients[0]) for g in gradients)
    assert torch.isfinite(results[0]).all()
    assert torch.isfinite(gradients[0]).all()
