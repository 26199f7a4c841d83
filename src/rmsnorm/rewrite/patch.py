"""Swapping the forward of every norm that can be proven, in place, and back.

A swapped module keeps its identity, parameters, hooks and attributes; only its class changes, to a
subclass of its own class that is made here and has its name. So ``isinstance`` holds, a deep copy
computes with its own weight, and a pickle names the original class and is swapped again on loading.
Weight, bias and eps are read at each call. Whatever was not proven takes the original forward:
another dtype or device, autocast, a second argument, a weight of another shape.
"""

from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rmsnorm.ops import rms_norm as operation
from rmsnorm.rewrite.identify import examine
from rmsnorm.rewrite.probe import (
    MODULES_INSIDE,
    Hypothesis,
    NotProvenError,
    Probe,
    Slot,
    dtype_name,
    fingerprint,
    holds_own_forward,
    original_class,
    probing,
    simple_attributes,
)
from rmsnorm.rewrite.prove import Pair, common_pairs, own_pair, prove, prove_own_weight
from rmsnorm.spec import NormSpec, specs

Choice = str | Iterable[str] | Callable[[str, nn.Module], bool]

_PLAN = "_rmsnorm_plan"


@dataclass(frozen=True)
class Entry:
    """One module of a :class:`PatchReport`.

    Args:
        name: the module's name in the model.
        cls: the name of its class.
        spec: its convention, or ``None`` if that was not found.
        eps: the eps it uses now.
        shape: the normalised dimensions, or ``None`` if it takes rows of any width.
        dtype: of its weight, or of the model where it has none.
        swapped: whether this package computes it now.
        reason: why it was left; empty where swapped.
        bit_identical: whether every probe gave the module's own bits.
        tensors: the names of its weight and bias.
    """

    name: str
    cls: str
    spec: NormSpec | None
    eps: float | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    swapped: bool
    reason: str
    bit_identical: bool
    tensors: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The entry in types that JSON has."""
        return {
            "name": self.name,
            "cls": self.cls,
            "spec": None if self.spec is None else spec_name(self.spec),
            "encoded_spec": None if self.spec is None else self.spec.encode(),
            "eps": self.eps,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "swapped": self.swapped,
            "reason": self.reason,
            "bit_identical": self.bit_identical,
            "tensors": list(self.tensors),
        }


@dataclass(frozen=True)
class PatchReport:
    """What :func:`patch` did with each norm. ``str()`` is a table, equal layers in one line.

    Args:
        entries: one for each norm, in the model's order.
    """

    entries: tuple[Entry, ...] = ()

    @property
    def swapped(self) -> list[Entry]:
        """The norms that this package computes now."""
        return [entry for entry in self.entries if entry.swapped]

    @property
    def left(self) -> list[Entry]:
        """The norms, and what is called a norm, that stayed as they were."""
        return [entry for entry in self.entries if not entry.swapped]

    def parameter_names(self) -> list[str]:
        """The names of the weights and biases of the swapped norms: those without weight decay."""
        return [
            f"{entry.name}.{tensor}" if entry.name else tensor
            for entry in self.swapped
            for tensor in entry.tensors
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report in types that JSON has."""
        return {
            "swapped": len(self.swapped),
            "left": len(self.left),
            "entries": [entry.to_dict() for entry in self.entries],
        }

    def __str__(self) -> str:
        head = f"{len(self.swapped)} norms swapped, {len(self.left)} left"
        if not self.entries:
            return head
        header = ("count", "module", "class", "spec", "eps", "shape", "dtype", "result")
        rows = [header, *(_row(count, name, entry) for count, name, entry in _grouped(self))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])


