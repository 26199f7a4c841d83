"""What the norms cost in a training step, and whether another kernel changes the training.

The step of one model is timed with this package's norms, with ``torch.nn.RMSNorm`` and without
norms: in one process, a step of each in turn. What eager norms take is the step with them minus the
step without; that part of it is gone which ours do not take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmsnorm.libc import c_function
from rmsnorm.lm.config import preset
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.modules import RMSNorm
from rmsnorm.progress import Say

VARIANTS = ("ours", "unfused", "eager", "none")
"""Ours as it is by default, ours without the fused residual, ``torch.nn.RMSNorm``, no norms."""
COMPILED = ("ours", "eager", "none")

GONE = 0.75
"""The part of eager's time that must be gone."""
LOSS_STEPS, LOSS_WARMUP = 200, 100
LOSS_DIFFERENCE = 1e-3
# So many that a short training meets each of them often.
_TOKENS = 256
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h> of glibc


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

    def median(self, variant: str) -> float:
        """The median step of ``variant``, in milliseconds."""
        return statistics.median(self.samples[variant])

    def _norms(self, variant: str) -> float:
        pairs = zip(self.samples[variant], self.samples["none"], strict=True)
        return statistics.median(one - other for one, other in pairs)

    def share(self, variant: str) -> float:
        """The part of the step of ``variant`` that its norms take."""
        return self._norms(variant) / self.median(variant)

    @property
    def ratio(self) -> float:
        """Eager's step through ours: the median over rounds."""
        pairs = zip(self.samples["eager"], self.samples["ours"], strict=True)
        return statistics.median(eager / ours for eager, ours in pairs)

    @property
    def gone(self) -> float:
        """The part of the time of eager norms that ours do not take."""
        return 1.0 - self._norms("ours") / self._norms("eager")

    @property
    def ok(self) -> bool:
        """Whether ours are not slower, most of eager's time is gone, and the losses are equal.

        What must be gone is asked of eager steps alone: compiled norms are fused by themselves.
        """
        if self.loss_difference is not None and not self.loss_difference < LOSS_DIFFERENCE:
            return False
        return self.ratio >= 1.0 and (self.compiled or self.gone >= GONE)


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
    norm = "none" if variant == "none" else "rms"
    model = MindForCausalLM(preset(name, norm=norm, fuse_residual=variant == "ours"), device="meta")
    if variant == "eager":
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if isinstance(module, RMSNorm):
                    eager = nn.RMSNorm(module.normalized_shape, module.eps, device="meta")
                    setattr(parent, child, eager)
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

    def step(self, tokens: Tensor, lr: float | None = None) -> Tensor:
        """One step on ``tokens`` (batch, sequence + 1); the loss before it.

        Args:
            tokens: what is learned.
            lr: another learning rate than before.
        """
        if lr is not None:
            self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        output = self._model(tokens[:, :-1], labels=tokens[:, 1:])
        loss: Tensor = output.loss  # type: ignore[attr-defined]
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
        found.append(StepTimes(workload.name, False, _time(workload, VARIANTS, False), difference))
        if compiled:
            say(f"{workload.name}: compiled training steps")
            found.append(StepTimes(workload.name, True, _time(workload, COMPILED, True), None))
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


def _keep_memory() -> None:
    """Let glibc's allocator keep what is freed, where it is glibc's.

    Else larger tensors are given back to the system and their pages are touched for the first time
    in every step; how often depends on what else lies on the heap, and takes longer than the norms.
    """
    mallopt = c_function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _time(
    workload: Workload, variants: Sequence[str], compiled: bool
) -> dict[str, tuple[float, ...]]:
    _keep_memory()
    trainers = {
        # A small rate: without norms a larger one would diverge, and infinities have another speed.
        variant: Trainer(make_model(workload.name, variant), compiled, lr=1e-5)
        for variant in variants
    }
    vocab_size = preset(workload.name).vocab_size
    tokens = make_tokens(vocab_size, workload.batch_size, workload.sequence)
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(-2, workload.rounds):
        turn = number % len(variants)
        for variant in (*variants[turn:], *variants[:turn]):
            start = time.perf_counter()
            trainers[variant].step(tokens)
            if number >= 0:  # the first two warm up
                samples[variant].append((time.perf_counter() - start) * 1e3)
    return {variant: tuple(times) for variant, times in samples.items()}
