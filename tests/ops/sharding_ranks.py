"""What each rank does in test_sharding.py: the operations on distributed tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import oracle
from rmsnorm import NormSpec, RMSNorm, add_rms_norm, gated_rms_norm, rms_norm

WORLD = 4


@dataclass(frozen=True)
class Case:
    """A call of an operation, and where its tensors lie.

    Placements are words, one for each dimension of the mesh: ``S1`` is ``Shard(1)``, ``R``
    ``Replicate()``, ``P`` ``Partial()``.
    """

    operation: str
    """``rms_norm``, ``add_rms_norm`` or ``gated_rms_norm``."""
    spec: NormSpec
    x: str
    """The placements of x."""
    beside: str | None = None
    """Of the residual or gate; as x's if ``None``."""
    weight: str = "R"
    mesh: tuple[int, ...] = (WORLD,)
    shape: tuple[int, ...] = (3, 6, 20)
    ndim: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False
    weighted: bool = True
    frozen: bool = False
    scale: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The arguments, and the gradients of the results ``dy`` and ``dh``, on one device."""
        normalized = self.shape[len(self.shape) - self.ndim :]
        drawn = {
            "x": oracle.random(*self.shape, dtype=self.dtype, seed=1, scale=self.scale),
            "dy": oracle.random(*self.shape, dtype=self.dtype, seed=2),
        }
        if self.operation != "rms_norm":
            drawn["beside"] = oracle.random(*self.shape, dtype=self.dtype, seed=3)
        if self.operation == "add_rms_norm":
            drawn["dh"] = oracle.random(*self.shape, dtype=torch.float32, seed=4)
        if self.weighted:
            drawn["weight"] = 1 + oracle.random(*normalized, dtype=torch.float32, seed=5) / 4
        if self.bias:
            drawn["bias"] = oracle.random(*normalized, dtype=torch.float32, seed=6)
        return drawn

    def call(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The results, of plain or distributed tensors."""
        x, weight = tensors["x"], tensors.get("weight")
        if self.operation == "rms_norm":
            shape = self.shape[len(self.shape) - self.ndim :]
            bias = tensors.get("bias")
            return (rms_norm(x, weight, spec=self.spec, bias=bias, normalized_shape=shape),)
        if self.operation == "add_rms_norm":
            return add_rms_norm(x, tensors["beside"], weight, spec=self.spec, **self.options)
        return (gated_rms_norm(x, tensors["beside"], weight, spec=self.spec, **self.options),)


@dataclass
class Part:
    """A result or gradient as one rank has it."""

    local: Tensor
    words: str
    shape: tuple[int, ...]


@dataclass
class Found:
    """What one rank saw."""

    results: list[Part]
    gradients: dict[str, Part]
    forward: dict[str, int]
    """The collectives of the forward and how often."""
    backward: dict[str, int]


