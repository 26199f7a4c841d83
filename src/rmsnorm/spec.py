"""What an RMSNorm computes, and where it rounds.

All families share one formula (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)::

    y_i = x_i / sqrt(mean(x^2) + eps) * (weight_i + offset)

They differ in where intermediate results are rounded, where eps enters, and which dtype comes out.
:class:`NormSpec` states those choices; the named specs state them for the families in use. This
module imports nothing outside the standard library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

EpsIn = Literal["mean_square", "root", "clamp"]
Reduce = Literal["mean", "sum"]
Accumulate = Literal["float32", "input"]
Rounding = Literal["before_weight", "after_weight", "weight_dtype"]
Output = Literal["input", "promote", "weight"]
Gate = Literal["silu", "sigmoid"]
GateOrder = Literal["before", "after"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "eps_in": get_args(EpsIn),
    "reduce": get_args(Reduce),
    "accumulate": get_args(Accumulate),
    "rounding": get_args(Rounding),
    "output": get_args(Output),
    "gate": (None, *get_args(Gate)),
    "gate_order": get_args(GateOrder),
}


@dataclass(frozen=True)
class NormSpec:
    """One convention of RMSNorm: the formula's constants and the places where it rounds.

    ``xhat = x * rstd`` is computed in float32 (float64 for float64 input under
    ``accumulate="input"``); what happens next is what the fields say.

    Args:
        eps: the constant under the root. ``None`` is the machine epsilon of the dtype that
            accumulates: 2**-23 for half and float32 input, 2**-52 for float64.
        eps_in: ``"mean_square"``: rstd = 1/sqrt(ms + eps). ``"root"``: 1/(sqrt(ms) + eps), as in
            Zhang & Sennrich's code. ``"clamp"``: sqrt(d)/max(norm(x), eps), as ``F.normalize``.
        reduce: ``"mean"`` of the squares, or their ``"sum"`` (a plain l2 norm).
        offset: 0.0, or 1.0 for zero-centred weights (Gemma); ``weight + offset`` is formed in
            float32, or in float64 where the row is kept in float64.
        accumulate: ``"float32"``: float64 input is rounded to float32 first, as the classes of
            transformers do. ``"input"``: float64 is kept, as torch does.
        rounding: ``"before_weight"``: xhat is rounded to x's dtype, then multiplied (LLaMA).
            ``"after_weight"``: multiplied first, rounded once (torch, Gemma).
            ``"weight_dtype"``: xhat is rounded to the weight's dtype if that is a half type (T5).
        output: the dtype of the result: ``"input"`` is x's, ``"promote"`` is
            ``torch.promote_types(x, weight)``, ``"weight"`` is the weight's.
        groups: the mean square is taken over each of this many equal parts of the row.
        partial: the mean square is taken over the first ``ceil(partial * d)`` elements (pRMSNorm).
        gate: activation of the gate of a gated norm, or ``None``.
        gate_order: ``"before"``: the gate multiplies x before the norm (Mamba2); ``"after"``: the
            normed row after it (Qwen3-Next).

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a value out of range, or a combination that means nothing.

    Example:
        >>> NormSpec(eps=1e-5, rounding="before_weight", output="promote").eps
        1e-05
        >>> specs.llama.rounding
        'before_weight'
    """

    eps: float | None = None
    eps_in: EpsIn = "mean_square"
    reduce: Reduce = "mean"
    offset: float = 0.0
    accumulate: Accumulate = "input"
    rounding: Rounding = "after_weight"
    output: Output = "input"
    groups: int = 1
    partial: float = 1.0
    gate: Gate | None = None
    gate_order: GateOrder = "before"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"NormSpec.{name} is {value!r}; expected one of "
                    + ", ".join(repr(choice) for choice in choices)
                )
        if self.eps is not None:
            object.__setattr__(self, "eps", check_eps(self.eps))
        for name in ("offset", "partial"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.offset not in (0.0, 1.0):
            raise ValueError(f"NormSpec.offset is {self.offset!r}; expected 0.0 or 1.0")
        if isinstance(self.groups, bool) or not isinstance(self.groups, int):
            raise TypeError(f"NormSpec.groups is {self.groups!r}; expected an int of at least 1")
        if self.groups < 1:
            raise ValueError(f"NormSpec.groups is {self.groups}; expected at least 1")
        if not 0.0 < self.partial <= 1.0:
            raise ValueError(f"NormSpec.partial is {self.partial!r}; expected 0 < partial <= 1")
        if self.partial < 1.0 and self.groups > 1:
            raise ValueError(
                f"NormSpec(partial={self.partial}, groups={self.groups}): a partial mean square "
                "of each group is not defined by any model; set one of them to 1"
            )
        if self.eps_in == "clamp" and self.reduce == "sum":
            raise ValueError(
                "NormSpec(eps_in='clamp', reduce='sum'): clamp already divides by the l2 norm and "
                "scales by sqrt(d), so there is no mean to leave out; use reduce='mean'"
            )
        # Kept, because every call of an operation needs it and hashing eleven fields costs more.
        object.__setattr__(self, "_encoded", _encode(self))

    def width(self, d: int) -> int:
        """The number of elements that one mean square is taken over, in a row of ``d``.

        Raises:
            ValueError: ``d`` is not a multiple of ``groups``.

        Example:
            >>> NormSpec(partial=0.0625).width(100)
            7
        """
        if d % self.groups:
            raise ValueError(f"a row of {d} elements cannot be cut into {self.groups} equal groups")
        if self.partial < 1.0:
            # 0.1 * 30 is 3.0000000000000004 in binary: nine decimals undo that.
            return min(d, max(1, math.ceil(round(self.partial * d, 9))))
        return d // self.groups

    def encode(self) -> str:
        """The spec as one canonical string: the fields that differ from ``NormSpec()``, in order.

        Equal specs give equal strings; :meth:`decode` is the inverse. An operation takes its spec
        in this form, and reads it at every call: hence the short form.

        Example:
            >>> specs.gemma.encode()
            'eps=1e-06;offset=1.0;accumulate=float32'
            >>> NormSpec.decode(specs.gemma.encode()) == specs.gemma
            True
        """
        encoded: str = self._encoded  # type: ignore[attr-defined]
        return encoded

    @staticmethod
    def decode(text: str) -> NormSpec:
        """The spec that :meth:`encode` wrote as ``text``.

        Raises:
            ValueError: ``text`` is not of that form.

        Example:
            >>> NormSpec.decode("eps=1e-06;rounding=before_weight").rounding
            'before_weight'
        """
        return _decode(text)


def check_eps(eps: object) -> float:
    """``eps`` as a float.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is negative, infinite or NaN.

    Example:
        >>> check_eps(1)
        1.0
    """
    value = _number("eps", eps)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"eps is {eps!r}; expected a finite number of at least 0")
    return value


def _number(name: str, value: object) -> float:
    if type(value) is float:  # of a traced one Dynamo cannot ask whether it has an attribute
        return value
    if isinstance(value, bool) or not hasattr(value, "__float__") or isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected a number")
    return float(value)


def _encode(spec: NormSpec) -> str:
    values = ((field, getattr(spec, field.name)) for field in fields(spec))
    return ";".join(f"{field.name}={value}" for field, value in values if value != field.default)


@functools.lru_cache(maxsize=1024)
def _decode(text: str) -> NormSpec:
    names = {field.name for field in fields(NormSpec)}
    numbers: dict[str, type] = {"offset": float, "groups": int, "partial": float}
    values: dict[str, Any] = {}
    for part in text.split(";") if text else ():
        name, equals, value = part.partition("=")
        if not equals or name not in names or name in values:
            raise ValueError(f"{text!r} is not an encoded NormSpec: {part!r} is not a field of it")
        try:
            if name == "eps":
                values[name] = None if value == "None" else float(value)
            elif name == "gate":
                values[name] = None if value == "None" else value
            else:
                values[name] = numbers.get(name, str)(value)
        except ValueError:
            raise ValueError(f"{text!r} is not an encoded NormSpec: {part!r}") from None
    return NormSpec(**values)


_LLAMA = NormSpec(eps=1e-6, accumulate="float32", rounding="before_weight", output="promote")
_FLOAT32_MULTIPLY = NormSpec(eps=1e-6, accumulate="float32", rounding="after_weight")

_NAMED: dict[str, NormSpec] = {
    # torch.nn.RMSNorm and F.rms_norm: one rounding, x's dtype, float64 kept.
    "torch": NormSpec(),
    # LlamaRMSNorm, and with it Mistral, Qwen2, Qwen3, DeepSeek, Phi-3, GLM: the most common one.
    "llama": _LLAMA,
    # Olmo2RMSNorm, GptOssRMSNorm, HeliumRMSNorm, Gemma3nRMSNorm, minimind.
    "olmo2": _FLOAT32_MULTIPLY,
    # GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, Qwen3NextRMSNorm: zero-centred weights.
    "gemma": replace(_FLOAT32_MULTIPLY, offset=1.0),
    # T5LayerNorm: rounds to the weight's dtype, returns the weight's dtype.
    "t5": replace(_LLAMA, rounding="weight_dtype", output="weight"),
    # Zhang & Sennrich's code: eps beside the root.
    "original": NormSpec(eps=1e-8, eps_in="root"),
    # F.normalize(x) * sqrt(d) * g, as x-transformers: eps is a floor of the norm.
    "l2": NormSpec(eps=1e-12, eps_in="clamp"),
    # l2norm of the gated-delta families: x * rsqrt(sum(x^2) + eps).
    "l2_sum": NormSpec(eps=1e-6, reduce="sum"),
    # MambaRMSNormGated, Zamba2RMSNormGated: the gate multiplies x first.
    "mamba2": replace(_LLAMA, eps=1e-5, gate="silu", gate_order="before"),
    # Qwen3NextRMSNormGated: the gate multiplies the normed row, the result has x's dtype.
    "qwen3_next": replace(_LLAMA, output="input", gate="silu", gate_order="after"),
    # KimiLinearRMSNormGated: one rounding, sigmoid gate.
    "kimi_linear": replace(_FLOAT32_MULTIPLY, gate="sigmoid", gate_order="after"),
    # FalconH1RMSNormGated: one rounding, the gate multiplies x first.
    "falcon_h1": replace(_FLOAT32_MULTIPLY, gate="silu", gate_order="before"),
}


class NamedSpecs:
    """The named specs, as attributes and by name; iterating gives the names.

    Example:
        >>> specs.gemma.offset, specs["gemma"] is specs.gemma
        (1.0, True)
        >>> "llama" in specs
        True
    """

    torch: NormSpec
    llama: NormSpec
    olmo2: NormSpec
    gemma: NormSpec
    t5: NormSpec
    original: NormSpec
    l2: NormSpec
    l2_sum: NormSpec
    mamba2: NormSpec
    qwen3_next: NormSpec
    kimi_linear: NormSpec
    falcon_h1: NormSpec

    def __getattr__(self, name: str) -> NormSpec:
        try:
            return _NAMED[name]
        except KeyError:
            raise AttributeError(_unknown(name)) from None

    def __getitem__(self, name: str) -> NormSpec:
        try:
            return _NAMED[name]
        except KeyError:
            raise ValueError(_unknown(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMED)

    def __contains__(self, name: object) -> bool:
        return name in _NAMED

    def __len__(self) -> int:
        return len(_NAMED)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_NAMED]

    def name_of(self, spec: NormSpec) -> str | None:
        """The name of the spec that equals ``spec`` in everything but eps, or ``None``.

        Example:
            >>> specs.name_of(NormSpec(eps=1e-3))
            'torch'
        """
        for name, named in _NAMED.items():
            if replace(spec, eps=named.eps) == named:
                return name
        return None


def _unknown(name: str) -> str:
    return f"no spec is called {name!r}; the names are " + ", ".join(_NAMED)


specs = NamedSpecs()


def as_spec(spec: NormSpec | str) -> NormSpec:
    """``spec`` itself, or the named spec of that name.

    Raises:
        TypeError: neither a NormSpec nor a string.
        ValueError: an unknown name.

    Example:
        >>> as_spec("t5").output
        'weight'
    """
    if isinstance(spec, NormSpec):
        return spec
    if isinstance(spec, str):
        return specs[spec]
    raise TypeError(f"spec is a {type(spec).__name__}; expected a NormSpec or a name")
