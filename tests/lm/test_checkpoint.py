"""Checkpoints: whole or not there, and damage is told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")

from rmsnorm.lm import checkpoint
from rmsnorm.lm.checkpoint import CheckpointError


def write(content: bytes) -> Callable[[Path], None]:
    def files(folder: Path) -> None:
        (folder / "a").write_bytes(content)
        (folder / "b").write_bytes(content * 2)

    return files


def test_round_trip_and_how_many_are_kept(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (1, 9, 10, 200):
        checkpoint.save(tmp_path, step, write(b"x"), {"seed": step}, keep=3)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    found.verify()
    assert (found.step, found.state["seed"]) == (200, 200)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000009", "step-00000010", "step-00000200"]


def test_the_same_step_twice(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, write(b"old"), {})
    checkpoint.save(tmp_path, 5, write(b"new"), {})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    found.verify()
    assert (found.folder / "a").read_bytes() == b"new"


class Killed(BaseException):
    """Stands for the end of the process."""


def test_killed_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever operation on files is the last, the old checkpoint or the new one is whole."""
    left = [0]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return operation(*arguments, **more)

        return call

    # rmtree goes through os.unlink and os.rmdir, so it is stopped halfway too.
    for owner, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
        (Path, "write_bytes"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "open"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    seen = set()
    for operations in range(1000):
        left[0] = 10**6
        run = tmp_path / str(operations)
        for step in (1, 2):
            checkpoint.save(run, step, write(b"old"), {})
        left[0] = operations
        try:
            checkpoint.save(run, 3, write(b"new"), {})
            done = True
        except Killed:
            done = False
        left[0] = 10**6
        found = checkpoint.newest(run)
        assert found is not None
        found.verify()
        seen.add(found.step)
        assert (found.folder / "a").read_bytes() == (b"new" if found.step == 3 else b"old")
        checkpoint.clean(run)
        checkpoint.save(run, 4, write(b"newer"), {})
        assert len(list((run / "checkpoints").iterdir())) == 2
        if done:
            break
    assert done
    assert operations > 15
    assert seen == {2, 3}


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    made = checkpoint.save(tmp_path, 3, write(b"x"), {})
    for name in ("step-00000009", ".unfinished-12", "step-x", "other"):
        shutil.copytree(made.folder, made.folder.with_name(name))
    (made.folder.with_name("step-00000009") / "state.json").unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 0 bytes; expected 1: it was"),
        (lambda path: path.write_bytes(b"y"), "was changed: its SHA-256 is not the one"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_damaged_file(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    made = checkpoint.save(tmp_path, 3, write(b"x"), {})
    damage(made.folder / "a")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError) as error:
        found.verify()
    assert message in str(error.value)
    assert str(made.folder / "a") in str(error.value)
    assert f"remove {made.folder} to resume" in str(error.value)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "step": 3, "files": {"a": 1}}',
        b'{"format": 1, "step": Infinity, "files": {}}',
        b"[" * 100_000,
    ],
)
def test_damaged_manifest(tmp_path: Path, manifest: bytes) -> None:
    made = checkpoint.save(tmp_path, 3, write(b"x"), {})
    (made.folder / "state.json").write_bytes(manifest)
    with pytest.raises(CheckpointError, match=r"state\.json is not the manifest"):
        checkpoint.newest(tmp_path)


def test_manifest_of_another_format(tmp_path: Path) -> None:
    made = checkpoint.save(tmp_path, 3, write(b"x"), {})
    state = json.loads((made.folder / "state.json").read_text())
    (made.folder / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99; expected 1"):
        checkpoint.newest(tmp_path)


def model() -> nn.Module:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
    net[3].weight = net[0].weight  # type: ignore[union-attr]
    return net


def updated(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.randint(5, (4,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_goes_on_from_the_tensors_with_equal_bits(tmp_path: Path) -> None:
    first = model()
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1, fused=True)
    updated(first, optimizer, 3)
    checkpoint.write_tensors(tmp_path / "m", checkpoint.weights(first))
    checkpoint.write_tensors(tmp_path / "o", checkpoint.optimizer_tensors(first, optimizer))
    second = model()
    places = [parameter.data_ptr() for parameter in second.parameters()]
    other = torch.optim.AdamW(second.parameters(), lr=0.1, fused=True)
    checkpoint.load_weights(second, checkpoint.read_tensors(tmp_path / "m"), tmp_path / "m")
    checkpoint.load_optimizer(second, other, checkpoint.read_tensors(tmp_path / "o"), tmp_path)
    assert [parameter.data_ptr() for parameter in second.parameters()] == places
    updated(first, optimizer, 3)
    updated(second, other, 3)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_a_shared_parameter_is_stored_once() -> None:
    names = set(checkpoint.weights(model()))
    assert "0.weight" in names
    assert "3.weight" not in names
    assert "2.running_mean" in names


def test_tensors_of_another_model(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    weights = checkpoint.weights(net)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"weight": weights["weight"]}, "1 missing, such as bias"),
        ({**weights, "extra": weights["bias"]}, "1 not of this model, such as extra"),
        ({**weights, "bias": torch.zeros(4)}, r"bias is torch.float32 \(4,\); expected"),
        ({**weights, "bias": torch.zeros(3).half()}, r"bias is torch.float16"),
    ]
    for tensors, message in cases:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_weights(net, tensors, tmp_path)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(CheckpointError, match="2 missing, such as bias"):
        checkpoint.load_optimizer(net, optimizer, {}, tmp_path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "harm").touch, ())

    torch.save({"weight": Harm()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        checkpoint.read_tensors(tmp_path / "model.safetensors")
    assert not (tmp_path / "harm").exists()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.read_tensors(tmp_path / "other")


def test_what_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model.safetensors"
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written"):
        checkpoint.write_tensors(path, {"a": torch.ones(2)})


def test_write_atomically_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write_atomically(path, "one")
    checkpoint.write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 4}, "says step 4; expected 5, as its folder does"),
        ({"step": -5}, "says step -5; expected 5"),
        (
            {"files": {"../a": {"bytes": 1, "sha256": ""}}},
            r"names '\.\./a'; expected files",
        ),
        ({"files": {"/a": {"bytes": 1, "sha256": ""}}}, "names '/a'; expected files of its own"),
    ],
)
def test_a_manifest_of_something_else(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = checkpoint.save(tmp_path, 5, write(b"x"), {})
    path = made.folder / checkpoint.STATE
    path.write_text(json.dumps({**made.state, **change}))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.newest(tmp_path)
