"""Swapping the forward of every norm that can be proven, in place, and back.

Each module is examined (:mod:`rmsnorm.rewrite.identify`), compared bit for bit with what was found
(:mod:`rmsnorm.rewrite.prove`), and given a class that computes the plan that comes of it
(:mod:`rmsnorm.rewrite.swap`). Weight, bias and eps are read at each call. Whatever was not proven
takes the original forward: another dtype or device, autocast, a second argument that is no gate, a
weight of another shape.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.ops.rms_norm import has_kernels
from rmsnorm.rewrite import residual
from rmsnorm.rewrite.identify import examine
from rmsnorm.rewrite.plan import Plan, guards_of
from rmsnorm.rewrite.probe import (
    MODULES_INSIDE,
    Hypothesis,
    NotProvenError,
    Probe,
    dtype_name,
    fingerprint,
    holds_own_forward,
    original_class,
    probing,
)
from rmsnorm.rewrite.prove import (
    Dtypes,
    common_pairs,
    explanation,
    own_pair,
    prove,
    prove_gradients,
    prove_own_weight,
)
from rmsnorm.rewrite.report import Block, Entry, PatchReport
from rmsnorm.rewrite.swap import Swapped, plan_of, restore, swap, swap_later
from rmsnorm.spec import NormSpec

Choice = str | Iterable[str] | Callable[[str, nn.Module], bool]


def patch(
    model: nn.Module,
    *,
    exact: bool = False,
    dtypes: Iterable[torch.dtype] | torch.dtype | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
    fuse_residual: bool = False,
) -> PatchReport:
    """Let this package compute every norm of ``model`` that it can prove, in place.

    Each norm is probed through a copy (see :func:`rmsnorm.identify`) and compared with its own
    output. It is swapped if they agree bit for bit; or, unless ``exact``, if they agree within 4
    units in the last place (float32, float64) or in 99.9 % of the elements (half types), as a
    module does that divides by ``torch.sqrt``, which is not correctly rounded everywhere. Gated
    norms never agree bit for bit, since torch's own silu and sigmoid are off by up to two units:
    they are swapped within 16 units in float32.

    Where a gradient is needed, this package computes forward and backward, on the CPU, if the
    module's own gradients were compared too and agree to the precision of their dtype; else the
    module's own code runs. ``entry.training`` says which.

    The bits are those of rows that are contiguous in their last dimension. For other rows PyTorch
    itself adds in another order, and the result agrees to the last bits only.

    Calling it again changes nothing but norms that became provable, or are no longer.

    Args:
        model: any module; it may be a norm itself.
        exact: swap only what agrees bit for bit.
        dtypes: a norm is swapped if it is proven for rows and weight of each of these; by default
            of the dtype that it has. Beside these, every pair of float32, bfloat16 and float16
            that agrees bit for bit (with a gate, every three of row, weight and gate that agree as
            stated) is computed here too, so a model may be moved between them. Any other pair takes
            the module's own code.
        include: only these modules: shell-style patterns of names (``"model.layers.*"``), or a
            function of name and module.
        exclude: not these modules; the same forms.
        fuse_residual: compute each addition to the residual stream and the norm that follows it as
            one operation (:func:`rmsnorm.add_rms_norm`), with the same bits, in every block that
            does nothing with its stream but normalise it and add to it.

    Returns:
        A report with one entry for each norm, and with ``fuse_residual`` one for each block.

    Raises:
        TypeError: ``model`` is not a module, or ``dtypes`` holds something that is not a
            floating-point dtype, or ``include`` or ``exclude`` is neither patterns nor a function.

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
    included = _chosen("include", include, True)
    excluded = _chosen("exclude", exclude, False)
    floating = (p for p in model.parameters() if p.is_floating_point())
    like: Tensor = next(floating, torch.empty(0, device="cpu"))
    patcher = _Patcher(exact, wanted, like.dtype, like.device)
    residual.part(model)
    entries = []
    for name, module in list(model.named_modules()):
        if included(name, module) and not excluded(name, module):
            entry = patcher.entry(name, module)
            if entry is not None:
                entries.append(entry)
    blocks: tuple[Block, ...] = ()
    if fuse_residual:
        blocks = residual.join(model, lambda name, m: included(name, m) and not excluded(name, m))
    return PatchReport(tuple(entries), blocks)


