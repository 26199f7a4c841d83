"""Rows that are computed side by side: each has the bits that it has alone.

The kernels take the sums of the next rows while they write the current ones, so what is odd about a
row must not reach the rows before and behind it, at whatever place of a block it stands.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from calls import check_gradients, needs_kernels, norm_gradients, same_bits, weight_of
from rmsnorm import add_rms_norm, rms_norm, specs

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# From 2048 on, float32 rows are differentiated side by side; 17 fills no block of rows.
WIDTHS = (5, 40, 128, 700, 2048, 4100)
ROWS = 17


def odd_rows(dtype: torch.dtype, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows and their incoming gradients, every other one of which is out of the ordinary."""
    x = oracle.random(ROWS, d, dtype=dtype, seed=seed)
    dy = oracle.random(ROWS, d, dtype=dtype, seed=seed + 1)
    kinds = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    scales = (1e30, 1e-30, 1e-38, 0.0, -0.0)  # these are redone with a scale, or are zeros
    for row, scale in zip(kinds[: len(scales)].tolist(), scales, strict=True):
        x[row] *= scale
    infinite, not_a_number, parallel, no_gradient = kinds[5:9].tolist()
    x[infinite, d // 2] = torch.inf
    x[not_a_number, d - 1] = torch.nan
    dy[parallel] = x[parallel] + dy[parallel] * 1e-4  # what is left of dx cancels
    dy[no_gradient] = 0
    return x, dy


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_a_row_among_odd_ones_is_as_it_is_alone(dtype: torch.dtype, groups: int) -> None:
    spec = replace(specs.torch, eps=1e-6, groups=groups)
    for seed, d in enumerate(width for width in WIDTHS if width % groups == 0):
        x, dy = odd_rows(dtype, d, 7 * seed)
        residual = oracle.random(ROWS, d, dtype=dtype, seed=seed)
        weight = weight_of(dtype, d, seed)
        y = rms_norm(x, weight, spec=spec)
        added, total = add_rms_norm(x, residual, weight, spec=spec)
        placed = add_rms_norm(x.clone(), residual.clone(), weight, spec=spec, inplace=True)
        assert same_bits(placed[0], added)
        assert same_bits(placed[1], total)
        dx = norm_gradients(x, weight, dy, spec=spec)[0]
        for row in range(ROWS):
            one = slice(row, row + 1)
            y_alone = rms_norm(x[one], weight, spec=spec)
            added_alone, total_alone = add_rms_norm(x[one], residual[one], weight, spec=spec)
            dx_alone = norm_gradients(x[one], weight, dy[one], spec=spec)[0]
            assert same_bits(y_alone, y[one]), (d, row)
            assert same_bits(added_alone, added[one]), (d, row)
            assert same_bits(total_alone, total[one]), (d, row)
            assert same_bits(dx_alone, dx[one]), (d, row)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_wide_rows_follow_the_oracle(dtype: torch.dtype) -> None:
    """Several chunks of rows, and what is left of a step and of a pair of registers."""
    for d in (2048, 2049, 4100):
        x = oracle.random(35, d, dtype=dtype, seed=d)
        dy = oracle.random(35, d, dtype=dtype, seed=d + 1)
        check_gradients(x, weight_of(dtype, d, d), dy, spec=specs.torch)
