"""What every test gets: the same random numbers, and no memory that happens to be zero."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
import torch

# glibc's M_PERTURB: fresh memory is filled with the complement of the byte given. 0xfe is nan in
# float16 and about -1.7e38 in bfloat16 and float32, which no right result is. It reaches what the
# kernels allocate, which torch.utils.deterministic does not.
_M_PERTURB = -6
_COMPLEMENT_OF_FE = 0x01
# Speed is measured there, or whole models run.
_UNPOISONED = {"bench", "real"}


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _UNPOISONED & set(request.node.path.parts):
        yield
        return
    mallopt(_M_PERTURB, _COMPLEMENT_OF_FE)
    yield
    mallopt(_M_PERTURB, 0)
