"""Telling a difference that is smaller than the noise of the machine.

Norms are a few percent of a model, and a shared machine makes the same step 10 to 20 percent slower
or faster from one second to the next. So

* variants run in rounds, every variant in every round, in an order that is drawn anew and reversed
  in the next round, and only differences within a round count;
* a round is taken in laps (the modules of a pass, the tokens of a text), since a disturbance is
  mostly shorter than a pass: it spoils a lap and not the round;
* of the differences of a lap over the rounds, the middle half is averaged (the interquartile mean:
  robust as the median, and less noisy), and the laps are added up;
* beside each number stands its 95 percent interval. A round's part in a trimmed mean is its
  winsorized value (Yuen 1974, https://doi.org/10.1093/biomet/61.1.165), added up over its laps,
  which need not be independent; rounds are. The interval of a quotient is that of Fieller (1954,
  https://doi.org/10.1111/j.2517-6161.1954.tb00159.x), which is infinite where it is not sure that
  what is divided by is anything.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.bench.process import no_collection

Piece = Callable[[], Sequence[float]]
"""Does a part of the work of a round and returns the seconds of its laps."""
Start = Callable[[], Sequence[Piece]]
"""Prepares a round, untimed; its pieces, as many in every round and variant."""

FEWEST_ROUNDS, MOST_ROUNDS = 6, 400


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 percent interval.

    Example:
        >>> Estimate(0.83, 0.71, 0.95).percent()
        '83 % (71 to 95 %)'
        >>> Estimate(0.4, -0.2, 1.1).percent()
        'cannot be told (-20 to 110 %)'
        >>> Estimate(1.04, 1.02, 1.06).times()
        '1.040x (1.020 to 1.060)'
    """

    value: float
    low: float
    high: float

    @property
    def tells(self) -> bool:
        """Whether anything between none and all is excluded: for a part of a whole."""
        return math.isfinite(self.value) and (self.low > 0.0 or self.high < 1.0)

    def at_least(self, goal: float) -> bool | None:
        """Whether it is ``goal`` or more; ``None`` where the interval holds both.

        Example:
            >>> [Estimate(0.8, low, high).at_least(0.75) for low, high in ((0.76, 0.9), (0.7, 0.9))]
            [True, None]
        """
        if self.low >= goal:
            return True
        return False if self.high < goal else None

    def plus(self, shift: float) -> Estimate:
        """All three moved."""
        return Estimate(self.value + shift, self.low + shift, self.high + shift)

    def complement(self) -> Estimate:
        """Of a part, the rest.

        Example:
            >>> Estimate(0.25, 0.125, 0.5).complement()
            Estimate(value=0.75, low=0.5, high=0.875)
        """
        return Estimate(1.0 - self.value, 1.0 - self.high, 1.0 - self.low)

    def percent(self) -> str:
        """As a part of a whole, in words."""
        if not math.isfinite(self.low) or not math.isfinite(self.high):
            return "cannot be told"
        bounds = f"({self.low * 100:.0f} to {self.high * 100:.0f} %)"
        return f"{self.value * 100:.0f} % {bounds}" if self.tells else f"cannot be told {bounds}"

    def times(self) -> str:
        """As a ratio, in words."""
        return f"{self.value:.3f}x ({self.low:.3f} to {self.high:.3f})"

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which has no infinities."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


