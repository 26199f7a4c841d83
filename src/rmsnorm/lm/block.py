"""The block of the Transformer: norm, attention, add, norm, MLP, add.

Pre-norm with RMSNorm, rotary positions, grouped-query attention and SwiGLU is the architecture of
LLaMA (Touvron et al. 2023, https://arxiv.org/abs/2302.13971); per-head norms of queries and keys
are Qwen3's. Parameters have the names of Hugging Face's implementations.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm.lm.config import ModelConfig
from rmsnorm.modules import RMSNorm

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, (batch or 1, sequence, 1, head_dim) each."""


class LayerCache(Protocol):
    """What one attention layer keeps of earlier positions."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, (batch, num_key_value_heads, past + sequence, head_dim)."""


class Scale(nn.Module):
    """A norm without its normalisation: the weight alone.

    Example:
        >>> Scale(2)(torch.tensor([3.0, 4.0])).detach()
        tensor([3., 4.])
    """

    def __init__(
        self,
        hidden_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., hidden_size) times the weight."""
        return x * self.weight


def make_norm(config: ModelConfig, size: int, **where: Any) -> nn.Module:
    """The norm that ``config`` asks for, over a last dimension of ``size``."""
    if config.norm == "none":
        return nn.Identity()
    if config.norm == "scale":
        return Scale(size, **where)
    if config.norm == "layer":
        return nn.LayerNorm(size, eps=config.rms_norm_eps, **where)
    return RMSNorm(size, config.rms_norm_eps, spec=config.norm_spec, **where)


def rotary(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """The angles of rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    Args:
        positions: (batch or 1, sequence), integers.
        head_dim: width of a head.
        theta: base of the frequencies.

    Returns:
        Cosine and sine, (batch or 1, sequence, 1, head_dim), float32 whatever the model's dtype:
        an angle of a thousand needs more than a half type's precision.

    Example:
        >>> cos, sin = rotary(torch.arange(3)[None], 4, 1e4)
        >>> cos.shape, cos[0, 0, 0].tolist()
        (torch.Size([1, 3, 1, 4]), [1.0, 1.0, 1.0, 1.0])
    """
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.int64)
    frequencies = 1.0 / (theta ** (steps.float() / head_dim))  # (head_dim / 2,)
    angles = positions[:, :, None, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: Rotary) -> Tensor:
    """``x`` (batch, sequence, heads, head_dim) turned by its positions, in half-split pairs.

    Element i is paired with element i + head_dim / 2, as in Hugging Face's LLaMA.
    """
    cos, sin = (part.to(x.dtype) for part in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, width = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * width, bias=False, **where)
        self.k_proj = nn.Linear(hidden, kv_heads * width, bias=False, **where)
        self.v_proj = nn.Linear(hidden, kv_heads * width, bias=False, **where)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False, **where)
        self.q_norm = make_norm(config, width, **where) if config.qk_norm else None
        self.k_norm = make_norm(config, width, **where) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        angles: Rotary,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix the positions of ``x`` (batch, sequence, hidden_size).

        Args:
            x: the normalised residual stream.
            angles: of :func:`rotary`.
            mask: (batch or 1, 1, sequence, past + sequence), true where a query may look; ``None``
                for every earlier position, and for all of them where the sequence is one token.
            cache: earlier keys and values; these are appended.
        """
        split = (*x.shape[:2], -1, self.head_dim)  # (batch, sequence, heads, head_dim)
        q, k, v = (f(x).view(split) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            rotate(q, angles).transpose(1, 2),
            rotate(k, angles).transpose(1, 2),
            v.transpose(1, 2),
        )
        if cache is not None:
            k, v = cache.append(k, v)
        causal = mask is None and x.shape[1] > 1
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False, **where)
        self.up_proj = nn.Linear(hidden, inner, bias=False, **where)
        self.down_proj = nn.Linear(inner, hidden, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., hidden_size), one position at a time."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class MindBlock(nn.Module):
    """A pre-norm block: each sublayer reads the normalised stream and adds to the stream itself.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> block = MindBlock(preset("tiny"))
        >>> x = torch.randn(1, 3, 128)
        >>> block(x, rotary(torch.arange(3)[None], 32, 1e4)).shape
        torch.Size([1, 3, 128])
    """

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, **where)
        self.mlp = MLP(config, **where)
        self.input_layernorm = make_norm(config, config.hidden_size, **where)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, **where)

    def forward(self, x: Tensor, *positions: Any) -> Tensor:
        """``x`` (batch, sequence, hidden_size) after both sublayers.

        Args:
            x: the residual stream.
            positions: the rest of :meth:`Attention.forward`'s arguments.
        """
        x = x + self.self_attn(self.input_layernorm(x), *positions)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class FusedBlock(MindBlock):
    """:class:`MindBlock` with each addition and the norm after it in one kernel.

    The last addition of a block belongs to the first norm of the next, so the stream travels in two
    parts whose sum it is. The bits are those of :class:`MindBlock`.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None, *positions: Any
    ) -> tuple[Tensor, Tensor]:
        """The result of the last sublayer, and the residual stream without it.

        Args:
            x: (batch, sequence, hidden_size), what the sublayer before computed.
            residual: the residual stream without ``x``; ``None`` before the first block.
            positions: the rest of :meth:`Attention.forward`'s arguments.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, *positions)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class PostNormBlock(MindBlock):
    """Norms on the stream itself (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

    def forward(self, x: Tensor, *positions: Any) -> Tensor:
        """As :meth:`MindBlock.forward`; ``input_layernorm`` follows the attention."""
        x = self.input_layernorm(x + self.self_attn(x, *positions))
        x = self.post_attention_layernorm(x + self.mlp(x))
        return x


class SandwichBlock(MindBlock):
    """A norm before and after each sublayer, as in Gemma 2 (https://arxiv.org/abs/2408.00118)."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__(config, **where)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size, **where)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size, **where)

    def forward(self, x: Tensor, *positions: Any) -> Tensor:
        """As :meth:`MindBlock.forward`."""
        mixed = self.self_attn(self.input_layernorm(x), *positions)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x


def make_block(config: ModelConfig, **where: Any) -> MindBlock:
    """The block that ``config`` asks for.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> type(make_block(preset("tiny", placement="sandwich"))).__name__
        'SandwichBlock'
    """
    if config.placement == "post":
        return PostNormBlock(config, **where)
    if config.placement == "sandwich":
        return SandwichBlock(config, **where)
    return FusedBlock(config, **where) if config.is_fused else MindBlock(config, **where)
