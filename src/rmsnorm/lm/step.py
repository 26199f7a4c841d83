"""What the norms cost in a training step, and whether another kernel changes the training.

The step of one model is timed with this package's norms, with ``torch.nn.RMSNorm`` and without
norms: in one process, a step of each in turn. What eager norms take is the step with them minus the
step without; that part of it is gone which ours do not take. Beside it stands what copies in the
place of the norms leave: a norm that is not fused with an addition must move these bytes too.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from rmsnorm.lm.config import preset
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.modules import RMSNorm
from rmsnorm.progress import Say

VARIANTS = ("ours", "unfused", "eager", "copies", "none")
"""Ours as it is by default, ours without the fused residual, ``torch.nn.RMSNorm``, copies in their
place (:class:`Copies`), no norms."""
COMPILED = ("ours", "eager", "none")

GONE = 0.75
"""The part of eager's time that must be gone."""
LOSS_STEPS, LOSS_WARMUP = 200, 100
LOSS_DIFFERENCE = 1e-3
# So many that a short training meets each of them often.
_TOKENS = 256


@dataclass(frozen=True)
class Workload:
    """A model and the tokens of one step.

    Attributes:
        name: of the preset.
        batch_size: sequences in a timed step.
        sequence: tokens of a sequence in a timed step.
        loss_batch: sequences in a step of the loss curves.
        loss_sequence: tokens of a sequence there.
        loss_lr: the learning rate there, after the warm-up.
        rounds: how often every variant is timed.
    """

    name: str
    batch_size: int
    sequence: int
    loss_batch: int
    loss_sequence: int
    loss_lr: float
    rounds: int

    def with_rounds(self, factor: int) -> Workload:
        """The same with ``factor`` times as many rounds."""
        return replace(self, rounds=factor * self.rounds)


WORKLOADS = (
    Workload("tiny", 16, 256, 8, 128, 1e-3, rounds=41),
    Workload("mind-26m", 2, 256, 1, 96, 1e-4, rounds=31),
)

QUICK_WORKLOADS = (Workload("tiny", 16, 256, 2, 64, 1e-3, rounds=11),)


@dataclass(frozen=True)
class StepTimes:
    """The steps of one model.

    Attributes:
        name: of the preset.
        compiled: whether the models went through ``torch.compile``.
        samples: for each variant, the milliseconds of its steps, in rounds.
        loss_difference: the largest between ours and eager over the loss curves; ``None`` where
            they were not compared.

    Example:
        >>> samples = {"ours": (11.0, 12.0), "eager": (14.0, 15.0), "none": (10.0, 11.0)}
        >>> times = StepTimes("tiny", False, samples, 0.0)
        >>> times.gone, round(times.share("eager"), 3), times.ok
        (0.75, 0.276, True)
    """

    name: str
    compiled: bool
    samples: dict[str, tuple[float, ...]]
    loss_difference: float | None
    laps: Paired | None = None
    """The rounds of ``samples`` in laps."""
    around: Paired | None = None
    """Of these, the laps that lie within no module without a norm: norms, additions, and what
    stands beside them."""
    alone: Paired | None = None
    """Forward and backward of the norms alone: ours (unfused), eager's, and copies."""

    @functools.cached_property
    def paired(self) -> Paired:
        """The rounds, as what is compared."""
        if self.laps is not None:
            return self.laps
        return Paired({name: [1e-3 * one for one in ms] for name, ms in self.samples.items()})

    def median(self, variant: str) -> float:
        """The median step of ``variant``, in milliseconds."""
        return statistics.median(self.samples[variant])

    def share(self, variant: str) -> float:
        """The part of the step of ``variant`` that its norms take."""
        return self.paired.share(variant, "none").value

    @functools.cached_property
    def ratio_interval(self) -> Estimate:
        """Eager's step divided by ours."""
        return self.paired.ratio("eager", "ours")

    @functools.cached_property
    def gone_interval(self) -> Estimate:
        """The part of the time of eager norms that ours do not take."""
        return self.gone_of("ours")["clock"]

    def gone_of(self, variant: str) -> dict[str, Estimate]:
        """The part of the time of eager norms that ``variant`` does not take, by how it was timed.

        By the ``clock``; by the laps ``around`` the norms, where less is seen, with less noise; and
        of the norms ``alone``, which are not fused with additions there.
        """
        if variant not in self.samples:
            return {}
        found = {"clock": self.paired.gone("eager", variant, "none")}
        if self.around is not None:
            found["around"] = self.around.gone("eager", variant, "none")
        if self.alone is not None and variant in self.alone.variants:
            found["alone"] = self.alone.ratio(variant, "eager").complement()
        return found

    @property
    def ratio(self) -> float:
        """Eager's step divided by ours."""
        return self.ratio_interval.value

    @property
    def gone(self) -> float:
        """The part of the time of eager norms that ours do not take."""
        return self.gone_interval.value

    def text(self) -> str:
        """What was found, in words, and no more than the intervals support.

        Example:
            >>> samples = {"ours": (11.0,) * 9, "eager": (14.0,) * 9, "none": (10.0,) * 9}
            >>> StepTimes("tiny", False, samples, 0.0).text()  # doctest: +NORMALIZE_WHITESPACE
            'tiny: eager / ours: 1.273x (1.273 to 1.273); of the time of eager norms,
             28.6 % of the step (28.6 to 28.6 %), gone: by the clock 75 % (75 to 75 %)'
        """
        share = self.paired.share("eager", "none")
        name = f"{self.name}, compiled" if self.compiled else self.name
        parts = [
            f"{name}: eager / ours: {self.ratio_interval.times()}",
            f"of the time of eager norms, {share.value * 100:.1f} % of the step "
            f"({share.low * 100:.1f} to {share.high * 100:.1f} %), gone: {self._told('ours')}",
        ]
        if "copies" in self.samples:
            parts.append(f"with copies instead: {self._told('copies')}")
        return "; ".join(parts)

    def _told(self, variant: str) -> str:
        words = {
            "clock": "by the clock",
            "around": "by the laps around them alone",
            "alone": "of the norms alone",
        }
        gone = self.gone_of(variant).items()
        return ", ".join(f"{words[how]} {estimate.percent()}" for how, estimate in gone)

    def intervals(self) -> dict[str, Any]:
        """The estimates with their 95 percent intervals, for JSON."""
        found: dict[str, Any] = {
            "eager_over_ours": self.ratio_interval.to_dict(),
            "share_of_eager": self.paired.share("eager", "none").to_dict(),
        }
        for variant in ("ours", "copies"):
            gone = self.gone_of(variant)
            found[f"gone_{variant}"] = {how: estimate.to_dict() for how, estimate in gone.items()}
        return found

    @property
    def ok(self) -> bool:
        """Whether the losses are equal, and nothing tells that ours are slower or that too little
        of eager's time is gone: what an interval leaves open is not held against them.

        What must be gone is asked of eager steps alone: compiled norms are fused by themselves.
        """
        if self.loss_difference is not None and not self.loss_difference < LOSS_DIFFERENCE:
            return False
        if self.ratio_interval.at_least(1.0) is False:
            return False
        gone = self.gone_of("ours")
        best = gone.get("around", gone["clock"])
        return self.compiled or best.at_least(GONE) is not False