class Paired:
    """What variants of the same work took, in the same rounds.

    Args:
        laps: for each variant its seconds, (rounds, laps) or (rounds,).

    Raises:
        ValueError: there are no rounds, or not the same number for all.

    Example:
        >>> found = Paired({"before": [12.0] * 9, "after": [10.5] * 9, "without": [10.0] * 9})
        >>> found.seconds("before"), found.gone("before", "after", "without").value
        (12.0, 0.75)
        >>> found.share("before", "without").percent(), found.ratio("before", "after").times()
        ('17 % (17 to 17 %)', '1.143x (1.143 to 1.143)')
    """

    def __init__(self, laps: Mapping[str, Any]) -> None:
        taken = {name: _rounds_and_laps(values) for name, values in laps.items()}
        rounds = {len(values) for values in taken.values()}
        if len(rounds) != 1 or rounds == {0}:
            raise ValueError(f"there are {sorted(rounds)} rounds; expected one number above 0")
        self._taken = taken
        (self.rounds,) = rounds

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of what was timed."""
        return tuple(self._taken)

    @property
    def laps(self) -> int:
        """Of how many laps a round consists, of the variant that has most."""
        return max(values.shape[1] for values in self._taken.values())

    def only(self, laps: Sequence[bool]) -> Paired:
        """These laps of those variants that have as many.

        Example:
            >>> found = Paired({"one": [[1.0, 2.0, 4.0]], "compiled": [[6.0]]})
            >>> part = found.only([True, False, True])
            >>> part.variants, part.totals("one")
            (('one',), [5.0])
        """
        chosen = torch.tensor(laps)
        taken = self._taken.items()
        return Paired({name: one[:, chosen] for name, one in taken if one.shape[1] == len(laps)})

    def totals(self, variant: str) -> list[float]:
        """The seconds of each round."""
        totals: list[float] = self._taken[variant].sum(1).tolist()
        return totals

    def median(self, variant: str) -> float:
        """The median round, in seconds: what a clock beside the machine would show."""
        return float(self._taken[variant].sum(1).quantile(0.5))

    def seconds(self, variant: str) -> float:
        """A round in seconds, as far as it is not disturbed: the sum of its laps' middles."""
        return float(self._level(variant).mean())

    def ratio(self, one: str, other: str) -> Estimate:
        """The time of ``one`` divided by that of ``other``."""
        return _quotient(self._difference(one, other), self._level(other)).plus(1.0)

    def share(self, whole: str, without: str) -> Estimate:
        """The part of ``whole`` that ``without`` does not have."""
        return _quotient(self._difference(whole, without), self._level(whole))

    def gone(self, before: str, after: str, without: str) -> Estimate:
        """The part that is gone of what ``before`` takes and ``without`` does not.

        Infinite bounds where it is not even sure that this is anything.
        """
        return _quotient(self._difference(before, after), self._difference(before, without))

    def _level(self, variant: str) -> Tensor:
        return _parts(self._taken[variant])

    def _difference(self, one: str, other: str) -> Tensor:
        ours, others = self._taken[one], self._taken[other]
        if ours.shape != others.shape:  # laps without a counterpart cannot be compared, sums can
            ours, others = ours.sum(1, keepdim=True), others.sum(1, keepdim=True)
        return _parts(ours - others)


def _rounds_and_laps(values: Any) -> Tensor:
    found: Tensor = torch.as_tensor(values, dtype=torch.float64)
    return found[:, None] if found.ndim == 1 else found


def _parts(values: Tensor) -> Tensor:
    """The part of each round in the interquartile means of the laps of ``values`` (rounds, laps),
    added up: (rounds,), whose mean is the sum of these, and whose spread tells how sure it is."""
    rounds = len(values)
    cut = rounds // 4
    ordered = values.sort(dim=0).values
    middle = ordered[cut : rounds - cut].mean(0)
    winsorized = values.clamp(ordered[cut], ordered[rounds - 1 - cut])
    spread = (winsorized - winsorized.mean(0)) * (rounds / (rounds - 2 * cut))
    return (middle + spread).sum(1)


