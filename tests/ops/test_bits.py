"""Bit for bit the result of eager PyTorch: F.rms_norm, and the norm classes of transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from calls import (
    HALVES,
    environment,
    grid_hashes,
    normalise,
    other_isas,
    rows_of,
    same_bits,
    weight_of,
)
from rmsnorm import cpu_isa, rms_norm, specs

LARGER = (
    *(1152, 1280, 1407, 1536, 1600, 1920, 2047, 2048, 2304, 2560, 2880, 3000, 3072, 3584, 4095),
    *(4096, 4097, 5120, 5376, 6144, 7168, 8192, 8193, 11008, 12288, 14336, 16384, 20480, 28672),
    32768,
)
WIDTHS = (*range(1, 1101), *LARGER)
SHORT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
Eager = Callable[[Tensor, Tensor | None], Tensor]


def _transformers(module: str, name: str, **options: object) -> Eager:
    imported = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    norm = getattr(imported, name)(**options)

    def call(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            norm._parameters["weight"] = weight
        return norm.forward(x)

    return call


# What PyTorch computes, and the spec that says the same.
FAMILIES: dict[str, tuple[str, Callable[[], Eager]]] = {
    "torch": ("torch", lambda: lambda x, w: F.rms_norm(x, x.shape[-1:], w)),
    "llama": ("llama", lambda: _transformers("llama", "LlamaRMSNorm", hidden_size=1)),
    "gemma": ("gemma", lambda: _transformers("gemma", "GemmaRMSNorm", dim=1)),
    "t5": ("t5", lambda: _transformers("t5", "T5LayerNorm", hidden_size=1)),
    "olmo2": ("olmo2", lambda: _transformers("olmo2", "Olmo2RMSNorm", hidden_size=1)),
}
WEIGHTLESS: dict[str, tuple[str, Callable[[], Eager]]] = {
    "torch": FAMILIES["torch"],
    "llama4_l2": ("olmo2", lambda: _transformers("llama4", "Llama4TextL2Norm")),
    "gemma3n": (
        "olmo2",
        lambda: _transformers("gemma3n", "Gemma3nRMSNorm", dim=1, with_scale=False),
    ),
}


class Rows:
    """Cuts rows of any width out of random numbers that were drawn once."""

    def __init__(self, dtype: torch.dtype) -> None:
        numbers = rows_of(torch.float32, 64, 4096, 0).flatten()
        numbers = numbers[
            torch.randperm(numbers.numel(), generator=torch.Generator().manual_seed(1))
        ]
        self.numbers = numbers.to(dtype)

    def __getitem__(self, d: int) -> Tensor:
        """1 to 7 rows of ``d``; for odd widths with three elements between them."""
        rows, gap = 1 + d % 7, 3 * (d % 2)
        return self.numbers[d : d + rows * (d + gap)].view(rows, d + gap)[:, :d]


def _differing(
    eager: Eager,
    spec: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype | None,
    widths: tuple[int, ...],
) -> list[int]:
    numbers = Rows(x_dtype)
    longest = None if w_dtype is None else weight_of(w_dtype, max(widths), 0)
    differing = []
    with torch.no_grad():
        for d in widths:
            x = numbers[d]
            weight = None if longest is None else longest[:d]
            if not torch.equal(rms_norm(x, weight, spec=spec), eager(x, weight)):
                differing.append(d)
    return differing


@pytest.mark.parametrize("x_dtype", SHORT_TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_weighted_families(family: str, x_dtype: torch.dtype) -> None:
    spec, make = FAMILIES[family]
    eager = make()
    differing = {w: _differing(eager, spec, x_dtype, w, WIDTHS) for w in SHORT_TYPES}
    assert not any(differing.values()), differing


@pytest.mark.parametrize("x_dtype", SHORT_TYPES, ids=str)
@pytest.mark.parametrize("family", WEIGHTLESS)
def test_weightless_families(family: str, x_dtype: torch.dtype) -> None:
    spec, make = WEIGHTLESS[family]
    assert not _differing(make(), spec, x_dtype, None, WIDTHS)


@pytest.mark.parametrize("family", ["torch", "llama", "gemma", "olmo2"])
def test_float64_among_the_dtypes(family: str) -> None:
    spec, make = FAMILIES[family]
    eager = make()
    widths = (*range(1, 70), *WIDTHS[69::17])
    pairs = [(torch.float64, w) for w in (torch.float64, *SHORT_TYPES)]
    pairs += [(x, torch.float64) for x in SHORT_TYPES]
    differing = {pair: _differing(eager, spec, *pair, widths) for pair in pairs}
    assert not any(differing.values()), differing


def test_float64_without_a_weight() -> None:
    eager = FAMILIES["torch"][1]()
    assert not _differing(eager, "torch", torch.float64, None, WIDTHS[::3])


@pytest.mark.parametrize("dtype", SHORT_TYPES, ids=str)
def test_zeros_keep_their_signs(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0] * 5, [-0.0] * 20]).to(dtype)
    weight = torch.tensor([-1.0, -0.0, 0.0, 1.0, 1.0] * 4).to(dtype)
    expected = F.rms_norm(x, (20,), weight, 1e-6)
    assert same_bits(normalise(x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", SHORT_TYPES, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0, 1e4])
def test_other_eps(dtype: torch.dtype, eps: float) -> None:
    for d in (1, 5, 8, 100, 1000):
        x, weight = rows_of(dtype, 5, d, d), weight_of(dtype, d, d)
        assert same_bits(normalise(x, weight, eps), F.rms_norm(x, (d,), weight, eps))


@pytest.mark.parametrize("dtype", SHORT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 8), (16, 16)])
def test_several_dimensions(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = rows_of(dtype, 6, torch.Size(shape).numel(), 2).view(6, *shape)
    weight = weight_of(dtype, torch.Size(shape).numel(), 2).view(shape)
    assert same_bits(normalise(x, weight), F.rms_norm(x, shape, weight))
    assert same_bits(normalise(x, normalized_shape=shape), F.rms_norm(x, shape))


@pytest.mark.parametrize("groups", [2, 4, 7])
@pytest.mark.parametrize("dtype", SHORT_TYPES, ids=str)
def test_groups_are_rows_of_their_own(dtype: torch.dtype, groups: int) -> None:
    for part in (1, 3, 8, 33, 128):
        x, weight = rows_of(dtype, 5, groups * part, part), weight_of(dtype, groups * part, part)
        spec = replace(specs.torch, groups=groups)
        wide = F.rms_norm(x.view(5, groups, part).float(), (part,), None, 2.0**-23).view(5, -1)
        assert same_bits(normalise(x, spec=spec), wide.to(dtype))
        assert same_bits(normalise(x, weight, spec=spec), (wide * weight.float()).to(dtype))


@pytest.mark.parametrize("dtype", [*SHORT_TYPES, torch.float64], ids=str)
def test_a_row_does_not_know_its_batch(dtype: torch.dtype) -> None:
    for spec in ("torch", "llama"):
        for d in (1, 3, 8, 17, 64, 129, 576):
            x, weight = rows_of(dtype, 4096, d, d), weight_of(dtype, d, d)
            whole = normalise(x, weight, spec=spec)
            for rows in (1, 7, 64):
                for start in (0, 641, 4096 - rows):
                    part = rms_norm(x[start : start + rows], weight, spec=spec)
                    assert same_bits(part, whole[start : start + rows]), (spec, d, rows, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_too_large_for_the_cache(dtype: torch.dtype) -> None:
    rows = 2**25 // 4096 // dtype.itemsize
    x, weight = rows_of(dtype, rows, 4096, 0), weight_of(dtype, 4096, 0)
    whole = normalise(x, weight)
    for start in range(0, rows, 64):
        assert same_bits(whole[start : start + 64], rms_norm(x[start : start + 64], weight))


_GRID = Path(__file__).with_name("bit_grid.py")


def test_threads_and_instruction_sets() -> None:
    usual = grid_hashes(_GRID, None, 2)
    assert len(usual) > 500
    others = {"1 thread": grid_hashes(_GRID, None, 1)}
    others |= {isa: grid_hashes(_GRID, isa, 2) for isa in other_isas()}
    for name, other in others.items():
        assert other.keys() == usual.keys()
        assert not [case for case in usual if usual[case] != other[case]], name


@pytest.mark.skipif(cpu_isa() is None, reason="there are no kernels")
def test_an_instruction_set_that_is_not_here_is_an_import_error() -> None:
    isa = next(name for name in ("neon", "avx2") if name not in (cpu_isa(), *other_isas()))
    run = subprocess.run(
        [sys.executable, "-c", "import rmsnorm; rmsnorm.cpu_isa()"],
        env={**environment(), "RMSNORM_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert isa in last


def test_half_values_between_two_numbers_go_to_the_even_one() -> None:
    # xhat is exactly x where the other half of the row brings the mean square to 1.
    for dtype in HALVES:
        x = torch.ones(4, 64, dtype=dtype)
        step = torch.finfo(dtype).eps
        weight = 1.0 + step * (torch.arange(64) + 0.5)
        assert same_bits(normalise(x, weight, 0.0), weight.to(dtype).expand(4, -1).contiguous())
