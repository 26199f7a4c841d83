"""The trainer: what it computes, where it stops, and that it goes on with equal bits."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import random
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from rmsnorm.lm import checkpoint, convert, train
from rmsnorm.lm.checkpoint import CheckpointError
from rmsnorm.lm.config import ConfigError, TrainConfig, preset
from rmsnorm.lm.data import Batches, Corpus, DataError
from rmsnorm.lm.evaluate import activation_rms, evaluate, windows
from rmsnorm.lm.metrics import Metrics, read
from rmsnorm.lm.model import MindForCausalLM, Output
from rmsnorm.lm.tokenizer import TokenizerError
from rmsnorm.lm.train import DivergedError, TrainError, Watch
from rmsnorm.models.files import ModelError

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


# Processes that start at once: forked from one that has imported the trainer and done no more.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["rmsnorm.lm.train"])


def words(count: int, seed: int = 0) -> str:
    source = random.Random(seed)
    lexicon = ["".join(source.choices("abcdefgh", k=source.randint(1, 6))) for _ in range(50)]
    lines = (
        " ".join(source.choices(lexicon, k=source.randint(3, 9))) for _ in range(count // 6 + 1)
    )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(words(1500), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    source = random.Random(1)
    lines = []
    for number in range(120):
        turns = [
            {"role": "user", "content": words(6, number).strip()},
            {"role": "assistant", "content": words(source.randint(1, 40), number + 500).strip()},
        ]
        lines.append(json.dumps({"conversations": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings(text: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "data": str(text),
        "model": SMALL,
        "vocab_size": 280,
        "seq_len": 16,
        "batch_size": 2,
        "steps": 12,
        "warmup": 4,
        "log_every": 4,
        "sample_every": 0,
        "tensorboard": False,
        "threads": 1,
    }
    return TrainConfig(**{**fields, **changes})


def tensors(run: Path) -> dict[str, Tensor]:
    """The weights and the optimizer's state of the newest checkpoint, and the weights beside it."""
    found = checkpoint.newest(run)
    assert found is not None
    found.verify()
    named = {}
    for path in (run / "model.safetensors", *sorted(found.folder.glob("*.safetensors"))):
        for name, tensor in checkpoint.read_tensors(path).items():
            named[f"{path.name}:{name}"] = tensor
    return named


def assert_equal_bits(one: Path, other: Path) -> None:
    expected, found = tensors(one), tensors(other)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def untimed(run: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in entry.items() if k not in timed} for entry in read(run)]


# --- what an update computes ------------------------------------------------------------------


