"""Proof that a hypothesis about a module holds, bit for bit, in each pair of dtypes.

The roundings of a convention show only where dtypes differ: float32 alone cannot part LLaMA's
convention from Gemma's. So every candidate is compared with the module's own output in all pairs of
float32, bfloat16 and float16 for the row and the weight, and the one that explains most pairs wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rmsnorm.ops import composite
from rmsnorm.ops import rms_norm as operation
from rmsnorm.rewrite.probe import SEED, Hypothesis, NotProvenError, Probe, dtype_name
from rmsnorm.spec import Accumulate, NormSpec, Output, Rounding

Pair = tuple[torch.dtype, torch.dtype | None]
Answer = Callable[[Tensor, Tensor | None, Tensor | None, float | None, NormSpec, int], Tensor]

_COMMON = (torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)

# In order of preference where the evidence does not part them.
_CONVENTIONS: tuple[tuple[Rounding, Output], ...] = (
    ("after_weight", "input"),
    ("before_weight", "promote"),
    ("weight_dtype", "weight"),
    ("after_weight", "promote"),
    ("before_weight", "input"),
    ("after_weight", "weight"),
    ("before_weight", "weight"),
    ("weight_dtype", "promote"),
    ("weight_dtype", "input"),
)

# What a module may differ by and still be the same formula.
_MOST_ULP = {torch.float32: 4.0, torch.float64: 4.0, torch.bfloat16: 2.0, torch.float16: 2.0}
_LEAST_EQUAL_IN_HALF = 0.999


@dataclass(frozen=True)
class Verdict:
    """How far a module and a hypothesis agree in one pair of dtypes.

    Args:
        bit_identical: every element of every probe.
        close: within 4 units in the last place (float32, float64), or 99.9 % of the elements equal
            and the rest within 2 units (half types).
        right_dtype: the output has the dtype that the hypothesis says.
        share: the share of equal elements; 0 unless ``right_dtype``.
        detail: what to say about it.
    """

    bit_identical: bool
    close: bool
    right_dtype: bool
    share: float
    detail: str


def common_pairs(found: Hypothesis) -> list[Pair]:
    """All (x, weight) pairs of float32 and the half types; weight ``None`` without a weight."""
    if found.weight is None and found.bias is None:
        return [(dtype, None) for dtype in _COMMON]
    return list(itertools.product(_COMMON, _COMMON))


def own_pair(found: Hypothesis, dtype: torch.dtype) -> Pair:
    """The pair of a model that is all of one dtype."""
    return (dtype, None) if found.weight is None and found.bias is None else (dtype, dtype)


def convention(probe: Probe, found: Hypothesis) -> NormSpec:
    """``found.spec`` with the roundings, the output dtype and the accumulation of the module.

    Raises:
        NotProvenError: the module cannot be asked in any pair of dtypes.
    """
    asked = {}
    for pair in common_pairs(found):
        try:
            asked[pair] = _Case(probe, found, pair, examples=1)
        except NotProvenError:
            continue
    if not asked:
        raise NotProvenError("its forward takes no float32 or half-type tensor")
    candidates = _CONVENTIONS if found.weight is not None else _CONVENTIONS[:1]
    best, best_score = found.spec, (-1, -1, -1, -1)
    for rounding, output in candidates:
        spec = replace(found.spec, rounding=rounding, output=output, accumulate="float32")
        verdicts = [case.verdict(spec) for case in asked.values()]
        if all(verdict.bit_identical for verdict in verdicts):
            best = spec
            break
        score = (
            sum(verdict.bit_identical for verdict in verdicts),
            sum(verdict.close for verdict in verdicts),
            sum(verdict.right_dtype for verdict in verdicts),
            # In tenths, so that a few last bits do not outweigh the order of preference.
            int(10 * sum(verdict.share for verdict in verdicts)),
        )
        if score > best_score:
            best, best_score = spec, score
    return replace(best, accumulate=_accumulation(probe, found, best))


def _accumulation(probe: Probe, found: Hypothesis, spec: NormSpec) -> Accumulate:
    """Whether a float64 row is kept in float64."""
    try:
        case = _Case(probe, found, own_pair(found, torch.float64), examples=1)
    except NotProvenError:
        return "float32"
    # T5's classes keep the row but not the mean square, which is neither.
    return "input" if case.distance(replace(spec, accumulate="input")) < 1e-10 else "float32"


def prove(probe: Probe, found: Hypothesis, pair: Pair) -> Verdict:
    """Compare the module with its hypothesis in one pair of dtypes.

    Three shapes, magnitudes near 1, large and tiny, a zero row, a row with inf, one with
    nan, and a weight of both signs. Call it inside :func:`rmsnorm.rewrite.probe.probing`.

    Raises:
        NotProvenError: the module does not take this pair.
    """
    case = _Case(probe, found, pair, examples=3)
    verdict = case.verdict(found.spec)
    # Training and transforms take the composite, everything else the operation: prove both.
    composed = case.verdict(found.spec, composite.rms_norm)
    return composed if composed.share < verdict.share else verdict


def prove_own_weight(probe: Probe, found: Hypothesis, pair: Pair) -> Verdict:
    """The same for one row of three magnitudes and the weight the module really has."""
    return _Case(probe, found, pair, examples=1, own_weight=True).verdict(found.spec)


class _Case:
    """The module's own outputs in one pair of dtypes."""

    def __init__(
        self, probe: Probe, found: Hypothesis, pair: Pair, examples: int, own_weight: bool = False
    ) -> None:
        x_dtype, weight_dtype = pair
        self._found = found
        generator = torch.Generator().manual_seed(SEED)
        tensors: dict[str, Tensor] = {}
        for slot in probe.slots:
            if own_weight:
                tensor = probe.tensors[slot.name]
            else:
                tensor = torch.randn(slot.shape, generator=generator) * 1.5 + 0.25
            tensors[slot.name] = tensor.to(probe.device, weight_dtype or tensor.dtype)
        probe.put(tensors)
        shape = found.shape
        self._weight = None if found.weight is None else tensors[found.weight.name].reshape(shape)
        self._bias = None if found.bias is None else tensors[found.bias.name].reshape(shape)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for x in _examples(found, x_dtype, generator)[:examples]:
            x = x.to(probe.device)
            y = probe.in_any_rank(x, shape)
            self._pairs.append((x, y))

    def _ours(self, x: Tensor, spec: NormSpec, answer: Answer) -> Tensor:
        return answer(x, self._weight, self._bias, None, spec, len(self._found.shape))

    def verdict(self, spec: NormSpec, answer: Answer = operation.forward) -> Verdict:
        """How far ``answer`` under ``spec`` agrees with the module."""
        different, elements, worst = 0, 0, 0.0
        dtype = self._pairs[0][0].dtype
        for x, theirs in self._pairs:
            dtype = theirs.dtype
            weight_dtype = None if self._weight is None else self._weight.dtype
            if composite.output_dtype(x.dtype, weight_dtype, spec) != dtype:
                return Verdict(False, False, False, 0.0, f"it returns {dtype_name(dtype)}")
            ours = self._ours(x, spec, answer)
            unequal = ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
            count = int(unequal.sum())
            different += count
            elements += ours.numel()
            if count:
                worst = max(worst, float(_ulps(ours[unequal], theirs[unequal]).max()))
        share = 1.0 - different / max(elements, 1)
        close = worst <= _MOST_ULP[dtype]
        if dtype in _HALF:
            close = close and share >= _LEAST_EQUAL_IN_HALF
        detail = f"{100 * (1 - share):.2g} % of the elements differ, by up to {worst:.3g} ulp"
        return Verdict(different == 0, close, True, share, detail)

    def distance(self, spec: NormSpec) -> float:
        """The largest difference, relative to the largest element."""
        worst = 0.0
        for x, theirs in self._pairs:
            ours = self._ours(x, spec, operation.forward)
            difference = (ours.double() - theirs.double()).abs()
            worst = max(worst, float(difference[difference.isfinite()].max()))
        return worst


