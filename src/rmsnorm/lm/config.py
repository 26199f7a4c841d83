"""What a model is: its sizes, its norms and where they stand; and what a training run is."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rmsnorm.spec import NormSpec, specs

NORMS = ("rms", "layer", "none", "partial", "scale")
PLACEMENTS = ("pre", "post", "sandwich")


class ConfigError(ValueError):
    """A configuration that means nothing; the message names the field and what was expected."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, with the names of Hugging Face's LLaMA and Qwen3 configurations.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: how many blocks.
        num_attention_heads: heads of the queries.
        num_key_value_heads: heads of the keys and values; divides ``num_attention_heads``.
        head_dim: width of a head; even, since rotary positions turn pairs.
        max_position_embeddings: the longest sequence the model is meant for.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: eps of every norm.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: whether the output layer is the embedding.
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
        norm: ``"rms"``; ``"layer"`` (LayerNorm); ``"partial"`` (pRMSNorm over the first
            ``partial`` of a row); ``"scale"`` (the weight alone); ``"none"``.
        partial: the part of a row that ``"partial"`` looks at, in (0, 1].
        placement: ``"pre"``: x + f(norm(x)), as in LLaMA; ``"post"``: norm(x + f(x)), as in the
            first Transformer; ``"sandwich"``: x + norm(f(norm(x))), as in Gemma 2.
        fuse_residual: compute each residual addition and the norm after it in one kernel, where
            the norm and the placement allow it. The bits are the same.

    Raises:
        ConfigError: a field of the wrong type or value, or fields that do not fit each other.

    Example:
        >>> config = preset("tiny", num_hidden_layers=2)
        >>> config.hidden_size, config.num_hidden_layers, config.norm
        (128, 2, 'rms')
        >>> ModelConfig.from_dict(config.to_dict()) == config
        True
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    norm: str = "rms"
    partial: float = 1.0
    placement: str = "pre"
    fuse_residual: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not value > 0:
                raise ConfigError(f"{field.name} is {value}; expected more than 0")
            # What torch counts with, and what a float can be.
            if field.type in ("int", "float") and not value < (
                2**31 if field.type == "int" else math.inf
            ):
                raise ConfigError(f"{field.name} is {value}; expected a smaller number")
        _check_choices(self, norm=NORMS, placement=PLACEMENTS)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads is {self.num_key_value_heads}; expected a divisor of "
                f"num_attention_heads, {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; expected an even number")
        if self.partial > 1:
            raise ConfigError(f"partial is {self.partial}; expected at most 1")
        if self.norm != "partial" and self.partial != 1.0:
            raise ConfigError(f"partial is {self.partial}, but norm is {self.norm!r}")

    @property
    def norm_spec(self) -> NormSpec:
        """The convention of the RMS norms: LLaMA's."""
        return dataclasses.replace(specs.llama, eps=self.rms_norm_eps, partial=self.partial)

    @property
    def is_fused(self) -> bool:
        """Whether the blocks carry the residual stream beside the sublayers' results."""
        return self.fuse_residual and self.placement == "pre" and self.norm in ("rms", "partial")

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The configuration of a dictionary that :meth:`to_dict` made.

        Raises:
            ConfigError: a field is unknown, missing or wrong.
        """
        _check_names(cls, fields)
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in fields:
                raise ConfigError(f"{field.name} is missing")
        return cls(**fields)


def _check_names(cls: Any, fields: Mapping[str, Any]) -> None:
    """Refuse fields that a configuration of class ``cls`` does not have."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"unknown field {name!r}; expected some of {', '.join(known)}")


def _check_choices(config: Any, **choices: tuple[str, ...]) -> None:
    """Refuse a field that is not one of the choices given under its name."""
    for name, expected in choices.items():
        if getattr(config, name) not in expected:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}; expected one of {', '.join(expected)}"
            )


def _check_types(config: Any) -> None:
    """Refuse fields of another type than the annotation; an int becomes a float."""
    kinds: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
    for field in dataclasses.fields(config):
        kind = kinds.get(str(field.type).removesuffix(" | None"))
        value = getattr(config, field.name)
        if value is None and str(field.type).endswith("| None"):
            continue
        if kind is float and type(value) is int:
            try:
                object.__setattr__(config, field.name, float(value))
            except OverflowError:
                raise ConfigError(f"{field.name} is {value}; expected a smaller number") from None
        elif kind is not None and type(value) is not kind:
            raise ConfigError(f"{field.name} is {value!r}; expected {kind.__name__}")
        elif kind is str and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(f"{field.name} is {value!a}; expected Unicode, to be kept in a file")