def test_updates_are_those_of_a_plain_loop(text: Path, tmp_path: Path) -> None:
    """Written once more with torch's unfused optimizer and schedulers."""
    config = settings(text, accumulate=2, weight_decay=0.3, clip=0.5, lr=0.02, min_lr=0.001)
    train.train(config, tmp_path / "run")
    corpus = Corpus.load(tmp_path / "run" / "data")
    torch.manual_seed(config.seed)
    model = MindForCausalLM(preset("tiny", **SMALL, vocab_size=corpus.tokenizer.vocab_size))
    matrices = [p for name, p in model.named_parameters() if "norm" not in name]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert len(norms) == 5
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": norms, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.9, 0.95),
        foreach=False,
    )
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 4, 1.0, total_iters=3)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=0.001)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [4])
    batches = Batches(corpus.train, 16, 4, seed=config.seed)
    losses, rates = [], []
    for step in range(12):
        ids, labels = batches.batch(step)
        logits = model(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    found = checkpoint.read_tensors(tmp_path / "run" / "model.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.data, rtol=0, atol=2e-4)
    entries = [entry for entry in read(tmp_path / "run") if "loss" in entry]
    assert [entry["step"] for entry in entries] == [4, 8, 12]
    for entry in entries:
        step = entry["step"]
        assert entry["loss"] == pytest.approx(sum(losses[step - 4 : step]) / 4, abs=1e-4)
        assert entry["lr"] == pytest.approx(rates[step - 1])
        assert entry["tokens"] == step * 4 * 16


def test_parts_of_a_batch_count_by_their_tokens(chats: Path, tmp_path: Path) -> None:
    """With chats the parts have different numbers of labels, some none at all."""
    whole = settings(chats, batch_size=8, accumulate=1, steps=6, lr=0.01)
    parts = dataclasses.replace(whole, batch_size=1, accumulate=8)
    for name, config in (("whole", whole), ("parts", parts)):
        train.train(config, tmp_path / name)
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    for name in one:
        if name.startswith("model.safetensors"):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=3e-4)
    corpus = Corpus.load(tmp_path / "whole" / "data")
    batches = Batches(corpus.train, 16, 1, seed=0)
    counts = {int((batches.batch(number)[1] != -100).sum()) for number in range(48)}
    assert 0 in counts
    assert len(counts) > 3


@pytest.mark.parametrize(
    "change", [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}, {"compile": True}]
)
def test_other_ways_to_compute_the_same(
    text: Path, tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "compile" in change:  # the default backend would spend a minute on its C++ compiler
        calls = []
        compile_module = nn.Module.compile

        def with_eager(module: nn.Module) -> None:
            calls.append(module)
            compile_module(module, backend="eager")

        monkeypatch.setattr(nn.Module, "compile", with_eager)
    train.train(settings(text), tmp_path / "usual")
    train.train(settings(text, **change), tmp_path / "other")
    usual, other = (
        [entry for entry in read(tmp_path / name) if "loss" in entry] for name in ("usual", "other")
    )
    tolerance = 0.05 if "dtype" in change else 1e-5
    for one, two in zip(usual, other, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=tolerance)
        assert one["activation_rms"] == pytest.approx(two["activation_rms"], rel=tolerance)
    if "dtype" in change:
        assert usual[-1]["loss"] != other[-1]["loss"]
    if "compile" in change:
        assert len(calls) == 1


def test_the_loss_falls_and_the_text_is_learned(text: Path, tmp_path: Path) -> None:
    config = settings(text, steps=150, lr=0.02, batch_size=4, log_every=50)
    result = train.train(config, tmp_path / "run")
    assert result.steps == 150
    assert result.tokens == 150 * 4 * 16
    # An order-0 model of the same characters needs more.
    held_out = (tmp_path / "run" / "data" / "held_out.txt").read_bytes()
    counts = np.bincount(np.frombuffer(held_out, np.uint8))
    p = counts[counts > 0] / len(held_out)
    assert result.bits_per_byte < float(-(p * np.log2(p)).sum())
    ends = [entry for entry in read(tmp_path / "run") if "bits_per_byte" in entry]
    assert ends[-1]["bits_per_byte"] == result.bits_per_byte
    assert len(ends) == 8
    assert [entry["step"] for entry in ends][-1] == 150


def test_a_loss_that_is_no_number_ends_the_run(text: Path, tmp_path: Path) -> None:
    config = settings(text, lr=1e30, warmup=0, clip=0.0, save_every=4, eval_every=0)
    with pytest.raises(DivergedError, match="the loss is nan at step"):
        train.train(config, tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run") is None


def test_weights_that_are_no_numbers_end_the_run(text: Path, tmp_path: Path) -> None:
    config = settings(text, steps=1, lr=1e30, warmup=0, clip=0.0)
    with pytest.raises(DivergedError, match="the loss on held-out text is nan at step 1"):
        train.train(config, tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run") is None


# --- held-out text ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 30, 31, 100])
@pytest.mark.parametrize("seq_len", [1, 2, 3, 8])
def test_windows_count_every_token_once(count: int, seq_len: int) -> None:
    counted = []
    for start, first, end in windows(count, seq_len):
        assert 0 <= start <= first < end <= count
        assert end - start <= seq_len
        assert first == 0 or first - start >= seq_len // 4 or seq_len == 1
        counted += range(first, end)
    assert counted == list(range(count))


class Table(nn.Module):
    """A model whose logits depend on the last token alone."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = logits

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.table[input_ids], None, None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("seq_len", "batch_size"), [(8, 3), (5, 1), (64, 2), (200, 2)])
def test_bits_per_byte_of_a_markov_chain(seq_len: int, batch_size: int, masked: bool) -> None:
    """Summed one token at a time, with math alone."""
    source = random.Random(0)
    table = [[source.gauss(0, 2) for _ in range(6)] for _ in range(6)]
    tokens = [source.randrange(6) for _ in range(101)]
    mask = [source.randrange(2) for _ in tokens]
    total = 0.0
    for number, token in enumerate(tokens):
        row = table[tokens[number - 1] if number else 3]
        if mask[number] or not masked:
            total -= row[token] - math.log(sum(map(math.exp, row)))
    count = sum(mask) if masked else len(tokens)
    found = evaluate(
        Table(torch.tensor(table)),
        np.array(tokens, np.uint16),
        np.array(mask, np.uint8) if masked else None,
        250,
        start_id=3,
        seq_len=seq_len,
        batch_size=batch_size,
    )
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / 250, rel=1e-6)
    parts = [
        evaluate(
            Table(torch.tensor(table)),
            np.array(tokens, np.uint16),
            np.array(mask, np.uint8) if masked else None,
            250,
            start_id=3,
            seq_len=seq_len,
            batch_size=batch_size,
            mean=lambda t: t / 3,
            rank=rank,
            world=3,
        )
        for rank in range(3)
    ]
    assert sum(part.bits_per_byte for part in parts) == pytest.approx(found.bits_per_byte)


@pytest.mark.parametrize(
    "change", [{}, {"fuse_residual": False}, {"placement": "sandwich"}, {"norm": "layer"}]
)
def test_activation_rms_is_that_of_the_stream(change: dict[str, Any]) -> None:
    model = MindForCausalLM(preset("tiny", **SMALL, initializer_range=0.3, **change))
    ids = torch.arange(24)[None]
    stream = []
    plain = MindForCausalLM(dataclasses.replace(model.config, fuse_residual=False))
    plain.load_state_dict(model.state_dict())
    for block in plain.model.layers:
        block.register_forward_hook(lambda module, arguments, output: stream.append(output))
    plain(ids)
    first, last = activation_rms(model, model, ids)
    assert first == pytest.approx(plain.model.embed_tokens(ids).square().mean().sqrt().item())
    assert last == pytest.approx(stream[-1].square().mean().sqrt().item())
    assert not model.model.norm._forward_pre_hooks


# --- minutes ----------------------------------------------------------------------------------


def test_minutes_fix_the_steps_and_resume_keeps_them(text: Path, tmp_path: Path) -> None:
    config = settings(text, steps=None, minutes=0.05, warmup=20, log_every=1)
    begun = time.monotonic()
    result = train.train(config, tmp_path / "run")
    took = time.monotonic() - begun
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan == {"steps": result.steps}
    assert result.steps >= 20
    assert took < 30
    rates = [entry["lr"] for entry in read(tmp_path / "run") if "lr" in entry]
    assert rates[:20] == pytest.approx([config.lr * (step + 1) / 20 for step in range(20)])
    # As if it had been killed before the first checkpoint, on a machine that is slower now.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    shutil.rmtree(again / "checkpoints")
    result = train.train(config, again, resume=True, started=time.monotonic() - 3600)
    assert result.steps == plan["steps"]
    assert untimed(again) == untimed(tmp_path / "run")
    assert_equal_bits(again, tmp_path / "run")


def test_a_run_without_time_left_stops_after_the_timed_steps(text: Path, tmp_path: Path) -> None:
    config = settings(text, steps=None, minutes=0.001, warmup=20)
    assert train.train(config, tmp_path / "run").steps == 20


def test_the_rate_of_the_first_steps_does_not_depend_on_the_number_of_steps() -> None:
    config = TrainConfig("text", minutes=1, warmup=20)
    for step in range(20):
        rates = {config.learning_rate(step, steps) for steps in (None, 20, 21, 1000)}
        assert len(rates) == 1
    with pytest.raises(ValueError, match="expected the number of steps"):
        config.learning_rate(20, None)


# --- killed and resumed -----------------------------------------------------------------------


def test_killed_at_random_moments(text: Path, tmp_path: Path) -> None:
    """kill -9 ten times; the weights, the optimizer and the metrics are those of one run."""
    config = settings(
        text, steps=150, save_every=3, eval_every=20, sample_every=40, log_every=4, tensorboard=True
    )
    begun = time.monotonic()
    train.train(config, tmp_path / "whole")
    took = time.monotonic() - begun
    source = random.Random(time.time_ns())  # other moments in every run of this test
    run = tmp_path / "killed"
    kills = 0
    steps = []
    while kills < 10:
        process = FORKED.Process(target=train.train, args=(config, run), kwargs={"resume": True})
        process.start()
        process.join(source.uniform(0.0, 0.5 * took + 1.0))
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
        else:
            assert process.exitcode == 0
            shutil.rmtree(run)  # it was complete: begin anew
        found = checkpoint.newest(run)
        steps.append(found.step if found else 0)
    result = train.train(config, run, resume=True)
    assert result.steps == 150, steps
    assert_equal_bits(tmp_path / "whole", run)
    assert untimed(run) == untimed(tmp_path / "whole")
    assert {path.name for path in run.iterdir() if path.name.startswith(".")} <= {
        ".metrics.jsonl.unfinished",
        ".train.toml.unfinished",
        ".mind.json.unfinished",
    }


class Stopped(BaseException):
    """Stands for the end of the process."""


class StopAt(Watch):
    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, entry: Mapping[str, Any]) -> None:
        if entry["step"] >= self.at:
            raise Stopped


def stopped(config: TrainConfig, run: Path, step: int) -> None:
    with pytest.raises(Stopped):
        train.train(config, run, watch=StopAt(step))


def test_between_checkpoints_lines_are_not_doubled(text: Path, tmp_path: Path) -> None:
    config = settings(text, steps=20, save_every=5, log_every=3, eval_every=6)
    train.train(config, tmp_path / "whole")
    run = tmp_path / "run"
    stopped(config, run, 15)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "los')  # torn by the end of the process
    assert [entry["step"] for entry in read(run)][-1] == 15
    train.train(config, run, resume=True)
    assert untimed(run) == untimed(tmp_path / "whole")
    assert_equal_bits(tmp_path / "whole", run)


def test_the_parts_of_a_step_may_change(text: Path, tmp_path: Path) -> None:
    config = settings(text, steps=12, save_every=4, batch_size=4)
    run = tmp_path / "run"
    stopped(config, run, 8)
    train.train(dataclasses.replace(config, batch_size=2, accumulate=2), run, resume=True)
    train.train(config, tmp_path / "whole")
    one, other = tensors(tmp_path / "whole"), tensors(run)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=3e-4)
    stopped(config, tmp_path / "more", 8)
    with pytest.raises(TrainError, match="8 sequences in a step"):
        train.train(dataclasses.replace(config, accumulate=2), tmp_path / "more", resume=True)


def test_a_complete_run_gives_its_result_again(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train.train(settings(text), run)
    lines = (run / "metrics.jsonl").read_text()
    assert train.train(settings(text), run, resume=True) == first
    assert (run / "metrics.jsonl").read_text() == lines
    (run / "metrics.jsonl").unlink()
    assert train.train(settings(text), run, resume=True) == first


def test_random_numbers_and_threads_of_the_caller_are_left(text: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    train.train(settings(text, threads=1), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


# --- ranks ------------------------------------------------------------------------------------

RANK = """
import os
os.environ.update(RANK="{rank}", WORLD_SIZE="{world}", LOCAL_RANK="{rank}", MASTER_PORT="{port}",
                  MASTER_ADDR="127.0.0.1")
from pathlib import Path
from rmsnorm.lm.config import TrainConfig
from rmsnorm.lm.train import train
train(TrainConfig.from_toml({toml!r}), Path({run!r}), resume={resume})
"""


def on_ranks(world: int, config: TrainConfig, run: Path, resume: bool = False) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    facts = {"world": world, "port": port, "toml": config.to_toml(), "run": str(run)}
    processes = [
        FORKED.Process(target=exec, args=(RANK.format(rank=rank, resume=resume, **facts),))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * world


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_ranks_compute_what_one_does_and_their_number_may_change(
    text: Path, tmp_path: Path, kind: str
) -> None:
    model = {**SMALL, "num_key_value_heads": 2}
    alone = settings(text, model=model, batch_size=2, steps=8, save_every=4, log_every=1, lr=0.01)
    train.train(alone, tmp_path / "alone")
    copies = 1 if kind == "tp" else 2
    config = dataclasses.replace(alone, batch_size=2 // copies, parallel=kind)
    run = tmp_path / "ranks"
    on_ranks(2, config, run)
    expected, found = untimed(tmp_path / "alone"), untimed(run)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        for name in {"loss", "grad_norm", "held_out_loss", "bits_per_byte"} & set(one):
            assert other[name] == pytest.approx(one[name], abs=1e-4), name
    weights = checkpoint.read_tensors(tmp_path / "alone" / "model.safetensors")
    for name, tensor in checkpoint.read_tensors(run / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-3)
    # As if all had been killed in step 5; one rank goes on alone.
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    on_ranks(1, dataclasses.replace(config, batch_size=2), run, resume=True)
    for one, other in zip(expected, untimed(run), strict=True):
        for name in {"loss", "held_out_loss", "bits_per_byte"} & set(one):
            assert other[name] == pytest.approx(one[name], abs=1e-4), name


def test_ranks_need_torchrun(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="start it by `torchrun"):
        train.train(settings(text, parallel="ddp"), tmp_path / "run")


# --- refused ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped; copied before it is used."""
    run = tmp_path_factory.mktemp("half") / "run"
    stopped(settings(text, save_every=4), run, 8)
    return run


def test_a_run_is_not_overwritten(half: Path, text: Path, tmp_path: Path) -> None:
    before = (half / "metrics.jsonl").read_bytes()
    with pytest.raises(TrainError, match="holds a run already; expected another folder"):
        train.train(settings(text), half)
    assert (half / "metrics.jsonl").read_bytes() == before
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    for resume in (False, True):
        with pytest.raises(TrainError, match=r"holds no run, but mother\.txt"):
            train.train(settings(text), tmp_path / "letters", resume=resume)
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["mother.txt"]
    with pytest.raises(TrainError, match="is not a folder"):
        train.train(settings(text), text)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.5), ("steps", 13), ("seed", 1), ("seq_len", 8), ("model", {})]
)
def test_other_settings_are_refused(half: Path, text: Path, name: str, value: Any) -> None:
    with pytest.raises(TrainError, match=f"^{name} is .*; expected .*, with which the run in"):
        train.train(settings(text, save_every=4, **{name: value}), half, resume=True)


