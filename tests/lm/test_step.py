import pytest
import torch
from torch import nn

from rmsnorm import RMSNorm
from rmsnorm.bench.paired import Paired
from rmsnorm.lm import step
from rmsnorm.lm.block import FusedBlock
from rmsnorm.lm.config import PRESETS, preset
from rmsnorm.lm.step import (
    VARIANTS,
    StepTimes,
    Workload,
    loss_difference,
    make_model,
    make_tokens,
    measure_steps,
)

WORKLOAD = Workload("small", 2, 8, 2, 8, 1e-2, rounds=3)


@pytest.fixture
def small(monkeypatch):
    config = preset("tiny", num_hidden_layers=2, hidden_size=32, vocab_size=64)
    monkeypatch.setitem(PRESETS, "small", config)


def test_the_variants_differ_in_their_norms_alone(small):
    models = {variant: make_model("small", variant) for variant in VARIANTS}
    kinds = {
        variant: {
            type(module) for module in model.modules() if "norm" in type(module).__name__.lower()
        }
        for variant, model in models.items()
    }
    assert kinds == {
        "ours": {RMSNorm},
        "unfused": {RMSNorm},
        "eager": {nn.RMSNorm},
        "copies": set(),
        "none": set(),
    }
    assert [type(model.model.layers[0]) is FusedBlock for model in models.values()] == [
        True,
        False,
        False,
        False,
        False,
    ]
    copies = models["copies"].modules()
    norms = sum(isinstance(module, nn.RMSNorm) for module in models["eager"].modules())
    assert sum(isinstance(module, step.Copies) for module in copies) == norms == 5
    states = {variant: model.state_dict() for variant, model in models.items()}
    for name, value in states["none"].items():
        assert all(torch.equal(state[name], value) for state in states.values()), name
    for name, value in states["eager"].items():
        assert torch.equal(states["ours"][name], value), name
    assert {norm.eps for norm in models["eager"].modules() if isinstance(norm, nn.RMSNorm)} == {
        1e-5
    }
    with pytest.raises(ValueError, match="'fused'; expected one of ours, unfused"):
        make_model("small", "fused")


def test_the_losses_agree_and_would_show_another_norm(small, monkeypatch):
    assert loss_difference(WORKLOAD, steps=5) < 1e-4
    trained = make_model("small", "ours").model
    assert trained.norm.eps == 1e-5
    original = step.make_model

    def other(name, variant):
        model = original(name, variant)
        for norm in model.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.eps = 1e-2
        return model

    monkeypatch.setattr(step, "make_model", other)
    assert loss_difference(WORKLOAD, steps=5) > 1e-3


def test_every_variant_is_timed_in_every_round(small, monkeypatch):
    monkeypatch.setattr(step, "LOSS_STEPS", 5)
    (found,) = measure_steps([WORKLOAD], compiled=False)
    assert {name: len(samples) for name, samples in found.samples.items()} == dict.fromkeys(
        VARIANTS, 3
    )
    assert found.loss_difference < 1e-3
    assert all(sample > 0 for samples in found.samples.values() for sample in samples)


@pytest.mark.parametrize(
    ("ours", "difference", "compiled", "ok"),
    [
        (12.5, 0.0, False, True),
        (12.6, 0.0, False, False),  # too little is gone
        (12.5, 2e-3, False, False),
        (12.5, float("nan"), False, False),
        (19.9, None, True, True),
        (20.1, None, True, False),  # slower
    ],
)
def test_what_must_hold(ours, difference, compiled, ok):
    samples = {"ours": (ours,) * 3, "eager": (20.0,) * 3, "none": (10.0,) * 3}
    assert StepTimes("small", compiled, samples, difference).ok is ok


def test_what_is_gone_is_told_for_copies_too():
    # Two laps of a step; the first is around the norms.
    laps = {"ours": (1.4, 10.1), "eager": (2.0, 11.0), "copies": (1.2, 10.0), "none": (1.0, 10.0)}
    paired = Paired({name: [list(lap)] * 9 for name, lap in laps.items()})
    around = paired.only([True, False])
    alone = Paired({"ours": [1.0] * 9, "eager": [5.0] * 9, "copies": [0.5] * 9})
    samples = {name: (sum(lap) * 1e3,) * 9 for name, lap in laps.items()}
    found = StepTimes("small", False, samples, 0.0, paired, around, alone)
    assert found.gone_of("ours").keys() == {"clock", "around", "alone"}
    assert found.gone == pytest.approx(0.75)
    assert not found.ok  # around them only 60 % is gone
    assert found.text().endswith(
        "with copies instead: by the clock 90 % (90 to 90 %), by the laps around them alone 80 % "
        "(80 to 80 %), of the norms alone 90 % (90 to 90 %)"
    )
    assert found.intervals()["gone_copies"]["around"]["low"] == pytest.approx(0.8)
    assert found.gone_of("unfused") == {}


def test_tokens_can_be_learned():
    tokens = make_tokens(64, 50, 100)
    assert tokens.shape == (50, 101)
    assert 0 <= tokens.min() <= tokens.max() < 64
    counts = torch.zeros(64, 64)
    counts.index_put_((tokens[:, :-1].flatten(), tokens[:, 1:].flatten()), torch.ones(()), True)
    assert (counts.amax(1).sum() / counts.sum()).item() > 0.4
