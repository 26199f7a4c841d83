"""What each rank does in test_distributed.py: the faults of distributed tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import oracle
from ops.sharding_ranks import counts, place
from rmsnorm import add_rms_norm, gated_rms_norm, rms_norm, specs
from rmsnorm.lm.parallel import Parallel


@dataclass(frozen=True)
class Call:
    """``rms_norm`` with eps 0 of tensors placed as the words of :func:`place` say."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    placed: str
    weight_placed: str
    mesh: tuple[int, ...] = (2,)
    frozen: bool = False


@dataclass
class Answer:
    """Whole tensors as one rank put them together, and what it took to compute them."""

    y: Tensor
    dx: Tensor
    dweight: Tensor | None
    placements: tuple[str, ...]
    forward: dict[str, int]
    """Collectives of the forward and how often."""
    backward: dict[str, int]


def run_calls(calls: list[Call]) -> list[Answer]:
    return [_run(call) for call in calls]


def _run(call: Call) -> Answer:
    mesh = init_device_mesh("cpu", call.mesh)
    x = place(call.x, mesh, call.placed).requires_grad_()
    weight = place(call.weight, mesh, call.weight_placed).requires_grad_(not call.frozen)
    with CommDebugMode() as forward:
        y = rms_norm(x, weight, 0.0)
    dy = place(call.dy, mesh, call.placed)
    with CommDebugMode() as backward:
        y.backward(dy)
    found: list[Any] = [tensor for tensor in (y, x.grad, weight.grad) if tensor is not None]
    with torch.no_grad():
        whole = [tensor.full_tensor() for tensor in found]
    return Answer(
        whole[0],
        whole[1],
        None if weight.grad is None else whole[2],
        tuple(str(tensor.placements) for tensor in found),
        counts(forward),
        counts(backward),
    )


_GATED = replace(specs.mamba2, accumulate=specs.torch.accumulate)  # as the others, in x's dtype
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "rms_norm": (
        ("x", "weight", "bias"),
        lambda x, weight, bias: rms_norm(x, weight, 1e-3, bias=bias),
    ),
    "add_rms_norm": (
        ("x", "beside", "weight"),
        lambda x, beside, weight: add_rms_norm(x, beside, weight, 1e-3),
    ),
    "gated_rms_norm": (
        ("x", "beside", "weight"),
        lambda x, beside, weight: gated_rms_norm(x, beside, weight, 1e-3, spec=_GATED),
    ),
}


def run_subsets() -> list[str]:
    """Every choice of the tensors that need a gradient, on meshes of two axes; what went wrong."""
    shapes = {"x": (4, 3, 6), "beside": (4, 3, 6), "weight": (6,), "bias": (6,)}
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((2, 1), (1, 2))}
    tolerances = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-5, 1e-5)}
    wrong = []
    for dtype, (shape, mesh), words in itertools.product(
        tolerances, meshes.items(), ("S0 S1", "S0 R", "S2 S0", "R S2")
    ):
        rtol, atol = tolerances[dtype]
        whole = {
            name: oracle.random(*size, dtype=dtype, seed=seed)
            for seed, (name, size) in enumerate(shapes.items())
        }
        for operation, (names, function) in _OPERATIONS.items():
            for wanted in itertools.product((False, True), repeat=len(names)):
                if not any(wanted):
                    continue
                found = _gradients(
                    function,
                    [place(whole[n], mesh, words if whole[n].dim() == 3 else "R R") for n in names],
                    wanted,
                )
                right = _gradients(function, [whole[n].clone() for n in names], wanted)
                for name, one, two in zip(names, found, right, strict=True):
                    one = one.full_tensor() if isinstance(one, DTensor) else one
                    if (one is None) != (two is None) or (
                        two is not None and not torch.allclose(one, two, rtol=rtol, atol=atol)
                    ):
                        wrong.append(
                            f"{operation} in {dtype} on {shape} {words}, of {wanted}: {name}"
                        )
    return wrong


def _gradients(
    function: Callable[..., Any], tensors: list[Tensor], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    for tensor, needed in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(needed)
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    sum((result * result).sum() for result in results).backward()
    return [tensor.grad for tensor in tensors]


def run_clipping(gradient: Tensor) -> dict[str, float]:
    """The norm that clipping finds of ``gradient`` by how it lies on the ranks, and of all."""
    parallel = Parallel.start("fsdp")
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    lying = {
        "replicated": ("R", gradient, Replicate()),
        "sharded": ("S0", gradient.chunk(2)[rank], Shard(0)),
        # What each rank found for its own rows.
        "partial": ("R", gradient * (0.25, 0.75)[rank], Partial()),
    }
    parameters = {}
    for name, (words, local, placement) in lying.items():
        parameters[name] = nn.Parameter(place(torch.ones_like(gradient), mesh, words))
        parameters[name].grad = DTensor.from_local(local, mesh, [placement], run_check=False)
    found = {
        name: parallel.clip(nn.ParameterList([parameter]), torch.inf).item()
        for name, parameter in parameters.items()
    }
    everything = nn.ParameterList(parameters.values())
    return found | {"all": parallel.clip(everything, torch.inf).item()}
