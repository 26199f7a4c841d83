"""What the norms of a whole model cost, by the clock, and what part of that a patch takes away.

Prefill, decoding and a training step are timed for twins of one model, which share its weights: as
it is, after :func:`rmsnorm.patch`, after ``patch(fuse_residual=True)``, without its norms, and
without its norms and residual additions. What norms take is the difference to the twin without
them; the part of it that is gone is what the patched twin does not take. Beside it stands what
would be gone if each norm were a mere copy of its input, but not in training, since the backward of
a copy does nothing.
:mod:`rmsnorm.bench.paired` says how such small differences are told from noise.

A norm is taken out by letting it hand on a tensor that was made before. It cannot be its input,
since numbers overflow within a few layers that nothing normalises.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.bench.alone import alone, calls_of
from rmsnorm.bench.paired import (
    Estimate,
    Paired,
    Piece,
    Stopwatch,
    compiled_apart,
    interleave,
    without_any,
)
from rmsnorm.bench.process import kept_memory
from rmsnorm.progress import Say
from rmsnorm.rewrite.inspect import cache_after, decode_step, decodes, inputs_of, prefill, twin_of
from rmsnorm.rewrite.patch import patch

PREFILL_TOKENS, DECODE_TOKENS = 512, 64
TRAIN_BATCH, TRAIN_TOKENS = 4, 256
GOAL = 0.8
"""The part of the norms' time that is to be gone."""

BEFORE, PATCHED, FUSED = "before", "patched", "residual fused"
NO_NORMS, NO_ADDITIONS = "without norms", "without norms and additions"
COMPILED, COMPILED_PATCHED = "compiled", "compiled, patched"
COPIES = "copies instead"

# What each variant is compared with, and what has neither its norms nor what is joined with them.
_PAIRS = {
    PATCHED: (BEFORE, NO_NORMS),
    FUSED: (BEFORE, NO_ADDITIONS),
    COPIES: (BEFORE, NO_NORMS),
    COMPILED_PATCHED: (COMPILED, None),
}
WORKS = {"prefill": 0.25, "decoding": 0.15, "training": 0.6}
"""What can be timed, and the part of the time that each takes where all are."""
# The part of each that the norms alone take.
_ALONE = 0.1
_ALONE_CALLS = 8


