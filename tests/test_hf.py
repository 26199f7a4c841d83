"""The Hugging Face switch: models that transformers makes while it is on, and after."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers import monkey_patching

from rmsnorm import patch, unpatch
from rmsnorm.hf import RMSNormGatedLayer, RMSNormLayer, kernel_mapping, register, unregister
from rmsnorm.rewrite.report import spec_name
from rmsnorm.rewrite.swap import Swapped, plan_of

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER, head_dim=16),
    "gemma": lambda: transformers.Gemma3TextConfig(**DECODER, head_dim=16, sliding_window=4),
    "t5": lambda: transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
    ),
}
TOKENS = torch.arange(3, 23)[None]  # (1, 20)


@pytest.fixture(autouse=True)
def _off_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # While a mapping is there, transformers lists the names of all its modules for each model that
    # it makes, and takes a second for its lazy ones, which hold no classes.
    lazy = transformers.utils.import_utils._LazyModule
    monkeypatch.setattr(lazy, "__dir__", lambda self: list(self.__dict__))
    yield
    unregister()
    assert monkey_patching.get_patch_mapping() == {}


def auto(name: str) -> Any:
    return transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM


def made(name: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return auto(name).from_config(CONFIGS[name](), dtype=dtype)


def randomised(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, -0.5, 2.0)
    return model


def logits(model: Any) -> Tensor:
    given = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS, **given).logits
    return found


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "Norm" in type(module).__name__]


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(map(torch.equal, a.values(), b.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "t5"])
def test_models_are_the_same_to_the_bit(name: str, dtype: Any, tmp_path: Path) -> None:
    plain = made(name, dtype)
    fresh = {key: value.clone() for key, value in plain.state_dict().items()}
    randomised(plain).eval().save_pretrained(tmp_path)
    right = logits(plain)

    register()
    model = made(name, dtype)
    assert same_tensors(fresh, model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert torch.equal(logits(model.eval()), right)

    loaded = auto(name).from_pretrained(tmp_path, dtype=dtype)
    # They are examined as soon as the weights are there, not at the first call.
    assert all(isinstance(norm, Swapped) and plan_of(norm) for norm in norms(loaded))
    assert same_tensors(plain.state_dict(), loaded.state_dict())
    assert torch.equal(logits(loaded), right)
    loaded.save_pretrained(tmp_path / "again")

    unregister()
    again = auto(name).from_pretrained(tmp_path / "again", dtype=dtype)
    assert not any(isinstance(norm, Swapped) for norm in norms(again))
    assert torch.equal(logits(again), right)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "t5"])
def test_each_class_has_its_own_convention(name: str) -> None:
    wanted = "llama" if name == "qwen3" else name
    register()
    for norm in norms(made(name).eval()):
        plan = plan_of(norm)
        assert plan is not None
        assert spec_name(plan.spec) == wanted
        assert plan.bit_identical
        assert plan.eps_of(norm) == 1e-6


def test_classes_go_by_their_names() -> None:
    register()
    model = made("llama")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert {type(norm).__name__ for norm in norms(model)} == {"LlamaRMSNorm"}
    assert all(isinstance(norm, LlamaRMSNorm) for norm in norms(model))
    # Outside of a model nothing is replaced.
    assert type(LlamaRMSNorm(4)) is LlamaRMSNorm


def test_it_may_be_turned_on_and_off_again() -> None:
    before = list(sys.meta_path)
    for _ in range(2):
        register()
        register()
        assert len(sys.meta_path) == len(before) + 1
        assert all(isinstance(norm, Swapped) for norm in norms(made("llama")))
        unregister()
        unregister()
        assert sys.meta_path == before
        assert not any(isinstance(norm, Swapped) for norm in norms(made("llama")))


def test_models_made_before_are_left_alone() -> None:
    before = made("llama")
    register()
    assert torch.equal(logits(before), logits(made("llama")))
    assert not any(isinstance(norm, Swapped) for norm in norms(before))
    kept = made("llama").eval()
    unregister()
    assert unpatch(kept) == 5
    assert type(kept.model.norm) is type(before.model.norm)


@pytest.mark.parametrize(("exact", "swapped"), [(True, 3), (False, 5)])
def test_norms_with_a_gate_are_changed_only_if_that_is_asked_for(exact: bool, swapped: int) -> None:
    right = logits(made("mamba2").eval())
    register()
    register(exact=exact)
    model = made("mamba2").eval()
    assert sum(isinstance(norm, Swapped) for norm in norms(model)) == swapped
    if exact:
        assert torch.equal(logits(model), right)
    assert (logits(model) - right).abs().max() <= 1e-5 * right.abs().max()


def test_training() -> None:
    plain = made("llama")
    register()
    model = made("llama")
    gradients = []
    for each in (plain, model):
        loss = each(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in each.parameters())])
    assert torch.equal(gradients[0][0], gradients[1][0])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_who_replaced_a_class_before_goes_first() -> None:
    class Other(nn.Module):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return x

    made("llama")  # so that its module is there
    monkey_patching.register_patch_mapping({"LlamaRMSNorm": Other})
    try:
        register()
        assert type(made("llama").model.norm) is Other
        unregister()
        assert monkey_patching.get_patch_mapping() == {"LlamaRMSNorm": Other}
    finally:
        monkey_patching.clear_patch_mapping()


def test_a_class_of_that_name_in_a_models_own_code() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    # What from_pretrained(trust_remote_code=True) imports is a module of such a name.
    module: Any = type(sys)("transformers_modules.own")
    exec(
        "from torch import nn, ones\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class LlamaRMSNorm(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.gain = nn.Parameter(ones(width))\n"
        "    def forward(self, x):\n"
        "        return x * (x * x).mean(-1, keepdim=True).add(1e-3).rsqrt() * (1 + self.gain)\n"
        "class Own(LlamaForCausalLM):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.extra_norm = LlamaRMSNorm(config.hidden_size)\n",
        module.__dict__,
    )
    sys.modules[module.__name__] = module
    try:
        made("llama")
        register()
        model = module.Own._from_config(LlamaConfig(**DECODER)).eval()
        plan = plan_of(model.extra_norm)
        assert plan is not None
        assert (plan.spec.offset, plan.eps) == (1.0, 1e-3)
        assert isinstance(model.extra_norm, module.LlamaRMSNorm)
        assert isinstance(model, LlamaForCausalLM)
        assert spec_name(plan_of(model.model.norm).spec) == "llama"
    finally:
        del sys.modules[module.__name__]


def test_modules_that_are_imported_later() -> None:
    # In a fresh process; the language model's module is imported while the whole is being made.
    code = (
        "import rmsnorm\n"
        "rmsnorm.hf.register()\n"
        "from transformers import AutoModelForImageTextToText, LlavaConfig\n"
        f"text = dict(model_type='qwen3', head_dim=16, **{DECODER})\n"
        "vision = dict(model_type='pixtral', hidden_size=32, intermediate_size=48, image_size=16,\n"
        "              num_hidden_layers=1, num_attention_heads=2, patch_size=4)\n"
        "config = LlavaConfig(text_config=text, vision_config=vision)\n"
        "make = AutoModelForImageTextToText.from_config\n"
        "model = make(config).eval()\n"
        "norms = [m for m in model.modules() if type(m).__name__.endswith('RMSNorm')]\n"
        "assert {type(m).__name__ for m in norms} == {'Qwen3RMSNorm', 'PixtralRMSNorm'}\n"
        "assert all('rmsnorm: llama in' in repr(m) for m in norms), norms\n"
        "rmsnorm.hf.unregister()\n"
        "assert 'rmsnorm: ' not in repr(make(config).eval())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(importlib.util, "find_spec", lambda name: None)
        for call in (register, unregister):
            with pytest.raises(ImportError, match="needs transformers, which is not installed"):
                call()


def test_transformers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found = transformers.__version__
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "transformers.monkey_patching", None)
        for call in (register, unregister):
            with pytest.raises(ImportError, match=rf"as 5\.24\.0 has it; found {found}"):
                call()


# Norms that are not examined yet.


def test_a_copy_and_a_pickle_are_examined_too() -> None:
    register()
    model = made("llama")
    right = logits(copy.deepcopy(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "not examined yet" in repr(other.model.norm)
        assert torch.equal(logits(other), right)
        assert plan_of(other.model.norm) is not None
    assert "not examined yet" in repr(model.model.norm)
    assert unpatch(model) == 5
    assert "rmsnorm" not in repr(model.model.norm)


def test_patch_does_not_wait() -> None:
    register()
    model = made("llama")
    assert len(patch(model).swapped) == 5
    assert "llama in bfloat16" in repr(model.model.norm)


@pytest.mark.parametrize("how", ["compile", "trace", "vmap", "meta"])
def test_where_values_cannot_be_asked_the_modules_own_code_runs(how: str) -> None:
    plain = made("llama").model.norm
    register()
    norm = made("llama").model.norm
    x = torch.randn(3, 32)
    if how == "compile":
        torch._dynamo.reset()
        compiled = torch.compile(norm, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), plain(x))
    elif how == "trace":
        with torch.no_grad():
            traced = torch.jit.trace(norm, x)
        assert "rmsnorm" not in str(traced.graph)
        assert torch.equal(traced(x), plain(x))
    elif how == "vmap":
        assert torch.equal(torch.func.vmap(norm)(x), plain(x))
    else:
        assert copy.deepcopy(norm).to("meta")(x.to("meta")).shape == x.shape
    # To check a trace, the tracer calls the module itself.
    assert ("not examined yet" in repr(norm)) is (how != "trace")
    assert torch.equal(norm(x), plain(x))
    assert plan_of(norm) is not None


# The layers for the kernels package.


def members(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls)}


@pytest.mark.parametrize(
    ("layer", "module", "name"),
    [
        (RMSNormLayer, "llama", "LlamaRMSNorm"),
        (RMSNormLayer, "qwen3_5", "Qwen3_5RMSNorm"),
        (RMSNormGatedLayer, "qwen3_next", "Qwen3NextRMSNormGated"),
        (RMSNormGatedLayer, "kimi_linear", "KimiLinearRMSNormGated"),
    ],
)
def test_layers_keep_the_contract(layer: type[nn.Module], module: str, name: str) -> None:
    """As its documentation says: no constructor, no state, the signature of what it replaces."""
    theirs = getattr(
        __import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name]), name
    )
    assert layer.__init__ is nn.Module.__init__
    assert members(layer) - members(nn.Module) == {"can_torch_compile", "has_backward"}
    kinds = [
        [parameter.kind for parameter in inspect.signature(cls.forward).parameters.values()]
        for cls in (layer, theirs)
    ]
    assert kinds[0] == kinds[1]


def kernelized(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
    for module in norms(model):
        module.forward = MethodType(layer.forward, module)
    return model


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_one_layer_serves_every_class(name: str, on: bool) -> None:
    plain = randomised(made(name)).eval()
    right = logits(plain)
    if on:
        register()
    model = made(name)
    model.load_state_dict(plain.state_dict())
    kernelized(model.eval(), RMSNormLayer)
    calls: list[nn.Module] = []
    for norm in norms(model):
        norm.register_forward_hook(lambda module, *_: calls.append(module))
    for rounds in (1, 2):
        assert torch.equal(logits(model), right)
        assert len(calls) == rounds * len(norms(model))
    assert {spec_name(plan_of(norm).spec) for norm in norms(model)} == {name}


def test_the_layer_gives_a_module_that_is_no_such_norm_its_own_forward_back() -> None:
    norm = nn.LayerNorm(8)
    x = torch.randn(3, 8)
    right = norm(x)
    norm.forward = MethodType(RMSNormLayer.forward, norm)
    assert torch.equal(norm(x), right)
    assert type(norm) is nn.LayerNorm
    assert "forward" not in vars(norm)


def test_the_layer_under_somebodys_wrapper() -> None:
    norm = nn.RMSNorm(8, eps=1e-5)
    x = torch.randn(3, 8)
    right = norm(x)
    norm.forward = MethodType(RMSNormLayer.forward, norm)
    inner = norm.forward
    norm.forward = lambda x: inner(x) + 1.0
    for _ in range(2):
        assert torch.equal(norm(x), right + 1.0)


def test_the_gated_layer() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(32)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    x, gate = torch.randn(4, 32), torch.randn(4, 32)
    right = norm(x, gate)
    norm.forward = MethodType(RMSNormGatedLayer.forward, norm)
    assert (norm(x, gate=gate) - right).abs().max() <= 4e-6
    assert spec_name(plan_of(norm).spec) == "qwen3_next"


def test_compiled_layers() -> None:
    torch._dynamo.reset()
    plain = nn.RMSNorm(16, eps=1e-5)
    x = torch.randn(3, 16)
    early, late = copy.deepcopy(plain), copy.deepcopy(plain)
    for norm in (early, late):
        norm.forward = MethodType(RMSNormLayer.forward, norm)
    late(x)
    for norm in (early, late):
        compiled = torch.compile(norm, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), plain(x))


def test_with_the_kernels_package() -> None:
    kernels = pytest.importorskip("kernels")
    if not hasattr(kernels, "kernelize"):  # a folder of that name
        pytest.skip("the kernels package is not installed")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Norm(LlamaRMSNorm):  # type: ignore[misc]
        pass

    kernels.replace_kernel_forward_from_hub(Norm, "RMSNorm")
    model = nn.Sequential(nn.Linear(32, 32), Norm(32), nn.Linear(32, 32), nn.LayerNorm(32))
    x = torch.randn(3, 32)
    right = model(x)
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(kernel_mapping()):
        kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    assert torch.equal(model(x), right)
    assert spec_name(plan_of(model[1]).spec) == "llama"