def unpatch(model: nn.Module) -> int:
    """Give every norm and every block of ``model`` its own class and forward back.

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
    residual.part(model)
    return sum(restore(module) for module in list(model.modules()))


def patch_later(module: nn.Module, *, exact: bool = False) -> None:
    """Patch one norm, as :func:`patch` does, as soon as it has its data.

    It is examined when it is put into training or evaluation mode or called, whichever is first;
    its own code runs until then, under ``torch.compile`` and inside transforms. Norms that are
    alike share the proof, those of other models included. :func:`patch` examines it at once, and
    :func:`unpatch` gives its class back.

    Args:
        module: any module that may be a norm; one that is none is as it was once it was examined.
        exact: swap it only if it agrees bit for bit.

    Example:
        >>> with torch.device("meta"):
        ...     norm = nn.RMSNorm(8)
        >>> patch_later(norm)
        >>> norm = norm.to_empty(device="cpu").eval()
        >>> norm
        RMSNorm((8,), eps=None, elementwise_affine=True, rmsnorm: torch in bfloat16, float16,
        float32)
        >>> unpatch(norm)
        1
    """
    with contextlib.suppress(NotProvenError):
        swap_later(module, _examine_exactly if exact else _examine)


def _examine(module: nn.Module) -> None:
    _alone(False).entry("", module)


def _examine_exactly(module: nn.Module) -> None:
    _alone(True).entry("", module)


@functools.cache
def _without_eps(spec: NormSpec) -> NormSpec:
    """``spec`` for a norm with an eps of its own: one object for all of them, since the direct call
    knows a spec by its identity."""
    return replace(spec, eps=None)


@functools.cache
def _alone(exact: bool) -> _Patcher:
    """What patches norms one by one and remembers the proofs."""
    return _Patcher(exact, None, torch.float32, torch.device("cpu"))


@dataclass(frozen=True)
class _Proof:
    """The outcome for one kind of norm: class, attributes, width and dtypes.

    Args:
        found: what it computes.
        pairs: the dtypes of row and weight (and gate) in which it does.
        training: those in which it differentiates the same.
        own_gradients: why it does not in all that are required; empty if it does.
        bit_identical: whether all bits agreed.
        fixed_width: whether it takes rows of one width only.
    """

    found: Hypothesis
    pairs: frozenset[Dtypes]
    training: frozenset[Dtypes]
    own_gradients: str
    bit_identical: bool
    fixed_width: bool


@dataclass(frozen=True)
class _Patcher:
    """One call of :func:`patch`: what it was asked for, and the proofs that it has made so far.

    Args:
        exact: swap only what agrees bit for bit.
        dtypes: those that each norm is proven for, or ``None`` for its own.
        dtype: of a norm without parameters.
        device: where a norm without tensors is probed.
        known: the outcomes so far; norms that are alike share one.
    """

    exact: bool
    dtypes: tuple[torch.dtype, ...] | None
    dtype: torch.dtype
    device: torch.device
    known: dict[Any, _Proof | NotProvenError] = field(default_factory=dict)

    def entry(self, name: str, module: nn.Module) -> Entry | None:
        """Swap or restore one module; ``None`` if it is nothing that a report should list."""
        cls = original_class(module).__name__
        dtype = self._dtype_of(module)
        required = self.dtypes or (dtype,)
        found: Hypothesis | None = None
        try:
            _refuse_own(module)
            had_forward = _had_forward(module)
            with probing(module, self.device) as probe:
                proof = self._proof(module, probe, required)
                found = proof.found
                identical = self._agrees_with_own_weight(probe, proof, required)
                plan = _plan(module, probe, proof, identical, had_forward)
            swap(module, plan)
        except NotProvenError as error:
            restore(module)
            named = "norm" in cls.lower() or "norm" in name.rpartition(".")[2].lower()
            if not (error.is_norm or (named and error.reason != MODULES_INSIDE)):
                return None
            spec = None if found is None else found.spec
            return Entry(
                name,
                cls=cls,
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
            cls=cls,
            spec=replace(plan.spec, eps=plan.eps),
            eps=plan.eps,
            shape=plan.shape,
            dtype=dtype,
            swapped=True,
            reason=proof.own_gradients,
            bit_identical=plan.bit_identical,
            training=all(own_pair(found, dtype) in plan.training for dtype in required),
            weight=None if plan.weight is None else plan.weight.name,
            bias=None if plan.bias is None else plan.bias.name,
            weight_inside=plan.inside is not None,
        )

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                return parameter.dtype
        return self.dtype

    def _proof(self, module: nn.Module, probe: Probe, required: tuple[torch.dtype, ...]) -> _Proof:
        """The proof for the module's kind; made once for all norms that are alike.

        Raises:
            NotProvenError: there is none.
        """
        kind = fingerprint(module)
        key = None if kind is None else (kind, required)
        outcome = None if key is None else self.known.get(key)
        if outcome is None:
            try:
                outcome = self._make_proof(probe, required)
            except NotProvenError as error:
                outcome = error
            if key is not None:
                self.known[key] = outcome
        if isinstance(outcome, NotProvenError):
            raise outcome
        return outcome

    def _make_proof(self, probe: Probe, required: tuple[torch.dtype, ...]) -> _Proof:
        found = examine(probe)
        pairs: set[Dtypes] = set()
        identical = True
        for dtype in required:
            pair = own_pair(found, dtype)
            try:
                verdict = prove(probe, found, pair)
            except NotProvenError as error:
                raise NotProvenError(
                    f"{error.reason} in {dtype_name(dtype)}", is_norm=True
                ) from None
            if not verdict.bit_identical:
                identical = False
                if verdict.close and self.exact and found.is_gated:
                    raise NotProvenError(
                        f"torch's {found.spec.gate} has other last bits than this package's",
                        is_norm=True,
                    )
                if self.exact or not verdict.close:
                    why = explanation(probe, found, pair)
                    detail = f"{verdict.detail}: {why}" if why else verdict.detail
                    raise NotProvenError(f"in {dtype_name(dtype)} {detail}", is_norm=True)
            pairs.add(pair)
        close = found.is_gated and not self.exact
        for pair in common_pairs(found):
            if pair not in pairs and _agrees(probe, found, pair, close=close):
                pairs.add(pair)
        fixed_width = True
        if not found.slots:
            widths = [(width,) for width in (37, 96, 200) if (width,) != found.shape]
            fixed_width = not all(
                _agrees(probe, replace(found, shape=width), pair, close=not identical)
                for width in widths
                for pair in sorted(pairs, key=str)
            )
        training, own_gradients = _training(probe, found, pairs, required)
        return _Proof(found, frozenset(pairs), training, own_gradients, identical, fixed_width)

    def _agrees_with_own_weight(
        self, probe: Probe, proof: _Proof, required: tuple[torch.dtype, ...]
    ) -> bool:
        """Whether the module with its real weight gave identical bits.

        Raises:
            NotProvenError: it is not even close, or it must be and is not identical.
        """
        identical = proof.bit_identical
        for dtype in required:
            verdict = prove_own_weight(probe, proof.found, own_pair(proof.found, dtype))
            if not verdict.bit_identical:
                identical = False
                if self.exact or not verdict.close:
                    raise NotProvenError(f"with its own weight, {verdict.detail}", is_norm=True)
        return identical


def _refuse_own(module: nn.Module) -> None:
    """This package's own modules need no swap."""
    modules = sys.modules.get("rmsnorm.modules")
    if modules is not None and isinstance(module, (modules.RMSNorm, modules.GatedRMSNorm)):
        raise NotProvenError("it is computed by rmsnorm already", is_norm=True)


