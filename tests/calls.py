"""How the tests call the operations and compare what they give."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from rmsnorm import NormSpec, cpu_isa, rms_norm, specs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

KERNELS = cpu_isa() is not None
needs_kernels = pytest.mark.skipif(not KERNELS, reason="only the kernels promise this")

UNGATED = {name: specs[name] for name in specs if specs[name].gate is None}
# The named conventions, and every other field of NormSpec at least once.
ALL_SPECS: dict[str, NormSpec] = {
    **UNGATED,
    "llama_input": replace(specs.llama, output="input"),
    "gemma_before": replace(specs.llama, offset=1.0),
    "weight_out": replace(specs.torch, output="weight", eps=1e-5),
    "root_mean": replace(specs.gemma, eps_in="root"),
    "partial": replace(specs.torch, partial=0.0625, eps=1e-6),
    "partial_llama": replace(specs.llama, partial=0.3),
}


def bits(x: Tensor) -> Tensor:
    """The patterns of ``x`` as integers, every nan as one of them."""
    patterns = x.detach().contiguous().view(_INTEGERS[x.element_size()])
    return torch.where(x.isnan(), torch.iinfo(patterns.dtype).max, patterns)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit: -0 is not 0, nan is nan."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bits(a), bits(b))


def without_direct_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the way through torch.ops, with an ``autograd.Function`` for gradients."""
    from rmsnorm.ops import add_rms_norm, route
    from rmsnorm.ops import rms_norm as operation

    for module in (operation, add_rms_norm):
        monkeypatch.setattr(module, "entry", None)
    monkeypatch.setattr(route, "_direct", None)


def normalise(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, **kw: Any
) -> Tensor:
    """:func:`rms_norm`, also into an ``out`` full of nan: both must have the same bits."""
    with torch.no_grad():
        y = rms_norm(x, weight, eps, **kw)
        out = torch.full(y.shape, torch.nan, dtype=y.dtype)
        returned = rms_norm(x, weight, eps, out=out, **kw)
    assert returned is out
    assert same_bits(y, out)
    assert y.shape == x.shape
    assert y.is_contiguous()
    return y


def rows_of(dtype: torch.dtype, rows: int, d: int, seed: int) -> Tensor:
    """Normal numbers (rows, d), each row on a scale of its own, between 1/64 and 64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, generator=generator)
    return (x * 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)).to(dtype)


def weight_of(dtype: torch.dtype, d: int, seed: int) -> Tensor:
    """Weights (d,) around 1, a few of them negative."""
    generator = torch.Generator().manual_seed(seed + 1)
    return (1.0 + torch.randn(d, generator=generator) / 2).to(dtype)


def gradients(
    f: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    dys: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``f(*inputs)``: None for inputs that are None, not needed or not used.

    An incoming gradient that is None belongs to a result that is not used.
    """
    needs = needs or [True] * len(inputs)
    leaves = [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip(inputs, needs, strict=True)
    ]
    results = f(*leaves)
    results = (results,) if isinstance(results, Tensor) else results
    used = [
        (y, dy) for y, dy in zip(results, dys, strict=True) if dy is not None and y.requires_grad
    ]
    ys, incoming = [y for y, _ in used], [dy.to(y.dtype) for y, dy in used]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(ys, wanted, incoming, allow_unused=True))
    return tuple(
        next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves
    )


