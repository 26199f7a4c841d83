"""Proof that a hypothesis about a module holds, bit for bit, in each pair of dtypes.

The roundings of a convention show only where dtypes differ: float32 alone cannot part LLaMA's
convention from Gemma's. So every candidate is compared with the module's own output in all pairs of
float32, bfloat16 and float16 for the row and the weight, and the one that explains most pairs wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
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

# What the norm of a gradient may differ by: four units in half types, in which modules round at
# each step. Any term of the formula contributes far more.
_MOST_GRADIENT_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
}
# The name under which the gradient of the row goes, which no attribute has.
_X = ""


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


def prove_gradients(probe: Probe, found: Hypothesis, pair: Pair) -> None:
    """Compare the module's own gradients with this package's in one pair of dtypes.

    A module may compute the formula and differentiate another: a detached root mean square, a
    gradient passed straight through, an ``autograd.Function`` of its own. Compared are dx, row by
    row, and the gradients of weight and bias, each by its norm, since modules round where this
    package does not. Call it inside :func:`rmsnorm.rewrite.probe.probing`.

    Raises:
        NotProvenError: they differ by more than roundings do, with the reason.
    """
    x_dtype, weight_dtype = pair
    generator = torch.Generator().manual_seed(SEED)
    x = _gradient_rows(found, x_dtype, generator).to(probe.device)
    tensors = {}
    for slot in probe.slots:
        tensor = torch.randn(slot.shape, generator=generator) * 1.5 + 0.25
        tensor = tensor.to(probe.device, weight_dtype or tensor.dtype)
        # Buffers too: whoever lets one require a gradient means to have it.
        tensors[slot.name] = tensor.requires_grad_()
    probe.put(tensors, requires_grad=True)
    value = probe.in_any_rank(x, found.shape)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        y = probe.in_any_rank(leaf, found.shape)
        if not y.requires_grad:
            raise NotProvenError("it lets no gradient through")
        if not bool(((y == value) | (y.isnan() & value.isnan())).all()):
            raise NotProvenError("its values differ where a gradient is needed")
        dy = _upstream(found, x, tensors, generator).to(y.dtype)
        held = [leaf, *(probe.held(slot) for slot in probe.slots)]
        theirs: tuple[Tensor | None, ...] = torch.autograd.grad(y, held, dy, allow_unused=True)
        ours = _formula_gradients(found, x, tensors, dy)
    dtypes = {x_dtype, weight_dtype or x_dtype, y.dtype}
    if found.spec.accumulate == "float32":
        dtypes.add(torch.float32)
    tolerance = max(_MOST_GRADIENT_ERROR[dtype] for dtype in dtypes)
    for name, seen in zip([_X, *tensors], theirs, strict=True):
        right = ours.get(name)
        if seen is None and right is None:
            continue
        least = _direct_size(found, x, tensors, dy) if name == _X else torch.zeros(1)
        if seen is None or right is None or not _gradient_error(seen, right, least) <= tolerance:
            of = "" if name == _X else f" of {name}"
            raise NotProvenError(f"its gradient{of} is not the formula's")


def _gradient_rows(found: Hypothesis, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """(8, *shape): rows of magnitude 1, large and near eps, one far from zero, one of zeros."""
    eps = found.spec.eps or 0.0
    at_eps = eps**0.5 if found.spec.eps_in == "mean_square" else eps
    x = torch.randn((8, *found.shape), generator=generator, dtype=torch.float64)
    for row, scale in zip(x, itertools.cycle((1.0, 32.0, min(max(at_eps, 2.0**-10), 1.0)))):
        row *= scale
    x[3] += 1.0
    x[5] = 0.0
    return x.to(dtype)


def _upstream(
    found: Hypothesis, x: Tensor, tensors: Mapping[str, Tensor], generator: torch.Generator
) -> Tensor:
    """dy, of x's shape: random, with a part along each row, which no term of dx can then hide.

    The term that comes from the root mean square would else be small in wide rows.
    """
    rows = x.detach().to(torch.float64).reshape(len(x), -1)
    along = rows / rows.pow(2).mean(dim=-1, keepdim=True).sqrt().clamp(min=2.0**-100)
    if found.weight is not None:
        weight = tensors[found.weight.name].detach().to(torch.float64) + found.spec.offset
        along = along * weight.reshape(-1).sign()
    drawn = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    return (drawn.to(x.device) + along).reshape(x.shape)


def _formula_gradients(
    found: Hypothesis, x: Tensor, tensors: Mapping[str, Tensor], dy: Tensor
) -> dict[str, Tensor]:
    """This package's gradients of x and of what the module has as weight and bias, by name."""
    leaves = {_X: x.clone().requires_grad_()}
    operands: list[Tensor | None] = []
    for slot in (found.weight, found.bias):
        if slot is not None:
            leaves[slot.name] = tensors[slot.name].detach().clone().requires_grad_()
        operands.append(None if slot is None else leaves[slot.name].reshape(found.shape))
    weight, bias = operands
    y = operation.forward(leaves[_X], weight, bias, None, found.spec, len(found.shape))
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def _direct_size(found: Hypothesis, x: Tensor, tensors: Mapping[str, Tensor], dy: Tensor) -> Tensor:
    """(rows,): the norm of rstd * dy * w, from which the part along the row is subtracted.

    A module's rounding errors are of that size, whatever is left: of a row of one element, noise.
    """
    _, rstd = operation.op_fwd(x, None, None, None, found.spec.encode(), len(found.shape))
    u = dy.to(torch.float64).reshape(len(x), -1)
    if found.weight is not None:
        weight = tensors[found.weight.name].detach().to(torch.float64) + found.spec.offset
        u = u * weight.reshape(-1)
    groups = u.unflatten(-1, (found.spec.groups, -1)) * rstd.to(torch.float64)[..., None]
    size: Tensor = groups.flatten(1).norm(dim=-1)
    return size


def _gradient_error(seen: Tensor, right: Tensor, least: Tensor) -> float:
    """The norm of the difference over the norm, or over ``least`` (rows,), the largest of all rows;
    nan if one is not finite where the other is."""
    same = (seen == right) | (seen.isnan() & right.isnan())
    difference = torch.where(same, 0.0, seen.to(torch.float64) - right.to(torch.float64))
    size = difference.reshape(len(least), -1).norm(dim=-1)
    whole = right.to(torch.float64).reshape(len(least), -1).norm(dim=-1)
    return float(torch.where(size == 0.0, 0.0, size / torch.maximum(whole, least)).max())


def _ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many units in the last place of the larger apart; inf where only one is finite."""
    info = torch.finfo(a.dtype)
    a, b = a.to(torch.float64), b.to(torch.float64)
    larger = torch.maximum(a.abs(), b.abs()).clamp(min=info.tiny)
    unit = torch.exp2(torch.floor(torch.log2(larger))) * info.eps
    return ((a - b).abs() / unit).nan_to_num(nan=float("inf"), posinf=float("inf"))