def _examples(found: Hypothesis, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Three shapes; each holds rows of magnitude 1, large and tiny; the first has odd rows too."""
    eps = found.spec.eps or 0.0
    at_eps = eps**0.5 if found.spec.eps_in == "mean_square" else eps
    # Not so small that the sum of squares leaves float32: such rows are meant to differ.
    tiny = min(max(at_eps / 4.0, 2.0**-40), 2.0**-6)
    large = 2.0**30
    if dtype == torch.float16:
        tiny, large = max(tiny, 2.0**-12), 2.0**10
    shapes = ((8,), (2, 3), (1,))
    examples = []
    for index, lead in enumerate(shapes):
        x = torch.randn((*lead, *found.shape), generator=generator, dtype=torch.float64)
        rows = x.view(-1, *found.shape)
        scales = (1.0, large, tiny) if index < 2 else (tiny,)
        for row, scale in zip(rows, itertools.cycle(scales), strict=False):
            row *= scale
        if index == 0:
            rows[3] += 1.0
            rows[5] = 0.0
            rows[6].view(-1)[-1] = float("inf")
            rows[7].view(-1)[0] = float("nan")
        examples.append(x.to(dtype))
    return examples


def gradients_agree(probe: Probe, found: Hypothesis) -> None:
    """A module may compute the formula and differentiate another (a detached rms, say).

    Raises:
        NotProvenError: its float32 gradient is not the formula's.
    """
    generator = torch.Generator().manual_seed(SEED)
    shape = found.shape
    x = torch.randn((4, *shape), generator=generator).to(probe.device)
    dy = torch.randn((4, *shape), generator=generator).to(probe.device)
    tensors = {
        slot.name: torch.randn(slot.shape, generator=generator).to(probe.device)
        for slot in probe.slots
    }
    with torch.enable_grad():
        probe.put(tensors, requires_grad=True)
        given = x.clone().requires_grad_()
        wanted = [given]
        operands: list[Tensor | None] = []
        ours = x.clone().requires_grad_()
        ours_wanted = [ours]
        for slot in (found.weight, found.bias):
            if slot is None:
                operands.append(None)
                continue
            own = tensors[slot.name].clone()
            if slot.store == "parameter":
                own.requires_grad_()
                wanted.append(probe.held(slot))
                ours_wanted.append(own)
            operands.append(own.reshape(shape))
        y = probe.in_any_rank(given, shape)
        if not y.requires_grad:
            raise NotProvenError("it lets no gradient through", is_norm=True)
        theirs = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        expected = torch.autograd.grad(
            operation.forward(ours, operands[0], operands[1], None, found.spec, len(shape)),
            ours_wanted,
            dy,
        )
    for seen, right in zip(theirs, expected, strict=True):
        if seen is None or not (seen - right).abs().max() <= 1e-3 * right.abs().max() + 1e-6:
            raise NotProvenError("its gradient is not the formula's", is_norm=True)


def _ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many units in the last place of the larger apart; inf where only one is finite."""
    info = torch.finfo(a.dtype)
    a, b = a.to(torch.float64), b.to(torch.float64)
    larger = torch.maximum(a.abs(), b.abs()).clamp(min=info.tiny)
    unit = torch.exp2(torch.floor(torch.log2(larger))) * info.eps
    return ((a - b).abs() / unit).nan_to_num(nan=float("inf"), posinf=float("inf"))
