"""What each rank does in test_parallel.py: a few steps of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsnorm.lm import checkpoint
from rmsnorm.lm.config import preset
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.lm.parallel import Parallel, ParallelError

STEPS = 6
BATCH = 4
SEQUENCE = 7  # uneven over the ranks
VOCABULARY = 50
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_norm": True,
}


@dataclass(frozen=True)
class Job:
    """A training run; ``saved`` and ``resumed`` are folders of runs."""

    kind: str = "none"
    model_parallel: int | None = None
    accumulate: int = 1
    first: int = 0
    last: int = STEPS
    saved: Path | None = None
    resumed: Path | None = None
    checkpointing: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Curve:
    """What a rank saw of a :class:`Job`."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the norms in the first step, as this rank has them, where it has the whole of them."""
    whole: dict[str, Tensor]
    """All of the first step, put together."""
    weights: dict[str, Tensor]


def make_model(**changes: Any) -> MindForCausalLM:
    """The model of every run, its norms not trivial."""
    torch.manual_seed(0)
    model = MindForCausalLM(preset("tiny", **{**CONFIG, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def train(job: Job) -> Curve:
    """The steps ``job.first`` to ``job.last``; each reads text that depends on its number alone."""
    parallel = Parallel.start(job.kind, job.model_parallel)
    model = make_model(**job.changes)
    model.gradient_checkpointing = job.checkpointing
    if not parallel.is_main:  # wrap() brings the weights of the main rank
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    wrapped = parallel.wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    if job.resumed is not None:
        newest = checkpoint.newest(job.resumed)
        assert newest is not None
        assert parallel.load(newest.folder, wrapped, optimizer) == {"seed": 7}
    curve = Curve([], [], {}, {}, {})
    for step in range(job.first, job.last):
        tokens = torch.randint(
            VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
        )
        mine = tokens.chunk(parallel.data_world)[parallel.data_rank].chunk(job.accumulate)
        total = torch.zeros(())
        for i, rows in enumerate(mine):
            with parallel.no_sync(wrapped, i + 1 == len(mine)):
                loss = wrapped(rows[:, :-1], labels=rows[:, 1:]).loss / len(mine)
                loss.backward()
            total += loss.detach()
        if step == job.first:
            curve.gradients, curve.whole = _gradients(model)
        curve.norms.append(parallel.clip(wrapped, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(parallel.mean(total).item())
    if job.saved is not None:
        save(parallel, job.saved, job.last, wrapped, optimizer)
    curve.weights = parallel.weights(wrapped)
    parallel.stop()
    return curve


def save(
    parallel: Parallel,
    run: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """A checkpoint, as the trainer makes it."""
    folder = checkpoint.begin(run, step) if parallel.is_main else run
    if parallel.world > 1:
        told = [folder]
        torch.distributed.broadcast_object_list(told, src=0)
        folder = told[0]
    parallel.save(folder, model, optimizer, {"seed": 7})
    if parallel.is_main:
        checkpoint.finish(run, step, folder, {})
    parallel.barrier()


def _gradients(model: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    here, whole = {}, {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        is_placed = hasattr(gradient, "full_tensor")
        whole[name] = (gradient.full_tensor() if is_placed else gradient).clone()
        if "norm" in name and not (is_placed and any(p.is_shard() for p in gradient.placements)):
            here[name] = (gradient.to_local() if is_placed else gradient).clone()
    return here, whole


def train_all(jobs: list[Job]) -> list[Curve]:
    """Every job, one after the other."""
    return [train(job) for job in jobs]


def refused() -> dict[str, str]:
    """What several ranks refuse."""
    found = {}
    for name, kind, size, changes in (
        ("several", "none", None, {}),
        ("not a divisor", "tp", 3, {}),
        ("no tp", "fsdp", 2, {}),
        ("heads", "tp", None, {"num_key_value_heads": 1}),
        ("width", "tp", None, {"intermediate_size": 31}),
        ("another model", "tp", None, None),
    ):
        try:
            parallel = Parallel.start(kind, size)
            if changes is None:
                parallel.wrap(torch.nn.Linear(2, 2))
            else:
                parallel.wrap(MindForCausalLM(preset("tiny", **{**CONFIG, **changes})))
        except ParallelError as error:
            found[name] = str(error)
    return found