def _quotient(above: Tensor, below: Tensor) -> Estimate:
    """The mean of ``above`` divided by that of ``below``, both of the same rounds."""
    rounds = len(above)
    a, b = float(above.mean()), float(below.mean())
    value = a / b if b else math.nan
    unknown = Estimate(value, -math.inf, math.inf)
    if rounds < 2:
        return unknown
    (aa, ab), (_, bb) = (torch.stack([above, below]).cov() / rounds).tolist()
    sure = _student(rounds - 2 * (rounds // 4) - 1) ** 2  # of what the trimming leaves
    # All q with (a - q b)^2 <= sure * (aa - 2 q ab + q^2 bb).
    square = b * b - sure * bb
    if not square > 0.0:
        return unknown
    half = a * b - sure * ab
    root = math.sqrt(max(half * half - square * (a * a - sure * aa), 0.0))
    bounds = (half - root) / square, (half + root) / square
    return Estimate(value, min(bounds[0], value), max(bounds[1], value))


def _student(freedom: int) -> float:
    """What 97.5 percent of Student's t distribution are below.

    Example:
        >>> [round(_student(freedom), 2) for freedom in (2, 5, 10, 30)]  # 4.303 2.571 2.228 2.042
        [4.3, 2.57, 2.23, 2.04]
    """
    if freedom == 1:
        return 12.706
    if freedom == 2:
        return 4.303
    # The expansion in 1 / freedom (Abramowitz & Stegun 1964, 26.7.5).
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


class Stopwatch:
    """Takes the laps of a piece of work.

    Example:
        >>> times = iter((0.0, 1.0, 3.0))
        >>> watch = Stopwatch(lambda: next(times))
        >>> watch.run(watch.lap), watch.free
        ([1.0, 2.0], [True, True])
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._marks: list[tuple[float, _Label]] = []
        self._free: set[tuple[bool, ...]] = set()

    def lap(self, label: _Label = ("between", None)) -> None:
        """End a lap and begin the next; without a label, neither is about norms."""
        self._marks.append((self._clock(), label))

    @property
    def free(self) -> list[bool] | None:
        """Which laps held nothing that differs between variants, in any run; ``None`` if the runs
        had different numbers of laps."""
        if len({len(laps) for laps in self._free}) != 1:
            return None
        return [all(lap) for lap in zip(*self._free, strict=True)]

    def run(self, work: Callable[[], object]) -> list[float]:
        """Do ``work``, whose result is dropped untimed; the seconds of its laps."""
        self._marks.clear()
        self.lap(("start", None))
        result = work()
        self.lap(("end", None))
        del result
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        self._free.add(tuple(_is_free(start, end) for (_, start), (_, end) in pairs))
        return [end - start for (start, _), (end, _) in pairs]

    def follow(self, modules: Sequence[nn.Module]) -> Callable[[], None]:
        """End a lap where each of ``modules`` begins and where it ends, forward and backward.

        Returns:
            What stops that.
        """

        def mark(label: _Label, backward: _Label, tensors: Sequence[Any]) -> None:
            self.lap(label)
            x = next((one for one in tensors if isinstance(one, Tensor)), None)
            if x is not None and x.requires_grad:
                x.register_hook(lambda _: self.lap(backward))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = id(module)
            mark(("enter", number), ("leave", number), (*args, *kwargs.values()))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            number, found = id(module), output if isinstance(output, tuple) else (output,)
            mark(("leave", number), ("enter", number), found)

        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop


# What a mark is: the kind, and the module.
_Label = tuple[str, int | None]


def _is_free(start: _Label, end: _Label) -> bool:
    """Whether a lap lies within one module, or ends or begins where the loss is known."""
    if "between" in (start[0], end[0]):
        return True
    # The backward of an embedding has no end but that of the step.
    return start[0] == "enter" and (end == ("leave", start[1]) or end[0] == "end")


def without_any(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The largest modules in ``model`` that do not hold any of ``names``.

    Example:
        >>> layer = nn.ModuleDict({"norm": nn.RMSNorm(4), "mlp": nn.Sequential(nn.Linear(4, 4))})
        >>> without_any(nn.Sequential(layer, nn.Linear(4, 2)), ["0.norm"])
        ['0.mlp', '1']
    """
    found = []

    def walk(module: nn.Module, prefix: str) -> None:
        for child, inner in module.named_children():
            name = f"{prefix}{child}"
            holds = any(one.startswith(f"{name}.") for one in names)
            # These two are never called themselves.
            if holds or isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
                walk(inner, f"{name}.")
            elif name not in names:
                found.append(name)

    walk(model, "")
    return found


def interleave(
    starts: Mapping[str, Start],
    seconds: float,
    *,
    fewest: int = FEWEST_ROUNDS,
    most: int = MOST_ROUNDS,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Paired:
    """Times variants in rounds, in turns piece by piece.

    Args:
        starts: what prepares a round of each variant.
        seconds: about how long, within the bounds on the number of rounds.
        fewest: the least rounds.
        most: the most rounds.
        warmup: rounds before, which are not counted.
        clock: tells the seconds.

    Example:
        >>> found = interleave({"one": lambda: [lambda: [2.0, 3.0]]}, 0.0, fewest=3)
        >>> found.rounds, found.laps, found.seconds("one")
        (3, 2, 5.0)
    """
    names = list(starts)
    drawn = random.Random(0)
    orders: dict[int, list[str]] = {}
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    number = -warmup
    begin = clock()
    with no_collection():
        while number < fewest or (clock() - begin < seconds and number < most):
            if number == 0:
                begin = clock()
            pieces = {name: starts[name]() for name in names}
            row: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(len(next(iter(pieces.values())))):
                order = orders.pop(turn, None)
                if order is None:
                    order = drawn.sample(names, len(names))
                    orders[turn] = order[::-1]
                for name in order:
                    row[name] += pieces[name][turn]()
            if number >= 0:
                for name in names:
                    taken[name].append(row[name])
            del pieces
            number += 1
    return Paired({name: _even(rows) for name, rows in taken.items()})


def _even(rows: list[list[float]]) -> list[list[float]]:
    """The laps, or their sum where they are not the same in every round."""
    if len({len(row) for row in rows}) == 1:
        return rows
    return [[sum(row)] for row in rows]


@contextlib.contextmanager
def compiled_apart() -> Iterator[None]:
    """While several models of one class are compiled: as many graphs of its code as that takes.

    torch.compile goes back to eager code beyond its limit, without an error; here it is one.
    """
    import torch._dynamo.config as config

    with config.patch(
        recompile_limit=512, accumulated_recompile_limit=4096, fail_on_recompile_limit_hit=True
    ):
        yield
