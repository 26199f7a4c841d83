from __future__ import annotations

import importlib
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rewrite import norms
from rmsnorm import NormSpec, identify, specs
from rmsnorm.rewrite.probe import Probe

D = 48

FOUND: list[tuple[nn.Module, NormSpec]] = [
    (norms.CastThenWeight(D), replace(specs.llama, eps=1e-5)),
    (norms.WeightThenCast(D), replace(specs.olmo2, eps=1e-5)),
    (norms.Gamma(D), replace(specs.olmo2, eps=1e-6)),
    (norms.ZeroCentred(D), replace(specs.gemma, eps=1e-6)),
    (norms.Grouped(D, 4), replace(specs.olmo2, eps=1e-5, groups=4)),
    (norms.ConfigEps(D), replace(specs.olmo2, eps=1e-4)),
    (norms.ClassEps(D), replace(specs.olmo2, eps=3e-6)),
    (norms.IgnoredEps(D, eps=1e-3), replace(specs.olmo2, eps=1e-6)),
    (norms.LeadingOnes(D), replace(specs.olmo2, eps=1e-5)),
    (norms.BufferWeight(D), replace(specs.olmo2, eps=1e-5)),
    (nn.RMSNorm(1, eps=1e-5), replace(specs.torch, eps=1e-5)),
    (norms.WeightThenCast(7), replace(specs.olmo2, eps=1e-5)),
    (nn.RMSNorm(D), specs.torch),
    (nn.RMSNorm(D, eps=1e-5), replace(specs.torch, eps=1e-5)),
    (nn.RMSNorm(D, eps=2.0**-23), replace(specs.torch, eps=2.0**-23)),
    (nn.RMSNorm((4, 12), eps=1e-5), replace(specs.torch, eps=1e-5)),
    (nn.RMSNorm(D, eps=1e-6, elementwise_affine=False), replace(specs.torch, eps=1e-6)),
    (nn.RMSNorm((4, 12), elementwise_affine=False), specs.torch),
    (nn.RMSNorm(D, eps=0.0), replace(specs.torch, eps=0.0)),
]


@pytest.mark.parametrize(("module", "spec"), FOUND, ids=lambda v: type(v).__name__)
def test_the_convention_is_found(module: nn.Module, spec: NormSpec) -> None:
    assert identify(module) == spec


@pytest.mark.parametrize(
    ("module", "eps_in", "eps", "partial"),
    [
        (norms.NoCast(D), "mean_square", 1e-6, 1.0),
        (norms.L2Scaled(D), "clamp", 1e-12, 1.0),
        (norms.Original(D), "root", 1e-8, 1.0),
        (norms.Original(64, part=0.25), "root", 1e-8, 0.25),
        (norms.Original(50, part=0.33), "root", 1e-8, 0.32),
    ],
    ids=lambda v: type(v).__name__,
)
def test_formulas_without_a_cast(
    module: nn.Module, eps_in: str, eps: float, partial: float
) -> None:
    spec = identify(module)
    assert spec is not None
    assert (spec.eps_in, spec.eps) == (eps_in, eps)
    assert spec.width(64) == NormSpec(partial=partial).width(64)
    assert spec.accumulate == "input"


@pytest.mark.parametrize(
    ("family", "name", "arguments", "named", "eps"),
    [
        ("llama", "LlamaRMSNorm", (D,), "llama", 1e-6),
        ("qwen2", "Qwen2RMSNorm", (D,), "llama", 1e-6),
        ("qwen3", "Qwen3RMSNorm", (D, 1e-5), "llama", 1e-5),
        ("xlstm", "xLSTMRMSNorm", (D,), "llama", 1e-6),
        ("xlstm", "xLSTMRMSNorm", (D, 1e-6, True, True), "llama", 1e-6),
        ("gemma", "GemmaRMSNorm", (D,), "gemma", 1e-6),
        ("gemma2", "Gemma2RMSNorm", (D,), "gemma", 1e-6),
        ("gemma3", "Gemma3RMSNorm", (D,), "gemma", 1e-6),
        ("gemma3n", "Gemma3nRMSNorm", (D,), "olmo2", 1e-6),
        ("gemma3n", "Gemma3nRMSNorm", (D, 1e-6, False), "olmo2", 1e-6),
        ("gemma4", "Gemma4RMSNorm", (D, 1e-6, False), "olmo2", 1e-6),
        ("t5", "T5LayerNorm", (D,), "t5", 1e-6),
        ("olmo2", "Olmo2RMSNorm", (D,), "olmo2", 1e-6),
        ("gpt_oss", "GptOssRMSNorm", (D,), "olmo2", 1e-6),
        ("llama4", "Llama4TextL2Norm", (1e-5,), "olmo2", 1e-5),
        ("nanochat", "NanoChatRMSNorm", (1e-6,), "olmo2", 1e-6),
        ("falcon_mamba", "FalconMambaWeightlessRMSNorm", (D,), "olmo2", 1e-6),
    ],
)
def test_classes_of_transformers(
    family: str, name: str, arguments: tuple[Any, ...], named: str, eps: float
) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(module, name)(*arguments)
    assert identify(norm) == replace(specs[named], eps=eps)
    assert identify(norm.to(torch.bfloat16)) == replace(specs[named], eps=eps)


