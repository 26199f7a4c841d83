"""Timing and judging.

All candidates of a cell run in one process, interleaved: each round takes one sample of each, in an
order that rotates from round to round, so that a slow second of the machine falls on everyone. A
sample is as many calls as take about 200 microseconds, and the result is the median over rounds;
who would use up the cell's time alone is sampled in the first, the middle and the last round. A
copy (``torch.add`` in call cells) is the control: if its own samples spread or drift, or anyone's
spread widely, the cell is measured again, and marked if that does not help. A cell that loses is
measured again, up to twice, before it counts.

A cell of which no more is asked than to be ahead of the peers, which are mostly far behind, gets
half the time at first, and all of it if it is measured again.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from rmsnorm.bench.engines import Engines
from rmsnorm.bench.goals import Limit, has_figure, limits
from rmsnorm.bench.grid import SPECS, Cell, tiny
from rmsnorm.bench.limit import (
    COPIES,
    Arguments,
    Bind,
    Candidate,
    CellBuffers,
    Memory,
    copies,
)
from rmsnorm.bench.peers import Compiler, candidates
from rmsnorm.bench.process import kept_memory, no_collection
from rmsnorm.progress import Say

Clock = Callable[[], int]

# Where the two halves of the control's samples, or its samples and their median, differ by more
# than this, something else used the machine.
_DRIFT = 1.25
_SPREAD = 0.15
_WIDE_SPREAD = 0.3
_MAX_CALLS = 20_000
_CONTROLS = ("copy", "rewrite", "add")


@dataclass(frozen=True)
class Policy:
    """How long to measure.

    Attributes:
        sample_ns: what one sample should take at least.
        budget_ns: what the rounds of one cell should take, within the bounds on their number.
        retries: how often a losing cell is measured again.
    """

    sample_ns: int = 200_000
    budget_ns: int = 800_000_000
    min_rounds: int = 5
    max_rounds: int = 51
    retries: int = 2

    def with_rounds(self, factor: int) -> Policy:
        """The same with ``factor`` times as many rounds."""
        return replace(
            self,
            budget_ns=factor * self.budget_ns,
            min_rounds=factor * self.min_rounds,
            max_rounds=factor * self.max_rounds,
        )


FULL = Policy()
QUICK = Policy(budget_ns=200_000_000, min_rounds=3, max_rounds=7)


@dataclass(frozen=True)
class Timing:
    """The samples of one candidate, in microseconds for one call.

    Example:
        >>> timing = Timing((1.0, 2.0, 9.0), calls=100)
        >>> timing.median, timing.mad
        (2.0, 1.0)
    """

    samples: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mad(self) -> float:
        """The median absolute deviation from the median."""
        middle = self.median
        return statistics.median(abs(sample - middle) for sample in self.samples)

    @property
    def drift(self) -> float:
        """How far the medians of the first and the second half of the samples are apart (>= 1)."""
        if len(self.samples) < 2:
            return 1.0
        half = len(self.samples) // 2
        first = statistics.median(self.samples[:half])
        second = statistics.median(self.samples[-half:])
        return max(first, second) / max(min(first, second), 1e-9)

    @property
    def disturbed(self) -> bool:
        """
        Example:
            >>> Timing((1.0, 1.0, 1.1, 2.0, 2.1, 2.0), calls=1).disturbed
            True
        """
        return self.drift > _DRIFT or self.mad > _SPREAD * self.median


Timings = Mapping[str, Timing]
Overheads = Mapping[str, float]
"""For each candidate, the microseconds of a call that computes next to nothing."""


@dataclass(frozen=True)
class Comparison:
    """One limit and what was measured; ``ratio`` is None where ours could not be measured."""

    limit: Limit
    ratio: float | None

    @property
    def ok(self) -> bool:
        return self.ratio is not None and self.limit.holds(self.ratio)


@dataclass(frozen=True)
class Result:
    """A cell, what was measured in it, and how often it took."""

    cell: Cell
    timings: Timings
    comparisons: tuple[Comparison, ...]
    attempts: int
    disturbed: bool
    overheads: Overheads = field(default_factory=dict)

    @property
    def loses(self) -> bool:
        return any(not comparison.ok for comparison in self.comparisons)

    @property
    def physical_limit(self) -> str | None:
        """The name of the fastest copy."""
        return fastest_copy(self.timings)

    def kernel_us(self, name: str) -> float | None:
        """The median of ``name`` without its call; None where one of them was not measured."""
        if name not in self.timings or name not in self.overheads:
            return None
        return max(self.timings[name].median - self.overheads[name], 0.0)


class WrongResultError(RuntimeError):
    """Our result is not the peers', so its speed would mean nothing."""


