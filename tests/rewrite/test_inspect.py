"""The inspection of a whole model, on small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rmsnorm import patch, rms_norm, unpatch
from rmsnorm.models.small import SMALL, small_model
from rmsnorm.rewrite.inspect import _decode, _wrong, inspect_model, prefill, token_ids

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gemma3() -> torch.nn.Module:
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=4)
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def prepared(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """In eval mode, with norm weights that are not trivial."""
    model = make().to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, -0.5, 2.0)
    return model


TOKENS = torch.arange(3, 23)[None]  # (1, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "convention", "norms"), [(llama, "llama", 5), (gemma3, "gemma", 13)]
)
def test_models(
    make: Callable[[], torch.nn.Module], convention: str, norms: int, dtype: torch.dtype
) -> None:
    model = prepared(make, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    found = inspect_model(model, TOKENS, seconds=0.0)
    assert (found.swapped, found.norms) == (norms, norms)
    assert {group.convention for group in found.groups} == {convention}
    assert all(group.bit_identical for group in found.groups)
    assert found.proof.holds
    assert found.proof.max_abs_diff == 0.0
    assert (found.proof.prefill_tokens, found.proof.decode_tokens) == (20, 8)
    assert (found.proof.wrong_max_abs_diff > 0.0) == (dtype is not torch.float32)
    assert found.timings == ()
    # The model itself is as it was.
    assert classes == [type(module) for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_times() -> None:
    found = inspect_model(prepared(llama, torch.float32), TOKENS, seconds=0.1)
    assert [timing.what for timing in found.timings] == [
        "norms, prefill",
        "norms, decoding",
        "forward, prefill",
        "forward, decoding",
    ]
    assert all(min(t.before, t.after) > 0.0 and t.rounds >= 3 for t in found.timings)


def test_model_without_rms_norms() -> None:
    found = inspect_model(prepared(gpt2, torch.float32), TOKENS, seconds=0.1)
    assert found.swapped == 0
    assert {group.reason for group in found.groups} == {"it subtracts the mean"}
    assert found.proof.holds
    assert found.proof.wrong_max_abs_diff == 0.0
    assert found.timings == ()


class ScaleAndShift(torch.nn.Module):
    """The bias comes first, and neither has the usual name."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.randn(d))
        self.scale = torch.nn.Parameter(torch.randn(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * self.scale.float() + self.shift.float()).to(x.dtype)


def test_the_wrong_convention_takes_weight_and_bias_whatever_their_names() -> None:
    model = torch.nn.Sequential(ScaleAndShift(16).bfloat16())
    (entry,) = patch(model).swapped
    unpatch(model)
    assert (entry.weight, entry.bias) == ("scale", "shift")
    assert entry.tensors == ("scale", "shift")
    x = torch.randn(64, 16).bfloat16()
    wrong = rms_norm(
        x,
        model[0].scale,
        spec=replace(entry.spec, rounding="before_weight"),
        bias=model[0].shift,
    )
    assert torch.equal(_wrong(model, [entry])(x), wrong)
    assert not torch.equal(model(x), wrong)


@pytest.mark.parametrize("shape", [(20,), (2, 10), (1, 1), (1, 0)])
def test_tokens_of_another_shape(shape: tuple[int, ...]) -> None:
    tokens = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens has shape .*; expected \(1, n\) with n >= 2"):
        inspect_model(prepared(llama, torch.float32), tokens)


def test_with_residual_additions_joined() -> None:
    found = inspect_model(prepared(llama, torch.float32), TOKENS, seconds=0.0, fuse_residual=True)
    assert found.proof.holds
    assert (found.fused_blocks, found.blocks) == (2, 2)
    assert found.to_dict()["fused_blocks"] == 2


def test_exact_leaves_gated_norms() -> None:
    config = transformers.Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        num_heads=4,
        state_size=8,
        n_groups=2,
    )
    model = transformers.Mamba2ForCausalLM(config).eval()
    swapped = [
        inspect_model(model, TOKENS, seconds=0.0, exact=exact).swapped for exact in (False, True)
    ]
    assert swapped == [5, 3]
    assert inspect_model(model, TOKENS, seconds=0.0, exact=True).proof.holds