def patch(
    model: nn.Module,
    *,
    exact: bool = False,
    dtypes: Iterable[torch.dtype] | torch.dtype | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
) -> PatchReport:
    """Let this package compute every norm of ``model`` that it can prove, in place.

    Each norm is probed through a copy (see :func:`rmsnorm.identify`) and compared with its own
    output. It is swapped if they agree bit for bit; or, unless ``exact``, if they agree within 4
    units in the last place (float32, float64) or in 99.9 % of the elements (half types), as a
    module does that divides by ``torch.sqrt``, which is not correctly rounded everywhere.

    The bits are those of rows that are contiguous in their last dimension. For other rows PyTorch
    itself adds in another order, and the result agrees to the last bits only.

    Calling it again changes nothing but norms that became provable, or are no longer.

    Args:
        model: any module; it may be a norm itself.
        exact: swap only what agrees bit for bit.
        dtypes: a norm is swapped if it is proven for rows and weight of each of these; by default
            of the dtype that it has. Beside these, every pair of float32, bfloat16 and float16
            that agrees bit for bit is computed here too, so a model may be moved between them.
            Any other pair takes the module's own code.
        include: only these modules: shell-style patterns of names (``"model.layers.*"``), or a
            function of name and module.
        exclude: not these modules; the same forms.

    Returns:
        A report with one entry for each norm.

    Raises:
        TypeError: ``model`` is not a module, or ``dtypes`` holds something that is not a
            floating-point dtype.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8))
        >>> report = patch(model)
        >>> [(entry.name, entry.eps, entry.bit_identical) for entry in report.swapped]
        [('1', 1e-05, True)]
        >>> [(entry.name, entry.reason) for entry in report.left]
        [('2', 'it subtracts the mean')]
        >>> unpatch(model)
        1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch() was given a {type(model).__name__}; expected a torch module")
    wanted = _dtypes(dtypes)
    included, excluded = _chosen(include, True), _chosen(exclude, False)
    floating: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    first = floating[0] if floating else torch.empty(0, device="cpu")
    known: dict[Any, _Proof | NotProvenError] = {}
    entries = []
    for name, module in list(model.named_modules()):
        if included(name, module) and not excluded(name, module):
            entry = _patch_one(name, module, exact, wanted, first, known)
            if entry is not None:
                entries.append(entry)
    return PatchReport(tuple(entries))


def unpatch(model: nn.Module) -> int:
    """Give every norm of ``model`` its own class and forward back.

    Returns:
        How many norms had been swapped.

    Example:
        >>> norm = nn.RMSNorm(8)
        >>> report = patch(norm)
        >>> unpatch(norm), type(norm) is nn.RMSNorm
        (1, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch() was given a {type(model).__name__}; expected a torch module")
    return sum(_restore(module) for module in list(model.modules()))


@dataclass(frozen=True)
class Plan:
    """What a swapped module knows about itself; everything else is read from it at each call.

    Args:
        spec: the convention, its eps ``None``: what is passed beside it decides.
        eps: the hard-coded eps, or the one at the time of the proof.
        eps_path: the attributes that lead to eps, or ``None`` if it is hard-coded.
        shape: the normalised dimensions, or ``None`` for rows of any width.
        ndim: how many they are.
        weight: where the weight is.
        bias: where the bias is.
        pairs: the proven pairs of dtypes.
        device: the type of device on which they were proven.
        argument: the name of forward's argument.
        bit_identical: whether all pairs gave the module's own bits.
        watched: attributes whose change makes the proof void.
        reshapes: a weight or bias has leading dimensions of 1.
        had_forward: the instance had its class's own forward as an attribute.
    """

    spec: NormSpec
    eps: float | None
    eps_path: tuple[str, ...] | None
    shape: tuple[int, ...] | None
    ndim: int
    weight: Slot | None
    bias: Slot | None
    pairs: frozenset[Pair]
    device: str
    argument: str | None
    bit_identical: bool
    watched: tuple[tuple[str, Any], ...]
    reshapes: bool = False
    had_forward: bool = False

    def eps_of(self, module: nn.Module) -> Any:
        """The eps that ``module`` uses now."""
        if self.eps_path is None:
            return self.eps
        value: Any = module
        for name in self.eps_path:
            value = getattr(value, name)
        return value

    def operands(self, module: nn.Module, x: Tensor) -> tuple[Any, ...] | None:
        """(weight, bias, eps) of a call that is proven, or ``None``.

        Runs at every call, so the usual case asks each tensor as little as possible.
        """
        weight: Tensor | None = None
        bias: Tensor | None = None
        if self.weight is not None:
            weight = module._parameters.get(self.weight.name)
            if weight is None:  # a buffer, an attribute, or a parameter that somebody wraps
                weight = getattr(module, self.weight.name, None)
        if self.bias is not None:
            bias = getattr(module, self.bias.name, None)
        if type(x) is not Tensor and not _is_ordinary(x):
            return None
        beside = bias if weight is None else weight
        if (x.dtype, None if beside is None else beside.dtype) not in self.pairs:
            return None
        if not (x.is_cpu if self.device == "cpu" else x.device.type == self.device):
            return None
        shape = x.shape
        if self.ndim > 1:
            if shape[-self.ndim :] != self.shape:
                return None
        elif not shape or (self.shape is not None and shape[-1] != self.shape[0]):
            return None
        if self.weight is not None and not self._fits(self.weight, weight, x, weight):
            return None
        if self.bias is not None and not self._fits(self.bias, bias, x, weight):
            return None
        # A graph that torch.jit records should run, or be converted, without this package.
        if torch._C._is_any_autocast_enabled() or torch._C._get_tracing_state() is not None:
            return None
        eps = self.eps if self.eps_path is None else self.eps_of(module)
        if type(eps) is float:
            if not eps >= 0.0:
                return None
        elif type(eps) is int and eps >= 0:
            eps = float(eps)
        elif eps is not None or self.eps is not None:
            return None
        if self.reshapes:
            # Broadcasting would add dimensions to a shorter x.
            if any(s is not None and len(shape) < len(s.shape) for s in (self.weight, self.bias)):
                return None
            if self.weight is not None and weight is not None:
                weight = weight.reshape(self.weight.row_shape)
            if self.bias is not None and bias is not None:
                bias = bias.reshape(self.bias.row_shape)
        return weight, bias, eps

    @staticmethod
    def _fits(slot: Slot, tensor: Any, x: Tensor, weight: Tensor | None) -> bool:
        """Whether a weight or bias is as it was when the module was proven."""
        if type(tensor) is not nn.Parameter and not _is_ordinary(tensor):
            return False
        if tensor.shape != slot.shape or tensor.is_cpu is not x.is_cpu:
            return False
        return tensor is weight or weight is None or tensor.dtype == weight.dtype


def _is_ordinary(x: Any) -> bool:
    """A tensor that the operation computes on, not one that distributes it or wraps another."""
    return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)


