"""What a model is: its sizes, its norms and where they stand; and what a training run is."""

from __future__ import annotations

import dataclasses
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
        check_fields(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not value > 0:
                raise ConfigError(f"{field.name} is {value}; expected more than 0")
        for name, choices in (("norm", NORMS), ("placement", PLACEMENTS)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}"
                )
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
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ConfigError(f"unknown field {unknown[0]!r}; expected some of {', '.join(known)}")
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in fields:
                raise ConfigError(f"{name} is missing")
        return cls(**fields)


def check_fields(config: Any) -> None:
    """Refuse fields of another type than the annotation; an int passes for a float.

    Raises:
        ConfigError: the value of a field has the wrong type.
    """
    kinds: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
    for field in dataclasses.fields(config):
        kind = kinds.get(field.type if isinstance(field.type, str) else "")
        value = getattr(config, field.name)
        if kind is float and type(value) is int:
            object.__setattr__(config, field.name, float(value))
        elif kind is not None and type(value) is not kind:
            raise ConfigError(f"{field.name} is {value!r}; expected {kind.__name__}")


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
