"""A training run on several ranks, each a process that ``torchrun`` has started.

* ``ddp``: every rank has the whole model and its own part of the batch.
* ``fsdp``: parameters, gradients and optimizer state are cut over the ranks too; a block's
  parameters are gathered while it runs (Zhao et al. 2023, https://arxiv.org/abs/2304.11277).
* ``tp``: the matrices are cut over the ranks, which work on the same text; between them the
  residual stream is cut along the sequence, so each rank has the norms of a part of the positions
  (tensor and sequence parallel: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Where
  there are more ranks than share a model, the copies are cut as with ``fsdp``.

All of it is torch's own; here is only which module is cut how. Checkpoints are those of
``torch.distributed.checkpoint`` in safetensors files, which hold nothing that could run; they
resume on any number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rmsnorm.lm import checkpoint
from rmsnorm.lm.block import MindBlock
from rmsnorm.lm.checkpoint import CheckpointError
from rmsnorm.lm.config import PARALLEL_CHOICES
from rmsnorm.lm.model import MindForCausalLM

_EXTRA = "extra.json"


class ParallelError(ValueError):
    """A way to run in parallel that these ranks, or this model, cannot take."""


class Parallel:
    """The ranks of a run and how they share the work; made by :meth:`start`.

    Attributes:
        kind: one of :data:`rmsnorm.lm.config.PARALLEL_CHOICES`.
        rank: of this process.
        world: the number of processes.
        data_rank: which part of the batch this process reads.
        data_world: how many parts there are.
        device: where this process computes.
        is_main: whether this process writes files and reports.
    """

    def __init__(
        self, kind: str, rank: int, world: int, model_parallel: int, device: torch.device
    ) -> None:
        self.kind, self.rank, self.world, self.device = kind, rank, world, device
        self.data_rank, self.data_world = rank // model_parallel, world // model_parallel
        self.is_main = rank == 0
        self._model_parallel = model_parallel
        self._owns_group = False
        self._mesh: Any = None

    @classmethod
    def start(cls, kind: str = "none", model_parallel: int | None = None) -> Parallel:
        """Join the other processes, which ``torchrun`` has told each other's addresses.

        Args:
            kind: one of :data:`rmsnorm.lm.config.PARALLEL_CHOICES`.
            model_parallel: with ``tp``, how many ranks share one copy of the model; all of them if
                ``None``.

        Raises:
            ParallelError: an unknown kind, processes that ``torchrun`` did not start, or a number
                of ranks that ``model_parallel`` does not divide.

        Example:
            >>> parallel = Parallel.start("none")
            >>> parallel.world, parallel.is_main, parallel.mean(torch.tensor(3.0))
            (1, True, tensor(3.))
            >>> parallel.stop()
        """
        if kind not in PARALLEL_CHOICES:
            raise ParallelError(
                f"parallel is {kind!r}; expected one of {', '.join(PARALLEL_CHOICES)}"
            )
        joined = dist.is_available() and dist.is_initialized()
        told = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
        world = dist.get_world_size() if joined else int(os.environ["WORLD_SIZE"]) if told else 1
        if kind == "none":
            if world > 1:
                raise ParallelError(
                    f"parallel is 'none', but there are {world} processes; expected one, or "
                    "'ddp', 'fsdp' or 'tp'"
                )
            return cls(kind, 0, 1, 1, torch.device("cpu"))
        if not joined and not told:
            raise ParallelError(
                f"parallel is {kind!r}, but this process has no ranks beside it; start it by "
                "`torchrun --nproc-per-node N -m rmsnorm train ...`"
            )
        size = 1
        if kind == "tp":
            size = world if model_parallel is None else model_parallel
        elif model_parallel not in (None, 1):
            raise ParallelError(
                f"model_parallel is {model_parallel}, but parallel is {kind!r}; expected 'tp'"
            )
        if size < 1 or world % size:
            raise ParallelError(
                f"model_parallel is {size}; expected a divisor of the number of ranks, {world}"
            )
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not joined:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        parallel = cls(kind, dist.get_rank(), world, size, device)
        parallel._owns_group = not joined
        from torch.distributed.device_mesh import init_device_mesh

        parallel._mesh = init_device_mesh(
            device.type, (parallel.data_world, size), mesh_dim_names=("data", "model")
        )
        return parallel

    def wrap(self, model: nn.Module) -> nn.Module:
        """``model`` cut over the ranks, with the weights of rank 0; make the optimizer afterwards.

        Args:
            model: with the same shapes on every rank, on :attr:`device`. With ``tp`` a
                :class:`~rmsnorm.lm.model.MindForCausalLM`.

        Returns:
            ``model`` itself; with ``ddp`` a module around it. Losses and logits are plain tensors.

        Raises:
            ParallelError: with ``tp``, another model, or heads or widths that cannot be cut into as
                many parts.
        """
        if self.kind == "none":
            return model
        with torch.no_grad():
            for tensor in checkpoint.weights(model).values():
                dist.broadcast(tensor, src=0)
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.kind == "tp":
            _cut_matrices(model, self._mesh["model"])
        if self.kind == "fsdp" or self.data_world > 1:
            _cut_parameters(model, self._mesh["data"])
        elif self.kind == "tp":
            _finish_gradients(model)
        return model

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module, last_micro_step: bool) -> Iterator[None]:
        """Around the forward and backward of one of several micro-steps: only in the last one are
        the gradients of the ranks added up.

        Args:
            model: what :meth:`wrap` returned.
            last_micro_step: whether the optimizer's step follows.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel) and not last_micro_step:
            with model.no_sync():
                yield
            return
        if self.kind == "fsdp" or (self.kind == "tp" and self.data_world > 1):
            model.set_requires_gradient_sync(last_micro_step)  # type: ignore[operator]
        yield

    def mean(self, t: Tensor) -> Tensor:
        """The mean of ``t`` over the ranks that read different text."""
        if self.data_world == 1:
            return t
        total = t.detach().clone()
        dist.all_reduce(total, group=self._mesh["data"].get_group())
        return total / self.data_world

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients down so that the norm of all of them is at most ``max_norm``.

        Args:
            model: what :meth:`wrap` returned, after the backward of the last micro-step.
            max_norm: infinite to measure only.

        Returns:
            The norm before, over all ranks: a plain tensor (), the same on every rank.
        """
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        if hasattr(total, "full_tensor"):
            total = total.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole parameters and buffers by name, on the CPU; every rank must ask for them.

        Args:
            model: what :meth:`wrap` returned.
        """
        found = {}
        for name, tensor in checkpoint.weights(_unwrapped(model)).items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = whole.detach().cpu()
        return found

    def save(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any],
    ) -> None:
        """Write this rank's part of weights and optimizer state into ``folder``; all ranks must.

        The folder becomes a checkpoint by :func:`rmsnorm.lm.checkpoint.finish` on the main rank.

        Args:
            folder: exists, and every rank sees it.
            model: what :meth:`wrap` returned.
            optimizer: of its parameters.
            extra: what :meth:`load` shall return; JSON values.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

        if self.is_main:
            checkpoint.write_atomically(folder / _EXTRA, json.dumps(dict(extra)) + "\n")
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        tensors = _tensors(_unwrapped(model), optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save_distributed(tensors, storage_writer=writer, no_dist=self.world == 1)
        self.barrier()

    def load(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Read what :meth:`save` wrote, whatever the ranks were; all ranks must.

        The main rank first compares the files with the checksums of the manifest.

        Args:
            folder: a checkpoint of the run itself.
            model: what :meth:`wrap` returned.
            optimizer: of its parameters; its hyperparameters are left.

        Returns:
            What :meth:`save` was given as extra.

        Raises:
            CheckpointError: a file is missing or was changed, or the checkpoint is of another
                model.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

        self._on_main(lambda: _verify(folder))
        inner = _unwrapped(model)
        reader = HuggingFaceStorageReader(str(folder))
        saved = {
            name: (tuple(found.size), found.properties.dtype)
            for name, found in reader.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        _prepare(inner, optimizer, saved)
        tensors = _tensors(inner, optimizer)
        expected = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        for name in sorted({*saved, *expected}):
            if saved.get(name) != expected.get(name):
                raise CheckpointError(
                    f"{folder} is of another model: it has {_said(saved, name)}; expected "
                    f"{_said(expected, name)}"
                )
        with warnings.catch_warnings():  # one process needs no others
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_distributed(tensors, storage_reader=reader, no_dist=self.world == 1)
        _put_back(inner, optimizer, tensors)
        extra: dict[str, Any] = json.loads((folder / _EXTRA).read_text(encoding="utf-8"))
        self.barrier()
        return extra

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world > 1:
            dist.barrier()

    def stop(self) -> None:
        """Leave the other ranks."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False

    def _on_main(self, check: Callable[[], None]) -> None:
        """Runs ``check`` on the main rank; what it raises, every rank raises."""
        failed: list[CheckpointError | None] = [None]
        if self.is_main:
            try:
                check()
            except CheckpointError as error:
                failed = [error]
        if self.world > 1:
            dist.broadcast_object_list(failed, src=0)
        if failed[0] is not None:
            raise failed[0]