class Accelerated:
    """Marks the classes of swapped modules; see :func:`_accelerated_class`."""

    __slots__ = ()
    _rmsnorm_original: ClassVar[type[nn.Module]]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _accelerated_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``original`` whose forward is this package's where that is proven.

    ``original`` stays the first base: Python lets an instance change to a class only if both have
    the same line of first bases.
    """
    if original in _classes:
        return _classes[original]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A bound method that outlived unpatch() finds no plan.
        plan = getattr(self, _PLAN, None)
        if plan is not None:
            x = None
            if not kwargs and len(args) == 1:
                x = args[0]
            elif not args and len(kwargs) == 1:
                x = kwargs.get(plan.argument)
            if x is not None:
                operands = plan.operands(self, x)
                if operands is not None:
                    weight, bias, eps = operands
                    return operation.forward(x, weight, bias, eps, plan.spec, plan.ndim)
        return original.forward(self, *args, **kwargs)

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        original.__setattr__(self, name, value)
        plan = self.__dict__.get(_PLAN)
        if plan is not None:
            for watched, before in plan.watched:
                if name == watched and not (type(value) is type(before) and value == before):
                    self.__dict__[_PLAN] = None

    def extra_repr(self: nn.Module) -> str:
        inner = original.extra_repr(self)
        plan = self.__dict__.get(_PLAN)
        if plan is None:
            note = "rmsnorm: changed since patch(), own code"
        else:
            note = f"rmsnorm: {spec_name(plan.spec)} in {_pairs_text(plan.pairs)}"
        return f"{inner}, {note}" if inner else note

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, max(int(protocol), 2))
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") == "__newobj__":
            cls, *arguments = reduced[1]
            if cls is type(self):
                return (_remake, (original, *arguments), *reduced[2:])
        return reduced

    forward.__qualname__ = f"{original.__qualname__}.forward"
    forward.__doc__ = original.forward.__doc__
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__setattr__": set_attribute,
        "__reduce_ex__": reduce_ex,
        "_rmsnorm_original": original,
        "extra_repr": extra_repr,
        "forward": forward,
    }
    # Made beside the original and then moved under it, so that the original's __init_subclass__,
    # which may register what it sees, does not see this class.
    metaclass: Any = type(original)
    made: type[nn.Module] = metaclass(original.__name__, (nn.Module, Accelerated), namespace)
    made.__bases__ = (original, Accelerated)
    _classes[original] = made
    return made


def _remake(original: type[nn.Module], *arguments: Any) -> nn.Module:
    """An empty swapped module, for pickle and copy, which fill it."""
    cls = _accelerated_class(original)
    made: nn.Module = cls.__new__(cls, *arguments)
    return made


@dataclass(frozen=True)
class _Proof:
    """The outcome for one kind of norm: class, attributes, width and dtypes."""

    found: Hypothesis
    pairs: frozenset[Pair]
    bit_identical: bool
    fixed_width: bool


def _patch_one(
    name: str,
    module: nn.Module,
    exact: bool,
    wanted: tuple[torch.dtype, ...] | None,
    like: Tensor,
    known: dict[Any, _Proof | NotProvenError],
) -> Entry | None:
    base = original_class(module)
    dtype = next(
        (t.dtype for t in module._parameters.values() if t is not None and t.is_floating_point()),
        like.dtype,
    )
    required = wanted or (dtype,)
    found: Hypothesis | None = None
    try:
        _check_own(module)
        had_forward = holds_own_forward(module)
        if isinstance(module, Accelerated):
            held = module.__dict__.get(_PLAN)
            had_forward = held is not None and bool(held.had_forward)
        with probing(module, like.device) as probe:
            proof = _proven(module, probe, exact, required, known)
            found = proof.found
            identical = _agrees_with_own_weight(probe, proof, required, exact)
        plan = _plan(module, probe, proof, identical, had_forward)
        _swap(module, base, plan)
    except NotProvenError as error:
        _restore(module)
        named = "norm" in base.__name__.lower() or "norm" in name.rpartition(".")[2].lower()
        if not (error.is_norm or (named and error.reason != MODULES_INSIDE)):
            return None
        spec = None if found is None else found.spec
        return Entry(
            name,
            cls=base.__name__,
            spec=spec,
            eps=None if spec is None else spec.eps,
            shape=None if found is None else found.shape,
            dtype=dtype,
            swapped=False,
            reason=error.reason,
            bit_identical=False,
        )
    return Entry(
        name,
        cls=base.__name__,
        spec=replace(plan.spec, eps=plan.eps),
        eps=plan.eps,
        shape=plan.shape,
        dtype=dtype,
        swapped=True,
        reason="",
        bit_identical=plan.bit_identical,
        tensors=tuple(slot.name for slot in (plan.weight, plan.bias) if slot is not None),
    )


def _check_own(module: nn.Module) -> None:
    """This package's own modules need no swap."""
    modules = sys.modules.get("rmsnorm.modules")
    if modules is not None and isinstance(module, modules.RMSNorm):
        raise NotProvenError("it is computed by rmsnorm already", is_norm=True)


