"""Finding the convention of a norm module from what it does.

No class name and no attribute name is looked at. A double of the module (never the module), with
random tensors and in training mode, is asked in float32:

1. Rows of ones show whether a shape is that of a row.
2. Rows of equal magnitude show the weight, the offset and the bias.
3. Rows of uneven energy show which elements one mean square is taken over.
4. Rows that shrink to nothing show eps and where it stands.
5. The same rows, beside perturbed attributes, show which of these carries eps.
6. Perturbed tensors and a second argument show whether anything else matters.
7. A row given again, in training and in evaluation, shows whether the output is its alone.

A module whose output depends on a second input is asked with one that is the same everywhere, a
number that an activation turns into 1; then with random ones, which show whether it is a gate, with
which activation, and on which side of the norm.

What is left, the places where the convention rounds, shows only beside half types and is decided by
:mod:`rmsnorm.rewrite.prove`.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.rewrite.probe import (
    SEED,
    Hypothesis,
    NotProvenError,
    Probe,
    Slot,
    probing,
    same_state,
)
from rmsnorm.rewrite.prove import by_composite, convention, own_pair, prove_gradients
from rmsnorm.spec import EpsIn, Gate, GateOrder, NormSpec, Reduce

# float32 evaluates these probes to a few 2**-24; the nearest wrong answer is further than this.
_EXACT = 2e-5
_CLEAR = 1e-4
# Of the rows of equal magnitude: so large that no eps shows beside them.
_LARGE = 2.0**10
# Of the rows that show eps: 2**-50 squared is below any eps in use, and still a normal float32.
_SMALLEST_EXPONENT = 50
_MACHINE_EPS = 2.0**-23
# Gates, and what each turns into 1: silu(1.278...), and the sigmoid of a number so large that
# silu of it is something else.
_GATES: tuple[tuple[Gate, float], ...] = (("silu", 1.2784645427610738), ("sigmoid", 32.0))
_ORDERS: tuple[GateOrder, ...] = ("before", "after")
# Widths to try on a module that has no tensor and no attribute to tell its width.
_USUAL_WIDTHS = (64, 128, 96, 256, 512, 768, 1024)


def identify(module: nn.Module) -> NormSpec | None:
    """The convention of ``module``, found by how it behaves, or ``None`` if it is no RMSNorm.

    The module is not called and not changed: a copy without hooks is probed, and random states
    stay as they are. A module without data (meta, offloaded) cannot be asked and gives ``None``.

    Args:
        module: any module; what is no norm is recognised cheaply.

    Returns:
        The :class:`~rmsnorm.spec.NormSpec` that explains every probe, with the eps the module uses
        now, with a gate if its second input is one; or ``None``: LayerNorm and other norms of the
        variance, norms over another axis, norms whose weight comes before the mean square, norms
        with dropout, norms that differentiate another formula (a detached root mean square), and
        everything else. For proof bit for bit, and for the reason why a module is left, see
        :func:`rmsnorm.patch`.

    Raises:
        TypeError: ``module`` is not a module.

    Example:
        >>> identify(nn.RMSNorm(8, eps=1e-5)) == NormSpec(eps=1e-5)
        True
        >>> identify(nn.LayerNorm(8)) is None
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"identify() was given a {type(module).__name__}; expected a torch module")
    try:
        with probing(module) as probe:
            found = examine(probe)
            if found.inside is not None:  # no spec says so
                return None
            prove_gradients(probe, found, own_pair(found, torch.float32))
            return found.spec
    except NotProvenError:
        return None


def examine(probe: Probe) -> Hypothesis:
    """The hypothesis that explains every probe, roundings included; gradients are not asked.

    Call it inside :func:`rmsnorm.rewrite.probe.probing`.

    Raises:
        NotProvenError: the module is no RMSNorm, with the reason.
    """
    training = probe.module.training
    found = _without_rounding(probe)
    probe.module.train(training)
    found = replace(found, spec=convention(probe, found))
    probe.put(probe.tensors)
    return found


def _without_rounding(probe: Probe) -> Hypothesis:
    """What one input explains; where that explains nothing, two."""
    arguments, alone = probe.arguments, None
    if not arguments.needs_second:
        try:
            return _asked(probe)
        except NotProvenError as error:
            if arguments.second is None:
                raise
            alone = error
    try:
        return _asked_with_gate(probe)
    except NotProvenError as error:
        if alone is not None and not error.is_norm:
            raise alone from None
        raise