def _verify(folder: Path) -> None:
    """Compares the files of a checkpoint with its manifest, which must name all that are read."""
    found = checkpoint.read(folder)
    found.verify()
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in found.state["files"]:
            raise CheckpointError(f"{path} is not one of the files in {checkpoint.STATE}")


def _unwrapped(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def _cut_matrices(model: nn.Module, mesh: Any) -> None:
    """Cut ``model`` for tensor and sequence parallel.

    The first matrices of a sublayer are cut by output, which gives each rank whole heads and
    channels; the last by input. The residual stream is cut along the sequence, so it is gathered
    before a sublayer, and what the sublayer's ranks have is added up and cut after it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class Gathered(ParallelStyle):
        """A sublayer: its first argument is gathered."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def gather(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
                x, *rest = arguments
                return (x.redistribute(placements=[Replicate()]), *rest)

            module.register_forward_pre_hook(gather)
            return module

    class OnStream(ParallelStyle):
        """A norm of the residual stream: its weight is on every rank."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return distribute_module(module, device_mesh)

    if not isinstance(model, MindForCausalLM):
        raise ParallelError(
            f"the model is a {type(model).__name__}; tensor parallel needs a MindForCausalLM"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(model.config, name)
        if value % mesh.size():
            raise ParallelError(
                f"{name} is {value}; expected a multiple of the {mesh.size()} ranks that share the "
                "model"
            )

    def last() -> ParallelStyle:
        return RowwiseParallel(output_layouts=Shard(1), use_local_output=False)

    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": OnStream(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index, block in enumerate(model.model.layers):
        at = f"model.layers.{index}"
        for name, _ in block.named_children():
            plan[f"{at}.{name}"] = Gathered() if name in ("self_attn", "mlp") else OnStream()
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        plan[f"{at}.self_attn.o_proj"] = plan[f"{at}.mlp.down_proj"] = last()
        if model.config.qk_norm:
            # (batch, sequence, heads, head_dim), plain tensors of this rank's heads.
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                plan[f"{at}.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    parallelize_module(model, mesh, plan)
    if model.config.tie_word_embeddings:  # each of the two was cut, in the same way
        model.lm_head.weight = model.model.embed_tokens.weight
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _cut_parameters(model: nn.Module, mesh: Any) -> None:
    """Cut ``model`` for FSDP: the sublayers of a block are gathered together.

    The norms between them belong to the model itself, and stay gathered from its forward to its
    backward: a fused block runs the first norm of the next one's stream.
    """
    from torch.distributed.fsdp import fully_shard

    for block in model.modules():
        if isinstance(block, MindBlock):
            fully_shard([block.self_attn, block.mlp], mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _finish_gradients(model: nn.Module) -> None:
    """Add up over the ranks, once, what each has found for a parameter that all of them hold."""

    def finish(parameter: Any) -> None:
        if parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(finish)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and optimizer state by name; a single number is (1,), since files are cut in parts
    of at least one dimension."""
    found = {name: tensor.detach() for name, tensor in checkpoint.weights(model).items()}
    for name, tensor in checkpoint.optimizer_tensors(model, optimizer).items():
        found[f"optimizer:{name}"] = tensor
    return {name: t.reshape(1) if t.dim() == 0 else t for name, t in found.items()}


def _prepare(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, tuple[Any, torch.dtype]]
) -> None:
    """Give ``optimizer`` room for the state that was saved."""
    parameters = dict(model.named_parameters())
    # Where AdamW counts its steps.
    beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    optimizer.state.clear()
    for key, (shape, dtype) in saved.items():
        kind, _, name = key.partition(":")
        name, _, entry = name.rpartition(":")
        if kind != "optimizer" or name not in parameters:
            continue
        parameter = parameters[name]
        if shape == (1,):
            value = torch.zeros((), dtype=dtype, device=parameter.device if beside else "cpu")
        else:
            value = torch.zeros_like(parameter, dtype=dtype)
        optimizer.state[parameter][entry] = value


def _put_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Copy into ``optimizer`` the numbers that are not its own memory."""
    for name, tensor in checkpoint.optimizer_tensors(model, optimizer).items():
        if tensor.dim() == 0:
            tensor.copy_(tensors[f"optimizer:{name}"][0])


def _said(found: Mapping[str, tuple[Any, torch.dtype]], name: str) -> str:
    if name not in found:
        return f"no {name}"
    shape, dtype = found[name]
    return f"{name} {dtype} {shape}"
