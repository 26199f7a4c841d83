"""The handed faults: each the smallest case that shows it, with right numbers and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CASES = {
    case["id"]: case for case in json.loads(Path(__file__).with_name("cases.json").read_text())
}


def condition(identifier: str) -> Any:
    """What the fault is given."""
    return _CASES[identifier]["condition"]


def expected(identifier: str) -> Any:
    """The right numbers, and under keys that say so the wrong ones."""
    return _CASES[identifier]["expected"]


def numbers(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers, nested as they are, where "nan" and "inf" are strings."""
    if isinstance(values, list):
        return torch.stack([numbers(value, dtype) for value in values])
    return torch.tensor(float(values), dtype=dtype)


def near(found: Tensor, right: Any, rtol: float = 2e-7) -> bool:
    """Equal to numbers of nine digits, as closely as float32 can be."""
    return torch.allclose(
        found.detach().double(),
        numbers(right).expand(found.shape),
        rtol=rtol,
        atol=1e-9,
        equal_nan=True,
    )