def _had_forward(module: nn.Module) -> bool:
    """Whether the instance has its class's own forward as an attribute, or had it when swapped.

    Raises:
        NotProvenError: it has another one.
    """
    own = holds_own_forward(module)
    if not isinstance(module, Swapped):
        return own
    plan = plan_of(module)
    return plan is not None and plan.had_forward


def _agrees(probe: Probe, found: Hypothesis, pair: Dtypes, *, close: bool) -> bool:
    """Whether the bits are the module's own, or, if that is enough, close to them."""
    try:
        verdict = prove(probe, found, pair)
    except NotProvenError:
        return False
    return verdict.bit_identical or (close and verdict.close)


def _training(
    probe: Probe, found: Hypothesis, pairs: Iterable[Dtypes], required: tuple[torch.dtype, ...]
) -> tuple[frozenset[Dtypes], str]:
    """The pairs in which this package may compute gradients, and why not in all that are required.

    On other devices, and without the kernels, gradients are left to the module in any case.
    """
    if probe.device.type != "cpu" or not has_kernels:
        return frozenset(), ""
    reasons = {}
    for pair in {own_pair(found, torch.float32), *pairs}:
        try:
            prove_gradients(probe, found, pair)
        except NotProvenError as error:
            reasons[pair] = error.reason
        except Exception as error:  # a backward may do anything, too
            reasons[pair] = f"its backward raises {type(error).__name__}"
    # float32 is the precise one: what fails there may hide in the roundings of the half types.
    decisive = [own_pair(found, dtype) for dtype in (torch.float32, *required)]
    reason = next((reasons[pair] for pair in decisive if pair in reasons), "")
    if decisive[0] in reasons:
        return frozenset(), reason
    return frozenset(pair for pair in pairs if pair not in reasons), reason