def _asked_with_gate(probe: Probe) -> Hypothesis:
    """The hypothesis for a module with a gate.

    Raises:
        NotProvenError: there is none.
    """
    reason = NotProvenError(f"its forward needs {probe.arguments.second} too")
    for gate, open_gate in _GATES:
        probe.gate = open_gate
        try:
            found = _asked(probe)
        except NotProvenError:
            continue
        finally:
            probe.gate = None
        reason = NotProvenError(
            "its output depends on a second input that is no silu or sigmoid gate", is_norm=True
        )
        if found.bias is not None or found.inside is not None or len(found.shape) != 1:
            continue
        for order in _ORDERS:
            spec = replace(found.spec, gate=gate, gate_order=order)
            if _explains(probe, replace(found, spec=spec)):
                return replace(found, spec=spec)
    raise reason


def _explains(probe: Probe, found: Hypothesis) -> bool:
    """Whether rows and gates that are random give what the formula gives, in float32."""
    generator = torch.Generator().manual_seed(SEED)
    lead = (4, 5)
    x = (torch.randn((*lead, *found.shape), generator=generator) * 8.0).to(probe.device)
    gate = (torch.randn(x.shape, generator=generator) * 2.0).to(probe.device)
    tensors = {
        slot.name: (0.5 + torch.rand(slot.shape, generator=generator)).to(probe.device)
        for slot in probe.slots
    }
    probe.put(tensors)
    given = x.clone(), gate.clone()
    try:
        y = probe.in_any_rank(x, found.shape, gate).to(torch.float64)
    except NotProvenError:
        return False
    if not (torch.equal(x, given[0]) and torch.equal(gate, given[1])):
        raise NotProvenError("it writes into its input", is_norm=True)
    weight = None if found.weight is None else tensors[found.weight.name].reshape(found.shape)
    right = by_composite((x, gate), weight, None, found.spec, 1).to(torch.float64)
    largest = right.abs().amax(dim=-1, keepdim=True)
    return bool(((y - right).abs() <= _CLEAR * largest).all())


def _asked(probe: Probe) -> Hypothesis:
    """The hypothesis for one input, or for two of which the second is ``probe.gate``."""
    state = probe.state(tensors=False)
    training = probe.module.training
    # Dropout and running statistics show in training mode.
    probe.module.train(True)
    try:
        found = _hypothesis(probe)
        full_state = probe.state(tensors=True)
        _check_modes(probe, found)
        if not same_state(probe.state(tensors=True), full_state):
            raise NotProvenError("it keeps state between calls", is_norm=True)
        reads = probe.reads(found.shape)
    finally:
        probe.module.train(training)
    if not same_state(probe.state(tensors=False), state):
        raise NotProvenError("it keeps state between calls", is_norm=True)
    return replace(found, reads=reads)


def _hypothesis(probe: Probe) -> Hypothesis:
    reason = NotProvenError("it maps no row to a row of the same shape")
    for shape in _shapes(probe):
        generator = torch.Generator().manual_seed(SEED)
        tensors = {
            slot.name: (0.5 + torch.rand(slot.shape, generator=generator)).to(probe.device)
            for slot in probe.slots
        }
        probe.put(tensors)
        asked = _RowProbe(probe, shape, generator)
        try:
            asked.rows(torch.ones(2, 3, math.prod(shape)))
        except NotProvenError as error:
            reason = error
            continue
        return _explain(asked, tensors)
    raise reason


def _shapes(probe: Probe) -> Iterator[tuple[int, ...]]:
    """The row shapes worth trying, most likely first."""
    seen: set[tuple[int, ...]] = set()
    by_parameter = [slot.row_shape for slot in probe.slots if slot.store == "parameter"]
    candidates = by_parameter or [slot.row_shape for slot in probe.slots]
    if not by_parameter:
        integers: list[tuple[int, ...]] = []
        for value in probe.simple_attributes().values():
            if isinstance(value, (tuple, list)) and value:
                if all(type(item) is int and 0 < item <= 2**16 for item in value):
                    candidates.append(tuple(value))
            elif type(value) is int and 1 < value <= 2**16:
                integers.append((value,))
        candidates += [*integers, *((width,) for width in _USUAL_WIDTHS)]
    for shape in candidates:
        if shape not in seen and math.prod(shape) > 0:
            seen.add(shape)
            yield shape


