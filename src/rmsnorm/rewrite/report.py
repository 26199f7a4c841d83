"""What :func:`rmsnorm.patch` did with each norm of a model, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rmsnorm.rewrite.probe import dtype_name
from rmsnorm.spec import NormSpec, specs


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
        reason: why it was left, or why its own code still computes gradients; empty otherwise.
        bit_identical: whether every probe gave the module's own bits.
        training: whether this package computes it where a gradient is needed, too.
        weight: the name of its weight among its attributes, or ``None``.
        bias: the name of its bias, or ``None``.
        weight_inside: the weight multiplies the row before its mean square is taken; ``spec`` then
            is what follows, without a weight.
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
    training: bool = False
    weight: str | None = None
    bias: str | None = None
    weight_inside: bool = False

    @property
    def convention(self) -> str:
        """The name of its spec, or what parts it from the nearest one; empty if it has none."""
        if self.spec is None:
            return ""
        name = spec_name(self.spec)
        return f"{name} of the weighted row" if self.weight_inside else name

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its weight and bias, as far as it has them."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

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
            "training": self.training,
            "tensors": list(self.tensors),
            "weight_inside": self.weight_inside,
        }


@dataclass(frozen=True)
class Block:
    """A block of a :class:`PatchReport` that adds to a residual stream.

    Args:
        name: the block's name in the model.
        cls: the name of its class.
        fused: whether its additions are computed with the norms that follow them.
        additions: how many there are.
        inside: how many of them are followed by a norm in the block; the last one is computed with
            the norm that follows the block, wherever that is.
        reason: why it was left; empty otherwise.
    """

    name: str
    cls: str
    fused: bool
    additions: int
    inside: int
    reason: str


@dataclass(frozen=True)
class PatchReport:
    """What :func:`rmsnorm.patch` did. ``str()`` is a table, equal layers in one line.

    Args:
        entries: one for each norm, in the model's order.
        blocks: with ``fuse_residual=True``, one for each block.
    """

    entries: tuple[Entry, ...] = ()
    blocks: tuple[Block, ...] = ()

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
            "blocks": [asdict(block) for block in self.blocks],
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
        return "\n".join([head, *lines, *_block_lines(self.blocks)])


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


def _block_lines(blocks: tuple[Block, ...]) -> Iterator[str]:
    """One line for blocks that differ only in the numbers of their names."""
    groups: dict[Block, list[Block]] = {}
    for block in blocks:
        groups.setdefault(replace(block, name=name_pattern(block.name)), []).append(block)
    for group, members in groups.items():
        name = members[0].name if len(members) == 1 else group.name
        result = (
            f"{group.additions} additions computed with the norms after them"
            if group.fused
            else f"additions left: {group.reason}"
        )
        yield f"{len(members)}  {name or '(the model)'}  {group.cls}  {result}"


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
        if entry.reason:
            result = f"{result}; own code for gradients: {entry.reason}"
    else:
        result = f"left: {entry.reason}"
    any_width = "any" if entry.swapped else "-"
    eps = entry.eps
    return (
        str(count),
        name,
        entry.cls,
        entry.convention or "-",
        "-" if entry.spec is None else "machine" if eps is None else f"{eps:.6g}",
        any_width if entry.shape is None else "x".join(map(str, entry.shape)),
        "-" if entry.dtype is None else dtype_name(entry.dtype),
        result,
    )
