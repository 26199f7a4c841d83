"""Every norm class of transformers, built, patched, and compared with its own code.

A census asks of each class in a list what :func:`rmsnorm.patch` makes of it, and whether the
patched module still gives what an untouched one gives, in each pair of float32, bfloat16 and
float16 for the row and the weight, forward and backward. Which code ran is seen from PyTorch's
dispatcher, not from the report. :func:`markdown` writes the findings as a page.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm.rewrite.patch import patch
from rmsnorm.rewrite.probe import SEED
from rmsnorm.rewrite.prove import ulps
from rmsnorm.rewrite.report import Entry, PatchReport

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = tuple(itertools.product(DTYPES, DTYPES))

WIDTH = 64
# What a constructor is given if it asks for it, by the name of the argument.
_WIDTHS = ("hidden_size", "dim", "num_features", "normalized_shape", "size", "num_channels", "c_in")
_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys((*_WIDTHS, "embedding_dim"), WIDTH),
    "group_size": 16,
    "num_embeddings": 8,
    "padding_idx": 0,
    "norm_eps": 1e-5,
    "num_heads": 4,
    "head_dim": 16,
}
_LEAD = (4, 64)


_PAGE = """# Every norm of transformers

Made by `{command}`; change that, not this. It builds each of the {classes}
classes of transformers {version} that divide a row by its root mean square, or nearly, with rows
of {width} elements, patches it, and compares it with an untouched one, forward and backward, in all
nine pairs of float32, bfloat16 and float16 for the row (and its gate) and the weight. What stands
here was measured so; what `patch` proves before, and how, is in [patching.md](patching.md).

{whole} classes are swapped in all three dtypes, {part} in float32 alone, and {left} are left:

| computes as | classes |
|---|---|
{counts}
| in float32 alone | {part} |
| left | {left} |

## Classes

- *computes as*: the [spec](numerics.md). *eps*: the constructor's default; at work it is read from
  the module.
- *swapped*: pairs of dtypes that are not take the class's own code. This was compared too.
- *forward*: whether all bits are equal in all pairs that are swapped; or by how many units in the
  last place they differ, and in how many of the elements, where the row is float32 and where it is
  of a half type. Gates differ because PyTorch's own silu and sigmoid are off by up to two units.
- *gradients*: the largest difference of dx, of the gate's and of the weight's gradient, by its
  norm, relative to the class's own; all in float32, and with half types, where most of it is the
  class's own rounding.

| class | family | computes as | eps | swapped | forward | gradients |
|---|---|---|---|---|---|---|
{rows}

## Called a norm

Classes that are called a norm and are none of this kind, and what `patch` says of them.

| class | family | left, because |
|---|---|---|
{others}

## Functions

Norms that are written out in a larger forward, or in a function that it calls, are no modules:
`patch` neither sees nor changes them.

| function | family |
|---|---|
{functions}
"""


@dataclass(frozen=True)
class NormClass:
    """A class of the list, and how it is built.

    Args:
        module: its module's name under ``transformers.models``.
        name: its name.
        arguments: what its constructor is given beside what it requires.
    """

    module: str
    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def family(self) -> str:
        """The model family, as transformers calls it."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.name}({given})" if given else self.name

    def build(self) -> nn.Module:
        """A module of the class for rows of :data:`WIDTH` elements, with random parameters.

        Raises:
            TypeError: its constructor requires an argument of which nothing is known here.
        """
        module = importlib.import_module(f"transformers.models.{self.module}")
        cls = getattr(module, self.name)
        positional: list[int] = []
        given = dict(self.arguments)
        if isinstance(given.get("config"), dict):
            given["config"] = SimpleNamespace(**given["config"])
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind == parameter.VAR_POSITIONAL and not given:
                positional = [WIDTH]
            needed = parameter.default is parameter.empty
            needed = needed or (parameter.default is None and name in _WIDTHS)
            starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if name in given or starred or not needed:
                continue
            if name == "config":
                given[name] = _config(module, parameter.annotation, self.name)
            elif name in _ARGUMENTS:
                given[name] = _ARGUMENTS[name]
            else:
                raise TypeError(f"{self.name} requires {name}, of which the census knows nothing")
        built: nn.Module = cls(*positional, **given)
        generator = torch.Generator().manual_seed(SEED)
        for tensor in built.parameters():
            # Some classes leave their weight as the allocator gave it.
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.data = drawn * 0.5 + 1.0 if tensor.dim() < 2 else drawn * 0.05
        return built


def _config(module: Any, annotation: Any, name: str) -> Any:
    """The default config of the class that a constructor's annotation names, narrowed.

    Raises:
        TypeError: there is no annotation.
    """
    cls = getattr(module, annotation) if isinstance(annotation, str) else annotation
    if cls is inspect.Parameter.empty:
        raise TypeError(f"{name} takes a config of unknown class; state its values in the list")
    config = cls()
    if hasattr(config, "hidden_size"):
        config.hidden_size = WIDTH
    return config


