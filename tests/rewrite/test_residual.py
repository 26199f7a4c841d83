"""Additions to the residual stream that are one operation with the norm that follows them."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rewrite import norms
from rewrite.norms import fused
from rmsnorm import patch, unpatch
from rmsnorm.rewrite.residual import Joined
from rmsnorm.rewrite.stream import LEAST_ELEMENTS, Stream

D = 16
Norm = norms.CastThenWeight


class Mixer(nn.Module):
    """Stands for attention: mixes tokens, keeps what it has seen, returns a tuple."""

    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> tuple[Tensor, None]:
        seen = x if not cache else torch.cat([*cache, x], dim=1)
        if cache is not None:
            cache.append(x)
        return self.linear(seen.cumsum(1)[:, -x.shape[1] :]), None


class Block(nn.Module):
    def __init__(self, d: int = D, norm: Callable[[int], nn.Module] = Norm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(d), norm(d)
        self.attn, self.mlp = Mixer(d), nn.Linear(d, d)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Any:
        x = x + self.attn(self.norm1(x), cache)[0]
        return x + self.mlp(self.norm2(x))


class Sandwich(Block):
    def __init__(self, d: int = D) -> None:
        super().__init__(d)
        self.norm3, self.norm4 = Norm(d), Norm(d)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Any:
        residual = x
        branch, _ = self.attn(self.norm1(x), cache=cache)
        x = residual + self.norm3(branch)
        residual = x
        return self.norm4(self.mlp(self.norm2(x))) + residual


class InPlace(Block):
    """The first addition changes the branch, the second is written the other way round."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Any:
        residual = x
        x, _ = self.attn(self.norm1(x), cache)
        x += residual
        return torch.add(x, self.mlp(self.norm2(x))), cache


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.norm = Norm(D)
        self.between: Callable[[Tensor], Any] = lambda x: x
        self.checkpointing: dict[str, Any] | None = None

    def forward(self, x: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            cache = None if caches is None else caches[index]
            if self.checkpointing is not None:
                x = checkpoint(block, x, cache, **self.checkpointing)
            else:
                x = block(x, cache)
            x = x[0] if isinstance(x, tuple) else x
            changed = self.between(x)
            x = x if changed is None else changed
        return self.norm(x)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().removeprefix("rmsnorm::")] += 1
        return func(*args, **(kwargs or {}))


def made(block: Callable[[], nn.Module] = Block, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model(block).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(7)).to(dtype)


def calls(model: nn.Module, x: Tensor) -> Counter[str]:
    with torch.no_grad(), Count() as count:
        model(x)
    return count.calls


@contextmanager
def only_values(inference: bool) -> Iterator[None]:
    with torch.inference_mode() if inference else torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [Block, Sandwich, InPlace])
def test_blocks_keep_their_bits(block: type[Block], dtype: torch.dtype) -> None:
    model = made(block, dtype)
    plain = copy.deepcopy(model)
    report = fused(model)
    assert [b.fused for b in report.blocks] == [True] * 3, report.blocks
    assert {b.inside for b in report.blocks} == {0 if block is InPlace else 1}
    for inference in (False, True):
        for batch, length in ((1, 1), (3, 5), (1, 9)):
            x = rows(batch, length, dtype=dtype)
            with only_values(inference):
                for _ in range(2):
                    assert torch.equal(model(x.clone()), plain(x))
                ours: list[list[Tensor]] = [[], [], []]
                theirs: list[list[Tensor]] = [[], [], []]
                for step in (x, x[:, :1] * 2.0, x[:, :1]):
                    assert torch.equal(model(step, ours), plain(step, theirs))


def test_every_addition_and_the_norm_after_it_are_one_operation() -> None:
    model = made()
    fused(model)
    x = rows(2, 3)
    first, second = calls(model, x), calls(model, x)
    # What follows a block is learnt when it runs for the first time.
    assert (first["add_rms_norm"], first["rms_norm"], first["aten::add.Tensor"]) == (3, 4, 3)
    assert (second["add_rms_norm"], second["rms_norm"], second["aten::add.Tensor"]) == (6, 1, 0)
    with torch.inference_mode():
        assert calls(model, x)["add_rms_norm"] == 6