class Copies(nn.Module):
    """In the place of a norm: one pass over what its forward must read and write, and another over
    what its backward must.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> Copies()(x).backward(torch.tensor([3.0, 4.0]))
        >>> x.grad
        tensor([3., 4.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """A copy of ``x``."""
        copy: Tensor = _Copy.apply(x)  # type: ignore[no-untyped-call]
        return copy


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.add(dy, x, alpha=0)  # reads x too, as the backward of a norm must


def make_model(name: str, variant: str, seed: int = 0) -> MindForCausalLM:
    """The preset ``name`` with the norms of ``variant``; the weights depend on ``seed`` alone.

    Raises:
        ConfigError: there is no such preset.
        ValueError: ``variant`` is not one of :data:`VARIANTS`.

    Example:
        >>> type(make_model("tiny", "eager").model.norm).__module__
        'torch.nn.modules.normalization'
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}; expected one of {', '.join(VARIANTS)}")
    norm = "none" if variant in ("copies", "none") else "rms"
    model = MindForCausalLM(preset(name, norm=norm, fuse_residual=variant == "ours"), device="meta")
    if variant in ("eager", "copies"):
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if isinstance(module, RMSNorm):
                    eager = nn.RMSNorm(module.normalized_shape, module.eps, device="meta")
                    setattr(parent, child, eager)
                elif isinstance(module, nn.Identity):
                    setattr(parent, child, Copies())
    model.to_empty(device="cpu")
    model.tie_weights()
    model.reset_parameters(torch.Generator().manual_seed(seed))
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.reset_parameters()
    return model


