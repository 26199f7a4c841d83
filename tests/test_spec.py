"""NormSpec: what it refuses, how it travels as a string, and what the named ones say."""

from __future__ import annotations

import dataclasses
import doctest
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rmsnorm.spec
from rmsnorm.spec import NormSpec, as_spec, check_eps, specs

BAD_FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"eps": -1e-6}, ValueError, "eps is -1e-06"),
    ({"eps": math.inf}, ValueError, "eps is inf"),
    ({"eps": math.nan}, ValueError, "eps is nan"),
    ({"eps": "1e-6"}, TypeError, "eps is '1e-6'"),
    ({"eps": True}, TypeError, "eps is True"),
    ({"eps_in": "sqrt"}, ValueError, "eps_in is 'sqrt'.*'mean_square', 'root', 'clamp'"),
    ({"reduce": "max"}, ValueError, "reduce is 'max'"),
    ({"offset": 0.5}, ValueError, "offset is 0.5"),
    ({"offset": "1"}, TypeError, "offset is '1'"),
    ({"accumulate": "bfloat16"}, ValueError, "accumulate is 'bfloat16'"),
    ({"rounding": "never"}, ValueError, "rounding is 'never'"),
    ({"output": "float32"}, ValueError, "output is 'float32'"),
    ({"groups": 0}, ValueError, "groups is 0"),
    ({"groups": 2.0}, TypeError, "groups is 2.0"),
    ({"groups": True}, TypeError, "groups is True"),
    ({"partial": 0.0}, ValueError, "partial is 0.0"),
    ({"partial": 1.5}, ValueError, "partial is 1.5"),
    ({"partial": math.nan}, ValueError, "partial is nan"),
    ({"gate": "relu"}, ValueError, "gate is 'relu'"),
    ({"gate_order": "during"}, ValueError, "gate_order is 'during'"),
    ({"partial": 0.5, "groups": 2}, ValueError, "partial=0.5, groups=2"),
    ({"eps_in": "clamp", "reduce": "sum"}, ValueError, "clamp"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD_FIELDS)