class Batches(Protocol):
    """Where :func:`measure` takes the arguments of its calls from."""

    def batch(self, bind: Bind, calls: int) -> Iterable[Arguments]: ...


def measure(
    candidates: Sequence[Candidate],
    buffers: Batches,
    policy: Policy = FULL,
    *,
    warm: bool = False,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Timing]:
    """Times the candidates against each other.

    Args:
        candidates: what to time.
        buffers: gives the arguments.
        policy: how long.
        warm: run one call before each sample, untimed. Hot buffers that fit in the cache need it,
            since the candidate before may have evicted them.
        clock: nanoseconds.

    Returns:
        A timing for each candidate's name.
    """

    def sample(candidate: Candidate, calls: int) -> int:
        call = candidate.call
        if warm:
            for arguments in buffers.batch(candidate.bind, 1):
                call(*arguments)
        batch = buffers.batch(candidate.bind, calls)
        start = clock()
        for arguments in batch:
            call(*arguments)
        return clock() - start

    with no_collection():
        calls: dict[str, int] = {}
        slow: set[str] = set()
        round_ns = 0
        for candidate in candidates:
            calls[candidate.name], spent = _calibrate(candidate, sample, policy.sample_ns)
            if spent * 2 * policy.min_rounds > policy.budget_ns:
                slow.add(candidate.name)
            else:
                round_ns += spent
        rounds = policy.budget_ns // round_ns if round_ns else 0
        rounds = min(max(rounds, policy.min_rounds), policy.max_rounds)
        samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        for number in range(rounds):
            turn = number % max(len(candidates), 1)
            for candidate in (*candidates[turn:], *candidates[:turn]):
                name = candidate.name
                if name not in slow or number in (0, rounds // 2, rounds - 1):
                    samples[name].append(sample(candidate, calls[name]) / calls[name] / 1e3)
    return {name: Timing(tuple(values), calls[name]) for name, values in samples.items()}


def _calibrate(
    candidate: Candidate, sample: Callable[[Candidate, int], int], sample_ns: int
) -> tuple[int, int]:
    """How many calls fill a sample, and what that sample takes."""
    spent = sample(candidate, 1)
    if spent >= 20 * sample_ns:
        return 1, spent
    calls = 1
    while True:
        spent = sample(candidate, calls)
        if spent >= sample_ns or calls >= _MAX_CALLS:
            return calls, spent
        wanted = math.ceil(1.1 * calls * sample_ns / max(spent, 1))
        calls = min(max(wanted, calls + 1), 10 * calls, _MAX_CALLS)


def fastest_copy(timings: Timings) -> str | None:
    """The name of the candidate that is the physical limit."""
    found = [name for name in COPIES if name in timings]
    return min(found, key=lambda name: timings[name].median, default=None)


def compare(limit: Limit, timings: Timings) -> Comparison | None:
    """What was measured for ``limit``; None where its rival is absent.

    Example:
        >>> times = {"add": Timing((2.0,), 1), "op torch": Timing((3.0,), 1)}
        >>> compare(Limit("op torch", "add", 1.9, strict=False), times).ratio
        1.5
    """
    rival = fastest_copy(timings) if limit.rival == "limit" else limit.rival
    if limit.ours not in timings:
        return Comparison(limit, None)
    if rival is None or rival not in timings:
        return None
    return Comparison(limit, timings[limit.ours].median / timings[rival].median)


def judge(cell: Cell, timings: Timings, absent: Collection[str] = ()) -> tuple[Comparison, ...]:
    """The limits of ``cell`` against the medians; peers that are absent are left out.

    Example:
        >>> cell = Cell("call", 1, 4096, "bfloat16", grad_mode="no_grad")
        >>> judge(cell, {"add": Timing((2.0,), 1), "op torch": Timing((3.0,), 1)})[0].ratio
        1.5
    """
    found = (compare(limit, timings) for limit in limits(cell, absent))
    return tuple(one for one in found if one is not None)


def settle(
    cell: Cell,
    time_cell: Callable[[Cell], Timings],
    retries: int,
    absent: Collection[str] = (),
) -> Result:
    """The result of one cell: measured again once if disturbed, up to ``retries`` times if it
    loses. The first attempt that wins is kept, or else the last."""
    attempts = 0
    repeated = False
    while True:
        timings = time_cell(cell)
        attempts += 1
        disturbed = _disturbed(timings)
        if disturbed and not repeated:
            repeated = True
            continue
        result = Result(cell, timings, judge(cell, timings, absent), attempts, disturbed)
        if not result.loses or attempts > retries + repeated:
            return result


def _disturbed(timings: Timings) -> bool:
    # A small copy runs on one thread and does not notice that a core is taken; those who wait for
    # a second thread do.
    return any(
        (name in _CONTROLS and timing.disturbed) or timing.mad > _WIDE_SPREAD * timing.median
        for name, timing in timings.items()
    )


def run(
    cells: Iterable[Cell],
    time_cell: Callable[[Cell], Timings],
    policy: Policy = FULL,
    on_result: Callable[[Result], None] | None = None,
    *,
    absent: Collection[str] = (),
    overheads: Callable[[Cell], Overheads] | None = None,
) -> list[Result]:
    """Settles every cell in turn.

    Args:
        cells: what to measure.
        time_cell: measures one.
        policy: how often again.
        on_result: hears of each when it is done.
        absent: what goals need and this system lacks.
        overheads: what the calls of a cell cost by themselves.
    """
    results = []
    for cell in cells:
        result = settle(cell, time_cell, policy.retries, absent)
        if overheads is not None:
            result = replace(result, overheads=overheads(cell))
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


class Bench:
    """Times cells on this machine.

    Args:
        policy: how long.
        compiler: makes the compiled peers.
        cache: bytes of the last-level cache.
        rotating: bytes of input that rotating cells walk through.
        engines: makes the inference engines; None leaves them out.
        say: hears what is going on.

    Example:
        >>> short = Policy(sample_ns=1000, budget_ns=1, min_rounds=1)
        >>> bench = Bench(short, Compiler(enabled=False), cache=2**20, rotating=2**16)
        >>> timings = bench.time_cell(Cell("forward", 2, 8, "float32"))
        >>> "eager torch" in timings, "copy" in timings
        (True, True)
    """

    def __init__(
        self,
        policy: Policy,
        compiler: Compiler,
        *,
        cache: int,
        rotating: int,
        engines: Engines | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self._policy, self._compiler, self._engines, self._say = policy, compiler, engines, say
        self._cache, self._rotating = cache, rotating
        self._memory: tuple[str, Memory] | None = None
        self._verified: set[tuple[str, ...]] = set()
        self._timed: set[Cell] = set()
        self._overheads: dict[Cell, dict[str, float]] = {}

    def time_cell(self, cell: Cell) -> dict[str, Timing]:
        """The timings of every candidate of ``cell``.

        Raises:
            WrongResultError: our result is not the peers'.
        """
        buffers = self._buffers(cell)
        with _allocator(cell), grad_mode(cell):
            if not self._compiler.has(cell):
                self._say(f"{cell}: compiling the peers")
            found = self._candidates(cell, buffers, self._compiler, self._engines)
            if cell.kind not in ("call", "sweep"):
                # The same calls whatever the buffers, so one look serves both states.
                calls = (cell.kind, cell.shape, cell.dtype, cell.output)
                if calls not in self._verified:
                    _verify(cell, found, buffers)
                    self._verified.add(calls)
            if cell.kind != "call":
                found = [*copies(cell), *found]
            self._say(f"{cell}: timing")
            warm = cell.buffers == "hot" and cell.touched_bytes <= self._cache
            return measure(found, buffers, self._policy_of(cell), warm=warm)

    def overheads(self, cell: Cell) -> dict[str, float]:
        """The microseconds of a call in which next to nothing is computed, made as in ``cell``.

        Ours and the eager peers only: what a compiled peer checks before it runs depends on what it
        was compiled for.
        """
        small = tiny(cell)
        if cell.kind in ("call", "sweep"):
            return {}
        if small not in self._overheads:
            buffers = self._buffers(small)
            with grad_mode(small):
                found = self._candidates(small, buffers, Compiler(enabled=False), None)
                policy = replace(self._policy, budget_ns=self._policy.budget_ns // 8)
                timings = measure(found, buffers, policy)
            self._overheads[small] = {name: timing.median for name, timing in timings.items()}
        return self._overheads[small]

    def _policy_of(self, cell: Cell) -> Policy:
        """All the time for a cell with a figure of its own, and for one that is timed again."""
        if has_figure(cell) or cell in self._timed:
            return self._policy
        self._timed.add(cell)
        return replace(self._policy, budget_ns=self._policy.budget_ns // 2)

    @staticmethod
    def _candidates(
        cell: Cell, buffers: CellBuffers, compiler: Compiler, engines: Engines | None
    ) -> list[Candidate]:
        # A parameter, as in a model: under no_grad its requires_grad must cost nothing.
        weight = nn.Parameter(torch.linspace(0.5, 1.5, cell.d, dtype=getattr(torch, cell.dtype)))
        return candidates(cell, weight, compiler, buffers.first(), engines)

    def _buffers(self, cell: Cell) -> CellBuffers:
        if self._memory is None or self._memory[0] != cell.dtype:
            self._memory = (cell.dtype, Memory(cell.dtype, self._rotating))
        return self._memory[1].buffers(cell)


def _allocator(cell: Cell) -> contextlib.AbstractContextManager[object]:
    return kept_memory() if cell.output == "recycled" else contextlib.nullcontext()


def grad_mode(cell: Cell) -> contextlib.AbstractContextManager[object]:
    """What the calls of ``cell`` run under."""
    if cell.trains:
        return torch.enable_grad()
    return torch.inference_mode() if cell.grad_mode == "inference" else torch.no_grad()


def _verify(cell: Cell, found: Sequence[Candidate], buffers: CellBuffers) -> None:
    """Compares every candidate with the eager peer of its spec.

    Raises:
        WrongResultError: they differ by more than rounding.
    """
    by_name = {candidate.name: candidate for candidate in found}

    def results(name: str) -> tuple[torch.Tensor, ...]:
        tensors = buffers.first()
        if cell.output == "inplace":
            # What is written over must be the same for the next candidate. Not inference tensors,
            # for which a compiled peer would be compiled again.
            with torch.inference_mode(False):
                tensors = tuple(None if one is None else one.clone() for one in tensors)
        candidate = by_name[name]
        return candidate.results(candidate.call(*candidate.bind(*tensors)))

    for spec in SPECS:
        reference = f"eager {spec}"
        expected = results(reference)
        for name in by_name:
            if name == reference or name.partition(" ")[2] != spec:
                continue
            for one, other in zip(results(name), expected, strict=True):
                _compare(cell, f"{name} and {reference}", one.detach(), other.detach())


def _compare(cell: Cell, names: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if torch.equal(found, expected):
        return
    tolerance = 1e-5 if cell.dtype == "float32" else 2e-2
    worst = (found.float() - expected.float()).abs().max().item()
    if not worst <= tolerance * max(1.0, expected.float().abs().max().item()):
        raise WrongResultError(
            f"{cell}: {names} differ by {worst:.3g}; a wrong result is not timed"
        )