def norm_gradients(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    needs: Sequence[bool] | None = None,
    **kw: Any,
) -> tuple[Tensor | None, ...]:
    """dx, dweight and dbias of :func:`rms_norm`."""

    def f(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return rms_norm(x, weight, eps, bias=bias, **kw)

    return gradients(f, (x, weight, bias), (dy,), needs)


def compute_dtype(x: torch.dtype, spec: NormSpec) -> torch.dtype:
    """What a row of ``x`` is computed in."""
    return torch.float64 if x == torch.float64 and spec.accumulate == "input" else torch.float32


def row_norms(rows: oracle.Array) -> oracle.Array:
    """The Euclidean norm along the last dimension, of numbers of any size."""
    largest = abs(rows).max(axis=-1, initial=0.0)
    scale = np.where(largest > 0.0, largest, 1.0)
    norms: oracle.Array = np.linalg.norm(rows / scale[..., None], axis=-1) * scale
    return norms


def assert_close_rows(
    found: Tensor, exact: oracle.Array, unit: float, slack: oracle.Array | float = 0.0
) -> None:
    """Within 2 ``unit`` of the exact rows in the Euclidean norm, no row off by more than 3.

    To that comes a ``slack`` of each row. Numbers too small for the dtype may be off by its
    smallest one; those too large are infinite.
    """
    info = torch.finfo(found.dtype)
    values = oracle.to_array(found)
    d = values.shape[-1] if values.ndim else 1
    large = abs(exact) > info.max * (1 - 4 * unit)
    beyond = abs(exact) > info.max * (1 + 4 * unit)
    assert np.array_equal(values[beyond], np.copysign(np.inf, exact[beyond]))
    difference = np.where(large, 0.0, values - np.where(large, 0.0, exact))
    assert np.isfinite(difference).all()
    error, size = row_norms(difference), row_norms(np.where(large, 0.0, exact))
    rest = slack + math.sqrt(d) * info.smallest_normal * info.eps
    bad = ~(error <= 3 * unit * size + rest)
    assert not bad.any(), (
        f"row {np.argwhere(bad)[0]}: error {error[bad][0]:.3g} of {size[bad][0]:.3g}, "
        f"which is {error[bad][0] / size[bad][0] / unit:.3g} units"
    )
    whole = max((size + rest).max(initial=0.0), info.smallest_normal)
    assert np.linalg.norm(error / whole) <= np.linalg.norm((2 * unit * size + rest) / whole)


def check_gradients(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    spec: NormSpec,
    ndim: int = 1,
) -> tuple[Tensor | None, ...]:
    """The gradients of rms_norm, which are within their limits of the oracle's.

    dx: 2 units of its dtype in the Euclidean norm (3 in the worst row), and what a wider type
    loses where the two terms of dx cancel. dweight and dbias: 1 unit, and 1e-6 of the sum of the
    magnitudes.

    The composite (no kernels) has the roundings of the forward in its gradients, and no wider type
    for rows that cancel.
    """
    shape = x.shape[x.dim() - ndim :]
    found = norm_gradients(x, weight, dy, eps, bias=bias, spec=spec, normalized_shape=shape)
    exact = oracle.rms_norm_backward(dy, x, weight, eps, spec=spec, ndim=ndim)
    compute = compute_dtype(x.dtype, spec)
    unit = max(torch.finfo(x.dtype).eps, torch.finfo(compute).eps)
    coarse = max(torch.finfo(t.dtype).eps for t in (x, weight, bias, dy) if t is not None)
    dx, dweight, dbias = found
    assert dx is not None
    assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
    assert dx.is_contiguous() or not KERNELS
    rows = (-1, math.prod(shape)) if x.numel() else x.shape
    wider = 2.0**-50 if KERNELS else 4 * max(unit, coarse)
    if spec.partial < 1.0:  # the elements that are not counted have no bound on their xhat
        wider = max(wider, unit)
    slack = wider * row_norms(exact.dx_size.reshape(rows))
    assert_close_rows(dx.reshape(rows), exact.dx.reshape(rows), unit, slack)

    relative = 1e-6 if compute == torch.float32 else 1e-14
    if not KERNELS and spec.rounding != "after_weight":
        relative = max(relative, coarse)
    for given, gradient, right, magnitude in (
        (weight, dweight, exact.dweight, exact.dweight_size),
        (bias, dbias, exact.dbias, exact.dbias_size),
    ):
        if given is not None:
            assert gradient is not None
            assert (gradient.dtype, gradient.shape) == (given.dtype, given.shape)
            assert_sums(gradient, right, magnitude, relative)
    return found


def assert_sums(
    found: Tensor, exact: oracle.Array, magnitude: oracle.Array, relative: float
) -> None:
    """Each sum within 1 unit of its dtype, and ``relative`` times that of the magnitudes."""
    info = torch.finfo(found.dtype)
    values = oracle.to_array(found)
    inside = abs(exact) < info.max * (1 - 2 * info.eps)
    assert np.isinf(values[abs(exact) > info.max * (1 + 2 * info.eps)]).all()
    limit = info.eps * abs(exact) + relative * magnitude + info.smallest_normal * info.eps
    error = abs(values - exact)[inside]
    assert (error <= limit[inside]).all(), (error / limit[inside]).max()


def grid_hashes(script: Path, isa: str | None, threads: int) -> dict[str, str]:
    """What ``script`` prints where the kernels of one instruction set run on so many threads."""
    env = {**environment(), "OMP_NUM_THREADS": str(threads)}
    env.pop("RMSNORM_ISA", None)
    if isa is not None:
        env["RMSNORM_ISA"] = isa
    run = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, str] = json.loads(run.stdout)
    assert answer.pop("isa") == str(isa if isa is not None else cpu_isa())
    assert answer.pop("threads") == str(threads)
    return answer


def environment() -> dict[str, str]:
    """That of this process, with the package and the tests on the path."""
    tests = Path(__file__).resolve().parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent / "src"), str(tests)])}


def other_isas() -> list[str]:
    """The instruction sets of this machine, other than the one in use."""
    if not KERNELS:
        return []
    found = ["scalar"]
    flags = Path("/proc/cpuinfo")
    words = set(flags.read_text().split()) if flags.exists() else set()
    if platform.machine() in ("x86_64", "AMD64"):
        found += ["avx2"] if "avx2" in words else []
        found += ["avx512"] if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= words else []
    else:
        found += ["neon"]
    return [isa for isa in found if isa != cpu_isa()]