def _plan(
    module: nn.Module, probe: Probe, proof: _Proof, identical: bool, had_forward: bool
) -> Plan:
    found = proof.found
    return Plan(
        spec=_without_eps(found.spec),
        eps=found.spec.eps,
        eps_path=found.eps_path,
        shape=found.shape if proof.fixed_width else None,
        ndim=len(found.shape),
        weight=found.weight or found.inside,
        bias=found.bias,
        pairs=proof.pairs,
        training=proof.training,
        device=probe.device.type,
        argument=probe.arguments.first,
        bit_identical=identical,
        guards=guards_of(module, found),
        reshapes=any(slot.shape != found.shape for slot in found.slots),
        had_forward=had_forward,
        gate_argument=probe.arguments.second if found.is_gated else None,
        inside=None if found.inside is None else found.inside_offset,
    )


def _dtypes(
    dtypes: Iterable[torch.dtype] | torch.dtype | None,
) -> tuple[torch.dtype, ...] | None:
    if dtypes is None:
        return None
    if isinstance(dtypes, str) or not isinstance(dtypes, (torch.dtype, Iterable)):
        raise TypeError(
            f"patch() was given dtypes={dtypes!r}; expected a floating-point torch dtype, such as "
            "torch.float32, or several"
        )
    given = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    for dtype in given:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtypes holds {dtype!r}; expected floating-point torch dtypes")
    return given or None


def _chosen(
    argument: str, choice: Choice | None, default: bool
) -> Callable[[str, nn.Module], bool]:
    if choice is None:
        return lambda name, module: default
    if callable(choice):
        return choice
    patterns = (choice,) if isinstance(choice, str) else choice
    patterns = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"patch() was given {argument}={choice!r}; expected a pattern of module names, "
                "several, or a function of name and module"
            )
    return lambda name, module: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