@dataclass(frozen=True)
class Census:
    """The list of a version of transformers.

    Args:
        transformers: the version.
        rms: the classes that divide by a root mean square, or nearly, each once.
        variants: some of these again, built with other arguments.
        other: classes that are called a norm and are not of this kind, with what they are built
            with.
        functions: family and name of norms that are no modules.
    """

    transformers: str
    rms: tuple[NormClass, ...]
    variants: tuple[NormClass, ...]
    other: tuple[NormClass, ...]
    functions: tuple[tuple[str, str], ...]

    @staticmethod
    def load(path: Path) -> Census:
        """The list in a JSON file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not such a list.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            rms = tuple(_classes(data["rms"]))
            variants = tuple(
                NormClass(norm.module, norm.name, tuple(arguments.items()))
                for norm in rms
                for arguments in data["variants"].get(norm.name, ())
            )
            given = data["arguments"]
            return Census(
                transformers=data["transformers"],
                rms=rms,
                variants=variants,
                other=tuple(
                    NormClass(norm.module, norm.name, tuple(given.get(norm.name, {}).items()))
                    for norm in _classes(data["other"])
                ),
                functions=tuple((norm.family, norm.name) for norm in _classes(data["functions"])),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no list of norm classes: {error!r}") from None


def _classes(modules: dict[str, list[str]]) -> Iterator[NormClass]:
    for module, names in modules.items():
        for name in names:
            yield NormClass(module, name)


@dataclass(frozen=True)
class Comparison:
    """A patched module beside an untouched one, in one pair of dtypes.

    Args:
        x: the dtype of the row, and of the gate.
        weight: that of the parameters.
        refused: both raise.
        computed: this package's operation ran, without and with a gradient.
        trained: its backward ran.
        same_bits: all elements are equal, and the dtype is.
        share: the share of elements that differ.
        ulp: by how many units in the last place of the coarser of x's dtype and the result's.
        gradient: the largest difference of a gradient, by its norm, relative to the untouched one.
    """

    x: torch.dtype
    weight: torch.dtype
    refused: bool = False
    computed: bool = False
    trained: bool = False
    same_bits: bool = True
    share: float = 0.0
    ulp: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True)
class Finding:
    """What :func:`rmsnorm.patch` made of one class.

    Args:
        norm: the class.
        entry: its line in the report; ``None`` if it has none.
        inside: the lines of modules inside it.
        reason: why it was left, or, if it was swapped in float32 alone, why in the half types.
        comparisons: one for each of :data:`PAIRS`; none if nothing was swapped.
    """

    norm: NormClass
    entry: Entry | None
    inside: tuple[Entry, ...]
    reason: str
    comparisons: tuple[Comparison, ...]

    @property
    def swapped(self) -> bool:
        """Whether this package computes it in float32, bfloat16 and float16."""
        return self.swapped_in_part and not self.reason

    @property
    def swapped_in_part(self) -> bool:
        """Whether this package computes it in float32 at least."""
        return self.entry is not None and self.entry.swapped

    @property
    def is_gated(self) -> bool:
        """Whether it has a gate."""
        return (
            self.entry is not None
            and self.entry.spec is not None
            and (self.entry.spec.gate is not None)
        )


def examine(norm: NormClass, *, compare: bool = True) -> Finding:
    """Build a class, patch it, and compare it with its own code.

    It is patched for float32, bfloat16 and float16 together; if that fails, for float32.

    Args:
        norm: the class.
        compare: whether to compare; what is no norm may take anything.
    """
    module = norm.build()
    report = patch(module, dtypes=DTYPES)
    entry = _own(report)
    reason = "it has modules inside" if entry is None else entry.reason
    if entry is not None and not entry.swapped:
        report = patch(module, dtypes=torch.float32)
        entry = _own(report)
    inside = tuple(other for other in report.entries if other.name)
    comparisons: tuple[Comparison, ...] = ()
    if compare and report.swapped:
        gated = entry is not None and entry.spec is not None and entry.spec.gate is not None
        untouched = norm.build()
        comparisons = tuple(_compare(untouched, module, gated, x, weight) for x, weight in PAIRS)
    return Finding(norm, entry, inside, reason, comparisons)


def _own(report: PatchReport) -> Entry | None:
    return next((entry for entry in report.entries if not entry.name), None)


class _Watch(TorchDispatchMode):
    """Notes which of this package's operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "rmsnorm":
            self.ran.add(func._opname)
        return func(*args, **(kwargs or {}))


