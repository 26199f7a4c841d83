"""What a model says about text that it was not trained on: loss and bits per byte, and a sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm.lm.model import IGNORED

Tokens: TypeAlias = "npt.NDArray[np.integer[npt.NBitBase]]"
Mean = Callable[[Tensor], Tensor]
"""The mean of a tensor over all ranks that read different text."""


@dataclass(frozen=True)
class HeldOut:
    """The result of :func:`evaluate`.

    Attributes:
        loss: the mean negative log likelihood of a token, in nats.
        bits_per_byte: the bits that an arithmetic coder with this model needs for the tokens,
            divided by the bytes that they spell. Models with other tokenizers can be compared by
            it.
    """

    loss: float
    bits_per_byte: float


def windows(count: int, seq_len: int) -> list[tuple[int, int, int]]:
    """Where to read ``count`` tokens so that each is predicted once, and with what came before.

    Neighbours overlap by a quarter, so that every token but the first ones is predicted from at
    least a quarter of ``seq_len``.

    Returns:
        (start, first, end): tokens ``start`` to ``end`` are in a window; those from ``first`` on
        count.

    Example:
        >>> windows(10, 4)
        [(0, 0, 4), (3, 4, 7), (6, 7, 10)]
        >>> windows(3, 4)
        [(0, 0, 3)]
    """
    stride = max(1, seq_len - seq_len // 4)
    found = [(0, 0, min(count, seq_len))]
    while found[-1][2] < count:
        end = min(count, found[-1][2] + stride)
        found.append((max(0, end - seq_len), found[-1][2], end))
    return found


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: Tokens,
    mask: Tokens | None,
    text_bytes: int,
    *,
    start_id: int,
    seq_len: int,
    batch_size: int,
    device: torch.device | str = "cpu",
    mean: Mean | None = None,
    rank: int = 0,
    world: int = 1,
) -> HeldOut:
    """The loss and the bits per byte of ``model`` on held-out tokens.

    Args:
        model: takes input_ids (batch, sequence) and returns something with ``logits``.
        tokens: (count,) of any integer dtype, all that is held out.
        mask: (count,) of any integer dtype, 1 at the tokens that are to be predicted; ``None`` for
            all.
        text_bytes: the bytes that these spell.
        start_id: what the first token is predicted from.
        seq_len: tokens of a window.
        batch_size: windows at a time.
        device: of the model.
        mean: over the ranks; each reads its own windows.
        rank: this one.
        world: how many there are.

    Returns:
        The loss and the bits per byte, over all ranks if ``mean`` is given.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> from rmsnorm.lm.model import MindForCausalLM
        >>> model = MindForCausalLM(preset("tiny", num_hidden_layers=1))
        >>> tokens = np.arange(100)
        >>> found = evaluate(model, tokens, None, 200, start_id=0, seq_len=16, batch_size=4)
        >>> bool(abs(found.loss - math.log(2048)) < 0.1)  # it knows nothing yet
        True
        >>> math.isclose(found.bits_per_byte, found.loss * 100 / 200 / math.log(2))
        True
    """
    spans = windows(len(tokens), seq_len)
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # the sum of the losses, and of how many tokens
    length = min(seq_len, len(tokens))
    # Every rank runs as many batches, of whole windows: ranks wait for each other in the model.
    stride = batch_size * world
    for begin in range(rank * batch_size, _round_up(len(spans), stride), stride):
        ids = torch.full((batch_size, length), start_id, dtype=torch.int64)
        labels = torch.full((batch_size, length), IGNORED, dtype=torch.int64)
        for row, span in enumerate(spans[begin : begin + batch_size]):
            _fill(ids[row], labels[row], tokens, mask, span)
        logits = model(ids.to(device)).logits
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten().to(device),
            ignore_index=IGNORED,
            reduction="none",
        )
        total[0] += losses.double().sum().cpu()
        total[1] += (labels != IGNORED).sum()
    model.train(was_training)
    if mean is not None:
        total = mean(total.to(device)).cpu() * world
    loss, count = total.tolist()
    return HeldOut(loss / max(1.0, count), loss / math.log(2) / text_bytes)


@torch.no_grad()
def activation_rms(model: nn.Module, inner: nn.Module, input_ids: Tensor) -> tuple[float, float]:
    """The root mean square of the residual stream before the first block and after the last.

    Args:
        model: is called; it may be wrapped.
        inner: the :class:`~rmsnorm.lm.model.MindForCausalLM` in it.
        input_ids: (batch, sequence).

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> from rmsnorm.lm.model import MindForCausalLM
        >>> model = MindForCausalLM(preset("tiny", initializer_range=0.5))
        >>> first, last = activation_rms(model, model, torch.arange(64)[None])
        >>> round(first, 1), last > first
        (0.5, True)
    """
    found: list[float] = []

    def measure(module: nn.Module, arguments: tuple[Tensor | None, ...]) -> None:
        # A fused block and the norm after it are given the stream in two parts.
        stream = [part for part in arguments[:2] if isinstance(part, Tensor)]
        x = sum((part.float() for part in stream[1:]), stream[0].float())
        if hasattr(x, "full_tensor"):
            x = x.full_tensor()
        found.append(x.square().mean().sqrt().item())

    body: nn.Module = inner.get_submodule("model")
    watched = (body.get_submodule("layers")[0], body.get_submodule("norm"))  # type: ignore[index]
    hooks = [module.register_forward_pre_hook(measure) for module in watched]
    try:
        model(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0], found[-1]


def _fill(
    ids: Tensor, labels: Tensor, tokens: Tokens, mask: Tokens | None, span: tuple[int, int, int]
) -> None:
    """Write what one of :func:`windows` reads and predicts into ``ids`` and ``labels``, (length,).

    Position i reads token ``start + i - 1`` and predicts token ``start + i``.
    """
    start, first, end = span
    read = torch.from_numpy(tokens[max(0, start - 1) : end - 1].astype(np.int64))
    ids[end - start - len(read) : end - start] = read
    expected = torch.from_numpy(tokens[first:end].astype(np.int64))
    if mask is not None:
        expected[torch.from_numpy(mask[first:end] == 0)] = IGNORED
    labels[first - start : end - start] = expected


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
