"""The timing of whole models, on small ones: what is timed, not how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rmsnorm.rewrite import speed
from rmsnorm.rewrite.inspect import prefill
from rmsnorm.rewrite.speed import (
    BEFORE,
    COMPILED,
    COMPILED_PATCHED,
    COPIES,
    FUSED,
    NO_ADDITIONS,
    NO_NORMS,
    PATCHED,
    Paired,
    Speed,
    TakenOut,
    make_variants,
    measure_speed,
)
from rmsnorm.rewrite.stream import Course
from rmsnorm.rewrite.swap import Swapped

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.arange(3, 23)[None]  # (1, 20)


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gemma3() -> torch.nn.Module:
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=64)
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def prepared(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    model = make().to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PREFILL_TOKENS", 12)
    monkeypatch.setattr(speed, "DECODE_TOKENS", 3)
    monkeypatch.setattr(speed, "TRAIN_TOKENS", 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "norms"), [(llama, 7), (gemma3, 19)])
def test_the_twins_differ_in_their_norms_alone(
    make: Callable[[], torch.nn.Module],
    norms: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small a model would not be worth it.
    monkeypatch.setattr(Course.__init__, "__defaults__", (0,))
    model = prepared(make, dtype)
    variants = make_variants(model)
    assert variants is not None
    assert variants.notes == ()
    assert list(variants.models) == [BEFORE, PATCHED, FUSED, COPIES, NO_NORMS, NO_ADDITIONS]
    assert len(variants.names) == norms
    counts = {
        variant: [
            sum(isinstance(one, cls) for one in twin.modules())
            for cls in (Swapped, TakenOut, type(model.model.norm))
        ]
        for variant, twin in variants.models.items()
    }
    assert counts == {
        BEFORE: [0, 0, norms],
        PATCHED: [norms, 0, norms],
        FUSED: [norms, 0, norms],
        COPIES: [0, norms, 0],
        NO_NORMS: [0, norms, 0],
        NO_ADDITIONS: [0, norms, 0],
    }
    own = dict(model.named_parameters())
    for variant, twin in variants.models.items():
        expected = {
            name
            for name in own
            if counts[variant][1] == 0 or name.rpartition(".")[0] not in variants.names
        }
        assert {name for name, _ in twin.named_parameters()} == expected
        assert all(parameter is own[name] for name, parameter in twin.named_parameters())

    with torch.inference_mode():
        logits = {name: prefill(twin, TOKENS) for name, twin in variants.models.items()}
    assert torch.equal(logits[PATCHED], logits[BEFORE])
    assert torch.equal(logits[FUSED], logits[BEFORE])
    assert torch.equal(logits[COPIES], logits[NO_NORMS])
    for variant in (NO_NORMS, NO_ADDITIONS):
        assert logits[variant].isfinite().all()
        assert logits[variant].shape == logits[BEFORE].shape
        assert not torch.equal(logits[variant], logits[BEFORE])


@pytest.mark.parametrize("make", [llama, gemma3])
def test_without_norms_everything_else_is_computed_and_trained(
    make: Callable[[], torch.nn.Module],
) -> None:
    model = prepared(make, torch.float32)
    variants = make_variants(model)
    assert variants is not None

    def operations(variant: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        twin = variants.models[variant].train()
        twin.zero_grad()
        with torch.profiler.profile() as profile:
            twin(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        for event in profile.events():
            counts[event.name] = counts.get(event.name, 0) + 1
        return counts

    before, without, neither = map(operations, (BEFORE, NO_NORMS, NO_ADDITIONS))
    trained = [name for name, one in variants.models[NO_NORMS].named_parameters()]
    for name in trained:
        gradient = model.get_parameter(name).grad
        assert gradient is not None, name
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0, name
    for name in ("aten::mm", "aten::addmm", "aten::silu", "aten::gelu", "aten::cat"):
        assert before.get(name, 0) == without.get(name, 0) == neither.get(name, 0), name
    assert before["aten::mm"] > 0
    # Only the final norm, which is made once, is left to compute something.
    assert before["aten::rsqrt"] == len(variants.names)
    assert without.get("aten::rsqrt", 0) <= 4
    # Two additions in each layer are gone, and those of their gradients.
    assert without["aten::add"] - neither["aten::add"] >= 2 * SIZES["num_hidden_layers"]


def test_what_is_handed_on_stays_as_it_was() -> None:
    variants = make_variants(prepared(llama, torch.float32))
    assert variants is not None
    twin = variants.models[NO_NORMS].train()
    norm = twin.model.norm
    for number in range(2):
        twin(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        kept = [*norm._results.values(), *norm._gradients.values()]
        if number == 0:
            first = [one.clone() for one in kept]
    assert len(kept) == len(first) == 2
    assert all(map(torch.equal, kept, first))
    # What is asked of the norm beside calling it.
    assert norm.variance_epsilon == 1e-6


WHATS = ["prefill of 12 tokens", "decoding of 3 tokens", "training step of 4x8 tokens"]


def test_every_work_is_timed_in_every_variant(short: None) -> None:
    model = prepared(llama, torch.float32)
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    classes = [type(module) for module in model.modules()]
    speeds = measure_speed(model, TOKENS[:, :5], seconds=0.01)
    assert speeds.left == ()
    assert [found.what for found in speeds.found] == WHATS
    for found in speeds.found:
        paired = found.paired
        copied = "training" not in found.what  # the backward of a copy does nothing
        copies = (COPIES,) if copied else ()
        assert paired.variants == (BEFORE, PATCHED, FUSED, *copies, NO_NORMS, NO_ADDITIONS)
        assert paired.rounds >= 6
        assert all(len(paired.totals(variant)) == paired.rounds for variant in paired.variants)
        assert min(min(paired.totals(variant)) for variant in paired.variants) > 0.0
        assert found.alone is not None
        assert found.alone.variants == (BEFORE, PATCHED)
        assert (found.gone(COPIES) is not None) is copied
        assert any("copies" in line for line in found.lines()) is copied
        assert found.notes == ()
        json.dumps(found.to_dict(), allow_nan=False)
    prefill, decoding, train = speeds.found
    # The embedding, the rotary angles, attention and MLP of each layer, and the head; and as many
    # laps between them.
    assert prefill.paired.laps == 2 * (2 + 2 * 3 + 1) + 1
    assert prefill.around is not None
    assert prefill.around.laps == 2 + 2 * 3 + 1 + 1
    assert decoding.paired.laps == 3
    assert decoding.around is None
    # The norms of three layers and the last one: eight times each, and forward and backward.
    assert prefill.alone.laps == decoding.alone.laps == 7 * 8
    assert train.alone.laps == 7 + 1
    assert train.around is not None
    # The model is as it was, its gradients included.
    assert model.lm_head.weight.grad is kept
    assert model.model.norm.weight.grad is None
    assert not model.training
    assert classes == [type(module) for module in model.modules()]
    assert not any(module._forward_hooks for module in model.modules())


def test_only_the_chosen_works_are_timed(short: None) -> None:
    model = prepared(llama, torch.float32)
    for works in (["decoding"], ("training", "prefill")):
        speeds = measure_speed(model, TOKENS, seconds=0.01, works=works)
        expected = [what for what in WHATS if what.startswith(tuple(works))]
        assert [found.what for found in speeds.found] == expected


def test_an_encoder_decodes_nothing(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "decodes", lambda model: False)
    speeds = measure_speed(prepared(llama, torch.float32), TOKENS, works=["decoding"])
    assert speeds.found == ()
    assert speeds.left == ("decoding of 3 tokens: not timed: the model does not decode",)


def test_copies_read_what_the_norms_are_given() -> None:
    variants = make_variants(prepared(llama, torch.float32))
    assert variants is not None
    counts = {}
    for variant in (COPIES, NO_NORMS):
        twin = variants.models[variant]
        with torch.inference_mode(), torch.profiler.profile() as profile:
            prefill(twin, TOKENS)
        counts[variant] = sum(event.name == "aten::clone" for event in profile.events())
    assert counts[COPIES] >= counts[NO_NORMS] + len(variants.names)


def test_compiled_variants(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    speeds = measure_speed(prepared(llama, torch.float32), TOKENS, compiled=True, seconds=0.01)
    assert [any(isinstance(one, Swapped) for one in twin.modules()) for twin in compiled] == [
        False,
        True,
    ]
    assert len(speeds.found) == 3
    for found in speeds.found:
        assert found.paired.variants[-2:] == (COMPILED, COMPILED_PATCHED)
        ratio = found.ratio(COMPILED_PATCHED)
        assert ratio is not None
        assert ratio.low < ratio.value < ratio.high
        assert found.gone(COMPILED_PATCHED) is None  # there is no compiled one without norms
        # They are in one lap, so they are not among those that are in many.
        assert found.around is None or COMPILED not in found.around.variants


def test_a_variant_that_fails_is_left_with_the_reason(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**kwargs: object) -> None:
        raise RuntimeError("no compiler\nwas found")

    def compile(model: torch.nn.Module) -> torch.nn.Module:
        model.forward = fail
        return model

    monkeypatch.setattr(torch, "compile", compile)
    speeds = measure_speed(prepared(llama, torch.float32), TOKENS, compiled=True, seconds=0.01)
    assert len(speeds.found) == 3
    for found in speeds.found:
        assert COMPILED not in found.paired.variants
        assert "compiled: not timed: RuntimeError: no compiler" in found.notes
        assert found.lines()[-2:] == list(found.notes)
        assert found.ratio(COMPILED_PATCHED) is None


def test_a_model_without_rms_norms() -> None:
    speeds = measure_speed(prepared(gpt2, torch.float32), TOKENS, seconds=0.01)
    assert speeds.found == ()
    assert speeds.left == ("none of its norms can be replaced",)


def test_what_cannot_be_measured_is_refused() -> None:
    model = prepared(llama, torch.float32)
    with pytest.raises(ValueError, match=r"tokens has shape \(20,\); expected \(1, n\)"):
        measure_speed(model, TOKENS[0])
    with pytest.raises(ValueError, match=r"seconds is 0\.0; expected a positive number"):
        measure_speed(model, TOKENS, seconds=0.0)
    for works in ([], ["prefill", "sleeping"]):
        with pytest.raises(ValueError, match="expected some of prefill, decoding, training"):
            measure_speed(model, TOKENS, works=works)


def test_no_more_is_said_than_is_known() -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(seconds: float) -> torch.Tensor:
        return seconds + 0.5 * torch.randn(20, generator=generator).double()

    clear = {BEFORE: [20.0] * 9, PATCHED: [19.2] * 9, NO_NORMS: [19.0] * 9}
    unclear = {BEFORE: noisy(20.0), PATCHED: noisy(19.9), NO_NORMS: noisy(19.9)}
    lines = Speed("prefill", Paired(clear), None).lines()
    assert lines == [
        "share of the norms: 5.0 % (5.0 to 5.0 %)",
        "patched: of the time of the norms, gone: 80 % (80 to 80 %)",
    ]
    lines = Speed("prefill", Paired(unclear), None).lines()
    assert lines[0].startswith("share of the norms: cannot be told (at most")
    assert lines[1] == "patched: of the time of the norms, gone: cannot be told"
