"""The small models of random weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rmsnorm.models.load import ModelError, load_model
from rmsnorm.models.small import SMALL, Small, small_model


@pytest.mark.parametrize("name", SMALL)
def test_every_model_is_small_and_the_same_each_time(name: str) -> None:
    state = torch.random.get_rng_state()
    model, tokenizer = load_model(f"random:{name}", "bfloat16")
    torch.manual_seed(1)
    again = small_model(name, torch.bfloat16)
    torch.random.set_rng_state(state)
    assert type(model).__name__ == SMALL[name].model
    assert tokenizer is None
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ours, theirs = model.state_dict(), again.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    norms = [value for key, value in ours.items() if "norm" in key and key.endswith("weight")]
    assert norms
    assert all(value.unique().numel() > 1 for value in norms)


def test_random_states_are_left_alone() -> None:
    state = torch.random.get_rng_state()
    small_model("qwen3", torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_models_have_what_parts_their_families() -> None:
    def classes(name: str) -> set[str]:
        model = small_model(name, torch.float32)
        return {type(module).__name__ for module in model.modules()}

    assert classes("llama4") >= {"Llama4TextL2Norm", "Llama4TextMoe"}
    assert classes("qwen3-next") >= {"Qwen3NextRMSNormGated", "Qwen3NextAttention"}
    assert classes("deepseek-v3") >= {"DeepseekV3MoE", "DeepseekV3MLP"}
    assert classes("gemma3n") >= {"Gemma3nTextLaurelBlock", "Gemma3nTextAltUp"}


@pytest.mark.parametrize("name", ["", "nonsense", "Qwen3"])
def test_unknown_name(name: str) -> None:
    known = ", ".join(SMALL)
    with pytest.raises(ModelError, match=f"^random:{name} is not known; .* one of {known}$"):
        load_model(f"random:{name}")


def test_transformers_without_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "qwen9", Small("Qwen9Config", "Qwen9ForCausalLM"))
    with pytest.raises(
        ModelError, match=r"^random:qwen9 needs a transformers with Qwen9ForCausalLM; found \d"
    ):
        load_model("random:qwen9")
