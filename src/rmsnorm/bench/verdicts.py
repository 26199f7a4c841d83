"""Which goals hold: every one of the table against everything that was measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rmsnorm.bench.goals import GOALS, MEMORY, STEP, Goal
from rmsnorm.bench.memory import Usage
from rmsnorm.bench.run import Comparison, Result, compare

if TYPE_CHECKING:  # a report without steps needs no language model
    from rmsnorm.lm.step import StepTimes

State = Literal["holds", "does not hold", "not measured", "not asked here"]


@dataclass(frozen=True)
class Case:
    """What one goal says about one cell.

    Attributes:
        where: the cell, and the candidate; with a ``~`` where the cell was disturbed.
        ratio: the worst ratio there; None where ours is absent.
        ok: whether it is within the bound.
    """

    where: str
    ratio: float | None
    ok: bool


@dataclass(frozen=True)
class Verdict:
    """One goal and the cases of this run.

    Attributes:
        missing: what this system lacks for it.

    Example:
        >>> case = Case("8x4096 float32 hot given", 1.2, ok=True)
        >>> verdict = Verdict(GOALS[0], (case,), missing="")
        >>> verdict.state, verdict.worst == case
        ('holds', True)
    """

    goal: Goal
    cases: tuple[Case, ...]
    missing: str

    @property
    def worst(self) -> Case | None:
        """The case with the largest ratio; one that could not be measured is worse than all."""
        return max(
            self.cases,
            key=lambda case: math.inf if case.ratio is None else case.ratio,
            default=None,
        )

    @property
    def broken(self) -> tuple[Case, ...]:
        """The cases that are beyond the bound, those that may be included."""
        return tuple(case for case in self.cases if not case.ok)

    @property
    def state(self) -> State:
        if self.missing:
            return "not asked here"
        if not self.cases:
            return "not measured"
        if len(self.broken) > self.goal.share * len(self.cases):
            return "does not hold"
        beyond = any(case.ratio is None or case.ratio > self.goal.at_most for case in self.broken)
        return "does not hold" if beyond else "holds"

    @property
    def ok(self) -> bool:
        """False where it does not hold; what was not measured breaks nothing."""
        return self.state != "does not hold"


def verdicts(
    results: Sequence[Result],
    usages: Sequence[Usage] = (),
    steps: Sequence[StepTimes] = (),
    absent: Collection[str] = (),
) -> list[Verdict]:
    """Every goal, in the order of the table."""
    found = []
    for goal in GOALS:
        if goal is MEMORY:
            cases = [
                Case(usage.name, usage.ratio, usage.ok)
                for usage in usages
                if usage.limit is not None
            ]
        elif goal is STEP:
            cases = [
                Case(f"{one.name}, compiled" if one.compiled else one.name, 1 / one.ratio, one.ok)
                for one in steps
            ]
        else:
            cases = [
                case
                for result in results
                if goal.covers(result.cell)
                for case in [_case(goal, result)]
                if case is not None
            ]
        missing = goal.needs if goal.needs in absent else ""
        found.append(Verdict(goal, tuple(cases), missing))
    return found


def _case(goal: Goal, result: Result) -> Case | None:
    found = [
        comparison
        for limit in goal.limits(result.cell)
        for comparison in [compare(limit, result.timings)]
        if comparison is not None
    ]
    if not found:
        return None
    worst = max(found, key=_size)
    where = str(result.cell)
    if goal.rival in ("peers", "neighbours"):
        where += f", {worst.limit.ours} beside {worst.limit.rival}"
    elif len(goal.specs) > 1:
        where += f", {worst.limit.ours}"
    if result.disturbed:
        where += " ~"
    return Case(where, worst.ratio, worst.ok)


def _size(comparison: Comparison) -> float:
    return math.inf if comparison.ratio is None else comparison.ratio