def test_a_bad_field_is_refused_by_name(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NormSpec(**fields)


def test_a_spec_is_a_value() -> None:
    assert NormSpec(eps=1) == NormSpec(eps=1.0)
    assert hash(NormSpec(eps=1)) == hash(NormSpec(eps=1.0))
    assert len({NormSpec(), NormSpec(), NormSpec(groups=2)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        NormSpec().eps = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "d", "width"),
    [
        ({}, 7, 7),
        ({"groups": 3}, 12, 4),
        ({"partial": 0.0625}, 100, 7),
        # 0.1 * 30 is 3.0000000000000004 in binary.
        ({"partial": 0.1}, 30, 3),
        ({"partial": 0.07}, 100, 7),
        ({"partial": 0.001}, 5, 1),
        ({"partial": 0.999}, 3, 3),
        ({}, 0, 0),
    ],
)
def test_width(fields: dict[str, Any], d: int, width: int) -> None:
    assert NormSpec(**fields).width(d) == width


def test_groups_must_divide_the_row() -> None:
    with pytest.raises(ValueError, match="7 elements cannot be cut into 2"):
        NormSpec(groups=2).width(7)


@st.composite
def any_spec(draw: st.DrawFn) -> NormSpec:
    eps_in = draw(st.sampled_from(["mean_square", "root", "clamp"]))
    partial = draw(st.just(1.0) | st.floats(1e-9, 1.0))
    return NormSpec(
        eps=draw(st.none() | st.floats(0.0, 1e3)),
        eps_in=eps_in,
        reduce="mean" if eps_in == "clamp" else draw(st.sampled_from(["mean", "sum"])),
        offset=draw(st.sampled_from([0.0, 1.0])),
        accumulate=draw(st.sampled_from(["float32", "input"])),
        rounding=draw(st.sampled_from(["before_weight", "after_weight", "weight_dtype"])),
        output=draw(st.sampled_from(["input", "promote", "weight"])),
        groups=1 if partial < 1.0 else draw(st.integers(1, 64)),
        partial=partial,
        gate=draw(st.sampled_from([None, "silu", "sigmoid"])),
        gate_order=draw(st.sampled_from(["before", "after"])),
    )


@settings(max_examples=60, deadline=None)
@given(spec=any_spec())
def test_decode_is_the_inverse_of_encode(spec: NormSpec) -> None:
    text = spec.encode()
    assert NormSpec.decode(text) == spec
    assert NormSpec.decode(text).encode() == text
    default = NormSpec()
    changed = [
        field.name
        for field in dataclasses.fields(NormSpec)
        if getattr(spec, field.name) != getattr(default, field.name)
    ]
    assert [part.partition("=")[0] for part in text.split(";") if part] == changed


def test_every_field_shows_in_the_encoding() -> None:
    changed = {
        "eps": 1e-3,
        "eps_in": "root",
        "reduce": "sum",
        "offset": 1.0,
        "accumulate": "float32",
        "rounding": "before_weight",
        "output": "weight",
        "groups": 2,
        "partial": 0.5,
        "gate": "silu",
        "gate_order": "after",
    }
    assert set(changed) == {field.name for field in dataclasses.fields(NormSpec)}
    texts = {NormSpec(**{name: value}).encode() for name, value in changed.items()}
    assert len(texts | {NormSpec().encode()}) == len(changed) + 1


@pytest.mark.parametrize(
    "text",
    [
        "eps",
        "eps=",
        "eps=1;eps=2",
        "epsilon=1",
        "groups=two",
        "groups=0",
        "rounding=never",
        ";",
        "eps=1;",
        "eps=nan",
    ],
)
def test_decode_refuses_what_encode_never_writes(text: str) -> None:
    with pytest.raises(ValueError):
        NormSpec.decode(text)


def test_the_named_specs() -> None:
    llama = {"accumulate": "float32", "rounding": "before_weight", "output": "promote"}
    once = {"accumulate": "float32", "rounding": "after_weight", "output": "input"}
    expected: dict[str, dict[str, Any]] = {
        "torch": {"eps": None},
        "llama": {"eps": 1e-6, **llama},
        "olmo2": {"eps": 1e-6, **once},
        "gemma": {"eps": 1e-6, "offset": 1.0, **once},
        "t5": {"eps": 1e-6, **llama, "rounding": "weight_dtype", "output": "weight"},
        "original": {"eps": 1e-8, "eps_in": "root"},
        "l2": {"eps": 1e-12, "eps_in": "clamp"},
        "l2_sum": {"eps": 1e-6, "reduce": "sum"},
        "mamba2": {"eps": 1e-5, **llama, "gate": "silu", "gate_order": "before"},
        "qwen3_next": {
            "eps": 1e-6,
            **llama,
            "output": "input",
            "gate": "silu",
            "gate_order": "after",
        },
        "kimi_linear": {"eps": 1e-6, **once, "gate": "sigmoid", "gate_order": "after"},
        "falcon_h1": {"eps": 1e-6, **once, "gate": "silu", "gate_order": "before"},
    }
    assert {name: specs[name] for name in specs} == {
        name: NormSpec(**fields) for name, fields in expected.items()
    }
    assert len(specs) == len(expected)


@pytest.mark.parametrize("name", list(specs))
def test_a_named_spec_is_found_again(name: str) -> None:
    spec = specs[name]
    assert getattr(specs, name) is spec
    assert as_spec(name) is spec
    assert as_spec(spec) is spec
    assert name in specs
    assert name in dir(specs)
    assert specs.name_of(dataclasses.replace(spec, eps=0.125)) == name


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lama'.*torch, llama"):
        as_spec("lama")
    with pytest.raises(AttributeError, match="lama"):
        _ = specs.lama
    assert "lama" not in specs
    assert specs.name_of(NormSpec(groups=3)) is None


def test_as_spec_takes_nothing_else() -> None:
    with pytest.raises(TypeError, match="int"):
        as_spec(3)  # type: ignore[arg-type]


def test_check_eps() -> None:
    assert check_eps(0) == 0.0
    assert isinstance(check_eps(1), float)
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="eps is"):
            check_eps(bad)
    for wrong in ("1e-6", None, True, [1e-6]):
        with pytest.raises(TypeError, match="eps is"):
            check_eps(wrong)


def test_the_examples_run() -> None:
    result = doctest.testmod(rmsnorm.spec)
    assert result.attempted >= 8
    assert result.failed == 0