def test_a_short_input_takes_the_own_code() -> None:
    model = made()
    patch(model, fuse_residual=True)
    assert calls(model, rows(1, LEAST_ELEMENTS // D - 1))["add_rms_norm"] == 0
    assert calls(model, rows(1, LEAST_ELEMENTS // D))["add_rms_norm"] == 3


class T5Like(nn.Module):
    """One norm, one addition, a dropout on the way, and a tuple that is added to another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.attn, self.dropout = Norm(D), Mixer(), nn.Dropout(0.1)

    def forward(self, x: Tensor, cache: Any = None, output_attentions: bool = False) -> Any:
        found = self.attn(self.layer_norm(x), cache)
        outputs = (x + self.dropout(found[0]),)
        outputs = outputs + found[1:]
        if output_attentions:
            outputs = outputs + found[:1]
        return outputs


def test_blocks_of_one_addition_are_joined_with_the_next() -> None:
    model = made(T5Like).eval()
    plain = copy.deepcopy(model)
    report = fused(model)
    assert [(b.fused, b.additions, b.inside) for b in report.blocks] == [(True, 1, 0)] * 3, (
        report.blocks
    )
    x = rows(2, 5)
    calls(model, x)
    assert calls(model, x)["add_rms_norm"] == 3
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients(dtype: torch.dtype, reentrant: bool | None) -> None:
    model = made(dtype=dtype).train()
    plain = copy.deepcopy(model)
    patch(plain)
    fused(model)
    if reentrant is not None:
        model.checkpointing = {"use_reentrant": reentrant}
    grads = []
    for module in (plain, model, model):
        module.zero_grad()
        x = rows(2, 6, dtype=dtype).requires_grad_()
        with torch.no_grad():  # what is learnt here must not cost a gradient below
            module(x)
        y = module(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for ours in grads[1:]:
        for mine, right in zip(ours, grads[0], strict=True):
            assert mine is not None
            error = (mine - right).float().norm() / right.float().norm()
            assert float(error) < (1e-5 if dtype is torch.float32 else 2e-2)


def test_the_gradient_of_a_block_s_output_is_whole() -> None:
    model, plain = made(), made()
    patch(plain)
    fused(model)
    found = []
    for module in (plain, model):
        kept: list[Tensor] = []
        module.between = kept.append
        module(rows(2, 4).requires_grad_()).pow(2).sum().backward(inputs=None)
        y = module(rows(2, 4).requires_grad_())
        found.append(torch.autograd.grad(y.pow(2).sum(), kept[-3:]))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inference", [False, True])
def test_what_changes_the_stream_between_blocks_is_seen(inference: bool) -> None:
    model, plain = made(), made()
    fused(model)
    x = rows(2, 4)
    with only_values(inference):
        model(x)
        for change in (
            lambda h: h.mul_(1.5),
            lambda h: h[:, :1].zero_().sum() * 0.0 + h,
            lambda h: h * 2.0,
            lambda h: setattr(h, "data", h * 3.0),
            lambda h: setattr(h[0], "data", h[0].sub_(1.0)),
        ):
            model.between = plain.between = lambda h: h
            assert [calls(model, x)["add_rms_norm"] for _ in range(2)][1] == 6
            model.between = plain.between = change
            assert torch.equal(model(x), plain(x))


def test_what_changes_the_norm_between_blocks_is_seen() -> None:
    model, plain = made(), made()
    fused(model)
    x = rows(2, 4)

    def double(module: Model) -> Callable[[Tensor], None]:
        return lambda h: [b.norm1.weight.mul_(1.25) for b in module.blocks] and None

    def renew(module: Model) -> Callable[[Tensor], None]:
        def change(h: Tensor) -> None:
            module.norm.weight = nn.Parameter(torch.full((D,), 3.0))

        return change

    with torch.no_grad():
        model(x)
        for make in (double, renew):
            model.between, plain.between = make(model), make(plain)
            assert torch.equal(model(x), plain(x))
        model.between = plain.between = lambda h: h
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), plain(x))


def test_blocks_may_be_called_in_any_order() -> None:
    model, plain = made(), made()
    fused(model)
    x = rows(2, 4)
    with torch.no_grad():
        for order in ((0, 1, 2), (0, 1, 2), (2, 0, 1), (1, 1, 0), (0,), (0, 2, 1), (0, 1, 2)):
            for module in (model, plain):
                module.chosen = nn.ModuleList(module.blocks[i] for i in order)
            results = []
            for module in (model, plain):
                h = x
                for block in module.chosen:
                    h = block(h)
                results.append(module.norm(h))
            assert torch.equal(*results)


def test_hooks_see_tensors() -> None:
    model, plain = made(), made()
    fused(model)
    x = rows(2, 4)
    calls(model, x)
    seen: list[type] = []

    def look(module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        seen.extend(type(value) for value in (*args, output) if value is not None)

    block = model.blocks[1]
    for module in (block.attn, block.mlp, block):
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    assert calls(model, x)["add_rms_norm"] == 6
    block.norm2.register_forward_pre_hook(look)
    block.norm2.register_forward_hook(lambda m, a, y: y * 2.0)
    plain.blocks[1].norm2.register_forward_hook(lambda m, a, y: y * 2.0)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert seen
    assert set(seen) <= {Tensor, tuple}
    everywhere = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    finally:
        everywhere.remove()
    assert Stream not in seen


def test_unpatch_and_patch_undo_it() -> None:
    model, plain = made(), made()
    state = [dict(module.__dict__) for module in model.modules()]
    x = rows(2, 4)
    fused(model)
    calls(model, x)
    assert isinstance(model.blocks[0], Joined)
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]).__name__ == "Block"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not patch(model).blocks
    assert type(model.blocks[0]) is Block
    assert calls(model, x)["add_rms_norm"] == 0
    assert fused(model) == fused(model)
    assert unpatch(model) == 7
    assert type(model.blocks[0]) is Block
    assert [module.__dict__ for module in model.modules()] == state
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_copies_run_by_themselves() -> None:
    model = made()
    model.between = abs
    fused(model)
    x = rows(2, 4)
    before = model(x)
    calls(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(copied(x), before)
        assert calls(copied, x)["add_rms_norm"] > 0
        with torch.no_grad():
            copied.blocks[0].norm1.weight.zero_()
            assert not torch.equal(copied(x), before)
            assert torch.equal(model(x), before)
        assert unpatch(copied) == 7
        assert type(copied.blocks[0]) is Block


def test_compiled_models_compute_the_same() -> None:
    model, plain = made(), made()
    patch(plain)
    fused(model)
    x = rows(2, 4)
    calls(model, x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), plain(x))
    compiled(x).sum().backward()
    assert model.blocks[0].norm1.weight.grad is not None


def test_transforms_of_torch_func() -> None:
    model, plain = made(), made()
    fused(model)
    x = rows(2, 4)
    for module in (model, plain):
        module.requires_grad_(False)
    calls(model, x)
    ours, theirs = (torch.func.jvp(m, (x,), (torch.ones_like(x),)) for m in (model, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    batched = torch.func.vmap(model)(x[None])
    torch.testing.assert_close(batched[0], plain(x))


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attn(y)[0] + self.mlp(y)


class Inline(nn.Module):
    """The sublayer is written out in the block, in another width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        batch, length, _ = x.shape
        inner = self.up(self.norm(x)).view(batch, length, 3, D).transpose(1, 2)
        return x + self.down(inner.transpose(1, 2).reshape(batch, length, 3 * D).relu())


@pytest.mark.parametrize("block", [Parallel, Inline])
def test_other_forms(block: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(block(), block(), Norm(D))
    plain = copy.deepcopy(model)
    report = fused(model)
    assert [b.fused for b in report.blocks] == [True, True], report.blocks
    x = rows(2, 5)
    calls(model, x)
    assert calls(model, x)["add_rms_norm"] == 2
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.mlp(x))
        return x + self.norm2(self.mlp(x))


class Branches(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm1(x))
        branch = self.mlp(self.norm2(x))
        return x + branch if branch.sum() > 0 else x


class Scales(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + self.mlp(self.norm1(x)) + x


class Depends(Block):
    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = x + self.mlp(self.norm1(x))
        return x + self.mlp(self.norm2(x)) if twice else x


class Hides(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm1(x))
        return self.norm2(x)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (PostNorm(), "its stream goes to mlp (Linear), which is no swapped norm"),
        (Branches(), "its forward cannot be traced: TraceError"),
        (Scales(), "its stream goes through mul"),
        (Depends(), "its additions depend on how it is called"),
        (Hides(), "it does not return its stream"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_reason_why_a_block_is_left(block: nn.Module, reason: str) -> None:
    (left,) = patch(block, fuse_residual=True).blocks
    assert not left.fused
    assert left.reason.startswith(reason)
    assert type(block).__name__ == left.cls
    assert not isinstance(block, Joined)


def test_what_is_no_block_is_not_listed() -> None:
    model = made()
    report = fused(model)
    assert [block.name for block in report.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert report.to_dict()["blocks"][0]["additions"] == 2
    line = "3  blocks.*  Block  2 additions computed with the norms after them"
    assert str(report).splitlines()[-1] == line
    assert not fused(nn.Sequential(nn.Linear(D, D), Norm(D))).blocks
    chosen = patch(made(), fuse_residual=True, exclude="blocks.1")
    assert [block.name for block in chosen.blocks] == ["blocks.0", "blocks.2"]


def test_a_forward_that_is_replaced_runs_as_it_is() -> None:
    class Own(Block):
        pass

    model = made(Own)
    fused(model)
    Own.forward = PostNorm.forward  # type: ignore[method-assign]
    plain = copy.deepcopy(model)
    unpatch(plain)
    x = rows(2, 4)
    with torch.no_grad():
        for ours, theirs in zip(model.blocks, plain.blocks, strict=True):
            assert torch.equal(ours(x), theirs(x))


def test_a_stream_answers_like_its_tensor() -> None:
    t = rows(2, 3)
    stream = Stream(t.clone(), (None, None), fused_tail())
    assert stream.shape == t.shape
    assert stream.dtype is t.dtype
    assert len(stream) == 2
    for ours, theirs in (
        (stream * 2.0, t * 2.0),
        (1.0 - stream, 1.0 - t),
        (stream[0], t[0]),
        (stream.float().mean(-1), t.float().mean(-1)),
        (torch.cat([stream, t]), torch.cat([t, t])),
        (nn.functional.gelu(stream), nn.functional.gelu(t)),
        (stream == t, t == t),
        (stream + 1.0, t + 1.0),
        (2.0 + stream, 2.0 + t),
    ):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)
    assert torch.equal((t + stream).tensor, t + t)
    assert torch.equal((stream + t[0]).tensor, t + t[0])
    before = stream.tensor
    stream += t
    assert stream.tensor is before
    assert torch.equal(before, t + t)


def fused_tail() -> Any:
    from rmsnorm.rewrite.stream import Tail

    return Tail()


CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "additions"),
    [("Llama", 2), ("Qwen3", 2), ("Gemma3", 2), ("Mistral", 2), ("Olmo2", 0)],
)
def test_models_of_transformers(name: str, additions: int) -> None:
    transformers = pytest.importorskip("transformers")
    text = "Text" if name == "Gemma3" else ""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}{text}Config")(**CONFIG)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()
    plain = copy.deepcopy(model)
    report = fused(model)
    assert len(report.blocks) == 3
    for block in report.blocks:
        assert (block.additions, block.fused) == (additions, bool(additions)), block
    if not additions:
        assert report.blocks[0].reason.startswith("its stream goes to self_attn")
    tokens = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with torch.no_grad():
        for _ in range(2):
            given = {"attention_mask": mask, "use_cache": False}
            assert torch.equal(model(tokens, **given).logits, plain(tokens, **given).logits)
        assert calls(model, tokens)["add_rms_norm"] == (6 if additions else 0)
        settings = {"max_new_tokens": 5, "do_sample": False, "output_hidden_states": True}
        settings |= {"return_dict_in_generate": True, "output_logits": True}
        ours, theirs = (m.generate(tokens, **settings) for m in (model, plain))
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(ours.hidden_states[0], theirs.hidden_states[0], strict=True):
            assert torch.equal(a, b)

    patch(plain)
    losses = []
    for module in (plain, model):
        module.train()
        losses.append(module(tokens, labels=tokens).loss)
        losses[-1].backward()
    model.gradient_checkpointing_enable()
    kept = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    losses.append(model(tokens, labels=tokens).loss)
    losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
    for (parameter_name, mine), theirs in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, kept[parameter_name])
        error = (mine.grad - theirs.grad).float().norm() / theirs.grad.float().norm()
        assert float(error) < 3e-2, parameter_name