def changed_text(run: Path, text: Path) -> None:
    (run.parent / "text.txt").write_text(words(1500, seed=3))


def foreign_tokenizer(run: Path, text: Path) -> None:
    config = settings(run.parent / "other.txt", vocab_size=270, steps=1)
    (run.parent / "other.txt").write_text(words(900, seed=9))
    train.train(config, run.parent / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.parent / "other" / name, run / name)


def foreign_model(run: Path, text: Path) -> None:
    fields = json.loads((run / "mind.json").read_text())
    (run / "mind.json").write_text(json.dumps({**fields, "rope_theta": 2.0}))


def truncated(run: Path, text: Path) -> None:
    path = run / "checkpoints" / "step-00000004" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def tampered(run: Path, text: Path) -> None:
    path = run / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def without_settings(run: Path, text: Path) -> None:
    (run / "train.toml").write_text("steps = ")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (changed_text, TrainError, "has changed, or is other text; expected what the run in"),
        (foreign_tokenizer, TrainError, r"tokenizer\.json is another model's; expected the"),
        (foreign_model, TrainError, r"mind\.json has changed; expected the model of"),
        (truncated, CheckpointError, r"optimizer\.safetensors has \d+ bytes; expected \d+"),
        (tampered, CheckpointError, r"model\.safetensors was changed: its SHA-256"),
        (without_settings, TrainError, r"train\.toml: not TOML"),
    ],
)
def test_damaged_runs_are_refused(
    half: Path, text: Path, tmp_path: Path, change: Any, error: Any, message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(half, run)
    shutil.copy(text, tmp_path / "text.txt")
    change(run, text)
    with pytest.raises(error, match=message):
        train.train(settings(tmp_path / "text.txt", save_every=4), run, resume=True)


def test_a_checkpoint_that_is_damaged_can_be_removed(
    half: Path, text: Path, tmp_path: Path
) -> None:
    config = settings(text, save_every=4)
    run = tmp_path / "run"
    shutil.copytree(half, run)
    tampered(run, text)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    train.train(config, run, resume=True)
    train.train(config, tmp_path / "whole")
    assert_equal_bits(run, tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": "no/such"}, DataError, "no such file"),
        ({"preset": "huge"}, ConfigError, "preset is 'huge'; expected one of tiny"),
        ({"model": {"hiden": 3}}, ConfigError, "unknown field 'hiden'"),
        ({"seq_len": 65}, ConfigError, "seq_len is 65; expected at most the model's"),
        (
            {"vocab_size": None, "tokenizer": "no/such"},
            TokenizerError,
            "no/such: no tokenizer here",
        ),
        ({"vocab_size": None, "model": {}, "init": "no/such"}, ModelError, "does not exist"),
    ],
)
def test_bad_settings(
    text: Path, tmp_path: Path, change: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        train.train(settings(text, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_share_a_folder(text: Path, tmp_path: Path) -> None:
    class Second(Watch):
        def begin(self, step: int, steps: int | None) -> None:
            with pytest.raises(TrainError, match=f"another process is training in {tmp_path}"):
                train.train(settings(text), tmp_path, resume=True)

    result = train.train(settings(text), tmp_path, watch=Second())
    assert result.steps == 12
    train.train(settings(text), tmp_path, resume=True)  # let go at the end


def test_a_run_inside_its_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words(900))
    run = tmp_path / "runs" / "first"
    with pytest.raises(TrainError, match="is inside the folder of the text"):
        train.train(settings(tmp_path), run)
    assert not run.exists()


def test_too_short_a_text_can_be_corrected(tmp_path: Path) -> None:
    path, run = tmp_path / "text.txt", tmp_path / "run"
    path.write_text("a\nb\n")
    with pytest.raises(DataError, match="too short"):
        train.train(settings(path), run)
    path.write_text(words(900))
    train.train(settings(path, steps=1), run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "either steps or minutes"),
        ({"minutes": 3}, "either steps or minutes"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"steps": 1.5}, "steps is 1.5; expected int"),
        ({"steps": None, "minutes": 1, "warmup": 19}, "warmup is 19; expected at least 20"),
        ({"lr": 0.0}, "lr is 0.0; expected more than 0"),
        ({"lr": math.nan}, "lr is nan; expected more than 0"),
        ({"lr": 10**400}, "lr is 1000"),
        ({"seed": 2**62}, "seed is 4611686018427387904; expected"),
        ({"threads": 2**40}, "threads is 1099511627776; expected"),
        ({"data": "\udcff.txt"}, r"data is '\\udcff\.txt'; expected Unicode"),
        ({"min_lr": 1}, "min_lr is 1.0; expected at most lr"),
        ({"beta2": 1.0}, "beta2 is 1.0; expected 0 or more, below 1"),
        ({"held_out": 0.0}, "held_out is 0.0; expected more than 0"),
        ({"held_out": 0.6}, "held_out is 0.6; expected more than 0 and at most 0.5"),
        ({"dtype": "float16"}, "dtype is 'float16'; expected one of auto, float32"),
        ({"lora_rank": 4}, "lora_rank needs init"),
        ({"init": "x", "preset": "tiny"}, "preset and init were both given"),
        ({"init": "x", "vocab_size": 300}, "vocab_size and init were both given"),
        ({"init": "x", "tokenizer": "y"}, "tokenizer and init were both given"),
        ({"init": "x", "model": {"norm": "rms"}}, "model has 'norm', but init has its own"),
        ({"tokenizer": "x", "vocab_size": 300}, "vocab_size and tokenizer were both given"),
        ({"model": {"vocab_size": 300}}, "expected it beside the table"),
        ({"model": "tiny"}, "expected a table"),
        ({"init": "x", "lora_rank": 2, "parallel": "ddp"}, "lora_rank needs 'none'"),
        ({"compile": True, "parallel": "tp"}, "compile was given with parallel 'tp'"),
        ({"model_parallel": 2}, "model_parallel needs parallel 'tp'; it is 'none'"),
    ],
)
def test_settings_that_mean_nothing(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"data": "text", "steps": 5, **change})