class _RowProbe:
    """A probe that is asked about rows of d elements, and answers in float64 on the CPU."""

    def __init__(self, probe: Probe, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self.probe = probe
        self.shape = shape
        self.d = math.prod(shape)
        self.generator = generator
        self._batched = True

    def rows(self, x: Tensor) -> Tensor:
        """x (batch, rows, d) or (rows, d) -> y of x's shape.

        Three dimensions show a norm over the wrong one; classes that take only matrices get one.
        """
        lead = x.shape[:-1]
        if self._batched and len(lead) == 1:
            lead = torch.Size((1, *lead))
        given = x.to(self.probe.device, torch.float32)
        try:
            y = self._call(given, lead if self._batched else torch.Size((lead.numel(),)))
        except NotProvenError:
            if not self._batched:
                raise
            self._batched = False
            y = self._call(given, torch.Size((lead.numel(),)))
        return y.reshape(x.shape).to("cpu", torch.float64)

    def _call(self, x: Tensor, lead: torch.Size) -> Tensor:
        given = x.reshape(*lead, *self.shape)
        before = given.clone()
        y = self.probe(given)
        if not torch.equal(given, before):
            raise NotProvenError("it writes into its input")
        return y

    def signs(self, rows: int) -> Tensor:
        """(rows, d) of -1 and 1."""
        drawn = torch.randint(0, 2, (rows, self.d), generator=self.generator)
        return drawn.to(torch.float32) * 2.0 - 1.0


def _explain(asked: _RowProbe, tensors: dict[str, Tensor]) -> Hypothesis:
    """Steps 2 to 6 of the module docstring, each with what those before it found."""
    factor, shift = _factor_and_shift(asked)
    inside = _match_inside(asked, tensors, factor)
    held = tensors
    if inside is not None:  # from here on it is all ones
        name = inside.slot.name
        asked.probe.put({name: torch.full_like(tensors[name], 1.0 - inside.offset)})
        held = {other: tensor for other, tensor in tensors.items() if other != name}
        factor, shift = _factor_and_shift(asked)
    weight, offset, reduce = _match_factor(asked, held, factor)
    bias = _match_shift(asked, held, shift, factor, weight)
    if bias is not None:  # from here on a row is scaled, and nothing else
        asked.probe.put({bias.name: torch.zeros_like(tensors[bias.name])})
    scale = factor * _divisor_of_ones(reduce, asked.d)
    groups, partial = _structure(asked, scale, reduce)
    spec = NormSpec(offset=offset, reduce=reduce, groups=groups, partial=partial)
    width = spec.width(asked.d)
    eps_in, eps = _find_eps(asked, scale, width, reduce)
    eps_path, exact_eps = _eps_attribute(asked, scale, width, reduce, eps_in, eps)
    _check_ignored(asked, held, {weight, bias, None if inside is None else inside.slot})
    asked.probe.put(tensors)
    _refuse_second_input(asked)
    found = Hypothesis(
        replace(spec, eps=exact_eps, eps_in=eps_in), asked.shape, weight, bias, eps_path
    )
    if inside is not None:
        if found.slots:
            raise NotProvenError("it has a weight before its mean square and one after it")
        found = replace(found, inside=inside.slot, inside_offset=inside.offset)
    return found


@dataclass(frozen=True)
class _Inside:
    """A weight that multiplies the row before its mean square is taken."""

    slot: Slot
    offset: float


def _match_inside(asked: _RowProbe, tensors: dict[str, Tensor], factor: Tensor) -> _Inside | None:
    """The weight that is divided by its own root mean square in the factor."""
    if asked.d == 1:
        return None
    for slot in asked.probe.slots:
        tensor = tensors[slot.name].to("cpu", torch.float64).reshape(-1)
        if tensor.shape != factor.shape:
            continue
        for offset in (0.0, 1.0):
            row = tensor + offset
            right = row / row.pow(2).mean().sqrt()
            if (right - factor).abs().max() < _CLEAR * right.abs().max():
                return _Inside(slot, offset)
    return None


def _factor_and_shift(asked: _RowProbe) -> tuple[Tensor, Tensor]:
    """What each element of a row of signs is multiplied by, and what is added to it: (d,) each.

    Every mean square of such a row is its magnitude squared, whatever it is taken over.
    """
    signs = asked.signs(6)
    high = asked.rows((signs * _LARGE).reshape(2, 3, asked.d)).reshape(6, asked.d)
    low = asked.rows((signs * -_LARGE).reshape(2, 3, asked.d)).reshape(6, asked.d)
    factors = (high - low) / 2 * signs
    largest = factors.abs().max()
    if not torch.isfinite(factors).all() or not largest > 0:
        raise NotProvenError("it does not keep the direction of a row")
    if (factors - factors[0]).abs().max() > _CLEAR * largest:
        raise NotProvenError(_why_not(asked))
    return factors[0], (high[0] + low[0]) / 2


def _match(
    probe: Probe, tensors: dict[str, Tensor], row: Tensor, offset: float = 0.0
) -> Slot | None:
    """The slot whose tensor, plus the offset, is ``row`` (d,)."""
    for slot in probe.slots:
        if slot.name not in tensors:
            continue
        tensor = tensors[slot.name].to("cpu", torch.float64).reshape(-1)
        if tensor.shape != row.shape:
            continue
        if (tensor + offset - row).abs().max() < _CLEAR * row.abs().max():
            return slot
    return None


def _match_factor(
    asked: _RowProbe, tensors: dict[str, Tensor], factor: Tensor
) -> tuple[Slot | None, float, Reduce]:
    """(weight, offset, reduce) that make up the factor."""
    reduces: tuple[Reduce, ...] = ("mean", "sum")
    for reduce in reduces:
        scale = factor * _divisor_of_ones(reduce, asked.d)
        for offset in (0.0, 1.0):
            slot = _match(asked.probe, tensors, scale, offset)
            if slot is not None:
                if asked.d == 1:
                    _refuse_scalar(asked.probe)
                return slot, offset, reduce
        if (scale - 1.0).abs().max() < _CLEAR:
            return None, 0.0, reduce
    raise NotProvenError("its scale is not a weight of its own")


def _divisor_of_ones(reduce: Reduce, d: int) -> float:
    """What a row of magnitude 1 is divided by."""
    return math.sqrt(d) if reduce == "sum" else 1.0


def _match_shift(
    asked: _RowProbe,
    tensors: dict[str, Tensor],
    shift: Tensor,
    factor: Tensor,
    weight: Slot | None,
) -> Slot | None:
    """The bias that makes up the shift; ``None`` if nothing is added."""
    if shift.abs().max() <= _CLEAR * factor.abs().max():
        return None
    bias = _match(asked.probe, tensors, shift)
    if bias is None or bias == weight:
        raise NotProvenError("it adds something to every row")
    return bias


def _refuse_scalar(probe: Probe) -> None:
    """A weight of one element may be meant for rows of any width."""
    try:
        probe(torch.ones(2, 8, device=probe.device))
    except NotProvenError:
        return
    raise NotProvenError("its weight is one number for the whole row")


def _structure(asked: _RowProbe, scale: Tensor, reduce: Reduce) -> tuple[int, float]:
    """(groups, partial): which elements one mean square is taken over."""
    d = asked.d
    drawn = torch.randn(6, d, generator=asked.generator)
    uneven = torch.exp(torch.randn(6, d, generator=asked.generator))
    # A shifted mean parts the mean square from the variance.
    x = (drawn * uneven + 0.7) * 64.0
    x = torch.where(x.abs() < 2.0, 2.0, x)
    y = asked.rows(x.reshape(2, 3, d)).reshape(6, d)
    x = x.to(torch.float64)
    rstd = y / (x * scale)
    if not torch.isfinite(rstd).all() or (rstd <= 0).any():
        raise NotProvenError(_why_not(asked))
    squares = x * x

    changes = ((rstd[:, 1:] / rstd[:, :-1] - 1.0).abs() > _CLEAR).any(dim=0)
    cuts = (torch.nonzero(changes).reshape(-1) + 1).tolist()
    groups = len(cuts) + 1
    if d % groups or cuts != list(range(d // groups, d, d // groups)):
        raise NotProvenError(_why_not(asked))
    if groups == d > 1:
        raise NotProvenError("it is a function of each element by itself")
    if groups > 1:
        sums = squares.reshape(6, groups, d // groups).sum(dim=-1)
        expected = sums if reduce == "sum" else sums / (d // groups)
        seen = rstd.reshape(6, groups, d // groups)[:, :, 0]
        if reduce == "sum" or (expected * seen**2 - 1.0).abs().max() > _EXACT:
            raise NotProvenError(_why_not(asked))
        return groups, 1.0

    sums = squares.cumsum(dim=-1)
    expected = sums if reduce == "sum" else sums / torch.arange(1, d + 1, dtype=torch.float64)
    error = (expected * rstd[:, :1] ** 2 - 1.0).abs().amax(dim=0)
    if error[-1] < _EXACT:
        return 1, 1.0
    count = int(error.argmin()) + 1
    if error[count - 1] > _EXACT or reduce == "sum":
        raise NotProvenError(_why_not(asked))
    for value in asked.probe.simple_attributes().values():
        named = isinstance(value, float) and 0.0 < value < 1.0
        if named and NormSpec(partial=value).width(d) == count:
            return 1, value
    return 1, count / d


def _why_not(asked: _RowProbe) -> str:
    """The reason for a module that passed the rows of equal magnitude only."""
    x = torch.randn(2, 3, asked.d, generator=asked.generator) * 8.0
    y, moved = asked.rows(x), asked.rows(x + 16.0)
    if not torch.equal(y, asked.rows(x)):
        return "its output is random: dropout inside"
    if (y - moved).abs().max() < 1e-2 * y.abs().max():
        return "it subtracts the mean"
    if (asked.rows(x * 64.0) - y).abs().max() > 1e-2 * y.abs().max():
        return "its output is not independent of the row's scale"
    return "it does not divide each row by its root mean square"


def _reciprocal_rstd(asked: _RowProbe, scale: Tensor, exponents: Tensor) -> Tensor:
    """1/rstd (n,) of rows of magnitude 2**-exponent (n,)."""
    sizes = torch.exp2(-exponents.to(torch.float64))
    signs = asked.signs(len(sizes))
    x = signs * sizes.to(torch.float32)[:, None]
    y = asked.rows(x)
    rstd = y * signs / scale / sizes[:, None]
    return 1.0 / rstd.mean(dim=-1)


def _find_eps(asked: _RowProbe, scale: Tensor, width: int, reduce: Reduce) -> tuple[EpsIn, float]:
    """Where eps stands, and its value to float32's precision."""
    exponents = torch.arange(0, _SMALLEST_EXPONENT + 1)
    seen = _reciprocal_rstd(asked, scale, exponents)
    if not torch.isfinite(seen).all():
        raise NotProvenError("it does not keep the direction of a small row")
    unit = _divisor_of_ones(reduce, width)
    size = torch.exp2(-exponents.to(torch.float64)) * unit
    last, smallest = float(seen[-1]), float(size[-1])
    if abs(last / smallest - 1.0) < _EXACT:
        candidates: list[tuple[EpsIn, float]] = [("mean_square", 0.0)]
    else:
        candidates = [
            ("mean_square", last * last - smallest * smallest),
            ("root", last - smallest),
            ("clamp", last * math.sqrt(width)),
        ]
    for eps_in, eps in candidates:
        expected = _denominator(size, width, eps_in, max(eps, 0.0))
        if eps >= 0.0 and (expected / seen - 1.0).abs().max() < _CLEAR:
            if eps_in == "clamp" and reduce == "sum":
                raise NotProvenError("it is an l2 norm without sqrt(d)")
            return eps_in, _short_decimal(eps)
    raise NotProvenError("its eps stands where no convention has it")


def _denominator(size: Tensor, width: int, eps_in: EpsIn, eps: float) -> Tensor:
    if eps_in == "mean_square":
        return (size * size + eps).sqrt()
    if eps_in == "root":
        return size + eps
    return size.clamp(min=eps / math.sqrt(width))


def _short_decimal(value: float) -> float:
    """The shortest decimal within the probe's precision: people write 1e-5."""
    for digits in range(1, 8):
        short = float(f"{value:.{digits - 1}e}")
        if abs(short - value) <= 1e-6 * value:
            return short
    return value


def _eps_attribute(
    asked: _RowProbe, scale: Tensor, width: int, reduce: Reduce, eps_in: EpsIn, eps: float
) -> tuple[tuple[str, ...] | None, float | None]:
    """The attribute that carries eps, by moving each and watching, and the exact value."""
    module = asked.probe.module
    exponents = torch.full((2,), _SMALLEST_EXPONENT)
    unit = _divisor_of_ones(reduce, width)
    size = torch.full((2,), 2.0**-_SMALLEST_EXPONENT, dtype=torch.float64) * unit
    is_machine_eps = abs(eps / _MACHINE_EPS - 1.0) < _EXACT
    for path, value in _numbers(module):
        if value is None:
            if not is_machine_eps:
                continue
        elif abs(value - eps) > _EXACT * eps:
            continue
        moved = 4.0 * eps + 1e-3
        with _changed(module, path, moved):
            try:
                seen = _reciprocal_rstd(asked, scale, exponents)
            except NotProvenError:
                continue
        if (_denominator(size, width, eps_in, moved) / seen - 1.0).abs().max() < _CLEAR:
            return path, value
    # Hard-coded. If eps is the machine's, it may follow the dtype, which float64 would show.
    if is_machine_eps and _follows_float64(asked, scale, width, unit):
        return None, None
    as_float32: float = struct.unpack("f", struct.pack("f", eps))[0]
    return None, as_float32 if is_machine_eps else eps


def _follows_float64(asked: _RowProbe, scale: Tensor, width: int, unit: float) -> bool:
    size = 2.0**-40
    x = (asked.signs(2) * size).to(torch.float64).reshape(2, *asked.shape)
    held = {slot.name: asked.probe.held(slot) for slot in asked.probe.slots}
    try:
        asked.probe.put({name: tensor.to(torch.float64) for name, tensor in held.items()})
        y = asked.probe(x.to(asked.probe.device)).to("cpu", torch.float64).reshape(2, -1)
    except NotProvenError:
        return False
    finally:
        asked.probe.put(held)
    seen = (size * scale / y.abs()).mean()
    expected = math.sqrt((size * unit) ** 2 + 2.0**-52)
    return bool(abs(seen / expected - 1.0) < 1e-3)


def _numbers(module: nn.Module) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Every attribute that may carry eps: on the instance, on its class, on what it holds."""
    seen = set()
    for name, value in module.__dict__.items():
        if name == "training":
            continue
        seen.add(name)
        if _is_number(value):
            yield (name,), value
    for name, value in module.__dict__.items():
        if not name.startswith("_") and hasattr(value, "__dict__") and not callable(value):
            for inner, number in vars(value).items():
                if _is_number(number):
                    yield (name, inner), number
    for base in type(module).__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            if name not in seen and not name.startswith("__") and _is_number(value):
                seen.add(name)
                yield (name,), value


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (float, int)) and not isinstance(value, bool))


@contextlib.contextmanager
def _changed(module: nn.Module, path: tuple[str, ...], value: float) -> Iterator[None]:
    owner: Any = module
    for name in path[:-1]:
        owner = getattr(owner, name)
    name, state = path[-1], vars(owner)
    present, before = name in state, state.get(name)
    state[name] = value
    try:
        yield
    finally:
        if present:
            state[name] = before
        else:
            del state[name]


def _check_ignored(asked: _RowProbe, tensors: dict[str, Tensor], used: set[Slot | None]) -> None:
    """A tensor that is neither weight nor bias must not matter."""
    for slot in asked.probe.slots:
        if slot in used:
            continue
        x = asked.signs(2) * torch.tensor([[1e-4], [3.0]])
        before = asked.rows(x)
        asked.probe.put({slot.name: tensors[slot.name] * 3.0 + 1.0})
        if not torch.equal(asked.rows(x), before):
            raise NotProvenError(f"its {slot.name} is neither a weight nor a bias", is_norm=True)


def _refuse_second_input(asked: _RowProbe) -> None:
    """A gate, or a residual, given by position."""
    if asked.probe.arguments.second is None or asked.probe.gate is not None:
        return
    x = torch.randn(2, 3, asked.d, generator=asked.generator).to(asked.probe.device)
    x = x.reshape(2, 3, *asked.shape)
    second = torch.randn(x.shape, generator=asked.generator).to(asked.probe.device)
    try:
        alone, together = asked.probe(x), asked.probe(x, second)
    except NotProvenError:
        return
    if not torch.equal(alone, together):
        raise NotProvenError("its output depends on a second input", is_norm=True)


def _check_modes(probe: Probe, found: Hypothesis) -> None:
    """Training, evaluation and a second call must give the same bits."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(2, 3, *found.shape, generator=generator).to(probe.device)
    outputs = []
    for training in (True, True, False):
        probe.module.train(training)
        outputs.append(probe.in_any_rank(x, found.shape))
    if not all(torch.equal(y, outputs[0]) for y in outputs):
        raise NotProvenError(
            "it differs between calls or between training and evaluation", is_norm=True
        )