def _proven(
    module: nn.Module,
    probe: Probe,
    exact: bool,
    required: tuple[torch.dtype, ...],
    known: dict[Any, _Proof | NotProvenError],
) -> _Proof:
    """The proof for the module's kind; made once for all norms that are alike.

    Raises:
        NotProvenError: there is none.
    """
    kind = fingerprint(module)
    key = None if kind is None else (kind, required)
    outcome = None if key is None else known.get(key)
    if outcome is None:
        try:
            outcome = _make_proof(probe, exact, required)
        except NotProvenError as error:
            outcome = error
        if key is not None:
            known[key] = outcome
    if isinstance(outcome, NotProvenError):
        raise outcome
    return outcome


def _make_proof(probe: Probe, exact: bool, required: tuple[torch.dtype, ...]) -> _Proof:
    found = examine(probe)
    pairs: set[Pair] = set()
    identical = True
    for dtype in required:
        pair = own_pair(found, dtype)
        try:
            verdict = prove(probe, found, pair)
        except NotProvenError as error:
            raise NotProvenError(f"{error.reason} in {dtype_name(dtype)}", is_norm=True) from None
        if not verdict.bit_identical:
            identical = False
            if exact or not verdict.close:
                raise NotProvenError(f"in {dtype_name(dtype)} {verdict.detail}", is_norm=True)
        pairs.add(pair)
    for pair in common_pairs(found):
        if pair not in pairs and _is_identical(probe, found, pair):
            pairs.add(pair)
    fixed_width = True
    if found.weight is None and found.bias is None:
        widths = [(width,) for width in (37, 96, 200) if (width,) != found.shape]
        fixed_width = not all(
            _is_identical(probe, replace(found, shape=width), pair) or not identical
            for width in widths
            for pair in sorted(pairs, key=str)
        )
    return _Proof(found, frozenset(pairs), identical, fixed_width)


