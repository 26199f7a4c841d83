"""Training on two and four ranks: the curve, the gradients and the checkpoints of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

distributed = pytest.importorskip("torch.distributed")
if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)
pytest.importorskip("safetensors")

import ranks
from lm import parallel_ranks
from lm.parallel_ranks import STEPS, Curve, Job, make_model, save, train
from rmsnorm.lm import checkpoint
from rmsnorm.lm.checkpoint import CheckpointError
from rmsnorm.lm.parallel import Parallel, ParallelError

HALF = STEPS // 2
SANDWICH = {"placement": "sandwich", "tie_word_embeddings": False, "qk_norm": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(runs: Path) -> dict[str, Curve]:
    """On one rank: the whole curve, and one that is saved halfway."""
    return {
        "whole": train(Job()),
        "half": train(Job(last=HALF, saved=runs / "alone")),
        "sandwich": train(Job(changes=SANDWICH, last=HALF)),
    }


@pytest.fixture(scope="module")
def on_two(runs: Path, alone: dict[str, Curve]) -> dict[str, list[Curve]]:
    jobs = {
        "ddp": Job("ddp"),
        "ddp, in two micro-steps": Job("ddp", accumulate=2),
        "fsdp": Job("fsdp", checkpointing=True),
        "fsdp, in two micro-steps": Job("fsdp", accumulate=2, last=HALF, saved=runs / "fsdp"),
        "tp": Job("tp"),
        "tp, in two micro-steps": Job("tp", accumulate=2, last=HALF, saved=runs / "tp"),
        "tp, sandwich": Job("tp", changes=SANDWICH, last=HALF),
        "ddp, resumed": Job("ddp", first=HALF, resumed=runs / "alone"),
    }
    return _run(2, jobs)


@pytest.fixture(scope="module")
def on_four(runs: Path, on_two: dict[str, list[Curve]]) -> dict[str, list[Curve]]:
    jobs = {
        "tp": Job("tp", last=HALF),
        "tp and fsdp, resumed": Job("tp", 2, first=HALF, resumed=runs / "fsdp"),
        "fsdp, resumed": Job("fsdp", first=HALF, resumed=runs / "tp"),
    }
    return _run(4, jobs)


def _run(world: int, jobs: dict[str, Job]) -> dict[str, list[Curve]]:
    by_rank = ranks.run(world, parallel_ranks.train_all, list(jobs.values()))
    return {name: [curves[i] for curves in by_rank] for i, name in enumerate(jobs)}


def _compare(curves: list[Curve], right: Curve, first: int = 0) -> None:
    """Losses and gradient norms of every rank are those of ``right`` from step ``first`` on."""
    for curve in curves:
        steps = slice(first, first + len(curve.losses))
        assert curve.losses == pytest.approx(right.losses[steps], abs=1e-4, rel=0.0)
        assert curve.norms == pytest.approx(right.norms[steps], rel=2e-3)
    for curve in curves[1:]:
        for name, weight in curve.weights.items():
            assert torch.equal(weight, curves[0].weights[name]), name
    assert set(curves[0].weights) == set(right.weights)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("ddp", "whole"),
        ("ddp, in two micro-steps", "whole"),
        ("fsdp", "whole"),
        ("fsdp, in two micro-steps", "whole"),
        ("tp", "whole"),
        ("tp, in two micro-steps", "whole"),
        ("tp, sandwich", "sandwich"),
    ],
)
def test_two_ranks_learn_as_one(
    name: str, right: str, on_two: dict[str, list[Curve]], alone: dict[str, Curve]
) -> None:
    _compare(on_two[name], alone[right])


def test_four_ranks_learn_as_one(on_four: dict[str, list[Curve]], alone: dict[str, Curve]) -> None:
    _compare(on_four["tp"], alone["whole"])


def test_the_curve_is_one_that_learns(alone: dict[str, Curve]) -> None:
    losses = alone["whole"].losses
    assert max(losses) - min(losses) > 1e-2
    assert min(alone["whole"].norms) > 0.5  # so that clipping does something


@pytest.mark.parametrize("name", ["ddp", "tp", "tp, in two micro-steps", "fsdp", "tp, four"])
def test_gradients_of_norms_are_counted_once(
    name: str,
    on_two: dict[str, list[Curve]],
    on_four: dict[str, list[Curve]],
    alone: dict[str, Curve],
) -> None:
    curves = on_four["tp"] if name == "tp, four" else on_two[name]
    right = alone["whole"].whole
    norms = {key for key in right if "norm" in key}
    assert len(norms) == 9
    for curve in curves:
        assert name == "fsdp" or set(curve.gradients) == norms
        for key, gradient in curve.gradients.items():
            torch.testing.assert_close(gradient, curves[0].gradients[key], rtol=0.0, atol=0.0)
        for key, gradient in right.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(curve.whole[key], gradient, rtol=0.0, atol=2e-6 * scale)


@pytest.mark.parametrize("name", ["ddp, resumed", "tp and fsdp, resumed", "fsdp, resumed"])
def test_a_checkpoint_resumes_on_other_ranks(
    name: str,
    on_two: dict[str, list[Curve]],
    on_four: dict[str, list[Curve]],
    alone: dict[str, Curve],
) -> None:
    _compare({**on_two, **on_four}[name], alone["whole"], first=HALF)


@pytest.mark.parametrize("run", ["fsdp", "tp", "alone"])
def test_a_checkpoint_resumes_on_one_rank(
    run: str, runs: Path, on_two: dict[str, list[Curve]], alone: dict[str, Curve]
) -> None:
    resumed = train(Job(first=HALF, resumed=runs / run))
    _compare([resumed], alone["whole"], first=HALF)
    if run == "alone":
        assert resumed.losses == alone["whole"].losses[HALF:]
        for name, weight in resumed.weights.items():
            assert torch.equal(weight, alone["whole"].weights[name])


class TestRefusedCheckpoints:
    @pytest.fixture
    def run(self, tmp_path: Path) -> tuple[Parallel, Path, Any, Any]:
        parallel, model = Parallel.start("none"), make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor([[1, 2]]), labels=torch.tensor([[2, 3]])).loss.backward()
        optimizer.step()
        save(parallel, tmp_path, 1, model, optimizer)
        newest = checkpoint.newest(tmp_path)
        assert newest is not None
        return parallel, newest.folder, model, optimizer

    def test_changed_file(self, run: tuple[Parallel, Path, Any, Any]) -> None:
        parallel, folder, model, optimizer = run
        (path,) = folder.glob("*.safetensors")
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(CheckpointError, match=r"was changed"):
            parallel.load(folder, model, optimizer)

    def test_truncated_file(self, run: tuple[Parallel, Path, Any, Any]) -> None:
        parallel, folder, model, optimizer = run
        (path,) = folder.glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=r"truncated"):
            parallel.load(folder, model, optimizer)

    def test_no_manifest(self, run: tuple[Parallel, Path, Any, Any]) -> None:
        parallel, folder, model, optimizer = run
        (folder / checkpoint.STATE).unlink()
        with pytest.raises(CheckpointError, match=r"manifest"):
            parallel.load(folder, model, optimizer)

    def test_a_file_beside_the_manifest(self, run: tuple[Parallel, Path, Any, Any]) -> None:
        parallel, folder, model, optimizer = run
        (path,) = folder.glob("*.safetensors")
        (folder / "other.safetensors").write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match=r"other\.safetensors is not one of"):
            parallel.load(folder, model, optimizer)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 32}, r"expected model\.embed_tokens\.weight .*\(50, 32\)"),
            ({"tie_word_embeddings": False}, r"it has no lm_head\.weight"),
            ({"num_hidden_layers": 1}, r"expected no model\.layers\.1"),
        ],
    )
    def test_another_model(
        self, changes: dict[str, Any], message: str, run: tuple[Parallel, Path, Any, Any]
    ) -> None:
        parallel, folder, _, _ = run
        config = {**parallel_ranks.CONFIG, **changes}
        model = parallel_ranks.MindForCausalLM(parallel_ranks.preset("tiny", **config))
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match=message):
            parallel.load(folder, model, torch.optim.AdamW(model.parameters()))
        assert all(map(torch.equal, before, model.parameters()))

    def test_nothing_that_could_run_is_in_it(self, run: tuple[Parallel, Path, Any, Any]) -> None:
        names = sorted(path.suffix for path in run[1].iterdir())
        assert names == [".json", ".json", ".safetensors"]


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    first, second = ranks.run(2, parallel_ranks.refused)
    assert first == second
    return dict(first)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("several", "parallel is 'none', but there are 2 processes"),
        ("not a divisor", "model_parallel is 3; expected a divisor of the number of ranks, 2"),
        ("no tp", "model_parallel is 2, but parallel is 'fsdp'"),
        ("heads", "num_key_value_heads is 1; expected a multiple of the 2 ranks"),
        ("width", "intermediate_size is 31; expected a multiple of the 2 ranks"),
        ("another model", "the model is a Linear; tensor parallel needs a MindForCausalLM"),
    ],
)
def test_refused(name: str, message: str, refused: dict[str, str]) -> None:
    assert refused[name].startswith(message)


class TestStart:
    @pytest.fixture(autouse=True)
    def _no_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)

    def test_unknown_kind(self) -> None:
        with pytest.raises(ParallelError, match=r"'zero'; expected one of none, ddp, fsdp, tp"):
            Parallel.start("zero")

    @pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
    def test_without_torchrun(self, kind: str) -> None:
        with pytest.raises(ParallelError, match=r"torchrun --nproc-per-node"):
            Parallel.start(kind)

    def test_none_under_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
            monkeypatch.setenv(name, value)
        with pytest.raises(ParallelError, match=r"there are 2 processes"):
            Parallel.start("none")

    def test_one_rank_of_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        parallel = Parallel.start("fsdp")
        assert distributed.is_initialized()
        assert (parallel.rank, parallel.world, parallel.data_world) == (0, 1, 1)
        parallel.stop()
        assert not distributed.is_initialized()


def test_extra_is_kept_as_json(tmp_path: Path) -> None:
    parallel, model = Parallel.start("none"), make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"not JSON serializable"):
        parallel.save(tmp_path, model, optimizer, {"a": torch.ones(1)})
    parallel.save(tmp_path, model, optimizer, {"a": [1, 2.5]})
    assert json.loads((tmp_path / "extra.json").read_text()) == {"a": [1, 2.5]}