NOT_FOUND = [
    norms.HandLayerNorm(D),
    norms.VarianceNorm(D),
    norms.WrongAxis(D),
    norms.DropoutInside(D),
    norms.DropoutInside(D).eval(),
    norms.DynamicTanh(D),
    norms.ScalarWeight(D),
    norms.ScaledBefore(D),
    norms.AddsOptionally(D),
    norms.Detached(D),
    norms.Counting(D),
    norms.InPlace(D),
    norms.TensorEps(D),
    norms.Raises(),
    norms.ReturnsTuple(D),
    nn.LayerNorm(D),
    nn.LayerNorm(D, elementwise_affine=False),
    nn.GroupNorm(4, D),
    nn.BatchNorm1d(D),
    nn.BatchNorm1d(D, affine=False, track_running_stats=False),
    nn.InstanceNorm1d(D),
    nn.LocalResponseNorm(2),
    nn.Linear(D, D),
    nn.Linear(D, D, bias=False),
    nn.Linear(2048, 2048, bias=False),
    nn.Embedding(D, D),
    nn.Conv1d(D, D, 3),
    nn.Dropout(0.5),
    nn.AlphaDropout(0.5),
    nn.Identity(),
    nn.Tanh(),
    nn.Softsign(),
    nn.Hardtanh(),
    nn.GELU(),
    nn.SiLU(),
    nn.PReLU(),
    nn.Softmax(-1),
    nn.Flatten(),
    nn.Module(),
    nn.ModuleList([nn.RMSNorm(D)]),
    nn.Sequential(nn.RMSNorm(D)),
    nn.MultiheadAttention(D, 4),
    nn.GRU(D, D),
    nn.RMSNorm(D, device="meta"),
    nn.RMSNorm(0),
]


@pytest.mark.parametrize("module", NOT_FOUND, ids=lambda v: type(v).__name__)
def test_what_is_no_rmsnorm_gives_none(module: nn.Module) -> None:
    assert identify(module) is None


@pytest.mark.parametrize("eps", [1e-12, 1e-10, 1e-8, 1.5625e-7, 1e-6, 1e-5, 3.7e-4, 1e-2])
def test_a_hard_coded_eps_is_recovered(eps: float) -> None:
    class Literal(norms.WeightThenCast):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    spec = identify(Literal(D, eps=0.5))
    assert spec is not None
    assert spec.eps == eps


def test_the_attribute_gives_every_digit_of_eps() -> None:
    as_float32 = 9.999999747378752e-06
    spec = identify(norms.WeightThenCast(D, eps=as_float32))
    assert spec is not None
    assert spec.eps == as_float32


def test_a_trained_weight_does_not_matter() -> None:
    module = norms.ZeroCentred(D)
    for values in (torch.zeros(D), torch.ones(D), torch.full((D,), float("nan")), torch.randn(D)):
        module.weight.data.copy_(values)
        assert identify(module) == specs.gemma


def test_the_module_is_not_changed() -> None:
    module = norms.WeightThenCast(D).train()
    module.register_buffer("seen", torch.tensor([1, 2]))
    module.weight.requires_grad_(False)
    fired: list[str] = []
    module.register_forward_hook(lambda *_: fired.append("after"))
    module.register_forward_pre_hook(lambda *_: fired.append("before"))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = dict(module.__dict__)
    weight, version = module.weight, module.weight._version
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    assert identify(module) is not None

    assert fired == []
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert module.training
    assert module.weight is weight
    assert (weight._version, weight.grad, weight.requires_grad) == (version, None, False)
    assert attributes.keys() == module.__dict__.keys()
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())
    assert torch.is_grad_enabled()


def test_dropout_is_noticed_without_drawing_from_the_callers_generator() -> None:
    state = torch.get_rng_state()
    assert identify(norms.DropoutInside(D)) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_under_modes_that_a_caller_may_be_in() -> None:
    module = norms.CastThenWeight(D)
    spec = identify(module)
    assert spec is not None
    with torch.inference_mode():
        assert identify(module) == spec
        assert identify(norms.CastThenWeight(D)) == spec
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert identify(module) == spec
    with torch.device("meta"):
        assert identify(module) == spec
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert identify(module) == spec
    finally:
        torch.set_default_dtype(default)


def test_a_module_that_holds_the_model_is_not_copied_with_it() -> None:
    module = norms.WeightThenCast(D)
    module.__dict__["parent"] = [nn.Linear(4, 4)]
    assert identify(module) is None


def test_big_modules_cost_little() -> None:
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(50)]
    begin = time.perf_counter()
    assert all(identify(layer) is None for layer in layers)
    assert time.perf_counter() - begin < 0.25


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a torch module"):
        identify(torch.ones(2))  # type: ignore[arg-type]


def test_the_double_shares_nothing() -> None:
    module = norms.ConfigEps(D)
    probe = Probe(module)
    assert probe.module is not module
    assert probe.module.config is not module.config
    assert probe.held(probe.slots[0]).data_ptr() != module.weight.data_ptr()
