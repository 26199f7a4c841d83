from __future__ import annotations

import copy
import importlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewrite import norms
from rmsnorm import GatedRMSNorm, RMSNorm, no_decay, patch, unpatch

D = 48


class ChannelsFirst(nn.Module):
    """A LayerNorm over the channels of an image."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        y = centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.gamma[:, None, None] * y + self.beta[:, None, None]


class RunningStatistics(nn.Module):
    """Statistics of the batch in training, of all batches in evaluation."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("square", torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            flat = x.flatten(0, -2)
            self.mean.lerp_(flat.mean(0), 0.1)
            self.square.lerp_(flat.var(0), 0.1)
            return self.scale * (x - flat.mean(0)) / flat.std(0)
        return self.scale * (x - self.mean) * self.square.rsqrt()


class Heads(nn.Module):
    """A weight for each of several heads."""

    def __init__(self, heads: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class WithResidual(norms.WeightThenCast):
    """Adds a residual first and returns it, too."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        total = x + residual
        return super().forward(total), total


class WithDropout(norms.WeightThenCast):
    """Holds another module."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(super().forward(x))
        return y


class OnlyElsewhereNorm(norms.WeightThenCast):
    """Cannot be asked here."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")


class OnlyElsewhere(OnlyElsewhereNorm):
    """Neither can this, and nothing says what it is."""


NORMS: list[Callable[[], nn.Module]] = [
    lambda: RMSNorm(D),
    lambda: GatedRMSNorm(D),
    lambda: GatedRMSNorm(D, group_size=12, spec="qwen3_next"),
    lambda: nn.RMSNorm((4, 12)),
    lambda: nn.LayerNorm(D),
    lambda: nn.GroupNorm(4, D),
    lambda: nn.BatchNorm2d(D),
    lambda: nn.SyncBatchNorm(D),
    lambda: nn.InstanceNorm1d(D, affine=True),
    lambda: norms.CastThenWeight(D),
    lambda: norms.WeightThenCast(1),
    lambda: norms.Gamma(D),
    lambda: norms.ZeroCentred(D),
    lambda: norms.Grouped(D, 4),
    lambda: norms.L2Scaled(D),
    lambda: norms.Original(D, part=0.25),
    lambda: norms.ConfigEps(D),
    lambda: norms.LeadingOnes(D),
    lambda: norms.HandLayerNorm(D),
    lambda: norms.VarianceNorm(D),
    lambda: norms.WrongAxis(D),
    lambda: norms.DropoutInside(D),
    lambda: norms.ScalarWeight(D),
    lambda: norms.ScaledBefore(D),
    lambda: norms.Gated(D),
    lambda: norms.GatedOptionally(D),
    lambda: norms.Detached(D),
    lambda: norms.Counting(D),
    lambda: norms.InPlace(D),
    lambda: norms.ReturnsTuple(D),
    lambda: norms.NonFiniteGuard(D),
    lambda: ChannelsFirst(D),
    lambda: RunningStatistics(D),
    lambda: Heads(3, 16),
    lambda: WithResidual(D),
    lambda: WithDropout(D),
    lambda: OnlyElsewhereNorm(D),
]


@pytest.mark.parametrize("make", NORMS)
def test_every_parameter_of_a_norm_is_named(make: Callable[[], nn.Module]) -> None:
    norm = make()
    own = [name for name, _ in norm.named_parameters()]
    assert own
    assert no_decay(norm) == own
    model = nn.Sequential(nn.Linear(D, D), nn.ModuleDict({"norm": norm}), nn.Embedding(3, D))
    expected = [f"1.norm.{name}" for name in own]
    assert no_decay(model) == expected
    patch(model)
    assert no_decay(model) == expected
    unpatch(model)
    assert no_decay(model.eval().requires_grad_(False)) == expected


OTHERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(D, D),
    lambda: nn.Linear(1, 1),
    lambda: nn.Embedding(3, D),
    lambda: nn.Conv1d(D, D, 3),
    lambda: nn.Conv2d(D, D, 3, groups=D),
    lambda: nn.Conv1d(1, 1, 1),
    lambda: nn.Bilinear(2, 2, 2),
    lambda: nn.PReLU(D),
    lambda: nn.MultiheadAttention(D, 4),
    lambda: nn.GRU(D, D),
    lambda: nn.RMSNorm(D, elementwise_affine=False),
    lambda: norms.DynamicTanh(D),
    lambda: norms.BufferWeight(D),
    lambda: OnlyElsewhere(D),
    lambda: nn.Identity(),
]


class Layer(nn.Module):
    """A function of a row with one parameter for each channel."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(shape or (D,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x * w,
    lambda x, w: x + w,
    lambda x, w: torch.tanh(x * w),
    lambda x, w: x.sign() * w,
    lambda x, w: w.expand_as(x).clone(),
    lambda x, w: torch.softmax(x * w, -1),
    lambda x, w: torch.zeros_like(x),
    lambda x, w: x,
    lambda x, w: x.cumsum(-1) * w,
    lambda x, w: x - x.mean(-1, keepdim=True) + w,
    lambda x, w: (x * w).sum(-1),
]