def _is_identical(probe: Probe, found: Hypothesis, pair: Pair) -> bool:
    try:
        return prove(probe, found, pair).bit_identical
    except NotProvenError:
        return False


def _agrees_with_own_weight(
    probe: Probe, proof: _Proof, required: tuple[torch.dtype, ...], exact: bool
) -> bool:
    """Whether the module with its real weight gave identical bits.

    Raises:
        NotProvenError: it is not even close, or ``exact`` and not identical.
    """
    identical = proof.bit_identical
    for dtype in required:
        verdict = prove_own_weight(probe, proof.found, own_pair(proof.found, dtype))
        if not verdict.bit_identical:
            identical = False
            if exact or not verdict.close:
                raise NotProvenError(f"with its own weight, {verdict.detail}", is_norm=True)
    return identical


def _plan(
    module: nn.Module, probe: Probe, proof: _Proof, identical: bool, had_forward: bool
) -> Plan:
    found = proof.found
    carriers = {found.eps_path[0]} if found.eps_path is not None else set()
    watched = tuple(
        (name, value) for name, value in simple_attributes(module).items() if name not in carriers
    )
    return Plan(
        spec=replace(found.spec, eps=None),
        eps=found.spec.eps,
        eps_path=found.eps_path,
        shape=found.shape if proof.fixed_width else None,
        ndim=len(found.shape),
        weight=found.weight,
        bias=found.bias,
        pairs=proof.pairs,
        device=probe.device.type,
        argument=probe.argument,
        bit_identical=identical,
        watched=watched,
        reshapes=any(slot and slot.shape != found.shape for slot in (found.weight, found.bias)),
        had_forward=had_forward,
    )


def _swap(module: nn.Module, base: type[nn.Module], plan: Plan) -> None:
    try:
        object.__setattr__(module, "__class__", _accelerated_class(base))
    except TypeError as error:
        raise NotProvenError("its class cannot be subclassed in place", is_norm=True) from error
    module.__dict__[_PLAN] = plan
    if plan.had_forward:
        module.__dict__.pop("forward", None)


