"""A model as people write their own: its own norm class, normed queries and keys, sums in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rewrite.norms import fused
from rmsnorm import PatchReport, patch, unpatch
from rmsnorm.ops.rms_norm import has_kernels

WIDTH, HEADS, VOCABULARY = 64, 4, 96
TOKENS = torch.arange(96).reshape(1, 96) * 7 % VOCABULARY

Past = tuple[Tensor, Tensor]


class OwnNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class RoundsOnce(OwnNorm):
    """The other place to round, which looks almost the same."""

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * self.weight.float()).type_as(x)


class SelfAttention(nn.Module):
    def __init__(self, norm: type[OwnNorm]) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm = norm(WIDTH // HEADS)
        self.k_norm = norm(WIDTH // HEADS)

    def forward(self, x: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(heads) for part in self.project(x).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        turned = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*turned, is_causal=past is None)
        return self.out(y.transpose(1, 2).reshape(x.shape)), (k, v)


class Block(nn.Module):
    """Adds the stream to what a sublayer gave, once in place: nobody needs that any more."""

    def __init__(self, norm: type[OwnNorm]) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = norm(WIDTH), norm(WIDTH)
        self.attention = SelfAttention(norm)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH, bias=False)
        )

    def forward(self, hidden: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        residual = hidden
        hidden, present = self.attention(self.before_attention(hidden), past)
        hidden += residual
        return hidden + self.feed_forward(self.before_feed_forward(hidden)), present


class InPlaceBlock(Block):
    """Does it twice."""

    def forward(self, hidden: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        residual = hidden
        hidden, present = self.attention(self.before_attention(hidden), past)
        hidden += residual
        residual = hidden
        hidden = self.feed_forward(self.before_feed_forward(hidden))
        hidden += residual
        return hidden, present


class OverwritingBlock(Block):
    """Adds to the stream itself, which its caller still holds."""

    def forward(self, hidden: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        y, present = self.attention(self.before_attention(hidden), past)
        hidden += y
        hidden += self.feed_forward(self.before_feed_forward(hidden))
        return hidden, present


class OwnModel(nn.Module):
    def __init__(self, block: type[Block] = Block, norm: type[OwnNorm] = OwnNorm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(norm) for _ in range(2))
        self.final = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, past: list[Past] | None = None) -> tuple[Tensor, list[Past]]:
        hidden, present = self.embedding(tokens), []
        for index, block in enumerate(self.blocks):
            hidden, kept = block(hidden, None if past is None else past[index])
            present.append(kept)
        return self.head(self.final(hidden)), present


def prepared(model: OwnModel, dtype: torch.dtype = torch.float32) -> OwnModel:
    for module in model.modules():
        if isinstance(module, OwnNorm):
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return model.to(dtype)


def results(model: OwnModel) -> list[Tensor]:
    """The logits in one pass, and of three tokens one at a time behind a cache."""
    with torch.no_grad():
        found = [model(TOKENS)[0]]
        past = model(TOKENS[:, :-3])[1]
        for token in TOKENS[:, -3:].split(1, 1):
            logits, past = model(token, past)
            found.append(logits)
    return found


def loss_and_gradients(model: OwnModel) -> list[Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(model(TOKENS)[0][0, :-1].float(), TOKENS[0, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def plain(model: OwnModel) -> PatchReport:
    return patch(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("norm", "convention"), [(OwnNorm, "llama"), (RoundsOnce, "olmo2")])
@pytest.mark.parametrize("change", [plain, fused])
def test_logits_are_identical(
    change: Callable[[OwnModel], PatchReport],
    norm: type[OwnNorm],
    convention: str,
    dtype: torch.dtype,
) -> None:
    model = prepared(OwnModel(norm=norm), dtype)
    before = results(model)
    report = change(model)
    assert [(e.convention, e.eps, e.bit_identical) for e in report.entries] == [
        (convention, 1e-5, True)
    ] * 9
    assert all(torch.equal(a, b) for a, b in zip(before, results(model), strict=True))
    assert unpatch(model) == 9
    assert all(torch.equal(a, b) for a, b in zip(before, results(model), strict=True))


@pytest.mark.parametrize("block", [Block, InPlaceBlock])
@pytest.mark.parametrize("change", [plain, fused])
def test_gradients_are_equal(change: Callable[[OwnModel], PatchReport], block: type[Block]) -> None:
    model = prepared(OwnModel(block))
    loss, *before = loss_and_gradients(model)
    assert all(entry.training == has_kernels for entry in change(model).swapped)
    again, *after = loss_and_gradients(model)
    assert torch.equal(loss, again)
    for a, b in zip(before, after, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


class Joins(TorchDispatchMode):
    """Counts the additions that are computed with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.rmsnorm.add_rms_norm.default
        return func(*args, **(kwargs or {}))


def test_sums_are_joined_with_the_norm_of_the_next_block() -> None:
    model = prepared(OwnModel())
    assert [(block.name, block.fused) for block in fused(model).blocks] == [
        ("blocks.0", True),
        ("blocks.1", True),
    ]
    results(model)  # the blocks learn what follows them
    with torch.no_grad(), Joins() as joins:
        model(TOKENS)
    assert joins.count == 2


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (InPlaceBlock, "its additions are all done in place, where none can be joined"),
        (OverwritingBlock, "its results differ when an addition and a norm are one"),
    ],
)
def test_sums_that_are_left(block: type[Block], reason: str) -> None:
    model = prepared(OwnModel(block))
    before = results(model)
    report = fused(model)
    assert len(report.swapped) == 9
    assert [(block.fused, block.reason) for block in report.blocks] == [(False, reason)] * 2
    assert all(torch.equal(a, b) for a, b in zip(before, results(model), strict=True))


@pytest.mark.parametrize("change", [None, plain])
def test_overwriting_what_a_norm_was_given_is_no_training_code(
    change: Callable[[OwnModel], PatchReport] | None,
) -> None:
    # Neither the class's own backward nor this package's has its input any more; both say so.
    model = prepared(OwnModel(OverwritingBlock))
    if change is not None:
        change(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_and_gradients(model)
