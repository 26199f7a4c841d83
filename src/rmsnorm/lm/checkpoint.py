"""Checkpoints that are whole or not there, and that say when they were changed.

A checkpoint is a folder ``checkpoints/step-00000200`` of a run: weights and optimizer state as
safetensors, and ``state.json``, the manifest, which holds everything else and the SHA-256 of each
file. It is written under another name, forced to the disk and renamed, so that a process that is
killed at any moment leaves either the whole checkpoint or none. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.models.files import sha256

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
FORMAT = 1

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".unfinished-"


class CheckpointError(ValueError):
    """A checkpoint that is damaged, was changed, or belongs to something else."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it is, its step, and what its manifest says."""

    folder: Path
    step: int
    state: dict[str, Any]

    def verify(self) -> None:
        """Compare every file with the checksum in the manifest.

        Raises:
            CheckpointError: a file is missing, has another length, or other bytes.
        """
        files = self.state["files"]
        for name, expected in files.items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; {_advice(self.folder)}")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{path} has {size} bytes; expected {expected['bytes']}: it was truncated or "
                    f"changed; {_advice(self.folder)}"
                )
            if sha256(path) != expected["sha256"]:
                raise CheckpointError(
                    f"{path} was changed: its SHA-256 is not the one in {STATE}; "
                    f"{_advice(self.folder)}"
                )