def _restore(module: nn.Module) -> bool:
    if not isinstance(module, Accelerated):
        return False
    plan = module.__dict__.pop(_PLAN, None)
    original = original_class(module)
    swapped: type[nn.Module] = type(module)
    if swapped is _classes.get(original):
        object.__setattr__(module, "__class__", original)
    # Wrappers that were put around the swapped forward keep a bound method of it.
    for name, value in list(module.__dict__.items()):
        if (
            isinstance(value, types.MethodType)
            and value.__self__ is module
            and value.__func__ is swapped.forward
        ):
            module.__dict__[name] = types.MethodType(original.forward, module)
    if plan is not None and plan.had_forward:
        module.__dict__["forward"] = types.MethodType(original.forward, module)
    return True


def _dtypes(
    dtypes: Iterable[torch.dtype] | torch.dtype | None,
) -> tuple[torch.dtype, ...] | None:
    if dtypes is None:
        return None
    given = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    for dtype in given:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtypes holds {dtype!r}; expected floating-point torch dtypes")
    return given or None


def _chosen(choice: Choice | None, default: bool) -> Callable[[str, nn.Module], bool]:
    if choice is None:
        return lambda name, module: default
    if callable(choice):
        return choice
    patterns = (choice,) if isinstance(choice, str) else tuple(choice)
    return lambda name, module: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def spec_name(spec: NormSpec) -> str:
    """The spec's name, or what parts it from the named spec that is nearest.

    Example:
        >>> spec_name(replace(specs.llama, eps=1e-5)), spec_name(replace(specs.llama, groups=4))
        ('llama', 'llama with groups=4')
    """
    name = specs.name_of(spec)
    if name is not None:
        return name
    best: list[str] | None = None
    for candidate in specs:
        differences = [
            f"{key}={getattr(spec, key)}"
            for key in spec.__dataclass_fields__
            if key != "eps" and getattr(spec, key) != getattr(specs[candidate], key)
        ]
        if best is None or len(differences) < len(best) - 1:
            best = [candidate, *differences]
    assert best is not None
    return f"{best[0]} with {', '.join(best[1:])}"


def _grouped(report: PatchReport) -> Iterator[tuple[int, str, Entry]]:
    """Entries that differ only in the numbers of their names, counted."""
    groups: dict[Any, list[Entry]] = {}
    for entry in report.entries:
        groups.setdefault((name_pattern(entry.name), replace(entry, name="")), []).append(entry)
    for (pattern, _), entries in groups.items():
        name = entries[0].name if len(entries) == 1 else pattern
        yield len(entries), name or "(the model)", entries[0]


def name_pattern(name: str) -> str:
    """The name of a module with ``*`` for the numbers in it: the same for all layers of a model.

    Example:
        >>> name_pattern("layers.11.norm")
        'layers.*.norm'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _row(count: int, name: str, entry: Entry) -> tuple[str, ...]:
    if entry.swapped:
        result = "swapped, bit-identical" if entry.bit_identical else "swapped, within tolerance"
    else:
        result = f"left: {entry.reason}"
    any_width = "any" if entry.swapped else "-"
    eps = entry.eps
    return (
        str(count),
        name,
        entry.cls,
        "-" if entry.spec is None else spec_name(entry.spec),
        "-" if entry.spec is None else "machine" if eps is None else f"{eps:.6g}",
        any_width if entry.shape is None else "x".join(map(str, entry.shape)),
        "-" if entry.dtype is None else dtype_name(entry.dtype),
        result,
    )


def _pairs_text(pairs: frozenset[Pair]) -> str:
    """The dtypes of rows, and those of their weights where not all of these were proven."""
    alike = sorted(dtype_name(x) for x, weight in pairs if weight in (x, None))
    mixed = sorted(
        f"{dtype_name(x)} with {dtype_name(weight)} weight"
        for x, weight in pairs
        if weight is not None and weight != x
    )
    every = len(alike) ** 2 == len(pairs)
    return ", ".join(alike if every else alike + mixed)