def make_tokens(vocab_size: int, count: int, sequence: int, seed: int = 0) -> Tensor:
    """(count, sequence + 1) tokens that a model can learn something about.

    Half of them follow from the one before, in the same way for every ``seed``; the other half are
    drawn, the small ones more often.
    """
    used = min(vocab_size, _TOKENS)
    follows = torch.randperm(used, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    tokens = torch.rand(count, sequence + 1, generator=random).pow(3).mul(used).long()
    chosen = torch.rand(count, sequence + 1, generator=random) < 0.5
    for position in range(1, sequence + 1):
        learned = follows[tokens[:, position - 1]]
        tokens[:, position] = torch.where(chosen[:, position], learned, tokens[:, position])
    return tokens


class Trainer:
    """A model with its optimizer, and the step that is timed."""

    def __init__(self, model: MindForCausalLM, compiled: bool = False, lr: float = 1e-3) -> None:
        self._model: Callable[..., object] = torch.compile(model) if compiled else model
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=(0.9, 0.95), fused=True)

    def step(
        self, tokens: Tensor, lr: float | None = None, lap: Callable[[], None] = lambda: None
    ) -> Tensor:
        """One step on ``tokens`` (batch, sequence + 1); the loss before it.

        Args:
            tokens: what is learned.
            lr: another learning rate than before.
            lap: called between forward and backward.
        """
        if lr is not None:
            self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        output = self._model(tokens[:, :-1], labels=tokens[:, 1:])
        loss: Tensor = output.loss  # type: ignore[attr-defined]
        lap()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return loss.detach()


def measure_steps(
    workloads: Sequence[Workload] = WORKLOADS,
    compiled: bool = True,
    say: Say = lambda text: None,
) -> list[StepTimes]:
    """Time the steps of every workload, first as they are, then compiled.

    Args:
        workloads: which models, and how many tokens a step has.
        compiled: whether ``torch.compile`` is measured too.
        say: hears what is going on.
    """
    found = []
    for workload in workloads:
        say(f"{workload.name}: the losses of {LOSS_STEPS} steps")
        difference = loss_difference(workload, LOSS_STEPS)
        say(f"{workload.name}: training steps")
        found.append(_time(workload, False, difference))
        if compiled:
            say(f"{workload.name}: compiled training steps")
            found.append(_time(workload, True, None))
    return found


def loss_difference(workload: Workload, steps: int) -> float:
    """The largest difference between the losses of ours and eager's, over a training.

    As in the trainer there are a warm-up and clipped gradients. Without them, or at a rate at the
    edge of what converges, a difference in a last bit grows until it can be seen, whatever made it.
    """
    trainers = [Trainer(make_model(workload.name, variant)) for variant in ("ours", "eager")]
    vocab_size = preset(workload.name).vocab_size
    worst = 0.0
    for number in range(steps):
        tokens = make_tokens(
            vocab_size, workload.loss_batch, workload.loss_sequence, seed=number + 1
        )
        lr = workload.loss_lr * min(1.0, (number + 1) / LOSS_WARMUP)
        ours, eager = (trainer.step(tokens, lr) for trainer in trainers)
        worst = max(worst, (ours - eager).abs().item())
    return worst


@kept_memory()
def _time(workload: Workload, compiled: bool, difference: float | None) -> StepTimes:
    variants = COMPILED if compiled else VARIANTS
    models = {variant: make_model(workload.name, variant) for variant in variants}
    trainers = {
        # A small rate: without norms a larger one would diverge, and infinities have another speed.
        variant: Trainer(model, compiled, lr=1e-5)
        for variant, model in models.items()
    }
    vocab_size = preset(workload.name).vocab_size
    tokens = make_tokens(vocab_size, workload.batch_size, workload.sequence)
    watch = Stopwatch()
    alone: Paired | None = None
    names = [name for name, one in models["eager"].named_modules() if isinstance(one, nn.RMSNorm)]
    if not compiled:
        alone = _norms_alone(models, names, lambda: trainers["eager"].step(tokens), workload.rounds)
        for model in models.values():
            followed = without_any(model, names)
            watch.follow([model.get_submodule(name) for name in followed])

    def start(variant: str) -> Sequence[Piece]:
        return [lambda: watch.run(lambda: trainers[variant].step(tokens, lap=watch.lap))]

    rounds = workload.rounds
    starts = {variant: functools.partial(start, variant) for variant in variants}
    with compiled_apart() if compiled else contextlib.nullcontext():
        paired = interleave(starts, 0.0, fewest=rounds, most=rounds)
    free = None if compiled else watch.free
    around = None if free is None else paired.only([not one for one in free])
    samples = {
        variant: tuple(seconds * 1e3 for seconds in paired.totals(variant)) for variant in variants
    }
    return StepTimes(workload.name, compiled, samples, difference, paired, around, alone)


def _norms_alone(
    models: dict[str, MindForCausalLM],
    names: Sequence[str],
    step: Callable[[], object],
    rounds: int,
) -> Paired:
    """Forward and backward of the norms alone, on what they are given in a step; the residual is
    not fused in any."""
    calls = calls_of(models["eager"], names, step)
    starts = {
        variant: alone(models[model], calls, backward=True)
        for variant, model in (("ours", "unfused"), ("eager", "eager"), ("copies", "copies"))
    }
    return interleave(starts, 0.0, fewest=rounds, most=rounds)
