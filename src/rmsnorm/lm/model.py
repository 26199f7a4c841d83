"""A decoder-only language model of :class:`~rmsnorm.lm.block.MindBlock`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmsnorm.lm.block import (
    MLP,
    Attention,
    LayerCache,
    Rotary,
    Scale,
    make_block,
    make_norm,
    rotary,
)
from rmsnorm.lm.config import ModelConfig
from rmsnorm.modules import RMSNorm

KeysAndValues = tuple[Tensor, Tensor]
IGNORED = -100
"""The label of a position that predicts nothing, as in ``F.cross_entropy``."""


class Output(NamedTuple):
    """What a call of :class:`MindForCausalLM` returns; what was not asked for is ``None``."""

    logits: Tensor
    """(batch, sequence, vocab_size)."""
    loss: Tensor | None
    """The mean cross entropy over the labels, in float32."""
    past_key_values: tuple[KeysAndValues, ...] | None
    """Keys and values of every layer, (batch, num_key_value_heads, positions, head_dim) each."""


class KVCache:
    """Room for the keys and values of every layer, allocated once.

    Args:
        config: the model's.
        batch_size: how many sequences.
        max_length: the most positions that can be kept.
        device: of the tensors.
        dtype: of the keys and values.

    Raises:
        ValueError: ``batch_size`` or ``max_length`` is below 1.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> model = MindForCausalLM(preset("tiny"))
        >>> cache = KVCache(model.config, batch_size=1, max_length=8)
        >>> with torch.no_grad():
        ...     _ = model(torch.tensor([[1, 2, 3]]), cache=cache)
        ...     logits = model(torch.tensor([[4]]), cache=cache).logits
        >>> cache.length, logits.shape
        (4, torch.Size([1, 1, 2048]))
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        heads, width = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, 2, batch_size, heads, max_length, width)
        self.memory = torch.empty(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.length = 0

    def reset(self) -> None:
        """Forget every position."""
        self.length = 0

    def layer(self, index: int) -> LayerCache:
        """The part of layer ``index``."""
        return _Preallocated(self.memory[index, 0], self.memory[index, 1], self.length)

    def check(self, batch_size: int, sequence: int, config: ModelConfig) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: another batch size or model, or more positions than there is room for.
        """
        heads, width = config.num_key_value_heads, config.head_dim
        layers, _, _, *rest = self.memory.shape
        if (layers, rest[0], rest[2]) != (config.num_hidden_layers, heads, width):
            raise ValueError(
                f"the cache is for {layers} layers of {rest[0]} heads of {rest[2]}; the model has "
                f"{config.num_hidden_layers} of {heads} of {width}"
            )
        if batch_size != self.memory.shape[2]:
            raise ValueError(
                f"the cache is for {self.memory.shape[2]} sequences; input_ids has {batch_size}"
            )
        if self.length + sequence > self.max_length:
            raise ValueError(
                f"the cache has room for {self.max_length} positions; {self.length} are taken and "
                f"{sequence} more were given"
            )


class _Preallocated:
    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        self.keys, self.values, self.length = keys, values, length

    def append(self, keys: Tensor, values: Tensor) -> KeysAndValues:
        if keys.dtype != self.keys.dtype and not torch.is_autocast_enabled(keys.device.type):
            raise TypeError(f"the cache is {self.keys.dtype}, but the keys are {keys.dtype}")
        if keys.requires_grad:
            raise RuntimeError(
                "a KVCache keeps no gradients: call the model under torch.no_grad(), or give it "
                "past_key_values"
            )
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class _Grown:
    """A layer's keys and values as a pair that is replaced by a longer one."""

    def __init__(self, pair: KeysAndValues | None) -> None:
        self.pair = pair

    def append(self, keys: Tensor, values: Tensor) -> KeysAndValues:
        if self.pair is not None:
            keys, values = (
                torch.cat((old, new), dim=2)
                for old, new in zip(self.pair, (keys, values), strict=True)
            )
        self.pair = keys, values
        return self.pair


class MindModel(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **where)
        self.layers = nn.ModuleList(
            make_block(config, **where) for _ in range(config.num_hidden_layers)
        )
        # With the norms behind the additions, the last block's result is normalised already.
        self.norm = (
            nn.Identity()
            if config.placement == "post"
            else make_norm(config, config.hidden_size, **where)
        )
        self.is_fused = config.is_fused
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor,
        angles: Rotary,
        mask: Tensor | None,
        caches: Sequence[LayerCache | None],
    ) -> Tensor:
        """The normalised residual stream after the last block, (batch, sequence, hidden_size)."""
        x: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            if self.is_fused:
                x, residual = self._run(layer, x, residual, angles, mask, cache)
            else:
                x = self._run(layer, x, angles, mask, cache)
        if residual is None:
            x = self.norm(x)
        else:
            x, _ = self.norm(x, residual)
        return x

    def _run(self, layer: nn.Module, *arguments: Any) -> Any:
        # Computed twice, a block would add its keys and values twice to the cache, the last one.
        once = arguments[-1] is not None or not (self.training and torch.is_grad_enabled())
        if self.gradient_checkpointing and not once:
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)