def test_settings_survive_toml() -> None:
    config = TrainConfig(
        'a "text"\n\\ \x7f \U0001f600.txt',
        model={"norm": "partial", "partial": 0.25, "qk_norm": True, "hidden_size": 64},
        minutes=2,
        lr=1e-5,
        threads=3,
    )
    assert TrainConfig.from_toml(config.to_toml()) == config
    for text, message in (
        ("data = ", "not TOML"),
        ("lr = 1.0", "data is missing"),
        ('data = "x"\nrate = 1', "unknown field 'rate'"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig.from_toml(text)


# --- metrics ----------------------------------------------------------------------------------


def test_tensorboard_has_what_the_lines_have(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings(text, tensorboard=True, save_every=5, sample_every=6)
    run = tmp_path / "run"
    stopped(config, run, 8)
    train.train(config, run, resume=True)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("loss", "grad_norm", "bits_per_byte"):
        expected = [(entry["step"], entry[name]) for entry in read(run) if name in entry]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
    assert "activation_rms/1" in events.Tags()["scalars"]
    assert any("sample" in tag for tag in events.Tags()["tensors"])


def test_lines_with_separators_within(tmp_path: Path) -> None:
    entries = [{"step": 1, "sample": "a\u2028b\u0085c\nd"}, {"step": 2, "loss": 1.0}]
    metrics = Metrics(tmp_path, 0)
    for entry in entries:
        metrics.write(entry)
    metrics.close()
    assert read(tmp_path) == entries
    Metrics(tmp_path, 2).close()
    assert read(tmp_path) == entries


# --- from another model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    train.train(settings(text, steps=30, lr=0.01), run)
    return run


def test_going_on_from_a_model(base: Path, text: Path, tmp_path: Path) -> None:
    config = settings(text, init=str(base), model={}, vocab_size=None, lr=1e-12, steps=4)
    result = train.train(config, tmp_path / "run")
    before = [entry for entry in read(base) if "bits_per_byte" in entry][-1]
    assert result.bits_per_byte == pytest.approx(before["bits_per_byte"], rel=1e-5)
    # Everything that is needed is in the run's own folder by now.
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    gone = dataclasses.replace(config, init=str(tmp_path / "gone"))
    (tmp_path / "copy" / "train.toml").write_text(gone.to_toml())
    assert train.train(gone, tmp_path / "copy", resume=True) == result


def test_lora(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    other = tmp_path / "other.txt"
    other.write_text(words(1500, seed=7))
    config = TrainConfig(
        **{
            **{"data": str(other), "init": str(base), "lora_rank": 3, "steps": 12, "lr": 0.02},
            **{"warmup": 2, "seq_len": 16, "batch_size": 2, "log_every": 4, "save_every": 4},
            **{"threads": 1, "tensorboard": False},
        }
    )
    train.train(config, tmp_path / "whole")
    run = tmp_path / "run"
    stopped(config, run, 8)
    train.train(config, run, resume=True)
    assert_equal_bits(tmp_path / "whole", run)
    assert untimed(run) == untimed(tmp_path / "whole")
    losses = [entry["loss"] for entry in untimed(run) if "loss" in entry]
    assert losses[-1] < losses[0]
    trained = {
        name.rpartition(":")[0].partition(":")[2]
        for name in tensors(run)
        if name.startswith("optimizer")
    }
    assert trained
    assert all(".lora_" in name for name in trained)
    # What plain peft makes of the base model, in plain transformers, and the adapter.
    tuned, _ = convert.load(run)
    convert.export(convert.load(base)[0], None, tmp_path / "hf")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(40)[None] * 7 % tuned.config.vocab_size
    before = plain(ids).logits
    adapted = peft.PeftModel.from_pretrained(plain, str(run / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, tuned(ids).logits, rtol=0, atol=1e-5)
        assert (before - tuned(ids).logits).abs().max() > 0.01
    content = bytearray((run / "base.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "base.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"base\.safetensors was changed"):
        train.train(config, run, resume=True)