# Of each small model: how many norms there are, how many of them are swapped for equal bits, and
# the conventions.
FOUND = {
    "llama4": (7, 7, {"llama", "olmo2"}),
    "qwen3": (9, 9, {"llama"}),
    "qwen3-next": (14, 11, {"gemma", "qwen3_next"}),
    "deepseek-v3": (9, 9, {"llama"}),
    "olmo2": (9, 9, {"olmo2"}),
    "gpt-oss": (5, 5, {"olmo2"}),
    "t5": (12, 12, {"t5"}),
    "mamba2": (5, 3, {"llama", "mamba2 with groups=2"}),
    "gemma3n": (38, 38, {"olmo2"}),
    "whisper": (12, 0, set()),
    "modernbert": (6, 0, set()),
}


def test_every_small_model_is_expected_here() -> None:
    assert list(FOUND) == list(SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_small_models(name: str, dtype: torch.dtype) -> None:
    norms, swapped, conventions = FOUND[name]
    model = small_model(name, dtype)
    found = inspect_model(model, TOKENS, seconds=0.0, exact=True)
    assert (found.norms, found.swapped) == (norms, swapped)
    named = {group.convention for group in found.groups if group.swapped}
    assert named == {c for c in conventions if c not in ("qwen3_next", "mamba2 with groups=2")}
    reasons = {group.reason for group in found.groups if not group.swapped}
    if norms > swapped > 0:
        assert reasons == {"torch's silu has other last bits than this package's"}
    elif not swapped:
        assert "it subtracts the mean" in reasons
    proof = found.proof
    assert proof.holds
    assert proof.max_abs_diff == 0.0
    assert proof.prefill_tokens == 20
    assert proof.decode_tokens == (0 if name == "modernbert" else 8)
    assert proof.compared == ("hidden states" if name == "modernbert" else "logits")
    if swapped:
        assert (proof.wrong_max_abs_diff > 0.0) == (dtype is not torch.float32)
    if dtype == torch.float32 and swapped != norms and swapped:
        every = inspect_model(model, TOKENS, seconds=0.0)
        assert every.swapped == norms
        assert {group.convention for group in every.groups} == conventions
        assert 0.0 < every.proof.max_abs_diff < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "t5", "whisper", "mamba2"])
def test_decoding_continues_what_was_cached(name: str) -> None:
    model = small_model(name, torch.float32)
    with torch.no_grad():
        whole, last = prefill(model, TOKENS), _decode(model, TOKENS, 5)
        other = _decode(model, TOKENS.flip(1), 5)
    torch.testing.assert_close(last, whole[:, -5:], rtol=1e-3, atol=1e-4)
    assert (other - last).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_what_the_encoder_is_given_reaches_the_logits(name: str) -> None:
    model = small_model(name, torch.float32)
    with torch.no_grad():
        before = _decode(model, TOKENS, 3)
        for parameter in model.get_encoder().parameters():
            if parameter.dim() == 1:  # the norms of either
                parameter.mul_(1.5)
        assert (_decode(model, TOKENS, 3) - before).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["whisper", "modernbert"])
def test_tokens_for_models_of_other_kinds(name: str) -> None:
    ids = token_ids(small_model(name, torch.float32), None, "", 24)
    assert ids.shape == (1, 24)
    assert 0 <= ids.min() <= ids.max() < 128


def test_a_model_that_takes_neither_tokens_nor_sound() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=16, patch_size=8)
    with pytest.raises(ValueError, match="ViTModel takes pixel_values; expected a model of tokens"):
        inspect_model(transformers.ViTModel(config).eval(), TOKENS)