class MindForCausalLM(nn.Module):
    """A language model whose parameters are named as those of Hugging Face's LLaMA and Qwen3.

    Args:
        config: the sizes, the norms and where they stand.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> model = MindForCausalLM(preset("tiny"))
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> output = model(ids[:, :-1], labels=ids[:, 1:])
        >>> output.logits.shape, output.loss.shape
        (torch.Size([1, 3, 2048]), torch.Size([]))
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.model = MindModel(config, **where)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **where)
        self.tie_weights()
        self.reset_parameters()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether a training step computes each block twice instead of keeping what is in it."""
        return self.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.model.gradient_checkpointing = enabled

    def tie_weights(self) -> None:
        """Make the output layer the embedding, if the configuration says so.

        ``to_empty`` gives each of them memory of its own, so it is to be followed by this.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise every parameter.

        Weights are normal with ``initializer_range``; those that write to the residual stream are
        smaller by the square root of their number, as in GPT-2 (Radford et al. 2019), so that the
        stream begins at one scale for any depth. Norms begin as norms alone.

        Args:
            generator: of the random numbers; the default one of the device if ``None``.
        """
        std = self.config.initializer_range
        shrink = 1.0 / math.sqrt(2 * self.config.num_hidden_layers)
        for module in self.model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, std, generator)
            elif isinstance(module, (RMSNorm, nn.LayerNorm, Scale)):
                module.reset_parameters()
        if not self.config.tie_word_embeddings:
            nn.init.normal_(self.lm_head.weight, 0.0, std, generator)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Attention):
                    module.o_proj.weight.mul_(shrink)
                elif isinstance(module, MLP):
                    module.down_proj.weight.mul_(shrink)

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        past_key_values: Sequence[KeysAndValues] | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> Output:
        """Logits, and what else is asked for.

        Args:
            input_ids: (batch, sequence), integers below ``vocab_size``.
            labels: (batch, sequence): the token that each position is to predict, which is the next
                one of input_ids; -100 where nothing is.
            attention_mask: (batch, past + sequence), 0 at padding, on the left of a prompt.
            position_ids: (batch or 1, sequence); by default they count up from the past, padding
                left out.
            cache: earlier positions; these are added to it.
            past_key_values: earlier positions as Hugging Face's tuples, instead of a cache.
            use_cache: return past_key_values.
            logits_to_keep: compute the logits of the last so many positions only; 0 for all.

        Raises:
            ValueError: shapes that do not fit each other or the cache, or an empty sequence.
            TypeError: input_ids that are not integers.
        """
        self._check(input_ids, labels, attention_mask, cache, past_key_values)
        _check_arguments(input_ids, labels, position_ids, logits_to_keep)
        batch, sequence = input_ids.shape
        layers = len(self.model.layers)
        past = _past_length(cache, past_key_values)
        grown = [_Grown(None) for _ in range(layers)]
        caches: Sequence[LayerCache | None] = grown
        if cache is not None:
            cache.check(batch, sequence, self.config)
            caches = [cache.layer(index) for index in range(layers)]
        elif past_key_values is not None:
            grown = [_Grown(pair) for pair in past_key_values]
            caches = grown
        elif not use_cache:
            caches = [None] * layers
        mask = _mask(attention_mask, sequence, past, input_ids.device)
        if position_ids is None:
            position_ids = _positions(attention_mask, sequence, past, input_ids.device)
        angles = rotary(position_ids, self.config.head_dim, self.config.rope_theta)
        x = self.model(input_ids, angles, mask, caches)
        if cache is not None:
            cache.length += sequence
        logits = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED
            )
        kept = None
        if use_cache and cache is None:
            kept = tuple(layer.pair for layer in grown if layer.pair is not None)
        return Output(logits, loss, kept)

    def _check(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        attention_mask: Tensor | None,
        cache: KVCache | None,
        past_key_values: Sequence[KeysAndValues] | None,
    ) -> None:
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"input_ids is {input_ids.dtype}; expected torch.int64")
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; expected (batch, sequence) with at "
                "least one token"
            )
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}; expected that of input_ids, "
                f"{tuple(input_ids.shape)}"
            )
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values were both given; expected one of them")
        layers = self.config.num_hidden_layers
        if past_key_values is not None and len(past_key_values) != layers:
            raise ValueError(
                f"past_key_values has {len(past_key_values)} layers; the model has {layers}"
            )
        if attention_mask is not None:
            past = _past_length(cache, past_key_values)
            expected = (input_ids.shape[0], past + input_ids.shape[1])
            if tuple(attention_mask.shape) != expected:
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}; expected {expected}, "
                    "which is (batch, past + sequence)"
                )


