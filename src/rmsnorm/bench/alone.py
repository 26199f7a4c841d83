"""Modules of a model alone, on what they are given in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.bench.paired import Start

# What a module was given: positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def calls_of(
    model: nn.Module, names: Sequence[str], run: Callable[[], object]
) -> list[tuple[str, Call]]:
    """What the modules ``names`` are given while ``run`` runs ``model``, in order.

    Tensors are detached, and need a gradient if they did.
    """
    seen: list[tuple[str, Call]] = []

    def keep(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tuple(map(_leaf, args)), {key: _leaf(value) for key, value in kwargs.items()}
        seen.append((name, given))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: keep(name, args, kwargs), with_kwargs=True
        )
        for name in names
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def alone(model: nn.Module, calls: Sequence[tuple[str, Call]], *, backward: bool) -> Start:
    """The modules of ``model`` on what they are given in it, and nothing else.

    The forward of each call is a lap. The backward of all is one, since PyTorch's engine is started
    once in a step too, and that takes longer than the backward of a small norm. The gradients all
    stay until its end, which they do not in a step.

    Args:
        model: any.
        calls: of :func:`calls_of`, for a model whose modules have these names.
        backward: whether the calls are differentiated, after the last one.
    """
    bound = [(model.get_submodule(name), call) for name, call in calls]
    leaves = [
        leaf
        for module, (args, kwargs) in bound
        for leaf in (*args, *kwargs.values(), *module.parameters())
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    gradients: list[Tensor] = []

    def run() -> list[float]:
        laps, outputs = [], []
        for module, (args, kwargs) in bound:
            start = time.perf_counter()
            output = module(*args, **kwargs)
            laps.append(time.perf_counter() - start)
            if backward and output.requires_grad:
                outputs.append(output)
            del output  # or the next one would be given other memory
        if outputs:
            if not gradients:
                gradients.extend(map(torch.randn_like, outputs))
            start = time.perf_counter()
            torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
            laps.append(time.perf_counter() - start)
        return laps

    return lambda: [run]
