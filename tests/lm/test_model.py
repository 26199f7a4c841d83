"""The model against an implementation of its own in float64, and against its other forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm import RMSNorm
from rmsnorm.lm.block import FusedBlock, MindBlock
from rmsnorm.lm.config import NORMS, PLACEMENTS, PRESETS, ConfigError, ModelConfig, preset
from rmsnorm.lm.model import KVCache, MindForCausalLM

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rope_theta=1e3,
    qk_norm=True,
)


def small(seed: int = 0, **changes: object) -> MindForCausalLM:
    torch.manual_seed(seed)
    model = MindForCausalLM(dataclasses.replace(SMALL, **changes))
    with torch.no_grad():  # so that a norm without its weight, or a shrunken branch, shows
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def ids(batch: int = 2, sequence: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(61, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def oracle(model: MindForCausalLM, tokens: list[int]) -> Tensor:
    """The logits of one sequence in float64, position by position and head by head."""
    config = model.config
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        if config.norm == "none":
            return x
        weight = weights[f"{name}.weight"]
        if config.norm == "scale":
            return x * weight
        if config.norm == "layer":
            centred = x - x.mean()
            scaled = centred / (centred.square().mean() + config.rms_norm_eps).sqrt()
            return scaled * weight + weights[f"{name}.bias"]
        counted = -(-x.numel() * config.partial // 1)
        mean_square = x[: int(counted)].square().mean()
        return x / (mean_square + config.rms_norm_eps).sqrt() * weight

    def turned(x: Tensor, position: int) -> Tensor:
        half = x.numel() // 2
        result = x.clone()
        for i in range(half):
            angle = torch.tensor(
                position * config.rope_theta ** (-2 * i / config.head_dim), dtype=torch.float64
            )
            result[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            result[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return result

    def attention(rows: list[Tensor], name: str) -> list[Tensor]:
        heads, shared, width = (
            config.num_attention_heads,
            config.num_attention_heads // config.num_key_value_heads,
            config.head_dim,
        )
        q, k, v = (
            [(weights[f"{name}.{part}_proj.weight"] @ row).split(width) for row in rows]
            for part in "qkv"
        )
        results = []
        for at, queries in enumerate(q):
            mixed = []
            for head in range(heads):
                query, group = queries[head], head // shared
                keys = [k[t][group] for t in range(at + 1)]
                if config.qk_norm:
                    query = norm(query, f"{name}.q_norm")
                    keys = [norm(key, f"{name}.k_norm") for key in keys]
                query = turned(query, at)
                scores = torch.stack([query @ turned(key, t) for t, key in enumerate(keys)])
                shares = (scores / width**0.5).softmax(0)
                mixed.append(sum(share * v[t][group] for t, share in enumerate(shares)))
            results.append(weights[f"{name}.o_proj.weight"] @ torch.cat(mixed))
        return results

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ ((gate @ x) * torch.sigmoid(gate @ x) * (up @ x))

    x = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}"
        first, second = f"{at}.input_layernorm", f"{at}.post_attention_layernorm"
        if config.placement == "post":
            x = [
                norm(a + b, first) for a, b in zip(x, attention(x, f"{at}.self_attn"), strict=True)
            ]
            x = [norm(row + mlp(row, f"{at}.mlp"), second) for row in x]
            continue
        mixed = attention([norm(row, first) for row in x], f"{at}.self_attn")
        if config.placement == "sandwich":
            before, after = (f"{at}.{side}_feedforward_layernorm" for side in ("pre", "post"))
            x = [a + norm(b, second) for a, b in zip(x, mixed, strict=True)]
            x = [row + norm(mlp(norm(row, before), f"{at}.mlp"), after) for row in x]
        else:
            x = [a + b for a, b in zip(x, mixed, strict=True)]
            x = [row + mlp(norm(row, second), f"{at}.mlp") for row in x]
    if config.placement != "post":
        x = [norm(row, "model.norm") for row in x]
    return torch.stack([weights["lm_head.weight"] @ row for row in x])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_logits(norm: str, placement: str) -> None:
    changes = {"norm": norm, "placement": placement, "partial": 0.4 if norm == "partial" else 1.0}
    model = small(**changes)
    tokens = ids()
    expected = torch.stack([oracle(model, row.tolist()) for row in tokens])
    found = model(tokens).logits
    scale = expected.abs().max()
    assert ((found - expected).abs().max() / scale).item() < 1e-5
    without = small(**changes, qk_norm=False, tie_word_embeddings=False)
    found = without(tokens[:1]).logits[0]
    expected = oracle(without, tokens[0].tolist())
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-5


def both(**changes: object) -> tuple[MindForCausalLM, MindForCausalLM]:
    plain, fused = small(**changes, fuse_residual=False), small(**changes)
    assert isinstance(fused.model.layers[0], FusedBlock)
    assert type(plain.model.layers[0]) is MindBlock
    return plain, fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["rms", "partial"])
def test_the_fused_form_has_equal_bits(norm: str, dtype: torch.dtype) -> None:
    plain, fused = (
        model.to(dtype) for model in both(norm=norm, partial=0.4 if norm == "partial" else 1.0)
    )
    tokens = ids()
    outputs = [model(tokens[:, :-1], labels=tokens[:, 1:]) for model in (plain, fused)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    for output in outputs:
        output.loss.backward()
    for (name, mine), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        # The order in which the two gradients of a sum meet differs, so not the bits.
        close = 1e-6 if dtype == torch.float32 else 2e-2
        difference = (mine.grad.double() - theirs.grad.double()).norm()
        assert difference <= close * theirs.grad.double().norm(), name


def test_the_fused_form_has_equal_bits_with_a_cache_and_autocast() -> None:
    tokens = ids()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        results = []
        for model in both():
            cache = KVCache(SMALL, 2, 9, dtype=torch.bfloat16)
            model(tokens[:, :4], cache=cache)
            results.append(model(tokens[:, 4:], cache=cache).logits)
    assert torch.equal(*results)


def test_hooks_on_the_norms_run_in_the_fused_form() -> None:
    model, seen = small(), []
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(ids())
    assert len(seen) == len(set(seen)) == 4 * SMALL.num_hidden_layers + 1


@pytest.mark.parametrize("fuse", [False, True])
def test_gradient_checkpointing_has_equal_bits(fuse: bool) -> None:
    model, tokens, found = small(fuse_residual=fuse).train(), ids(), []
    runs: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    for enabled in (False, True):
        model.gradient_checkpointing = enabled
        assert model.gradient_checkpointing is enabled
        model.zero_grad()
        model(tokens[:, :-1], labels=tokens[:, 1:]).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert len(runs) == 3  # the second time twice
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("fuse", [False, True])
def test_gradient_checkpointing_leaves_keys_and_values_alone(fuse: bool) -> None:
    model, tokens, found = small(fuse_residual=fuse).train(), ids(), []
    for enabled in (False, True):
        model.gradient_checkpointing = enabled
        model.zero_grad()
        past = model(tokens[:, :4], use_cache=True).past_key_values
        output = model(tokens[:, 4:-1], labels=tokens[:, 5:], past_key_values=past, use_cache=True)
        output.loss.backward()
        assert output.past_key_values[0][0].shape[2] == tokens.shape[1] - 1
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("fuse", [False, True])
def test_compiled(fuse: bool) -> None:
    model, tokens = small(fuse_residual=fuse, num_hidden_layers=2), ids()
    compiled = torch.compile(model, fullgraph=True)
    expected, found = (f(tokens[:, :-1], labels=tokens[:, 1:]) for f in (model, compiled))
    torch.testing.assert_close(found.logits, expected.logits)
    found.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected.loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (4, 1, 4), (1, 8)])
def test_decoding_in_parts(chunks: tuple[int, ...]) -> None:
    model, tokens = small().double(), ids()
    whole = model(tokens).logits
    cache = KVCache(SMALL, 2, 9, dtype=torch.float64)
    cache.memory.fill_(float("nan"))
    for attempt in range(2):
        past, parts, tuples = None, [], []
        for part in tokens.split(chunks, dim=1):
            parts.append(model(part, cache=cache).logits)
            output = model(part, past_key_values=past, use_cache=True)
            past = output.past_key_values
            tuples.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat(tuples, 1), whole, rtol=1e-12, atol=1e-12)
        assert (cache.length, past[0][0].shape) == (9, (2, 2, 9, 6)), attempt
        cache.reset()


@torch.no_grad()
def test_padding_on_the_left_changes_nothing() -> None:
    model, tokens = small().double(), ids(1, 7)
    alone = model(tokens).logits
    padded = torch.cat((torch.full((1, 3), 5), tokens), dim=1)
    padded = torch.cat((padded, ids(1, 10, seed=4)))
    mask = torch.ones(2, 10)
    mask[0, :3] = 0
    together = model(padded, attention_mask=mask).logits
    assert together.isfinite().all()
    torch.testing.assert_close(together[:1, 3:], alone, rtol=1e-12, atol=1e-12)
    cache = KVCache(SMALL, 2, 10, dtype=torch.float64)
    parts = [
        model(padded[:, :6], attention_mask=mask[:, :6], cache=cache).logits,
        model(padded[:, 6:9], attention_mask=mask[:, :9], cache=cache).logits,
        model(padded[:, 9:], attention_mask=mask, cache=cache).logits,
    ]
    torch.testing.assert_close(torch.cat(parts, 1)[:1, 3:], alone, rtol=1e-12, atol=1e-12)


def test_loss_and_labels() -> None:
    model, tokens = small(), ids()
    labels = tokens.roll(-1, 1)
    labels[0, 3:] = -100
    output = model(tokens, labels=labels)
    shares = output.logits.double().log_softmax(-1)
    expected = -torch.stack(
        [shares[b, t, labels[b, t]] for b in range(2) for t in range(9) if labels[b, t] >= 0]
    ).mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)
    kept = model(tokens, logits_to_keep=2).logits
    torch.testing.assert_close(kept, output.logits[:, -2:])


def test_initialisation() -> None:
    config = preset("tiny")
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    models = [MindForCausalLM(config) for _ in range(2)]
    for model, generator in zip(models, generators, strict=True):
        model.reset_parameters(generator)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert abs(first["model.layers.1.mlp.up_proj.weight"].std().item() / 0.02 - 1) < 0.05
    assert abs(first["model.layers.1.mlp.down_proj.weight"].std().item() / 0.02 * 8**0.5 - 1) < 0.05
    assert first["model.norm.weight"].unique().tolist() == [1.0]
    loss = models[0](ids(), labels=ids(seed=2)).loss.item()
    assert abs(loss - torch.tensor(2048.0).log().item()) < 0.3


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", (0.9, 1.2)), ("mind-26m", (25, 27)), ("mind-64m", (62, 66))]
)
def test_presets(name: str, millions: tuple[float, float]) -> None:
    model = MindForCausalLM(PRESETS[name], device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert millions[0] <= count / 1e6 <= millions[1]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_angles_do_not_depend_on_the_dtype_of_the_model() -> None:
    model = small().bfloat16()
    assert not list(model.buffers())
    tokens = ids(1, 4)
    far = model(tokens, position_ids=torch.arange(3001, 3005)[None]).logits.double()
    reference = small().to(torch.bfloat16).double()
    near = reference(tokens).logits
    # Rotary scores depend on distances alone; angles in bfloat16 would be off by radians.
    assert ((far - near).norm() / near.norm()).item() < 0.05


def test_a_linear_head_of_its_own() -> None:
    model = small(tie_word_embeddings=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; expected more than 0"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5; expected int"),
        ({"qk_norm": 1}, "qk_norm is 1; expected bool"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads, 4"),
        ({"head_dim": 5}, "head_dim is 5; expected an even number"),
        ({"norm": "batch"}, "norm is 'batch'; expected one of rms, layer"),
        ({"placement": "parallel"}, "placement is 'parallel'"),
        ({"norm": "partial", "partial": 1.5}, "partial is 1.5; expected at most 1"),
        ({"partial": 0.5}, "but norm is 'rms'"),
        ({"bias": True}, "unknown field 'bias'"),
    ],
)
def test_bad_configurations(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**SMALL.to_dict(), **change})


def test_missing_and_unknown_names() -> None:
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        ModelConfig.from_dict({})
    with pytest.raises(ConfigError, match="'huge'; expected one of tiny, mind-26m"):
        preset("huge")


def test_bad_calls() -> None:
    model, tokens = small(), ids()
    cache = KVCache(SMALL, 2, 9)
    with pytest.raises(TypeError, match=r"torch.float32; expected torch.int64"):
        model(tokens.float())
    for wrong in (tokens[0], tokens[:, :0]):
        with pytest.raises(ValueError, match=r"expected \(batch, sequence\)"):
            model(wrong)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 8\)"):
        model(tokens, labels=tokens[:, 1:])
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 8\); expected \(2, 9\)"):
        model(tokens, attention_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="is for 2 sequences; input_ids has 1"):
        model(tokens[:1], cache=cache)
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        model(tokens, cache=cache)
    with torch.no_grad():
        model(tokens, cache=cache)
    with pytest.raises(ValueError, match="room for 9 positions; 9 are taken and 1 more"):
        model(tokens[:, :1], cache=cache)
    other = KVCache(dataclasses.replace(SMALL, num_hidden_layers=2), 2, 9)
    with pytest.raises(ValueError, match=r"the cache is for 2 layers .* the model has 3 of 2 of 6"):
        model(tokens, cache=other)
    half = KVCache(SMALL, 2, 9, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"cache is torch\.bfloat16, but the keys are"):
        model(tokens, cache=half)
    with pytest.raises(ValueError, match="logits_to_keep is -3"):
        model(tokens, logits_to_keep=-3)
    with pytest.raises(ValueError, match="labels and logits_to_keep were both given"):
        model(tokens, labels=tokens, logits_to_keep=2)
    with pytest.raises(TypeError, match=r"labels is torch.int32; expected torch.int64"):
        model(tokens, labels=tokens.int())
    for wrong in (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"position_ids has shape .* \(2, 9\) or \(1, 9\)"):
            model(tokens, position_ids=wrong)
    past = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="expected one of them"):
        model(tokens, cache=cache, past_key_values=past)
    with pytest.raises(ValueError, match="has 2 layers; the model has 3"):
        model(tokens, past_key_values=past[:2])
    with pytest.raises(ValueError, match="max_length is 0"):
        KVCache(SMALL, 1, 0)


def test_trains() -> None:
    torch.manual_seed(0)
    model = MindForCausalLM(dataclasses.replace(SMALL, initializer_range=0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    tokens = ids(4, 16)
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 < F.cross_entropy(torch.zeros(1, 61), tokens[0, :1]).item()