def _check_arguments(
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> None:
    batch, sequence = input_ids.shape
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep is {logits_to_keep}; expected at least 0")
    if labels is not None:
        if logits_to_keep:
            raise ValueError("labels and logits_to_keep were both given; expected one of them")
        if labels.dtype != torch.int64:
            raise TypeError(f"labels is {labels.dtype}; expected torch.int64")
    if position_ids is not None and tuple(position_ids.shape) not in (
        (batch, sequence),
        (1, sequence),
    ):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; expected {(batch, sequence)} "
            f"or {(1, sequence)}"
        )


def _past_length(cache: KVCache | None, past_key_values: Sequence[KeysAndValues] | None) -> int:
    if cache is not None:
        return cache.length
    return 0 if past_key_values is None else past_key_values[0][0].shape[2]


def _positions(
    attention_mask: Tensor | None, sequence: int, past: int, device: torch.device
) -> Tensor:
    """(batch or 1, sequence): how many tokens come before, padding not counted."""
    if attention_mask is None:
        return torch.arange(past, past + sequence, device=device)[None]
    counted = attention_mask.long().cumsum(dim=1) - 1
    return counted.clamp(min=0)[:, past:]


def _mask(
    attention_mask: Tensor | None, sequence: int, past: int, device: torch.device
) -> Tensor | None:
    """(batch or 1, 1, sequence, past + sequence): true where a query may look; ``None`` for all.

    ``None`` also stands for every earlier position, where nothing is in the past.
    """
    if attention_mask is None and (past == 0 or sequence == 1):
        return None
    shape = (sequence, past + sequence)
    mask = torch.ones(shape, dtype=torch.bool, device=device).tril(past)
    if attention_mask is None:
        return mask[None, None]
    # Padding may look at itself: a query with nothing to look at has no softmax.
    itself = torch.ones(shape, dtype=torch.bool, device=device).tril(past).triu(past)
    return (mask & attention_mask.bool()[:, None, None, :]) | itself
