"""Proof that a hypothesis about a module holds, bit for bit, in each pair of dtypes.

The roundings of a convention show only where dtypes differ: float32 alone cannot part LLaMA's
convention from Gemma's. So every candidate is compared with the module's own output in all pairs of
float32, bfloat16 and float16 for the row and the weight, and the one that explains most pairs wins.

A gated norm has a third dtype, that of the gate. Its bits are never all equal: torch's own
activations are off by up to two units, by which depends on the place in a vector.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rmsnorm.ops import composite, gated_composite
from rmsnorm.ops import gated_rms_norm as gated_operation
from rmsnorm.ops import rms_norm as operation
from rmsnorm.rewrite.probe import SEED, Hypothesis, NotProvenError, Probe, dtype_name
from rmsnorm.spec import Accumulate, NormSpec, Output, Rounding

# Of the row, of the weight or bias (``None`` without one), and, where there is one, of the gate.
Dtypes = tuple[torch.dtype | None, ...]
# What computes (row, or row and gate), weight, bias, spec, number of normalised dimensions.
Answer = Callable[[tuple[Tensor, ...], Tensor | None, Tensor | None, NormSpec, int], Tensor]

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
# Of a gated norm in float32: the activation, off by 2, is in each product and in the mean square.
_MOST_ULP_GATED = 16.0
# So many elements that one that differs is no more than its share.
_ELEMENTS_GATED = 2**13
# Beyond, torch's silu loses bits: its exp(-gate) nears infinity.
_LARGEST_GATE = 30.0

# The share of equal elements from which another formula is taken to be the module's.
_LEAST_LIKE = 0.99

# What the norm of a gradient may differ by: four units in half types, in which modules round at
# each step. Any term of the formula contributes far more.
_MOST_GRADIENT_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
}
# The names under which the gradients of the row and the gate go, which no attribute has.
_X, _GATE = "", "."


@dataclass(frozen=True)
class Verdict:
    """How far a module and a hypothesis agree in one pair of dtypes.

    Args:
        bit_identical: every element of every probe; never of a gated norm.
        close: within 4 units in the last place (float32, float64; of a gated norm 16), or 99.9 % of
            the elements equal and the rest within 2 units (half types).
        right_dtype: the output has the dtype that the hypothesis says.
        share: the share of equal elements; 0 unless ``right_dtype``.
        detail: what to say about it.
    """

    bit_identical: bool
    close: bool
    right_dtype: bool
    share: float
    detail: str


def common_pairs(found: Hypothesis) -> list[Dtypes]:
    """All pairs of float32 and the half types for the row and the weight; a gate, if there is one,
    is like the row or, as beside a state that is kept in float32, like the weight."""
    pairs = itertools.product(_COMMON, _COMMON if found.slots else (None,))
    if not found.is_gated:
        return list(pairs)
    gates = _COMMON if not found.slots else ()
    return [
        (x, weight, gate) for x, weight in pairs for gate in dict.fromkeys(gates or (x, weight))
    ]


def own_pair(found: Hypothesis, dtype: torch.dtype) -> Dtypes:
    """The dtypes of a model that is all of one dtype."""
    pair: Dtypes = (dtype, dtype if found.slots else None)
    return (*pair, dtype) if found.is_gated else pair


def by_operation(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    """This package's operation for the row, or for the row and its gate."""
    if len(inputs) == 2:
        return gated_operation.forward(*inputs, weight, None, spec)
    return operation.forward(inputs[0], weight, bias, None, spec, ndim)


