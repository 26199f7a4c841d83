"""Known faults of distributed tensors, on two ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

distributed = pytest.importorskip("torch.distributed")
if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

import ranks
from faults import distributed_ranks
from faults.cases import expected, near
from faults.distributed_ranks import Answer, Call

_ROWS = Call(
    x=torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 4.0]]),
    weight=torch.ones(3),
    dy=torch.ones(2, 3),  # the loss is the sum
    placed="S0",
    weight_placed="R",
)
_CUT = Call(
    x=torch.tensor([[1.0, 2.0, 2.0, 4.0]]),
    weight=torch.ones(4),
    dy=torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
    placed="S1",
    weight_placed="S0",
)
_FROZEN = [
    replace(_ROWS, placed=placed, weight_placed="R R", mesh=mesh, frozen=True)
    for mesh, placed in (((2, 1), "S0 R"), ((1, 2), "R S0"))
]


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Of both ranks, which must agree, the first one's."""
    first, second = ranks.run(2, distributed_ranks.run_calls, [_ROWS, _CUT, *_FROZEN])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.y, other.y)
        assert torch.equal(one.dx, other.dx)
        assert (one.dweight is None) == (other.dweight is None)
        assert one.dweight is None or torch.equal(one.dweight, other.dweight)
    return list(first)


def _assert_right(found: Answer, y: object, dx: object, dweight: object) -> None:
    assert near(found.y, y)
    assert near(found.dx, dx, rtol=2e-6)
    assert found.dweight is not None
    assert near(found.dweight, dweight)


def test_B19_rows_on_different_ranks(answers: list[Answer]) -> None:
    right, found = expected("B19"), answers[0]
    _assert_right(found, right["y"], right["dx"], right["dw (full)"])
    assert found.placements == ("(Shard(dim=0),)", "(Shard(dim=0),)", "(Partial(sum),)")
    assert (found.forward, found.backward) == ({}, {})


def test_B20_a_frozen_weight(answers: list[Answer]) -> None:
    right = expected("B20")
    for found in answers[2:]:
        assert near(found.dx, right["dx"], rtol=2e-6)
        assert found.dweight is right["dw"]
    assert ranks.run(2, distributed_ranks.run_subsets) == [[], []]


def test_B22_elements_of_a_row_on_different_ranks(answers: list[Answer]) -> None:
    right, found = expected("B22"), answers[1]
    _assert_right(found, right["a: y"], right["a: dx"], right["a: dw"])
    assert found.forward == {"all_reduce": 1}
    assert found.backward == {"all_reduce": 1}


def test_B24_the_norm_of_all_gradients() -> None:
    right = expected("B24")["norm"]
    for found in ranks.run(2, distributed_ranks.run_clipping, torch.tensor([3.0, 4.0])):
        assert found.pop("all") == pytest.approx(right * math.sqrt(3), rel=1e-6)
        assert found == pytest.approx(dict.fromkeys(found, right), rel=1e-6)