@pytest.mark.parametrize("make", OTHERS)
def test_what_is_no_norm_is_not_named(make: Callable[[], nn.Module]) -> None:
    assert no_decay(make()) == []
    assert no_decay(nn.ModuleDict({"layer_norm": make()})) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_functions_of_a_row_are_not_named(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert no_decay(Layer(function)) == []


def test_a_matrix_behind_a_norm_is_not_named() -> None:
    def cosine(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) @ w

    assert no_decay(Layer(cosine, D, D)) == []
    assert no_decay(Layer(lambda x, w: nn.functional.normalize(x, dim=-1) * w)) == ["weight"]


def test_a_lazy_norm() -> None:
    model = nn.Sequential(nn.LazyLinear(D), nn.LazyBatchNorm1d())
    assert no_decay(model) == ["1.weight", "1.bias"]


def test_a_block_is_no_norm() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norms.Gamma(D)
            self.linear = nn.Linear(D, D)
            self.gate = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(self.norm(x)) * self.gate
            return y

    assert no_decay(Block()) == ["norm.gamma"]


def test_shared_parameters_and_modules_are_named_once() -> None:
    norm = norms.Gamma(D)
    model = nn.ModuleDict({"a": norm, "b": norm, "c": norms.Gamma(D), "d": nn.Linear(D, D)})
    model["c"].gamma = norm.gamma
    assert no_decay(model) == ["a.gamma"]
    assert set(no_decay(model)) < {name for name, _ in model.named_parameters()}


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("make", [norms.Gamma, nn.RMSNorm, RMSNorm, norms.HandLayerNorm])
def test_parametrized_weights(make: type[nn.Module], patched: bool) -> None:
    norm = make(D)
    (name,) = no_decay(norm)
    if patched:
        patch(norm)
    nn.utils.parametrize.register_parametrization(norm, name, Doubled())
    expected = f"parametrizations.{name}.original"
    assert no_decay(norm) == [expected]
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), norm)
    assert no_decay(model) == [f"1.{expected}"]


def test_modules_without_data() -> None:
    with torch.device("meta"):
        model = nn.Sequential(norms.Gamma(D), nn.Linear(D, D), ChannelsFirst(D), nn.RMSNorm(D))
        model.append(RunningStatistics(D))
    assert no_decay(model) == ["0.gamma", "2.gamma", "2.beta", "3.weight", "4.scale"]


def test_wrappers_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(D, D), norms.Gamma(D))
    assert no_decay(torch.compile(model)) == ["_orig_mod.1.gamma"]
    assert no_decay(nn.DataParallel(model)) == ["module.1.gamma"]
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["0"], modules_to_save=["1"])
    )
    assert set(no_decay(wrapped)) == {
        "base_model.model.1.original_module.gamma",
        "base_model.model.1.modules_to_save.default.gamma",
    }


