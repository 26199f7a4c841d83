"""The estimates against noise whose truth is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rmsnorm.bench.alone import alone, calls_of
from rmsnorm.bench.paired import Estimate, Paired, Stopwatch, interleave, without_any

BEFORE, AFTER, WITHOUT = 20.0, 19.2, 19.0


def rounds(seed: int, count: int, laps: int = 8) -> dict[str, torch.Tensor]:
    """Rounds of a machine that is up to 10 % slower for a while, and stumbles in one lap of ten."""
    generator = torch.Generator().manual_seed(seed)

    def taken(seconds: float) -> torch.Tensor:
        times = torch.full((count, laps), seconds / laps, dtype=torch.float64)
        slow = 1.0 + 0.1 * torch.rand(count, 1, generator=drift)
        jitter = 1.0 + 0.005 * torch.randn(count, laps, generator=generator)
        stumbles = torch.rand(count, laps, generator=generator) < 0.1
        late = stumbles * torch.rand(count, laps, generator=generator) * 0.5
        return times * slow * jitter * (1.0 + late)

    found = {}
    for name, seconds in (("before", BEFORE), ("after", AFTER), ("without", WITHOUT)):
        drift = torch.Generator().manual_seed(seed + 10_000)  # the same for all
        found[name] = taken(seconds)
    return found


@pytest.mark.parametrize("count", [8, 20, 60])
def test_the_intervals_hold_the_truth(count: int) -> None:
    gone, share, ratio = 0.8, 0.05, BEFORE / AFTER
    held = [0, 0, 0]
    trials = 200
    for seed in range(trials):
        paired = Paired(rounds(seed, count))
        found = (
            paired.gone("before", "after", "without"),
            paired.share("before", "without"),
            paired.ratio("before", "after"),
        )
        for index, (estimate, truth) in enumerate(zip(found, (gone, share, ratio), strict=True)):
            assert estimate.low <= estimate.value <= estimate.high
            held[index] += estimate.low <= truth <= estimate.high
    # 190 are expected, or a few less, since the noise is skewed. All of them would mean that the
    # intervals are wider than they need be.
    assert all(174 <= count < trials for count in held), held


def test_stumbles_and_slow_rounds_do_not_move_the_estimate() -> None:
    paired = Paired(rounds(1, 60))
    gone = paired.gone("before", "after", "without")
    assert gone.value == pytest.approx(0.8, abs=0.06)
    assert gone.high - gone.low < 0.4
    assert paired.share("before", "without").value == pytest.approx(0.05, abs=0.004)
    # A clock beside the machine sees far less.
    totals = torch.tensor(paired.totals("before"))
    assert totals.std() > 0.2


def test_more_rounds_tell_more() -> None:
    widths = []
    for count in (10, 40, 160):
        gone = Paired(rounds(3, count)).gone("before", "after", "without")
        widths.append(gone.high - gone.low)
    assert widths[0] > widths[1] > widths[2]


def test_where_nothing_is_taken_nothing_is_said_to_be_gone() -> None:
    generator = torch.Generator().manual_seed(0)
    same = {
        name: 10.0 + torch.randn(30, 4, generator=generator).double()
        for name in ("before", "after", "without")
    }
    gone = Paired(same).gone("before", "after", "without")
    assert (gone.low, gone.high) == (-math.inf, math.inf)
    assert not gone.tells
    assert gone.percent() == "cannot be told"
    assert gone.at_least(0.8) is None
    assert gone.to_dict()["low"] is None


def test_one_round_tells_nothing() -> None:
    ratio = Paired({"one": [2.0], "other": [1.0]}).ratio("one", "other")
    assert (ratio.value, ratio.low, ratio.high) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize("laps", [{"one": [1.0], "other": [1.0, 2.0]}, {"one": []}, {}])
def test_rounds_that_are_not_paired(laps: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="rounds; expected one number above 0"):
        Paired(laps)


def test_laps_without_a_counterpart_are_compared_by_their_sums() -> None:
    paired = Paired({"eager": [[1.0, 2.0]] * 6, "compiled": [[2.0]] * 6})
    assert paired.ratio("eager", "compiled").value == 1.5


def test_every_pair_goes_first_equally_often() -> None:
    order: list[str] = []
    names = ["a", "b", "c"]
    starts = {name: lambda name=name: [lambda: [order.append(name) or 1.0]] * 2 for name in names}
    found = interleave(starts, 0.0, fewest=8, most=8, warmup=2)
    assert (found.rounds, found.laps) == (8, 2)
    turns = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(turns) == (8 + 2) * 2
    assert all(sorted(turn) == names for turn in turns)
    for one in names:
        for other in names:
            first = sum(turn.index(one) < turn.index(other) for turn in turns)
            assert one == other or first == len(turns) / 2


def test_time_ends_the_rounds() -> None:
    now = iter(range(1000))
    found = interleave({"one": lambda: [lambda: [1.0]]}, 20.0, clock=lambda: float(next(now)))
    assert 15 <= found.rounds <= 25
    unequal = iter(range(1, 100))
    found = interleave({"one": lambda: [lambda: [1.0] * next(unequal)]}, 0.0, fewest=3, warmup=0)
    assert found.totals("one") == [1.0, 2.0, 3.0]
    assert found.laps == 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4), Layer(), Layer(), nn.RMSNorm(4), nn.Linear(4, 8))


NAMES = ["1.norm", "2.norm", "3"]


def test_laps_end_at_the_largest_modules_without_a_norm() -> None:
    built = model()
    names = without_any(built, NAMES)
    assert names == ["0", "1.mlp", "2.mlp", "4"]
    watch = Stopwatch()
    stop = watch.follow([built.get_submodule(name) for name in names])

    def step() -> None:
        loss = built(torch.arange(8)).sum()
        watch.lap()
        loss.backward()

    laps = watch.run(step)
    # Forward: into and out of four modules, and the loss. Backward: the head, two MLPs, and the
    # embedding, which has no end of its own.
    assert len(laps) == 4 * 2 + 1 + 3 * 2 + 1 + 1
    assert watch.free is not None
    norms = [index for index, free in enumerate(watch.free) if not free]
    assert len(norms) == 1 + 3 + 3
    assert len(watch.run(step)) == len(laps)
    stop()
    assert len(watch.run(step)) == 2
    assert watch.free is None  # that run had other laps


def test_a_lap_is_free_only_if_it_was_in_every_run() -> None:
    """Without norms, an embedding and what follows it are given the same tensor."""
    watch = Stopwatch()

    def run(first: str) -> None:
        for label in (first, "leave", "enter", "leave"):
            watch.lap((label, 1))

    watch.run(lambda: run("enter"))
    assert watch.free == [False, True, False, True, False]
    watch.run(lambda: run("between"))
    assert watch.free == [False, True, False, True, False]
    watch.run(lambda: run("leave"))
    assert watch.free == [False, False, False, True, False]


def test_the_norms_alone() -> None:
    built, given = model(), torch.arange(8)
    calls = calls_of(built, NAMES, lambda: built(given))
    assert [name for name, _ in calls] == NAMES
    assert not any(one._forward_pre_hooks for one in built.modules())
    for backward, laps in ((False, 3), (True, 4)):
        (piece,) = alone(built, calls, backward=backward)()
        assert len(piece()) == laps
        assert min(piece()) > 0.0
    (x,), _ = calls[1][1]
    assert x.requires_grad
    assert x.is_leaf
    assert x.grad is None
    assert all(parameter.grad is None for parameter in built.parameters())


def test_words() -> None:
    assert Estimate(0.83, 0.714, 0.951).percent() == "83 % (71 to 95 %)"
    assert Estimate(0.5, -0.1, 1.2).percent() == "cannot be told (-10 to 120 %)"
    assert Estimate(1.2, 0.3, 2.0).tells
    assert [Estimate(0.8, *bounds).at_least(0.75) for bounds in ((0.7, 0.74), (0.75, 0.9))] == [
        False,
        True,
    ]