@dataclass(frozen=True)
class Speed:
    """One piece of work, in all variants.

    Example:
        >>> times = {BEFORE: [20.0] * 9, PATCHED: [19.0] * 9, NO_NORMS: [18.8] * 9}
        >>> speed = Speed("prefill of 512 tokens", Paired(times), None)
        >>> speed.share.percent(), speed.gone(PATCHED).percent()
        ('6 % (6 to 6 %)', '83 % (83 to 83 %)')
        >>> speed.ratio(PATCHED).times(), speed.lines()[-1]
        ('1.053x (1.053 to 1.053)', 'patched: of the time of the norms, gone: 83 % (83 to 83 %)')
    """

    what: str
    paired: Paired
    """Seconds, in the same rounds."""
    alone: Paired | None
    """The norms alone, before and patched, on what they are given in the model."""
    around: Paired | None = None
    """Of the rounds, the laps that lie within no module without a norm: what is left to norms, to
    additions, and to whatever stands beside them. Less is seen (not what a norm does to the caches
    of others), with much less noise."""
    notes: tuple[str, ...] = ()
    """What could not be timed, and why."""

    @property
    def share(self) -> Estimate:
        """The part of the unpatched model's time that its norms take."""
        return self.paired.share(BEFORE, NO_NORMS)

    @property
    def alone_gone(self) -> Estimate | None:
        """The part of the norms' own time that is gone."""
        if self.alone is None:
            return None
        return self.alone.ratio(PATCHED, BEFORE).complement()

    def ratio(self, variant: str) -> Estimate | None:
        """The time before divided by that of ``variant``; ``None`` where there is nothing to
        compare with."""
        if variant not in _PAIRS or _PAIRS[variant][0] not in self.paired.variants:
            return None
        return self.paired.ratio(_PAIRS[variant][0], variant)

    def gone(self, variant: str) -> Estimate | None:
        """The part that is gone of what ``variant`` is to take away: the time of the norms, with
        the residual fused of norms and additions; ``None`` where that is not measured."""
        return _gone(self.paired, variant)

    def gone_around(self, variant: str) -> Estimate | None:
        """The same, of the laps that hold norms alone."""
        return None if self.around is None else _gone(self.around, variant)

    def lines(self) -> list[str]:
        """What was found, in words, and no more than the intervals support."""
        lines = [f"share of the norms: {_share(self.share)}"]
        if NO_ADDITIONS in self.paired.variants:
            both = self.paired.share(BEFORE, NO_ADDITIONS)
            lines.append(f"share of norms and residual additions: {_share(both)}")
        if self.alone is not None and self.alone_gone is not None:
            took = [self.alone.seconds(variant) * 1e3 for variant in (BEFORE, PATCHED)]
            lines.append(
                f"norms alone: before {took[0]:.3g} ms, after {took[1]:.3g} ms, gone: "
                f"{self.alone_gone.percent()}"
            )
        for variant in self.paired.variants:
            gone = self.gone(variant)
            if gone is not None:
                of = "norms and additions" if variant == FUSED else "the norms"
                line = f"{variant}: of the time of {of}, gone: {gone.percent()}"
                around = self.gone_around(variant)
                if around is not None:
                    line += f"; by the laps around them alone: {around.percent()}"
                lines.append(line)
        return [*lines, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times are seconds."""
        paired = self.paired

        def estimate(found: Estimate | None) -> dict[str, float | None] | None:
            return None if found is None else found.to_dict()

        variants = {
            variant: {
                "seconds": paired.seconds(variant),
                "median_round": paired.median(variant),
                "rounds": paired.totals(variant),
                "ratio": estimate(self.ratio(variant)),
                "gone": estimate(self.gone(variant)),
                "gone_around": estimate(self.gone_around(variant)),
            }
            for variant in paired.variants
        }
        alone = None
        if self.alone is not None:
            alone = {
                "rounds": self.alone.rounds,
                "before": self.alone.seconds(BEFORE),
                "patched": self.alone.seconds(PATCHED),
                "gone": estimate(self.alone_gone),
            }
        return {
            "what": self.what,
            "rounds": paired.rounds,
            "laps": paired.laps,
            "variants": variants,
            "share_of_norms": self.share.to_dict(),
            "share_of_norms_and_additions": paired.share(BEFORE, NO_ADDITIONS).to_dict()
            if NO_ADDITIONS in paired.variants
            else None,
            "norms_alone": alone,
            "goal": GOAL,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Speeds:
    """What :func:`measure_speed` found.

    Attributes:
        found: each work that was timed.
        left: why the others were not.
    """

    found: tuple[Speed, ...]
    left: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"works": [speed.to_dict() for speed in self.found], "left": list(self.left)}


def _gone(paired: Paired, variant: str) -> Estimate | None:
    before, without = _PAIRS.get(variant, (BEFORE, None))
    if without is None or not {before, variant, without} <= {*paired.variants}:
        return None
    return paired.gone(before, variant, without)


def _share(found: Estimate) -> str:
    """A share in words; it is nothing that can be told if it may be none."""
    if found.low <= 0.0:
        return f"cannot be told (at most {found.high * 100:.1f} %)"
    return f"{found.value * 100:.1f} % ({found.low * 100:.1f} to {found.high * 100:.1f} %)"


class _HandOn(torch.autograd.Function):
    """A tensor in the place of a norm's result, and another in that of each gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradients: dict[Any, Tensor], *xs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.keys = [(x.shape, x.dtype) for x in xs]
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        found = []
        for shape, dtype in ctx.keys:
            kept = ctx.gradients.get((shape, dtype))
            if kept is None:
                kept = g.clone() if g.shape == shape else g.new_zeros(shape)
                kept = ctx.gradients[shape, dtype] = kept.to(dtype)
            found.append(kept)
        return None, None, *found


class TakenOut(nn.Module):
    """In the place of a norm: hands on what some norm once computed for a row of the same shape.

    It has no parameters, and takes no time but that of being called.

    Args:
        norm: what was there; what is asked of it beside calling it is asked of it still.
        results: the results so far, shared by all norms that were taken out.
        gradients: likewise.
    """

    def __init__(
        self, norm: nn.Module, results: dict[Any, Tensor], gradients: dict[Any, Tensor]
    ) -> None:
        super().__init__()
        self._norm = (norm,)  # within a tuple it is no child, and its parameters are not ours
        self._results, self._gradients = results, gradients

    def forward(self, x: Any, *others: Any, **named: Any) -> Tensor:
        """The result for a tensor of the shape of ``x``."""
        if type(x) is _Unadded:
            x = x.tensor
        (norm,) = self._norm
        key = (type(norm), x.shape, x.stride(), x.dtype)
        result = self._results.get(key)
        if result is None:
            # An inference tensor could not be used in a training step.
            with torch.inference_mode(False), torch.no_grad():
                plain = [_ordinary(value) for value in (x, *others)]
                result = norm(*plain, **{name: _ordinary(value) for name, value in named.items()})
            self._results[key] = result
        if not torch.is_grad_enabled():
            return result
        given = (x, *others, *named.values())
        wanted = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
        if not wanted:
            return result
        handed: Tensor = _HandOn.apply(result, self._gradients, *wanted)  # type: ignore[no-untyped-call]
        return handed

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            (norm,) = self.__dict__["_norm"]
            return getattr(norm, name)


class Copied(TakenOut):
    """In the place of a norm: copies what it is given, and hands on what :class:`TakenOut` does."""

    def forward(self, x: Any, *others: Any, **named: Any) -> Tensor:
        """The result for a tensor of the shape of ``x``."""
        x.clone()
        return super().forward(x, *others, **named)


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def without_norms(
    model: nn.Module, names: Sequence[str], instead: type[TakenOut] = TakenOut
) -> nn.Module:
    """A twin of ``model`` that shares its weights and has no norms.

    Args:
        model: any; the twin's results are not those of the model, only their shapes are.
        names: of its norms.
        instead: what stands in their places.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
        >>> twin = without_norms(model, ["1"])
        >>> [name for name, _ in twin.named_parameters()], twin(torch.ones(2, 4)).shape
        (['0.weight', '0.bias'], torch.Size([2, 4]))
    """
    twin = twin_of(model)
    results: dict[Any, Tensor] = {}
    gradients: dict[Any, Tensor] = {}
    for name in names:
        twin.set_submodule(name, instead(twin.get_submodule(name), results, gradients))
    return twin


class _Unadded:
    """A residual stream to which adding is free: the sum is what was added."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __add__(self, branch: Tensor) -> _Unadded:
        return _Unadded(branch)

    __radd__ = __iadd__ = __add__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        one, two = args  # whatever the block calls with its stream is an addition
        return cls(one if isinstance(two, _Unadded) else two)


def without_additions(model: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """Lets each block hand on what it should add to its stream; in place.

    Args:
        model: of :func:`without_norms`.
        blocks: the names of those that do nothing with their stream but normalise it and add to it,
            as ``patch(model, fuse_residual=True)`` finds them.
    """
    for name in blocks:
        block = model.get_submodule(name)
        original = type(block).forward
        stream = list(inspect.signature(original).parameters)[1]
        block.forward = functools.partial(_unadded, block, original, stream)
    return model


def _unadded(
    block: nn.Module, original: Callable[..., Any], stream: str, *args: Any, **kwargs: Any
) -> Any:
    if args:
        return _plain(original(block, _Unadded(args[0]), *args[1:], **kwargs))
    return _plain(original(block, **{**kwargs, stream: _Unadded(kwargs[stream])}))


def _plain(result: Any) -> Any:
    if type(result) is _Unadded:
        return result.tensor
    return tuple(map(_plain, result)) if type(result) is tuple else result


@dataclass(frozen=True)
class Variants:
    """The twins of a model.

    Attributes:
        models: each variant's.
        names: of the norms that were replaced.
        compiled: what is called instead of the model, for the compiled variants.
        notes: which variants there are not, and why.
    """

    models: dict[str, nn.Module]
    names: tuple[str, ...]
    compiled: dict[str, Callable[..., Any]]
    notes: tuple[str, ...]

    def called(self, variant: str) -> Any:
        """What is called."""
        return self.compiled.get(variant, self.models[variant])


def make_variants(
    model: nn.Module, *, exact: bool = False, compiled: bool = False
) -> Variants | None:
    """The twins of ``model``; ``None`` if none of its norms can be replaced.

    Args:
        model: a model of transformers, which is left as it is.
        exact: as in :func:`rmsnorm.patch`.
        compiled: whether to have compiled ones, too; they compile when they are first called.
    """
    models = {BEFORE: twin_of(model), PATCHED: twin_of(model)}
    report = patch(models[PATCHED], exact=exact)
    names = tuple(entry.name for entry in report.swapped)
    if not names:
        return None
    fused = twin_of(model)
    found = patch(fused, exact=exact, fuse_residual=True).blocks
    blocks = [block.name for block in found if block.fused]
    models[NO_NORMS] = without_norms(model, names)
    models[COPIES] = without_norms(model, names, Copied)
    notes = []
    if blocks:
        models[FUSED] = fused
        models[NO_ADDITIONS] = without_additions(without_norms(model, names), blocks)
    else:
        reasons = sorted({block.reason for block in found}) or ["no block adds to its input"]
        notes.append(f"{FUSED}: not timed: {'; '.join(reasons)}")
    calls: dict[str, Callable[..., Any]] = {}
    if compiled:
        for variant, base in ((COMPILED, BEFORE), (COMPILED_PATCHED, PATCHED)):
            models[variant] = twin_of(model)
            if base == PATCHED:
                patch(models[variant], exact=exact)
            calls[variant] = torch.compile(models[variant])
    order = (BEFORE, PATCHED, FUSED, COPIES, NO_NORMS, NO_ADDITIONS, COMPILED, COMPILED_PATCHED)
    models = {variant: models[variant] for variant in order if variant in models}
    return Variants(models, names, calls, tuple(notes))


def measure_speed(
    model: nn.Module,
    tokens: Tensor,
    *,
    exact: bool = False,
    compiled: bool = False,
    seconds: float = 600.0,
    works: Sequence[str] = tuple(WORKS),
    say: Say | None = None,
) -> Speeds:
    """Times prefill, decoding and a training step of ``model``, which is left as it is.

    Args:
        model: a language model of transformers, in eval mode.
        tokens: (1, n) int64, repeated to as many as are needed.
        exact: replace only norms that agree bit for bit, as in :func:`rmsnorm.patch`.
        compiled: time ``torch.compile`` of the model and of the patched model, too.
        seconds: about how long to measure, without compiling; at least six rounds in any case.
        works: which of :data:`WORKS`.
        say: called with a few words whenever a longer step begins.

    Returns:
        What was found for each work; and what was left, with the reason.

    Raises:
        ValueError: ``tokens`` is not one row of at least one token, ``seconds`` is no positive
            number, or ``works`` has none or another.
    """
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 1:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected (1, n) with n >= 1")
    if not (seconds > 0.0 and math.isfinite(seconds)):
        raise ValueError(f"seconds is {seconds}; expected a positive number")
    if not works or not {*works} <= {*WORKS}:
        raise ValueError(f"works is {works!r}; expected some of {', '.join(WORKS)}")
    say = say or (lambda _: None)
    say("making twins")
    variants = make_variants(model, exact=exact, compiled=compiled)
    if variants is None:
        return Speeds((), ("none of its norms can be replaced",))
    prefill = _repeated(tokens, 1, PREFILL_TOKENS)
    train = _repeated(tokens, TRAIN_BATCH, TRAIN_TOKENS)
    made: dict[str, tuple[str, Callable[[Variants], _Work]]] = {
        "prefill": (f"prefill of {PREFILL_TOKENS} tokens", lambda v: _Prefill(v, prefill)),
        "decoding": (
            f"decoding of {DECODE_TOKENS} tokens",
            lambda v: _Decoding(v, prefill, DECODE_TOKENS),
        ),
        "training": (
            f"training step of {TRAIN_BATCH}x{TRAIN_TOKENS} tokens",
            lambda v: _Training(v, train),
        ),
    }
    found: list[Speed | str] = []
    if not decodes(model):
        what, _ = made.pop("decoding")
        if "decoding" in works:
            found.append(f"{what}: not timed: the model does not decode")
    chosen = [work for work in made if work in works]
    apart = compiled_apart() if compiled else contextlib.nullcontext()
    with kept_memory(), _gradients_kept(model), apart:
        for work in chosen:
            what, make = made[work]
            part = WORKS[work] / sum(WORKS[one] for one in chosen)
            found.append(_measure(what, variants, make, seconds * part, say))
    return Speeds(
        tuple(speed for speed in found if isinstance(speed, Speed)),
        tuple(reason for reason in found if isinstance(reason, str)),
    )


def _repeated(tokens: Tensor, batch: int, length: int) -> Tensor:
    """(batch, length): ``tokens`` as often as it takes."""
    count = batch * length
    return tokens.repeat(1, -(-count // tokens.shape[1]))[:, :count].reshape(batch, length)


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """The twins share the parameters, and write to their gradients."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class _Work:
    """What is timed, and how a round of it is prepared."""

    backward = False
    in_laps = True

    def __init__(self, variants: Variants) -> None:
        self.variants = variants
        self.watch = Stopwatch()
        self._compiled_watch = Stopwatch()

    def prepare(self) -> None:
        """What is done once."""

    def start(self, variant: str) -> Sequence[Piece]:
        """The pieces of a round of ``variant``."""
        raise NotImplementedError

    def timed(self, variant: str, work: Callable[[Stopwatch], object]) -> Piece:
        """``work`` as a piece of a round; compiled models have no laps."""
        watch = self._compiled_watch if variant in self.variants.compiled else self.watch
        return lambda: watch.run(lambda: work(watch))


class _Prefill(_Work):
    def __init__(self, variants: Variants, tokens: Tensor) -> None:
        super().__init__(variants)
        self._tokens = tokens

    def start(self, variant: str) -> Sequence[Piece]:
        model = self.variants.called(variant)
        return [self.timed(variant, lambda _: prefill(model, self._tokens))]


class _Decoding(_Work):
    """Token by token, all variants in turn for each."""

    in_laps = False

    def __init__(self, variants: Variants, tokens: Tensor, steps: int) -> None:
        super().__init__(variants)
        self._tokens, self._steps = tokens, steps

    def prepare(self) -> None:
        # The same cache for all, since what the twins without norms compute means nothing.
        self._cache = cache_after(self.variants.models[BEFORE], self._tokens, self._steps)

    def start(self, variant: str) -> Sequence[Piece]:
        model, cache = self.variants.called(variant), copy.deepcopy(self._cache)
        last = self._tokens[:, -self._steps :].split(1, 1)
        return [self._piece(variant, model, token, cache) for token in last]

    def _piece(self, variant: str, model: Any, token: Tensor, cache: dict[str, Any]) -> Piece:
        return self.timed(variant, lambda _: decode_step(model, token, cache))


class _Training(_Work):
    """Forward and backward; the optimizer knows no norms."""

    backward = True

    def __init__(self, variants: Variants, tokens: Tensor) -> None:
        super().__init__(variants)
        model = variants.models[BEFORE]
        self._given = inputs_of(model, tokens)
        if decodes(model):
            self._given |= {"labels": tokens, "use_cache": False}

    def start(self, variant: str) -> Sequence[Piece]:
        model = self.variants.models[variant]
        model.train()
        for parameter in model.parameters():
            parameter.grad = None
        return [self.timed(variant, functools.partial(self._run, self.variants.called(variant)))]

    def _run(self, model: Any, watch: Stopwatch) -> None:
        output = model(**self._given)
        loss = output.loss if "loss" in output else output[0].float().square().mean()
        watch.lap()
        loss.backward()


def _measure(
    what: str,
    variants: Variants,
    make: Callable[[Variants], _Work],
    seconds: float,
    say: Say,
) -> Speed | str:
    """One work, or why it was left."""
    for model in variants.models.values():
        model.eval()
    notes = list(variants.notes)
    able = []
    with contextlib.ExitStack() as stack:
        try:
            work = make(variants)
            stack.enter_context(torch.enable_grad() if work.backward else torch.inference_mode())
            work.prepare()
        except Exception as error:
            return f"{what}: not timed: {_first_line(error)}"
        for variant in variants.models:
            if variant == COPIES and work.backward:
                continue  # its backward would copy nothing
            say(f"{what}: {variant}, for the first time")
            try:
                for piece in work.start(variant):
                    piece()
            except Exception as error:  # a model's code, or the compiler's
                notes.append(f"{variant}: not timed: {_first_line(error)}")
            else:
                able.append(variant)
        if not {BEFORE, PATCHED, NO_NORMS} <= {*able}:
            return f"{what}: not timed: {'; '.join(notes)}"
        say(f"{what}: the norms alone")
        norms_alone = _norms_alone(work, seconds * _ALONE)
        say(what)
        work.watch = Stopwatch()  # whose runs are all followed
        if work.in_laps:
            for variant in able:
                if variant not in variants.compiled:
                    model = variants.models[variant]
                    names = without_any(model, variants.names)
                    stack.callback(work.watch.follow([model.get_submodule(n) for n in names]))
        starts = {variant: functools.partial(work.start, variant) for variant in able}
        paired = interleave(starts, seconds * (1.0 - _ALONE))
    free = work.watch.free
    around = None
    if work.in_laps and free is not None and not all(free):
        around = paired.only([not one for one in free])
    return Speed(what, paired, norms_alone, around, tuple(notes))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _norms_alone(work: _Work, seconds: float) -> Paired:
    """The norms of the model before and patched, on what they are given in it."""
    models = {variant: work.variants.models[variant] for variant in (BEFORE, PATCHED)}
    (piece, *_) = work.start(BEFORE)
    calls = calls_of(models[BEFORE], work.variants.names, piece)

    def start(variant: str) -> Sequence[Piece]:
        # A round of the small ones would be over before the processor has settled.
        count = 1 if work.backward else _ALONE_CALLS
        return [*alone(models[variant], calls, backward=work.backward)()] * count

    return interleave({one: functools.partial(start, one) for one in models}, seconds)