def _compare(
    untouched: nn.Module, patched: nn.Module, gated: bool, x: torch.dtype, weight: torch.dtype
) -> Comparison:
    generator = torch.Generator().manual_seed(SEED + PAIRS.index((x, weight)))
    # Rows of different size and shifted mean, some channels far larger than the others.
    rows = torch.randn(*_LEAD, WIDTH, generator=generator)
    rows = rows * torch.exp(torch.randn(*_LEAD, 1, generator=generator))
    rows = rows * torch.exp(torch.randn(WIDTH, generator=generator)) + 0.25
    inputs = [rows.to(x)]
    if gated:
        inputs.append((torch.randn(rows.shape, generator=generator) * 2.0).to(x))
    dy = torch.randn(rows.shape, generator=generator)
    try:
        right = _run(untouched.to(weight), inputs, dy)
    except RuntimeError:
        try:
            _run(patched.to(weight), inputs, dy)
        except RuntimeError:
            return Comparison(x, weight, refused=True)
        return Comparison(x, weight, same_bits=False, share=1.0)
    with _Watch() as watch:
        seen = _run(patched.to(weight), inputs, dy)
    forward, backward = zip(right[:2], seen[:2], strict=True), zip(right[2:], seen[2:], strict=True)
    same, share, worst = True, 0.0, 0.0
    for a, b in forward:
        assert a is not None
        assert b is not None
        unequal = ~((a == b) | (a.isnan() & b.isnan()))
        same = same and a.dtype == b.dtype and not bool(unequal.any())
        share = max(share, float(unequal.float().mean()))
        if bool(unequal.any()):
            unit = max((x, a.dtype), key=lambda dtype: torch.finfo(dtype).eps)
            worst = max(worst, float(ulps(a[unequal], b[unequal], unit).max()))
    return Comparison(
        x,
        weight,
        computed=any(name.endswith("rms_norm") for name in watch.ran)
        and any(name.endswith("rms_norm_fwd") for name in watch.ran),
        trained=any(name.endswith("rms_norm_bwd") for name in watch.ran),
        same_bits=same,
        share=share,
        ulp=worst,
        gradient=max(_gradient_difference(a, b) for a, b in backward),
    )


def _run(module: nn.Module, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor | None]:
    """The result without a gradient and with one, then the gradients of inputs and parameters."""
    with torch.no_grad():
        alone = module(*inputs)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = module(*leaves)
    held = [*leaves, *module.parameters()]
    gradients = torch.autograd.grad(y, held, dy.to(y.dtype), allow_unused=True)
    return [alone, y.detach(), *gradients]


def _gradient_difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    a, b = a.to(torch.float64), b.to(torch.float64)
    size = float(a.norm())
    return float((a - b).norm()) / size if size else float(b.norm())


def markdown(
    census: Census, findings: Iterable[Finding], others: Iterable[Finding], command: str
) -> str:
    """The findings as a page.

    Args:
        census: the list.
        findings: of its classes, variants among them.
        others: of what is merely called a norm.
        command: how this page is made again.
    """
    rows = list(findings)
    first = [finding for finding in rows if not finding.norm.arguments]
    whole = [finding for finding in first if finding.swapped]
    part = [f for f in first if f.swapped_in_part and not f.swapped]
    left = [f for f in first if not f.swapped_in_part]
    counts = Counter(_convention(finding) for finding in whole)
    return _PAGE.format(
        command=command,
        version=census.transformers,
        classes=len(first),
        width=WIDTH,
        whole=len(whole),
        part=len(part),
        left=len(left),
        counts="\n".join(f"| {name} | {count} |" for name, count in counts.most_common()),
        rows="\n".join(map(_line, rows)),
        others="\n".join(map(_line_of_other, others)),
        functions="\n".join(f"| `{name}` | {family} |" for family, name in census.functions),
    )


def _convention(finding: Finding) -> str:
    return "-" if finding.entry is None else finding.entry.convention or "-"


def _line(finding: Finding) -> str:
    entry = finding.entry
    eps = "-" if entry is None or entry.spec is None else f"{entry.eps:g}"
    if finding.swapped:
        result = "yes"
    elif finding.swapped_in_part:
        result = f"in float32; {finding.reason}"
    else:
        result = f"no: {_why_left(finding)}"
    cells = (f"`{finding.norm}`", finding.norm.family, _convention(finding), eps, result)
    return f"| {' | '.join(cells)} | {_forward(finding)} | {_gradients(finding)} |"


def _why_left(finding: Finding) -> str:
    swapped = any(inner.swapped for inner in finding.inside)
    return f"{finding.reason}; the RMSNorm among them is swapped" if swapped else finding.reason


def _forward(finding: Finding) -> str:
    computed = [c for c in finding.comparisons if c.computed]
    if not computed or all(c.same_bits for c in computed):
        return "same bits" if computed else "-"
    texts = []
    for name, half in (("float32", False), ("half types", True)):
        part = [c for c in computed if (c.x != torch.float32) == half]
        worst = max((c.ulp for c in part), default=0.0)
        share = max((c.share for c in part), default=0.0)
        if worst:
            texts.append(f"{worst:.0f} ulp in {100 * share:.2g} % ({name})")
    return ", ".join(texts)


def _gradients(finding: Finding) -> str:
    computed = [c for c in finding.comparisons if c.computed]
    full = [c.gradient for c in computed if c.x == c.weight == torch.float32]
    half = [c.gradient for c in computed if not c.x == c.weight == torch.float32]
    return ", ".join(f"{max(part):.0e}" for part in (full, half) if part) or "-"


def _line_of_other(finding: Finding) -> str:
    return f"| `{finding.norm.name}` | {finding.norm.family} | {_why_left(finding)} |"