PRESETS = {
    # About a million parameters: learns a book in minutes on two cores.
    "tiny": ModelConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=1e4,
    ),
    # The sizes of minimind's two models.
    "mind-26m": ModelConfig(
        vocab_size=6400,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "mind-64m": ModelConfig(
        vocab_size=6400,
        hidden_size=768,
        intermediate_size=2432,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=96,
        rms_norm_eps=1e-6,
        qk_norm=True,
    ),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The preset called ``name``, with some fields changed.

    Raises:
        ConfigError: there is no such preset, or the changes are wrong.

    Example:
        >>> preset("mind-26m", norm="layer").norm
        'layer'
    """
    if name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; expected one of {', '.join(PRESETS)}")
    return ModelConfig.from_dict({**PRESETS[name].to_dict(), **changes})


DTYPE_CHOICES = ("auto", "float32", "bfloat16")
PARALLEL_CHOICES = ("none", "ddp", "fsdp", "tp")
DEVICE_CHOICES = ("auto", "cpu", "cuda")

TRAIN_FILE = "train.toml"
"""Where a run keeps its settings."""

# The steps that a run of so many minutes times before it knows how many steps it has.
TIMED_STEPS = 20


@dataclass(frozen=True)
class TrainConfig:
    """A training run: what is learned from, how long, and how.

    The learning rate rises in ``warmup`` equal parts to ``lr``, then falls towards ``min_lr`` along
    a half cosine (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983).

    Args:
        data: a text file, a folder of them, or a ``.jsonl`` file.
        preset: the name of a model; ``"tiny"`` if ``None``.
        model: fields of :class:`ModelConfig` that differ from the preset's.
        init: a folder with a model to go on from, instead of a preset.
        tokenizer: a folder with a tokenizer; ``None``: ``init``'s, or one trained on ``data``.
        vocab_size: tokens of a tokenizer that is trained; the preset's if ``None``.
        steps: how many updates; or
        minutes: how long, from the start of the command. The number of steps is fixed once
            ``TIMED_STEPS`` of them were timed.
        seq_len: tokens of a sequence.
        batch_size: sequences of a forward pass on each rank.
        accumulate: forward passes of a step.
        lr: the highest learning rate.
        min_lr: what it falls towards.
        warmup: steps of the rise; at least ``TIMED_STEPS`` with ``minutes``.
        beta1: AdamW's decay of the mean gradient.
        beta2: AdamW's decay of the mean square.
        weight_decay: of the matrices; norms are not decayed.
        clip: the gradient is scaled down to this norm; 0: it is not.
        dtype: of the matrix products. ``"auto"``: bfloat16 on a GPU and on a CPU that multiplies
            bfloat16, else float32. The weights are float32.
        compile: run the model through ``torch.compile``.
        gradient_checkpointing: compute each block a second time instead of keeping what is in it.
        lora_rank: train low-rank additions to ``init``'s matrices instead of them; 0: do not.
        lora_alpha: their scale is ``lora_alpha / lora_rank``; twice the rank if ``None``.
        held_out: the part of the text that is not trained on; at most 0.5.
        seed: of the first weights, the order of the text and the samples.
        log_every: steps between two lines of ``metrics.jsonl``.
        eval_every: steps between two evaluations on held-out text; ``None``: 8 in a run; 0: one, at
            the end.
        save_every: steps between two checkpoints; ``None``: 20 in a run, and at most 200.
        sample_every: steps between two samples; ``None``: with every evaluation; 0: none.
        tensorboard: write what ``metrics.jsonl`` has for TensorBoard, too.
        device: ``"auto"`` is a GPU where there is one.
        threads: of torch; its own choice if ``None``.
        parallel: over the ranks of ``torchrun``: ``"ddp"``, ``"fsdp"``, ``"tp"`` (tensor and
            sequence parallel), or ``"none"``.
        model_parallel: the ranks that share one copy of the model, with ``"tp"``; all if ``None``.

    Raises:
        ConfigError: a field of the wrong type or value, or fields that do not fit each other.

    Example:
        >>> config = TrainConfig(data="bible.txt", steps=100, warmup=10, lr=0.01)
        >>> [round(config.learning_rate(step, 100), 4) for step in (0, 9, 10, 55, 99)]
        [0.001, 0.01, 0.01, 0.005, 0.0]
        >>> TrainConfig.from_toml(config.to_toml()) == config
        True
    """

    data: str
    preset: str | None = None
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    init: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    steps: int | None = None
    minutes: float | None = None
    seq_len: int = 256
    batch_size: int = 4
    accumulate: int = 1
    lr: float = 5e-3
    min_lr: float = 0.0
    warmup: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: int | None = None
    held_out: float = 0.05
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    save_every: int | None = None
    sample_every: int | None = None
    tensorboard: bool = True
    device: str = "auto"
    threads: int | None = None
    parallel: str = "none"
    model_parallel: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not isinstance(self.model, dict):
            raise ConfigError(f"model is {self.model!r}; expected a table of the model's fields")
        self._check_ranges()
        _check_choices(self, dtype=DTYPE_CHOICES, parallel=PARALLEL_CHOICES, device=DEVICE_CHOICES)
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("expected either steps or minutes, to know when the run ends")
        if self.minutes is not None and self.warmup < TIMED_STEPS:
            raise ConfigError(
                f"warmup is {self.warmup}; expected at least {TIMED_STEPS} with minutes, since the "
                "learning rate depends on the number of steps afterwards"
            )
        if self.min_lr > self.lr:
            raise ConfigError(f"min_lr is {self.min_lr}; expected at most lr, {self.lr}")
        if self.init is not None:
            for name in ("preset", "vocab_size", "tokenizer"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} and init were both given; init has its own")
            if self.model:
                raise ConfigError(f"model has {next(iter(self.model))!r}, but init has its own")
        elif self.lora_rank:
            raise ConfigError("lora_rank needs init, the model whose weights are added to")
        if self.vocab_size is not None and self.tokenizer is not None:
            raise ConfigError("vocab_size and tokenizer were both given; a tokenizer has its own")
        if "vocab_size" in self.model:
            raise ConfigError("model has 'vocab_size'; expected it beside the table, not in it")
        if self.lora_rank and self.parallel != "none":
            raise ConfigError(f"parallel is {self.parallel!r}; lora_rank needs 'none'")
        if self.compile and self.parallel == "tp":
            raise ConfigError("compile was given with parallel 'tp'; torch cannot compile that")
        if self.model_parallel is not None and self.parallel != "tp":
            raise ConfigError(f"model_parallel needs parallel 'tp'; it is {self.parallel!r}")

    def _check_ranges(self) -> None:
        for name in (
            "steps",
            "seq_len",
            "batch_size",
            "accumulate",
            "log_every",
            "save_every",
            "vocab_size",
            "threads",
            "model_parallel",
            "lora_alpha",
        ):
            self._check_least(name, 1)
        for name in (
            "min_lr",
            "warmup",
            "weight_decay",
            "clip",
            "lora_rank",
            "seed",
            "eval_every",
            "sample_every",
        ):
            self._check_least(name, 0)
        for name in ("minutes", "lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; expected more than 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more, below 1")
        for name, most in (("seed", 2**62 - 1), ("threads", 2**16)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(f"{name} is {value}; expected at most {most}")
        if not 0 < self.held_out <= 0.5:
            raise ConfigError(f"held_out is {self.held_out}; expected more than 0 and at most 0.5")

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} is {value}; expected at least {least}")

    def model_config(self, vocab_size: int | None = None) -> ModelConfig:
        """The model of the preset and the changes, with so many tokens, or as many as asked for.

        Raises:
            ConfigError: there is no such preset, or a change is wrong.
        """
        changes = dict(self.model)
        if vocab_size is not None or self.vocab_size is not None:
            changes["vocab_size"] = self.vocab_size if vocab_size is None else vocab_size
        return preset(self.preset or "tiny", **changes)

    def learning_rate(self, step: int, steps: int | None) -> float:
        """The rate of update number ``step``, from 0, of ``steps``.

        During the warm-up it does not depend on ``steps``, which may be ``None`` until then.

        Raises:
            ValueError: ``steps`` is ``None`` after the warm-up.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if steps is None:
            raise ValueError(f"step {step} is after the warm-up; expected the number of steps")
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def to_toml(self) -> str:
        """The fields as TOML; those that are ``None`` are left out."""
        plain, tables = [], []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, dict):
                if value:
                    tables += ["", f"[{name}]", *(_assignment(*item) for item in value.items())]
            elif value is not None:
                plain.append(_assignment(name, value))
        return "\n".join([*plain, *tables]) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> TrainConfig:
        """The configuration that :meth:`to_toml` wrote.

        Raises:
            ConfigError: the text is not TOML, or a field is unknown, missing or wrong.
        """
        fields = parse_train_toml(text)
        if "data" not in fields:
            raise ConfigError("data is missing")
        return cls(**fields)


def parse_train_toml(text: str) -> dict[str, Any]:
    """The fields of :class:`TrainConfig` that a TOML file sets, unchecked but for their names.

    Raises:
        ConfigError: the text is not TOML, or a field is unknown.

    Example:
        >>> parse_train_toml('lr = 0.003\\n[model]\\nhidden_size = 64')
        {'lr': 0.003, 'model': {'hidden_size': 64}}
    """
    # Python 3.10 has no TOML of its own; tomli is the same reader.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        fields: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
        raise ConfigError(f"not TOML: {error}") from None
    _check_names(TrainConfig, fields)
    return fields


def _assignment(name: str, value: Any) -> str:
    # JSON's numbers, booleans and strings are TOML's, but for infinities and the delete character.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