def by_composite(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    """The same from plain torch operations."""
    if len(inputs) == 2:
        return gated_composite.gated_rms_norm(*inputs, weight, None, spec)
    return composite.rms_norm(inputs[0], weight, bias, None, spec, ndim)


def scaled(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """A row times a weight that counts towards its mean square, rounded to x's dtype.

    Example:
        >>> scaled(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]), 1.0)
        tensor([3., 8.])
    """
    return (x.float() * (weight + offset if offset else weight).float()).to(x.dtype)


def convention(probe: Probe, found: Hypothesis) -> NormSpec:
    """``found.spec`` with the roundings, the output dtype and the accumulation of the module.

    Raises:
        NotProvenError: the module cannot be asked in any pair of dtypes.
    """
    asked = {}
    for pair in common_pairs(found):
        if found.is_gated and pair[2] != pair[0]:
            continue  # a gate is not rounded before it is activated: its dtype shows no convention
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
        if all(v.bit_identical or (found.is_gated and v.close) for v in verdicts):
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


def prove(probe: Probe, found: Hypothesis, pair: Dtypes) -> Verdict:
    """Compare the module with its hypothesis in one pair of dtypes, or with those of a gate three.

    Three shapes, magnitudes near 1, large and tiny, a zero row, a row with inf, one with
    nan, and a weight of both signs. Call it inside :func:`rmsnorm.rewrite.probe.probing`.

    Raises:
        NotProvenError: the module does not take this pair.
    """
    case = _Case(probe, found, pair, examples=3)
    verdict = case.verdict(found.spec)
    # Training and transforms take the composite, everything else the operation: prove both.
    composed = case.verdict(found.spec, by_composite)
    return composed if composed.share < verdict.share else verdict


def prove_own_weight(probe: Probe, found: Hypothesis, pair: Dtypes) -> Verdict:
    """The same for one row of three magnitudes and the weight the module really has."""
    return _Case(probe, found, pair, examples=1, own_weight=True).verdict(found.spec)


class _Case:
    """The module's own outputs in one pair of dtypes."""

    def __init__(
        self, probe: Probe, found: Hypothesis, pair: Dtypes, examples: int, own_weight: bool = False
    ) -> None:
        x_dtype, weight_dtype, *gate_dtype = pair
        assert x_dtype is not None
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
        self._weight, self._bias, self._inside = (
            None if slot is None else tensors[slot.name].reshape(found.shape)
            for slot in (found.weight, found.bias, found.inside)
        )
        self._pairs: list[tuple[tuple[Tensor, ...], Tensor]] = []
        for x in _examples(found, x_dtype, generator)[:examples]:
            inputs: tuple[Tensor, ...] = (x,)
            for dtype in gate_dtype:
                inputs = (x, _gates(x, generator).to(dtype))
            inputs = tuple(tensor.to(probe.device) for tensor in inputs)
            self._pairs.append((inputs, probe.in_any_rank(inputs[0], found.shape, *inputs[1:])))

    def _ours(self, inputs: tuple[Tensor, ...], spec: NormSpec, answer: Answer) -> Tensor:
        if self._inside is not None:
            inputs = (scaled(inputs[0], self._inside, self._found.inside_offset),)
        return answer(inputs, self._weight, self._bias, spec, len(self._found.shape))

    def _unit(self, x_dtype: torch.dtype, out: torch.dtype, spec: NormSpec) -> torch.dtype:
        """The coarsest dtype that a gated norm rounds to, in whose units a difference shows."""
        dtypes = [out]
        if self._found.is_gated:
            if spec.rounding == "before_weight":
                dtypes.append(x_dtype)
            elif spec.rounding == "weight_dtype" and self._weight is not None:
                dtypes.append(self._weight.dtype)
            if spec.accumulate == "float32":
                dtypes.append(torch.float32)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def verdict(self, spec: NormSpec, answer: Answer = by_operation) -> Verdict:
        """How far ``answer`` under ``spec`` agrees with the module."""
        different, elements, worst = 0, 0, 0.0
        unit = torch.float32
        for inputs, theirs in self._pairs:
            x_dtype, dtype = inputs[0].dtype, theirs.dtype
            weight_dtype = None if self._weight is None else self._weight.dtype
            if composite.output_dtype(x_dtype, weight_dtype, spec) != dtype:
                return Verdict(False, False, False, 0.0, f"it returns {dtype_name(dtype)}")
            ours = self._ours(inputs, spec, answer)
            unit = self._unit(x_dtype, dtype, spec)
            unequal = ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
            count = int(unequal.sum())
            different += count
            elements += ours.numel()
            if count:
                worst = max(worst, float(ulps(ours[unequal], theirs[unequal], unit).max()))
        share = 1.0 - different / max(elements, 1)
        if unit in _HALF:
            close = worst <= _MOST_ULP[unit] and share >= _LEAST_EQUAL_IN_HALF
        else:
            close = worst <= (_MOST_ULP_GATED if self._found.is_gated else _MOST_ULP[unit])
        detail = f"{100 * (1 - share):.2g} % of the elements differ, by up to {worst:.3g} ulp"
        # A gate's bits may happen to agree; nothing says that they do elsewhere.
        same = different == 0 and not self._found.is_gated
        return Verdict(same, close, True, share, detail)

    def distance(self, spec: NormSpec) -> float:
        """The largest difference, relative to the largest element."""
        worst = 0.0
        for inputs, theirs in self._pairs:
            ours = self._ours(inputs, spec, by_operation)
            difference = (ours.double() - theirs.double()).abs()
            worst = max(worst, float(difference[difference.isfinite()].max()))
        return worst


def explanation(probe: Probe, found: Hypothesis, pair: Dtypes) -> str:
    """Where a module rounds that no spec says, if it is one of the ways that are known; or ``""``.

    Call it where :func:`prove` has failed.
    """
    if found.is_gated or found.bias is not None or found.spec.reduce == "sum":
        return ""
    case = _Case(probe, found, pair, examples=1)
    for reason, answer in (
        ("it rounds 1/rms to the dtype of the row", _rounded_rstd),
        (f"it adds {found.spec.offset:g} to the weight in the weight's dtype", _rounded_offset),
        ("its mean square is taken in the dtype of the row", _narrow),
        ("its mean square is taken in the dtype of the row", _narrow_product),
        ("its mean square is taken in the dtype of the row", _narrow_quotient),
    ):
        if case.verdict(replace(found.spec, accumulate="float32"), answer).share > _LEAST_LIKE:
            return reason
    return ""


def _rounded_rstd(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    x, ones = inputs[0], replace(spec, rounding="after_weight", output="input")
    rstd = operation.op_fwd(x, None, None, None, ones.encode(), ndim)[1].to(x.dtype)
    y: Tensor = x * rstd.repeat_interleave(x.shape[-1] // spec.groups, dim=-1)
    return y if weight is None else y * (weight + spec.offset)


def _rounded_offset(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    moved = None if weight is None else weight + spec.offset
    return by_operation(inputs, moved, bias, replace(spec, offset=0.0), ndim)


def _narrow_product(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    y = _narrow(inputs, None, None, spec, ndim)
    return y if weight is None else (weight + spec.offset) * y


def _narrow(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    x = inputs[0]
    y = x if weight is None else (weight + spec.offset) * x
    return y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (spec.eps or 0.0))


def _narrow_quotient(
    inputs: tuple[Tensor, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    ndim: int,
) -> Tensor:
    x = inputs[0]
    y = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + (spec.eps or 0.0))
    return y if weight is None else y * (weight + spec.offset)


def _examples(found: Hypothesis, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Three shapes; each holds rows of magnitude 1, large and tiny; the first has odd rows too."""
    eps = found.spec.eps or 0.0
    at_eps = eps**0.5 if found.spec.eps_in == "mean_square" else eps
    # Not so small that the sum of squares leaves float32: such rows are meant to differ.
    tiny = min(max(at_eps / 4.0, 2.0**-40), 2.0**-6)
    large = 2.0**30
    if dtype == torch.float16:
        tiny, large = max(tiny, 2.0**-12), 2.0**10
    most = 8
    if found.is_gated:
        most = max(16, math.ceil(_ELEMENTS_GATED / math.prod(found.shape)))
    shapes = ((most,), (2, 3), (1,))
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


def _gates(x: Tensor, generator: torch.Generator) -> Tensor:
    """Gates for the rows of x: of both signs; with enough rows one of zeros, one with inf, one
    with nan."""
    gate = torch.randn(x.shape, generator=generator, dtype=torch.float64) * 3.0
    gate = gate.clamp(-_LARGEST_GATE, _LARGEST_GATE)
    if gate.numel() // x.shape[-1] > 11:
        special = gate.view(-1, x.shape[-1])
        special[9] = 0.0
        special[10, 0] = float("inf")
        special[11, -1] = float("nan")
    return gate


def prove_gradients(probe: Probe, found: Hypothesis, pair: Dtypes) -> None:
    """Compare the module's own gradients with this package's in one pair of dtypes.

    A module may compute the formula and differentiate another: a detached root mean square, a
    gradient passed straight through, an ``autograd.Function`` of its own. Compared are dx and that
    of the gate, row by row, and the gradients of weight and bias, each by its norm, since modules
    round where this package does not. Call it inside :func:`rmsnorm.rewrite.probe.probing`.

    Raises:
        NotProvenError: they differ by more than roundings do, with the reason.
    """
    x_dtype, weight_dtype, *gate_dtype = pair
    assert x_dtype is not None
    generator = torch.Generator().manual_seed(SEED)
    x = _gradient_rows(found, x_dtype, generator).to(probe.device)
    tensors = {}
    for slot in probe.slots:
        tensor = torch.randn(slot.shape, generator=generator) * 1.5 + 0.25
        tensor = tensor.to(probe.device, weight_dtype or tensor.dtype)
        # Buffers too: whoever lets one require a gradient means to have it.
        tensors[slot.name] = tensor.requires_grad_()
    probe.put(tensors, requires_grad=True)
    inputs: dict[str, Tensor] = {_X: x}
    for dtype in gate_dtype:
        inputs[_GATE] = torch.randn(x.shape, generator=generator).to(probe.device, dtype)
    value = probe.in_any_rank(x, found.shape, *list(inputs.values())[1:])
    with torch.enable_grad():
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        y = probe.in_any_rank(leaves[_X], found.shape, *list(leaves.values())[1:])
        if not y.requires_grad:
            raise NotProvenError("it lets no gradient through")
        if not bool(((y == value) | (y.isnan() & value.isnan())).all()):
            raise NotProvenError("its values differ where a gradient is needed")
        dy = _upstream(found, inputs, tensors, generator).to(y.dtype)
        held = [*leaves.values(), *(probe.held(slot) for slot in probe.slots)]
        theirs: tuple[Tensor | None, ...] = torch.autograd.grad(y, held, dy, allow_unused=True)
        ours = _formula_gradients(found, inputs, tensors, dy)
    dtypes = {dtype for dtype in pair if dtype is not None} | {y.dtype}
    if found.spec.accumulate == "float32":
        dtypes.add(torch.float32)
    tolerance = max(_MOST_GRADIENT_ERROR[dtype] for dtype in dtypes)
    for name, seen in zip([*inputs, *tensors], theirs, strict=True):
        right = ours.get(name)
        if seen is None and right is None:
            continue
        least = torch.zeros(1)
        if name in inputs:
            least = _direct_size(found, inputs, tensors, dy, name)
        if seen is None or right is None or not _gradient_error(seen, right, least) <= tolerance:
            of = "" if name == _X else f" of {'the gate' if name == _GATE else name}"
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


def _activation(found: Hypothesis, gate: Tensor) -> Tensor:
    return F.silu(gate) if found.spec.gate == "silu" else torch.sigmoid(gate)


def _normed(found: Hypothesis, inputs: Mapping[str, Tensor], weight: Tensor | None) -> Tensor:
    """The rows whose mean square is taken, float64."""
    rows = inputs[_X].detach().to(torch.float64)
    if found.is_gated and found.spec.gate_order == "before":
        rows = rows * _activation(found, inputs[_GATE].to(torch.float64))
    elif found.inside is not None and weight is not None:
        rows = rows * weight
    return rows


def _factor(
    found: Hypothesis, inputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> tuple[Tensor | float, Tensor | None]:
    """What the normed rows are multiplied by, and a weight inside, float64."""
    factor: Tensor | float = 1.0
    inside = None
    if found.weight is not None:
        weight = tensors[found.weight.name].detach().to(torch.float64)
        factor = (weight + found.spec.offset).reshape(found.shape)
    if found.inside is not None:
        weight = tensors[found.inside.name].detach().to(torch.float64)
        inside = (weight + found.inside_offset).reshape(found.shape)
    if found.is_gated and found.spec.gate_order == "after":
        factor = factor * _activation(found, inputs[_GATE].to(torch.float64))
    return factor, inside


def _upstream(
    found: Hypothesis,
    inputs: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    generator: torch.Generator,
) -> Tensor:
    """dy, of x's shape: random, with a part along each row, which no term of dx can then hide.

    The term that comes from the root mean square would else be small in wide rows.
    """
    factor, inside = _factor(found, inputs, tensors)
    rows = _normed(found, inputs, inside)
    sign = factor.sign() if isinstance(factor, Tensor) else 1.0
    size = rows.reshape(len(rows), -1).pow(2).mean(dim=-1).sqrt().clamp(min=2.0**-100)
    along = rows / size.reshape(-1, *(1 for _ in found.shape)) * sign
    drawn = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    return drawn.to(rows.device) + along


def _formula_gradients(
    found: Hypothesis,
    inputs: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    dy: Tensor,
) -> dict[str, Tensor]:
    """This package's gradients of the inputs and of what the module has as weight and bias."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    given = tuple(leaves.values())
    operands: list[Tensor | None] = []
    for slot in (found.weight, found.bias, found.inside):
        if slot is not None:
            leaves[slot.name] = tensors[slot.name].detach().clone().requires_grad_()
        operands.append(None if slot is None else leaves[slot.name].reshape(found.shape))
    weight, bias, inside = operands
    if inside is not None:
        given = (scaled(given[0], inside, found.inside_offset),)
    y = by_operation(given, weight, bias, found.spec, len(found.shape))
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def _direct_size(
    found: Hypothesis,
    inputs: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    dy: Tensor,
    name: str,
) -> Tensor:
    """(rows,): the norm of the gradient of an input before what lies along the row is subtracted.

    That of the row is rstd * dy * w. A module's rounding errors are of that size, whatever is left:
    of a row of one element, noise.
    """
    factor, inside = _factor(found, inputs, tensors)
    rows = _normed(found, inputs, inside).to(inputs[_X].dtype)
    ungated = replace(found.spec, gate=None).encode()
    _, rstd = operation.op_fwd(rows, None, None, None, ungated, len(found.shape))
    u = (dy.to(torch.float64) * factor).reshape(len(rows), -1)
    groups = u.unflatten(-1, (found.spec.groups, -1)) * rstd.to(torch.float64)[..., None]
    direct = groups.flatten(1)
    if found.is_gated and found.spec.gate_order == "before":
        gate = inputs[_GATE].to(torch.float64)
        # An activation has a slope of at most 1.1.
        beside = inputs[_X].to(torch.float64) if name == _GATE else _activation(found, gate)
        direct = direct * beside.reshape(direct.shape)
    elif name == _GATE:
        return torch.zeros(len(rows), dtype=torch.float64, device=dy.device)
    elif inside is not None:
        direct = direct * inside.reshape(-1)
    size: Tensor = direct.norm(dim=-1)
    return size


def _gradient_error(seen: Tensor, right: Tensor, least: Tensor) -> float:
    """The norm of the difference over the norm, or over ``least`` (rows,), the largest of all rows;
    nan if one is not finite where the other is."""
    same = (seen == right) | (seen.isnan() & right.isnan())
    difference = torch.where(same, 0.0, seen.to(torch.float64) - right.to(torch.float64))
    size = difference.reshape(len(least), -1).norm(dim=-1)
    whole = right.to(torch.float64).reshape(len(least), -1).norm(dim=-1)
    return float(torch.where(size == 0.0, 0.0, size / torch.maximum(whole, least)).max())


def ulps(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """How many units in the last place of the larger in ``dtype`` apart; inf where only one is
    finite.

    Example:
        >>> ulps(torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-23]), torch.float32)
        tensor([1.], dtype=torch.float64)
    """
    info = torch.finfo(dtype)
    a, b = a.to(torch.float64), b.to(torch.float64)
    larger = torch.maximum(a.abs(), b.abs()).clamp(min=info.tiny)
    unit = torch.exp2(torch.floor(torch.log2(larger))) * info.eps
    return ((a - b).abs() / unit).nan_to_num(nan=float("inf"), posinf=float("inf"))