def test_distributed_tensors() -> None:
    distributed = pytest.importorskip("torch.distributed.tensor")
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(D, D), norms.Gamma(D))
        model[1].gamma = nn.Parameter(distributed.distribute_tensor(model[1].gamma.detach(), mesh))
        assert no_decay(model) == ["1.gamma"]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "name", "arguments"),
    [
        ("llama", "LlamaRMSNorm", (D,)),
        ("gemma3", "Gemma3RMSNorm", (D,)),
        ("t5", "T5LayerNorm", (D,)),
        ("mamba2", "MambaRMSNormGated", (D, 12)),
        ("zamba2", "Zamba2RMSNormGated", (D, 4)),
        ("nemotron_h", "NemotronHRMSNormGated", (D, 12)),
        ("falcon_h1", "FalconH1RMSNormGated", (D,)),
        ("qwen3_next", "Qwen3NextRMSNormGated", (D,)),
        ("cohere", "CohereLayerNorm", ((3, 16),)),
        ("nemotron", "NemotronLayerNorm1P", (D,)),
        ("xlstm", "xLSTMMultiHeadLayerNorm", (3, 16)),
        ("convnext", "ConvNextLayerNorm", (D,)),
    ],
)
def test_classes_of_transformers(family: str, name: str, arguments: tuple[Any, ...]) -> None:
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        norm = getattr(module, name)(*arguments)
    except (ImportError, AttributeError, TypeError) as error:
        pytest.skip(f"this transformers has no such {name}: {error}")
    assert no_decay(norm) == [parameter for parameter, _ in norm.named_parameters()]


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=30,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    model = transformers.LlamaForCausalLM(config)
    expected = [name for name, _ in model.named_parameters() if "norm" in name]
    begin = time.perf_counter()
    assert no_decay(model) == expected
    assert time.perf_counter() - begin < 3.0
    assert len(expected) == 61
    report = patch(model)
    assert no_decay(model) == expected == report.parameter_names()


def test_the_model_is_not_changed() -> None:
    model = nn.Sequential(norms.Counting(D), RunningStatistics(D), WithDropout(D), norms.InPlace(D))
    fired: list[str] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: fired.append("after"))
        module.register_forward_pre_hook(lambda *_: fired.append("before"))
    state = copy.deepcopy(model.state_dict())
    attributes = [dict(module.__dict__) for module in model.modules()]
    versions = [parameter._version for parameter in model.parameters()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    assert len(no_decay(model)) == 4
    assert fired == []
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert model[0].calls == 0
    assert torch.is_grad_enabled()


def test_one_class_with_and_without_normalisation() -> None:
    class Optional(norms.WeightThenCast):
        def __init__(self, d: int, on: bool) -> None:
            super().__init__(d)
            self.on = on

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.on else x * self.weight

    assert no_decay(nn.Sequential(Optional(D, True), Optional(D, False))) == ["0.weight"]


def test_under_modes_that_a_caller_may_be_in() -> None:
    model = nn.Sequential(nn.Linear(D, D), norms.Gamma(D).bfloat16(), norms.HandLayerNorm(D))
    expected = ["1.gamma", "2.weight"]
    for mode in (
        torch.inference_mode(),
        torch.device("meta"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        with mode:
            assert no_decay(model) == expected
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert no_decay(model) == expected
    finally:
        torch.set_default_dtype(default)


def test_hostile_modules() -> None:
    class Exits(norms.WeightThenCast):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(1)

    class Interrupted(norms.WeightThenCast):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    class HoldsTheModel(norms.WeightThenCast):
        def __init__(self) -> None:
            super().__init__(D)
            self.__dict__["parent"] = [nn.Linear(4, 4)]

    assert no_decay(Exits(D)) == []
    assert no_decay(HoldsTheModel()) == []
    with pytest.raises(KeyboardInterrupt):
        no_decay(Interrupted(D))
    with pytest.raises(TypeError, match="was given a list; expected a torch module"):
        no_decay([nn.RMSNorm(D)])  # type: ignore[arg-type]


def test_two_groups_for_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(D, D), norms.Gamma(D), nn.LayerNorm(D))
    patch(model)
    exempt = set(no_decay(model))
    parameters = list(model.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [p for name, p in parameters if name not in exempt]},
            {"params": [p for name, p in parameters if name in exempt], "weight_decay": 0.0},
        ],
        lr=0.1,
        weight_decay=0.5,
    )
    before = {name: p.detach().clone() for name, p in parameters}
    for _, p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in parameters:
        assert torch.equal(p, before[name]) is (name in exempt)
