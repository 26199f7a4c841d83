"""The inspection of a whole model, on small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rmsnorm import patch, rms_norm, unpatch
from rmsnorm.rewrite.inspect import _wrong, inspect_model

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
