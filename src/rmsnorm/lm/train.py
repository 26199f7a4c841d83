"""Trains a language model on text, in a folder from which it can go on after being killed.

The folder of a run: ``train.toml`` (the settings), ``mind.json`` (the model), the tokenizer,
``data/`` (the packed text), ``plan.json`` (how many steps, where minutes were asked for),
``metrics.jsonl``, ``tensorboard/``, ``checkpoints/`` and, at the end, ``model.safetensors`` with
``config.json`` for transformers.

Every update is a function of the one before it and of its number, so a run that is killed and
resumed ends with the same bits as one that is not, on the same machine, with as many threads.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.lm import checkpoint, convert, lora
from rmsnorm.lm.checkpoint import Checkpoint, CheckpointError
from rmsnorm.lm.config import TIMED_STEPS, TRAIN_FILE, ConfigError, TrainConfig
from rmsnorm.lm.data import Batches, Corpus, prepare
from rmsnorm.lm.evaluate import activation_rms, evaluate
from rmsnorm.lm.generate import generate
from rmsnorm.lm.metrics import Metrics
from rmsnorm.lm.metrics import read as read_metrics
from rmsnorm.lm.model import IGNORED, MindForCausalLM
from rmsnorm.lm.parallel import Parallel
from rmsnorm.lm.tokenizer import Tokenizer
from rmsnorm.lm.watch import Watch
from rmsnorm.models.files import sha256
from rmsnorm.optim import no_decay

_PLAN, _DATA = "plan.json", "data"
_RANKS = "ranks"
_BASE, _ADAPTER, _ADAPTER_WEIGHTS = "base.safetensors", "adapter", "adapter.safetensors"

# What may be changed when a run goes on, since no weight depends on it. How many sequences a step
# has does matter; how they are divided over forward passes and ranks changes last bits only.
_CHANGEABLE = (
    "data",
    "batch_size",
    "accumulate",
    "log_every",
    "eval_every",
    "save_every",
    "sample_every",
    "tensorboard",
    "threads",
    "model_parallel",
)
# Held out of the minutes for the last checkpoint and the export: a part, and some seconds.
_RESERVE, _RESERVE_SECONDS = 0.02, 2.0
# A forward pass without its backward pass takes about a third of a training step.
_FORWARD = 0.35
# Of a run that does not say how often.
_EVALUATIONS = 8
_PROMPT, _SAMPLE = 16, 64


class TrainError(ValueError):
    """A run that cannot be started or continued as asked."""


class DivergedError(RuntimeError):
    """The loss is not a number any more."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        steps: updates in all.
        tokens: that were read, in all.
        seconds: spent in updates, in all.
        held_out_loss: at the end, in nats for a token.
        bits_per_byte: at the end, on the held-out text.
        xz_bits_per_byte: what ``xz -9e`` needs for that text.
    """

    steps: int
    tokens: int
    seconds: float
    held_out_loss: float
    bits_per_byte: float
    xz_bits_per_byte: float


def train(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    started: float | None = None,
    watch: Watch | None = None,
) -> Result:
    """Train as ``config`` says, in the folder ``out``.

    Args:
        config: the run.
        out: its folder: new, or empty, or, with ``resume``, that of a run.
        resume: continue the run in ``out``; begin it if there is none yet.
        started: when the minutes began, of ``time.monotonic()``; now, if ``None``.
        watch: is told what happens.

    Returns:
        How it ended.

    Raises:
        TrainError: ``out`` holds something else, or a run of other settings or other text.
        DivergedError: the loss became infinite or not a number.
        CheckpointError: the newest checkpoint is damaged or of another model.
        ConfigError: settings that do not fit each other.
        DataError: text that nothing can be learned from.
        TokenizerError: a tokenizer that cannot be read.
        ModelError: ``init`` is no model.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder, "text.txt")
        ...     _ = text.write_text("In the beginning was the Word.\\n" * 100)
        ...     config = TrainConfig(
        ...         str(text), steps=2, vocab_size=280, seq_len=16, tensorboard=False,
        ...         model={"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32},
        ...     )
        ...     train(config, Path(folder, "run")).steps
        2
    """
    started = time.monotonic() if started is None else started
    parallel = Parallel.start(config.parallel, config.model_parallel)
    try:
        with _process(config), contextlib.ExitStack() as held:
            run = _Run(config, Path(out), parallel, resume, started, watch or Watch(), held)
            return run.train()
    finally:
        parallel.stop()


def has_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16; without them it is slower."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in asked)


@contextlib.contextmanager
def _process(config: TrainConfig) -> Iterator[None]:
    """What a run sets in the whole process, undone at its end."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if _device(config).type == "cuda":
        # Some CUDA kernels add in any order otherwise.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
    try:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _device(config: TrainConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no such device")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class _Run:
    """A run: its folder, what it learns from, the model, and how far it is."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        parallel: Parallel,
        resume: bool,
        started: float,
        watch: Watch,
        held: contextlib.ExitStack,
    ) -> None:
        self.config = config
        self.out = out
        self.parallel = parallel
        self.started = started
        self.watch = watch
        self.held = held
        self.distributed = config.parallel != "none"
        self.device = parallel.device if self.distributed else _device(config)
        is_new = self._open(resume)
        found = checkpoint.newest(out)
        if found is not None:
            watch.say("checking the checkpoint")
            found.verify()
        try:
            model = self._prepare(found)
        except ValueError:
            if is_new:
                _forget(out)  # so that the same folder can be named once more
            raise
        self._build(model)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        # Of the updates since the last line of metrics.jsonl.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.loss_count = 0
        self.evaluation: dict[str, Any] | None = None
        self.metrics: Metrics | None = None
        self.steps = config.steps if config.steps is not None else _read_plan(out)
        if found is not None:
            self._restore(found)

    # --- the folder -----------------------------------------------------------------------------

    def _open(self, resume: bool) -> bool:
        """Make the folder, or see that it is one that this run may go on in.

        Returns:
            Whether this process begins the run, and owns what is in the folder.
        """
        path = self.out / TRAIN_FILE
        is_new = self.parallel.is_main and not path.exists()
        if self.parallel.is_main:
            text = Path(self.config.data)
            if text.is_dir() and text.resolve() in self.out.resolve().parents:
                raise TrainError(
                    f"{self.out} is inside the folder of the text, {text}; expected another place, "
                    "since the run would learn from its own files"
                )
            if path.is_file():
                if not resume:
                    raise TrainError(
                        f"{self.out} holds a run already; expected another folder, or --resume to "
                        "continue it"
                    )
            elif self.out.exists():
                if not self.out.is_dir():
                    raise TrainError(f"{self.out} is not a folder; expected one, or a new name")
                there = sorted(p.name for p in self.out.iterdir() if not p.name.startswith("."))
                if there:
                    raise TrainError(
                        f"{self.out} holds no run, but {there[0]}; expected an empty folder or a "
                        "new name"
                    )
            self.out.mkdir(parents=True, exist_ok=True)
            self.held.enter_context(_locked(self.out))
            if not is_new:
                _check_same(self.config, path)
                checkpoint.clean(self.out)
            checkpoint.write_atomically(path, self.config.to_toml())
        self.parallel.barrier()
        return is_new

    def _prepare(self, found: Checkpoint | None) -> MindForCausalLM:
        """The packed text, and the model as it was before the first update."""
        config = self.config
        model: MindForCausalLM | None = None
        tokenizer: Tokenizer | None = None
        wanted = config.model_config() if config.init is None else None  # refused before long work
        if found is not None and (config.init or config.tokenizer):
            tokenizer = Tokenizer.load(self.out)
        elif config.init is not None:
            model, tokenizer = convert.load(config.init, torch.float32, say=self.watch.say)
        elif config.tokenizer is not None:
            tokenizer = Tokenizer.load(config.tokenizer)
        if self.parallel.is_main:
            self.corpus = prepare(
                config.data,
                self.out / _DATA,
                tokenizer,
                0 if wanted is None else wanted.vocab_size,
                held_out=config.held_out,
                seq_len=config.seq_len,
                say=self.watch.say,
            )
        self.parallel.barrier()
        if not self.parallel.is_main:
            self.corpus = Corpus.load(self.out / _DATA)
        if found is not None:
            self._check_belongs(found)
            model = MindForCausalLM(convert.read_config(self.out / convert.MIND))
        elif model is None:
            model = MindForCausalLM(config.model_config(self.corpus.tokenizer.vocab_size))
        if model.config.max_position_embeddings < config.seq_len:
            raise ConfigError(
                f"seq_len is {config.seq_len}; expected at most the model's "
                f"max_position_embeddings, {model.config.max_position_embeddings}"
            )
        if self.parallel.is_main and found is None:
            self.corpus.tokenizer.save(self.out)
            checkpoint.write_atomically(
                self.out / convert.MIND, json.dumps(model.config.to_dict(), indent=1) + "\n"
            )
        return model

    def _check_belongs(self, found: Checkpoint) -> None:
        """Refuse a checkpoint of other text, another tokenizer, another model or batch."""
        state, out = found.state, self.out
        tokenizer = Tokenizer.load(out)
        if tokenizer.fingerprint != state.get("tokenizer"):
            raise TrainError(
                f"{out / 'tokenizer.json'} is another model's; expected the tokenizer that "
                f"{found.folder} was trained with"
            )
        if self.corpus.fingerprint != state.get("data"):
            raise TrainError(
                f"{self.config.data} has changed, or is other text; expected what the run in {out} "
                "has learned from so far"
            )
        if convert.read_config(out / convert.MIND).to_dict() != state.get("model"):
            raise TrainError(
                f"{out / convert.MIND} has changed; expected the model of {found.folder}"
            )
        if self._sequences() != state.get("sequences"):
            raise TrainError(
                f"{self._sequences()} sequences in a step (batch_size x accumulate x ranks); "
                f"expected {state.get('sequences')}, as the run in {out} began"
            )
        if state.get("distributed") != self.distributed:
            kind = "ddp, fsdp or tp" if state.get("distributed") else "none"
            raise TrainError(f"parallel is {self.config.parallel!r}; {found.folder} needs {kind}")
        threads = state.get("threads")
        if threads != torch.get_num_threads():
            self.watch.note(
                f"the run had {threads} threads and now has {torch.get_num_threads()}: last bits "
                "may differ"
            )

    # --- the model ------------------------------------------------------------------------------

    def _build(self, model: MindForCausalLM) -> None:
        config = self.config
        self.adapted: Any = None
        if config.lora_rank:
            self._set_base(model)
            self.adapted = lora.add(model, config.lora_rank, config.lora_alpha, config.init or "")
        self.inner = model.to(self.device)
        self.inner.gradient_checkpointing = config.gradient_checkpointing
        self.model: nn.Module = self.parallel.wrap(self.inner).train()
        exempt = set(no_decay(self.model))
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in trained if name not in exempt]},
            {"params": [p for name, p in trained if name in exempt], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        if config.compile:
            self.model.compile()
        half = self.device.type == "cuda" or has_bfloat16()
        self.bfloat16 = config.dtype == "bfloat16" or (config.dtype == "auto" and half)
        self.batches = Batches(
            self.corpus.train, config.seq_len, config.batch_size, seed=config.seed
        )

    def _set_base(self, model: MindForCausalLM) -> None:
        """Keep the weights that are added to in the run's folder, or take them from there."""
        path = self.out / _BASE
        if checkpoint.newest(self.out) is not None:
            checkpoint.load_weights(model, checkpoint.read_tensors(path), path)
        else:
            temporary = path.with_name(f".{path.name}.unfinished")
            checkpoint.write_tensors(temporary, checkpoint.weights(model))
            temporary.replace(path)
        self.base = sha256(path)

    def _sequences(self) -> int:
        return self.config.batch_size * self.config.accumulate * self.parallel.data_world

    def _restore(self, found: Checkpoint) -> None:
        self.watch.say("loading the checkpoint")
        state, folder = found.state, found.folder
        if self.distributed:
            self.parallel.load(folder / _RANKS, self.model, self.optimizer)
        else:
            if self.adapted is None:
                path = folder / checkpoint.MODEL
                checkpoint.load_weights(self.inner, checkpoint.read_tensors(path), path)
            else:
                if self.base != state.get("base"):
                    raise CheckpointError(f"{self.out / _BASE} was changed since the run began")
                path = folder / _ADAPTER_WEIGHTS
                checkpoint.load_weights(
                    self.inner, checkpoint.read_tensors(path), path, trained=True
                )
            path = folder / checkpoint.OPTIMIZER
            tensors = checkpoint.read_tensors(path)
            checkpoint.load_optimizer(self.inner, self.optimizer, tensors, path)
        try:
            self.step, self.tokens = found.step, int(state["tokens"])
            self.seconds = float(state["seconds"])
            self.loss_sum.fill_(float(state["loss"]))
            self.loss_count = int(state["losses"])
            if self.steps is None:
                self.steps = int(state["steps"])
            _set_random(state["random"])
        except (
            *(KeyError, TypeError, ValueError),
            *(AttributeError, OverflowError, RuntimeError),
        ) as error:
            raise CheckpointError(f"{folder / checkpoint.STATE}: {error!r}") from None

    # --- updates --------------------------------------------------------------------------------

    def train(self) -> Result:
        config, parallel = self.config, self.parallel
        parallel.barrier()
        self.metrics = self._open_metrics()
        self.watch.begin(self.step, self.steps)
        durations: list[float] = []
        mark, marked = time.perf_counter(), self.tokens
        with contextlib.closing(self.metrics) if self.metrics else contextlib.nullcontext():
            while self.steps is None or self.step < self.steps:
                began = time.perf_counter()
                ids, norm = self._update()
                if self.steps is None:
                    self._synchronize()
                    durations.append(time.perf_counter() - began)
                    if self.step >= TIMED_STEPS:
                        self._plan(durations)
                last = self.step == self.steps
                if last or self.step % config.log_every == 0:
                    entry = self._measure(ids, norm)
                    now = time.perf_counter()
                    self.seconds += now - mark
                    entry["tokens_per_second"] = round((self.tokens - marked) / (now - mark), 1)
                    entry["seconds"] = round(self.seconds, 3)
                    mark, marked = now, self.tokens
                    self._write(entry)
                    self.watch.step(entry)
                paused = time.perf_counter()
                self._between(last)
                mark += time.perf_counter() - paused
            return self._finish()

    def _open_metrics(self) -> Metrics | None:
        if not self.parallel.is_main:
            return None
        try:
            return Metrics(self.out, self.step, tensorboard=self.config.tensorboard)
        except ModuleNotFoundError:
            self.watch.note("tensorboard is not installed: metrics.jsonl only")
            return Metrics(self.out, self.step)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(entry)

    def _update(self) -> tuple[Tensor, Tensor]:
        """One update; a row of its tokens, and the norm of its gradient."""
        config, parallel = self.config, self.parallel
        rate = config.learning_rate(self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = [
            self.batches.batch(
                self.step * config.accumulate + number, parallel.data_rank, parallel.data_world
            )
            for number in range(config.accumulate)
        ]
        shares = self._shares([labels for _, labels in parts])
        for number, ((ids, labels), share) in enumerate(zip(parts, shares, strict=True)):
            ids, labels = (part.to(self.device, non_blocking=True) for part in (ids, labels))
            with parallel.no_sync(self.model, number == config.accumulate - 1):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
                    loss = self.model(ids, labels=labels).loss
                if share != 1.0:
                    loss = loss * share
                loss.backward()
            self.loss_sum += loss.detach()
        norm = parallel.clip(self.model, config.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_count += 1
        self.step += 1
        self.tokens += self._sequences() * config.seq_len
        return ids[:1], norm

    def _shares(self, labels: list[Tensor]) -> list[float]:
        """What the mean loss of each part counts, so that every token of the step counts the same.

        The ranks' gradients are averaged afterwards.
        """
        if self.corpus.train.mask is None:
            return [1.0 / len(labels)] * len(labels)
        counts = [int((part != IGNORED).sum()) for part in labels]
        total = torch.tensor(float(sum(counts)), dtype=torch.float64, device=self.device)
        mean = max(1.0, self.parallel.mean(total).item())
        for part, count in zip(labels, counts, strict=True):
            if count == 0:
                part[0, 0] = 0  # the mean over no labels is no number; this one counts 0 times
        return [count / mean for count in counts]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _plan(self, durations: list[float]) -> None:
        """Fix the number of steps, from what the last ones have taken and what is left."""
        assert self.config.minutes is not None
        # The first steps allocate, and compile.
        timed = durations[5:] if len(durations) > 5 else durations
        left = self.config.minutes * 60 - (time.monotonic() - self.started)
        facts = torch.tensor(
            [sum(timed) / len(timed), left], dtype=torch.float64, device=self.device
        )
        duration, left = self.parallel.mean(facts).tolist()
        held_out = len(self.corpus.held_out) * 4 / 3 / (self._sequences() * self.config.seq_len)
        evaluations = _EVALUATIONS if self.config.eval_every is None else 1
        left = left * (1 - _RESERVE) - _RESERVE_SECONDS
        updates = left / duration - evaluations * held_out * _FORWARD
        if self.config.eval_every:
            updates /= 1 + held_out * _FORWARD / self.config.eval_every
        self.steps = self.step + max(0, int(updates))
        if self.parallel.is_main:
            checkpoint.write_atomically(self.out / _PLAN, json.dumps({"steps": self.steps}) + "\n")
        self.parallel.barrier()
        self.watch.begin(self.step, self.steps)

    def _measure(self, ids: Tensor, norm: Tensor) -> dict[str, Any]:
        """What is known about the updates since the last line, and about this one."""
        loss = self.parallel.mean(self.loss_sum / self.loss_count).item()
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} at step {self.step}; a lower lr or a longer warmup may help"
            )
        self.loss_sum.zero_()
        self.loss_count = 0
        with self._eager():
            scales = activation_rms(self.model, self.inner, ids)
        return {
            "step": self.step,
            "loss": loss,
            "lr": self.config.learning_rate(self.step - 1, self.steps),
            "grad_norm": float(norm),
            "activation_rms": list(scales),
            "tokens": self.tokens,
        }

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        """Other shapes and hooks must not make torch.compile compile once more."""
        with contextlib.ExitStack() as stack:
            if self.config.compile:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(
                torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)
            )
            yield

    # --- between updates ------------------------------------------------------------------------

    def _between(self, last: bool) -> None:
        """Evaluate, write a sample, save, if it is time."""
        config = self.config
        if self.steps is None or (config.minutes is not None and self.step < TIMED_STEPS):
            return  # nothing disturbs the timed steps, and a resumed run does the same
        every = config.eval_every
        if every is None:
            every = math.ceil(self.steps / _EVALUATIONS)
        evaluates = last or _due(self.step, every)
        if evaluates:
            self.evaluation = self._evaluate()
            self._write(self.evaluation)
            self.watch.held_out(self.evaluation)
        samples = evaluates if config.sample_every is None else _due(self.step, config.sample_every)
        if samples:
            self._sample()
        every = config.save_every or min(200, math.ceil(self.steps / 20))
        if last or _due(self.step, every):
            self._save()

    def _evaluate(self) -> dict[str, Any]:
        config, parallel, corpus = self.config, self.parallel, self.corpus
        self.watch.say("evaluating")
        with self._eager():
            found = evaluate(
                self.model,
                corpus.held_out.tokens,
                corpus.held_out.mask,
                corpus.held_out.bytes,
                start_id=corpus.tokenizer.eos_id,
                seq_len=config.seq_len,
                batch_size=config.batch_size,
                device=self.device,
                mean=parallel.mean,
                rank=parallel.data_rank,
                world=parallel.data_world,
            )
        if not math.isfinite(found.loss):
            raise DivergedError(
                f"the loss on held-out text is {found.loss} at step {self.step}; a lower lr or a "
                "longer warmup may help"
            )
        return {
            "step": self.step,
            "held_out_loss": found.loss,
            "bits_per_byte": found.bits_per_byte,
            "xz_bits_per_byte": corpus.xz_bits_per_byte,
        }

    def _sample(self) -> None:
        if self.config.parallel not in ("none", "ddp"):
            return  # there the ranks would have to write together
        if self.parallel.is_main:
            tokenizer = self.corpus.tokenizer
            prompt = [int(token) for token in self.corpus.held_out.tokens[:_PROMPT]]
            room = self.inner.config.max_position_embeddings - len(prompt)
            with self._eager():
                [written] = generate(
                    self.inner,
                    [prompt],
                    max_new_tokens=min(_SAMPLE, room),
                    temperature=0.8,
                    top_p=0.95,
                    seed=self.config.seed,
                    tokenizer=tokenizer,
                    eos_ids=[tokenizer.eos_id],
                )
            before = tokenizer.decode(prompt)
            self._write({"step": self.step, "prompt": before, "sample": written.text})
            self.watch.sample(self.step, before, written.text)
        self.parallel.barrier()

    def _save(self) -> None:
        if not math.isfinite(float(self.loss_sum)):
            raise DivergedError(f"the loss is not finite at step {self.step}; nothing is saved")
        if self.metrics is not None:
            self.metrics.sync()
        state = {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "loss": float(self.loss_sum),
            "losses": self.loss_count,
            "random": _random(),
            "threads": torch.get_num_threads(),
            "sequences": self._sequences(),
            "distributed": self.distributed,
            "tokenizer": self.corpus.tokenizer.fingerprint,
            "data": self.corpus.fingerprint,
            "model": self.inner.config.to_dict(),
            "torch": torch.__version__,
        }
        if self.distributed:
            self._save_distributed(state)
            return
        if self.adapted is not None:
            state["base"] = self.base

        def write(folder: Path) -> None:
            checkpoint.write_tensors(folder / checkpoint.MODEL, self._weights())
            checkpoint.write_tensors(
                folder / checkpoint.OPTIMIZER,
                checkpoint.optimizer_tensors(self.inner, self.optimizer),
            )
            if self.adapted is not None:
                trained = checkpoint.weights(self.inner, trained=True)
                checkpoint.write_tensors(folder / _ADAPTER_WEIGHTS, trained)

        checkpoint.save(self.out, self.step, write, state)

    def _save_distributed(self, state: dict[str, Any]) -> None:
        """Every rank writes its part; then the first makes it a checkpoint."""
        weights = self._weights()
        folder = checkpoint.temporary(self.out, self.step)
        ranks = folder / _RANKS
        if self.parallel.is_main:
            checkpoint.begin(self.out, self.step)
            checkpoint.write_tensors(folder / checkpoint.MODEL, weights)
            ranks.mkdir()
        self.parallel.barrier()
        self.parallel.save(ranks, self.model, self.optimizer, {})
        if self.parallel.is_main:
            checkpoint.seal(ranks, self.step, {})
            checkpoint.finish(self.out, self.step, folder, state)
        self.parallel.barrier()

    def _weights(self) -> dict[str, Tensor]:
        """The weights of the whole model, by their names in a :class:`MindForCausalLM`."""
        if self.adapted is not None:
            return lora.merged(self.inner)
        if self.distributed:
            return self.parallel.weights(self.model)
        return checkpoint.weights(self.inner)

    # --- the end --------------------------------------------------------------------------------

    def _finish(self) -> Result:
        assert self.steps is not None
        end = self.evaluation
        if end is None and not self.distributed:  # the run was complete before
            known = [entry for entry in read_metrics(self.out) if "bits_per_byte" in entry]
            end = known[-1] if known and known[-1]["step"] == self.step else None
        if end is None:
            end = self._evaluate()
        self.watch.say("writing the model")
        weights = self._weights()
        if self.parallel.is_main:
            whole = MindForCausalLM(self.inner.config, device="meta").to_empty(device="cpu")
            whole.tie_weights()
            checkpoint.load_weights(whole, weights, self.out / checkpoint.MODEL)
            convert.save(whole, self.corpus.tokenizer, self.out)
            if self.adapted is not None:
                lora.save(self.adapted, self.out / _ADAPTER)
        self.parallel.barrier()
        return Result(
            steps=self.steps,
            tokens=self.tokens,
            seconds=self.seconds,
            held_out_loss=end["held_out_loss"],
            bits_per_byte=end["bits_per_byte"],
            xz_bits_per_byte=end["xz_bits_per_byte"],
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in ``folder``; a process that is killed lets it go.

    Raises:
        TrainError: another process does.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # not a system that locks folders
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainError(
                f"another process is training in {folder}; expected it to have ended"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _check_same(config: TrainConfig, path: Path) -> None:
    """Refuse other settings than those that the run in the folder of ``path`` began with."""
    try:
        stored = TrainConfig.from_toml(path.read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise TrainError(f"{path}: {error}") from None
    for field in dataclasses.fields(config):
        given, expected = getattr(config, field.name), getattr(stored, field.name)
        if field.name not in _CHANGEABLE and given != expected:
            raise TrainError(
                f"{field.name} is {given!r}; expected {expected!r}, with which the run in "
                f"{path.parent} began"
            )


def _forget(out: Path) -> None:
    """Remove what a run that could not begin has written, and the folder if that was all."""
    shutil.rmtree(out / _DATA, ignore_errors=True)
    for name in (TRAIN_FILE, convert.MIND, "tokenizer.json", "tokenizer_config.json"):
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.rmdir()


def _read_plan(out: Path) -> int | None:
    path = out / _PLAN
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["steps"])
    except (ValueError, KeyError, TypeError):
        raise TrainError(f"{path} does not say how many steps the run has") from None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _random() -> dict[str, str]:
    """The states of torch's generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def _set_random(states: Mapping[str, str]) -> None:
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