def run_cases(cases: list[Case]) -> list[Found]:
    """Run every case on this rank."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in {case.mesh for case in cases}}
    return [_run(case, meshes[case.mesh]) for case in cases]


def _run(case: Case, mesh: DeviceMesh) -> Found:
    whole = case.tensors()
    words = {"x": case.x, "beside": case.beside or case.x}
    words |= dict.fromkeys(("weight", "bias"), case.weight)
    leaves = {
        name: place(whole[name], mesh, word).requires_grad_(
            not (case.frozen and name in ("weight", "bias"))
        )
        for name, word in words.items()
        if name in whole
    }
    with CommDebugMode() as forward:
        results = case.call(leaves)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    incoming = [
        distribute_tensor(whole[name].to(y.dtype), mesh, y.placements, src_data_rank=None)
        for name, y in zip(("dy", "dh"), results, strict=False)
    ]
    with CommDebugMode() as backward:
        gradients = torch.autograd.grad(results, list(wanted.values()), incoming)
    return Found(
        [_part(y) for y in results],
        {name: _part(g) for name, g in zip(wanted, gradients, strict=True)},
        counts(forward),
        counts(backward),
    )


def _part(tensor: Any) -> Part:
    letters = {Replicate: "R", Partial: "P"}
    words = [f"S{p.dim}" if isinstance(p, Shard) else letters[type(p)] for p in tensor.placements]
    with torch.no_grad():
        return Part(tensor.to_local(), " ".join(words), tuple(tensor.shape))


def place(tensor: Tensor, mesh: DeviceMesh, words: str) -> DTensor:
    """``tensor`` with the placements of ``words``; of a pending sum the first rank has all."""
    placements = []
    for word in words.split():
        placements.append(Shard(int(word[1:])) if word[0] == "S" else Replicate())
    # Every rank has drawn the same numbers, so none need be sent.
    placed = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    if "P" not in words:
        return placed
    local = placed.to_local()
    for i, word in enumerate(words.split()):
        if word == "P":
            placements[i] = Partial()
            local = local if mesh.get_local_rank(i) == 0 else torch.zeros_like(local)
    return DTensor.from_local(
        local, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def counts(mode: CommDebugMode) -> dict[str, int]:
    """The collectives that ``mode`` saw and how often."""
    return {str(name).rpartition(".")[2]: count for name, count in mode.get_comm_counts().items()}


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run_in_place() -> dict[str, Any]:
    """The operations that write, and what all of them refuse."""
    mesh = init_device_mesh("cpu", (2,))
    spec = NormSpec().encode()
    x, h = (oracle.random(3, 6, 20, dtype=torch.float32, seed=seed) for seed in (1, 2))
    w = oracle.random(20, dtype=torch.float32, seed=3)
    plain_h, plain_y = h.clone(), x.clone()
    add_rms_norm(plain_y, plain_h, w, inplace=True)
    found: dict[str, Any] = {"wrong": []}
    weight = place(w, mesh, "R")
    for words, beside in (("S0", "S0"), ("S1", "S1"), ("S2", "S2"), ("S1", "R"), ("R", "R")):
        dx, dh = place(x.clone(), mesh, words), place(h.clone(), mesh, beside)
        memory = dx.to_local().data_ptr(), dh.to_local().data_ptr()
        versions = dx._version, dh._version
        y, new = add_rms_norm(dx, dh, weight, inplace=True)
        if (
            y is not dx
            or new is not dh
            or memory != (dx.to_local().data_ptr(), dh.to_local().data_ptr())
        ):
            found["wrong"].append(f"in place {words} {beside}: other tensors")
        whole_y, whole_h = dx.full_tensor(), dh.full_tensor()
        if not torch.allclose(whole_y, plain_y, rtol=1e-6, atol=1e-6):
            found["wrong"].append(f"in place {words} {beside}: y")
        if not torch.equal(whole_h, plain_h):
            found["wrong"].append(f"in place {words} {beside}: residual")
        if dx._version == versions[0] or dh._version == versions[1]:
            found["wrong"].append(f"in place {words}: unnoticed")
    right = rms_norm(x, w)
    for words, target in (("S0", "S0"), ("S2", "S2"), ("S1", "S0"), ("R", "S2"), ("S2", "R")):
        out = place(torch.full_like(x, torch.nan), mesh, target)
        returned = rms_norm(place(x, mesh, words), weight, out=out)
        if returned is not out:
            found["wrong"].append(f"out {words}: another tensor")
        whole = out.full_tensor()
        if not torch.allclose(whole, right, rtol=1e-6, atol=1e-6):
            found["wrong"].append(f"out {words} {target}")
    raw = torch.ops.rmsnorm.rms_norm(place(x, mesh, "S0"), weight, None, None, spec).full_tensor()
    if not torch.equal(raw, right):
        found["wrong"].append("raw")

    other = init_device_mesh("cpu", (2, 1))
    shard, plain = place(x, mesh, "S0"), x
    pending = place(x, mesh, "P")
    refused = {
        "plain weight": lambda: rms_norm(shard, w),
        "plain x": lambda: rms_norm(plain, weight),
        "another mesh": lambda: rms_norm(shard, place(w, other, "R R")),
        "pending out": lambda: rms_norm(shard, weight, out=pending),
        "pending in place": lambda: add_rms_norm(pending, shard, weight, inplace=True),
        "weight's shape": lambda: rms_norm(shard, place(w[:7], mesh, "R")),
        "gradient in place": lambda: add_rms_norm(
            shard, shard.clone(), weight.detach().requires_grad_(), inplace=True
        ),
    }
    return found | {name: _raised(call) for name, call in refused.items()}


def run_modules() -> list[str]:
    """Modules, second derivatives, activation checkpointing and torch.compile; what went wrong."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    x, z = (oracle.random(3, 5, 8, dtype=torch.float64, seed=seed) for seed in (1, 2))

    def compare(name: str, found: Any, right: Any) -> None:
        for one, two in zip(found, right, strict=True):
            whole = one.full_tensor()
            if not torch.allclose(whole, two, rtol=1e-9, atol=1e-11):
                wrong.append(name)

    def twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = rms_norm(x, w, 1e-3)
        (g,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), (x, w))

    w = oracle.random(8, dtype=torch.float64, seed=3)
    right = twice(x.clone().requires_grad_(), w.clone().requires_grad_())
    for words in ("S0", "S1", "S2"):
        dx, dw = place(x, mesh, words).requires_grad_(), place(w, mesh, "R").requires_grad_()
        compare(f"second derivative {words}", twice(dx, dw), right)

    # A module's own hooks bring plain tensors to where its weight expects them.
    norm = RMSNorm(8, dtype=torch.float64)
    torch.nn.init.uniform_(norm.weight)
    y = norm(x)
    (right_dw,) = torch.autograd.grad((y * z).sum(), norm.weight)
    parallelize_module(norm, mesh, SequenceParallel())
    here, there = place(x, mesh, "S1").to_local(), place(z, mesh, "S1")
    for name, f in (
        ("module", norm),
        ("checkpointed", lambda part: checkpoint(norm, part, use_reentrant=False)),
    ):
        found = f(DTensor.from_local(here, mesh, [Shard(1)], shape=x.shape, stride=x.stride()))
        (dw,) = torch.autograd.grad((found * there).sum(), norm.weight)
        compare(name, [found, dw], [y, right_dw])

    compiled = torch.compile(lambda x, w: rms_norm(x, w), backend="aot_eager", fullgraph=True)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = rms_norm(*leaves)
    right = torch.autograd.grad((y * z).sum(), leaves)
    for words in ("S1", "S2"):
        placed = place(x, mesh, words).requires_grad_(), place(w, mesh, "R").requires_grad_()
        found = compiled(*placed)
        gradients = torch.autograd.grad((found * place(z, mesh, words)).sum(), placed)
        compare(f"compiled {words}", [found, *gradients], [y, *right])
    return wrong