def save(
    run: Path,
    step: int,
    write: Callable[[Path], None],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Checkpoint:
    """Make the checkpoint of ``step`` in the folder ``run``, atomically.

    Args:
        run: the run's folder.
        step: steps done.
        write: is given an empty folder and writes its files into it.
        state: what the manifest shall say besides; JSON values.
        keep: so many checkpoints are left; older ones are removed afterwards.

    Returns:
        The checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     run = Path(name)
        ...     made = save(run, 7, lambda folder: None, {"seed": 1})
        ...     newest(run).state["seed"], made.folder.name
        (1, 'step-00000007')
    """
    folder = begin(run, step)
    write(folder)
    return finish(run, step, folder, state, keep=keep)


def temporary(run: Path, step: int) -> Path:
    """The folder that is a checkpoint while it is written."""
    return run / _FOLDER / f"{_TEMPORARY}{step}"


def begin(run: Path, step: int) -> Path:
    """Make :func:`temporary`, empty; :func:`finish` makes it the checkpoint."""
    folder = temporary(run, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def seal(folder: Path, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Force the files of ``folder`` to the disk and write their manifest, which is returned."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(path)
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {"format": FORMAT, "step": step, **state, "files": files}
    write_atomically(folder / STATE, json.dumps(manifest, indent=1) + "\n")
    return manifest


def finish(
    run: Path, step: int, unfinished: Path, state: Mapping[str, Any], *, keep: int = 2
) -> Checkpoint:
    """Give the files of ``unfinished`` a manifest, force them to the disk, rename the folder.

    The rename is what makes it the checkpoint of ``step``; only then are older ones removed.
    """
    manifest = seal(unfinished, step, state)
    parent = run / _FOLDER
    folder = parent / f"step-{step:08d}"
    if folder.exists():
        _remove(folder)
    unfinished.rename(folder)
    _sync(parent)
    for old in _folders(run)[keep:]:
        _remove(old)
    return Checkpoint(folder, step, manifest)


def newest(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of ``run``, its files not yet verified; ``None``: there is none.

    Folders without a manifest are no checkpoints and are passed over.

    Raises:
        CheckpointError: the newest manifest cannot be read.
    """
    for folder in _folders(run):
        if (folder / STATE).is_file():
            return read(folder)
    return None


def read(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``, its files not yet verified.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {state['format']!r}; expected {FORMAT}")
        for name, entry in state["files"].items():
            int(entry["bytes"]), str(entry["sha256"])
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise CheckpointError(f"{path} names {name!r}; expected files of its own folder")
        checkpoint = Checkpoint(folder, int(state["step"]), state)
        match = _NAME.fullmatch(folder.name)
        if match is not None and checkpoint.step != int(match[1]):
            raise CheckpointError(
                f"{path} says step {checkpoint.step}; expected {int(match[1])}, as its folder does"
            )
    except CheckpointError:
        raise
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError),  # an infinity, lists too deep
    ) as error:
        raise CheckpointError(
            f"{path} is not the manifest of a checkpoint ({type(error).__name__}: {error}); "
            f"{_advice(folder)}"
        ) from None
    return checkpoint


def clean(run: Path) -> None:
    """Remove what processes that were killed have left under temporary names."""
    parent = run / _FOLDER
    if parent.is_dir():
        for path in parent.iterdir():
            if path.name.startswith(_TEMPORARY):
                shutil.rmtree(path)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write ``tensors`` as a safetensors file, with ``metadata`` in its header.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(dense, path, metadata)
    except SafetensorError as error:  # what the system said is in the words only
        raise OSError(f"{path} cannot be written: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: there is no such file, or it is not a safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def weights(model: nn.Module, *, trained: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each shared one once.

    Args:
        model: any module.
        trained: only the parameters that are trained.
    """
    # First: where FSDP has left gathered parameters in their modules, this puts back its own.
    persistent = set(model.state_dict())
    if trained:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = dict(model.named_parameters())
    found.update((name, b) for name, b in model.named_buffers() if name in persistent)
    return found


@torch.no_grad()
def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, *, trained: bool = False
) -> None:
    """Copy ``tensors`` into what :func:`weights` finds in ``model``.

    They are copied into the model's own memory: matrix products may give other bits for memory
    that starts at another alignment, as that of a mapped file does.

    Raises:
        CheckpointError: names or shapes are others; ``path`` is named.
    """
    targets = weights(model, trained=trained)
    _check_names(path, set(tensors), set(targets))
    for name, target in targets.items():
        _copy(path, name, target, tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``{parameter}:{entry}``, by the names of the model's parameters."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}:{entry}"] = value
    return tensors


@torch.no_grad()
def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Give ``optimizer`` the state that :func:`optimizer_tensors` took.

    Raises:
        CheckpointError: the names or shapes are not those of the model's trained parameters.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition(":")
        states.setdefault(name, {})[entry] = tensor
    parameters = weights(model, trained=True)
    _check_names(path, set(states), set(parameters))
    for name, parameter in parameters.items():
        optimizer.state[parameter] = state = {}
        for entry, tensor in states[name].items():
            if tensor.dim() == 0:
                state[entry] = tensor.to(parameter.device, copy=True)
            else:
                state[entry] = torch.empty_like(parameter, memory_format=torch.preserve_format)
                _copy(path, f"{name}:{entry}", state[entry], tensor)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file ``path`` by ``text``; a reader or a crash sees the old file or the new."""
    temporary = path.with_name(f".{path.name}.unfinished")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _folders(run: Path) -> list[Path]:
    """The folders named as checkpoints are, the newest first."""
    parent = run / _FOLDER
    if not parent.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in parent.iterdir() if path.is_dir()]
    steps = [(int(match[1]), path) for match, path in named if match is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def _remove(folder: Path) -> None:
    """Removes ``folder``; killed halfway, it leaves no folder that looks like a checkpoint."""
    away = folder.with_name(f"{_TEMPORARY}{folder.name}")
    if away.exists():
        shutil.rmtree(away)
    folder.rename(away)
    shutil.rmtree(away)


def _advice(folder: Path) -> str:
    return f"remove {folder} to resume from the checkpoint before it"


def _sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system syncs folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_names(path: Path, given: set[str], expected: set[str]) -> None:
    if given == expected:
        return
    missing, unknown = sorted(expected - given), sorted(given - expected)
    parts = [
        f"{len(names)} {what}, such as {names[0]}"
        for what, names in (("missing", missing), ("not of this model", unknown))
        if names
    ]
    raise CheckpointError(f"{path} is of another model: {'; '.join(parts)}")


def _copy(path: Path, name: str, target: Tensor, source: Tensor) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise CheckpointError(
            f"{path}: {name} is {source.dtype} {tuple(source.shape)}; "
            f"expected {target.dtype} {tuple(target.shape)}"
        )
    target.copy_(source)
