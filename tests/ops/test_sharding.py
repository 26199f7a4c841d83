"""The operations on distributed tensors, on four ranks, against the oracles and one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

distributed = pytest.importorskip("torch.distributed")
if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

import oracle
import ranks
from calls import KERNELS, assert_close_rows, assert_sums, row_norms, same_bits
from ops import gated_oracle, sharding_ranks
from ops.sharding_ranks import WORLD, Case, Found, Part
from rmsnorm import NormSpec, specs

TORCH, LLAMA = replace(specs.torch, eps=1e-5), specs.llama
BFLOAT16 = torch.bfloat16


def _cases() -> Iterator[tuple[str, Case]]:
    operations = {
        "norm": Case("rms_norm", TORCH, "R", bias=True),
        "norm bf16": Case("rms_norm", LLAMA, "R", dtype=BFLOAT16),
        "add": Case("add_rms_norm", LLAMA, "R"),
        "add bf16": Case(
            "add_rms_norm",
            TORCH,
            "R",
            dtype=BFLOAT16,
            options={"alpha": 0.5, "residual_dtype": torch.float32},
        ),
        "mamba2": Case("gated_rms_norm", specs.mamba2, "R"),
        "qwen3_next bf16": Case("gated_rms_norm", specs.qwen3_next, "R", dtype=BFLOAT16),
    }
    for name, case in operations.items():
        if case.dtype == BFLOAT16:
            for words in ("S0", "S1", "S2"):
                yield f"{name}: {words}, weight R", replace(case, x=words)
            continue
        # 3 and 6 rows over 4 ranks: uneven, with an empty part.
        for words in ("S0", "S1", "S2", "R", "P"):
            for weight in ("R", "S0"):
                yield f"{name}: {words}, weight {weight}", replace(case, x=words, weight=weight)
        yield f"{name}: frozen", replace(case, x="S1", frozen=True)
        yield f"{name}: cut, frozen", replace(case, x="S2", frozen=True)
        yield f"{name}: cut, no weight", replace(case, x="S2", weighted=False, bias=False)
        for d in (10, 3, 1):
            yield f"{name}: uneven {d}", replace(case, x="S2", shape=(3, 2, d))
        for words in ("S0 S2", "S1 S2", "S2 S2", "S0 S1", "S0 S0", "R S2", "S2 S1", "P S1", "S2 P"):
            shape = (3, 5, 14)
            yield (
                f"{name}: mesh {words}",
                replace(case, x=words, mesh=(2, 2), weight="R S0", shape=shape),
            )
        if case.operation != "rms_norm":
            for words, beside in (("P", "S1"), ("R", "S2"), ("S1", "S0"), ("S1", "S2")):
                yield f"{name}: {words} beside {beside}", replace(case, x=words, beside=beside)

    for name in ("original", "l2", "l2_sum", "gemma", "t5", "olmo2"):
        yield f"{name}: cut", Case("rms_norm", specs[name], "S2")
    for name in ("kimi_linear", "falcon_h1"):
        yield f"{name}: cut", Case("gated_rms_norm", specs[name], "S2")
    yield "partial: cut", Case("rms_norm", NormSpec(partial=0.3, eps=1e-6), "S2")
    for words in ("S1", "S2"):
        yield f"two dimensions: {words}", Case("rms_norm", TORCH, words, ndim=2)
    yield (
        "two dimensions: mesh",
        Case("rms_norm", TORCH, "S1 S2", ndim=2, mesh=(2, 2), weight="R R", shape=(3, 5, 7)),
    )
    for size in (10, 5, 4, 2, 1):
        for spec in (specs.mamba2, specs.qwen3_next):
            yield (
                f"groups of {size}, {spec.gate_order}",
                Case("gated_rms_norm", spec, "S2", options={"group_size": size}),
            )
    yield "groups: norm", Case("rms_norm", NormSpec(groups=4), "S1", shape=(5, 12))
    for scale in (1e30, 1e-30):
        yield f"float32 {scale}", Case("rms_norm", NormSpec(eps=0.0), "S2", scale=scale)
    for scale in (1.0, 1e200, 1e-200, 1e-300):
        for spec in (NormSpec(eps=0.0), NormSpec(eps=1e-280, eps_in="root")):
            yield (
                f"float64 {scale} {spec.eps_in} {spec.eps}",
                Case("rms_norm", spec, "S1", dtype=torch.float64, scale=scale, shape=(4, 9)),
            )


CASES = dict(_cases())


class Whole:
    """What all ranks have of a case, put together."""

    def __init__(self, case: Case, parts: Sequence[Found]) -> None:
        first = parts[0]
        self.forward, self.backward = first.forward, first.backward
        for other in parts:
            assert (other.forward, other.backward) == (first.forward, first.backward)
        self.results = [
            _assembled([part.results[i] for part in parts], case.mesh)
            for i in range(len(first.results))
        ]
        self.gradients = {
            name: _assembled([part.gradients[name] for part in parts], case.mesh)
            for name in first.gradients
        }
        self.placements = {name: part.words for name, part in first.gradients.items()}
        self.placements |= dict(
            zip(("y", "h"), (part.words for part in first.results), strict=False)
        )


def _assembled(parts: Sequence[Part], mesh: tuple[int, ...]) -> Tensor:
    """The tensor that the ranks of ``mesh`` have ``parts`` of."""
    assert len({(part.words, part.shape) for part in parts}) == 1
    locals_ = [part.local for part in parts]
    for size, word in reversed(list(zip(mesh, parts[0].words.split(), strict=True))):
        groups = [locals_[i : i + size] for i in range(0, len(locals_), size)]
        if word[0] == "S":
            locals_ = [torch.cat(group, dim=int(word[1:])) for group in groups]
        elif word == "P":
            locals_ = [torch.stack(group).sum(0) for group in groups]
        else:
            assert all(same_bits(group[0], other) for group in groups for other in group)
            locals_ = [group[0] for group in groups]
    assert tuple(locals_[0].shape) == parts[0].shape
    return locals_[0]


@pytest.fixture(scope="module")
def found() -> dict[str, Whole]:
    by_rank = ranks.run(WORLD, sharding_ranks.run_cases, list(CASES.values()))
    by_case = zip(*by_rank, strict=True)
    return {
        name: Whole(case, parts) for (name, case), parts in zip(CASES.items(), by_case, strict=True)
    }


def _is_cut(case: Case) -> bool:
    """Whether a row of the case has parts on several ranks."""
    lead = len(case.shape) - case.ndim
    words = case.x.split()
    beside = (case.beside or case.x).split()
    placed = [w if w[0] == "S" else b for w, b in zip(words, beside, strict=True)]
    return any(word[0] == "S" and int(word[1:]) >= lead for word in placed)


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, found: dict[str, Whole]) -> None:
    """They are the oracle's; rows that are whole have the bits of one device."""
    case, tensors = CASES[name], CASES[name].tensors()
    x, weight = tensors["x"], tensors.get("weight")
    results = found[name].results
    twice = case.spec.rounding == "before_weight"
    limit = 4 if case.dtype in (torch.float32, torch.float64) else 1 + twice
    if case.operation == "rms_norm":
        bias = tensors.get("bias")
        right = [oracle.rms_norm(x, weight, spec=case.spec, bias=bias, ndim=case.ndim)]
        if bias is not None:  # which may cancel what was rounded
            torch.testing.assert_close(results[0], right[0], rtol=1e-6, atol=1e-6)
            right, results = [], []
    elif case.operation == "add_rms_norm":
        right = [*oracle.add_rms_norm(x, tensors["beside"], weight, spec=case.spec, **case.options)]
        assert same_bits(results[1], right[1])
    else:
        spec = _grouped(case)
        right = [gated_oracle.gated_rms_norm(x, tensors["beside"], weight, spec=spec)]
    for one, two in zip(results, right, strict=True):
        assert oracle.max_ulp(one, two) <= limit
    if not _is_cut(case):
        with torch.no_grad():
            assert all(map(same_bits, found[name].results, case.call(tensors)))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, found: dict[str, Whole]) -> None:
    """They are the oracle's, counted once, and no frozen weight has one."""
    case, tensors = CASES[name], CASES[name].tensors()
    given = found[name].gradients
    expected = {"x", "beside"} | ({"weight", "bias"} if not case.frozen else set())
    assert set(given) == expected & set(tensors)
    for key, gradient in given.items():
        assert (gradient.shape, gradient.dtype) == (tensors[key].shape, tensors[key].dtype)
    x, weight, spec = tensors["x"], tensors.get("weight"), case.spec
    result = found[name].results[0]
    dy = tensors["dy"].to(result.dtype)
    coarse = torch.finfo(case.dtype).eps
    if case.operation == "gated_rms_norm":
        gate = tensors["beside"]
        exact = gated_oracle.gated_rms_norm_backward(dy, x, gate, weight, spec=_grouped(case))
        pairs = {
            "x": (exact.dx, exact.dx_size),
            "beside": (exact.dgate, exact.dgate_size),
            "weight": (exact.dweight, exact.dweight_size),
        }
        for key, (right, size) in pairs.items():
            if key in given:
                limit = 4 * coarse * float(size.norm() + right.norm())
                assert float((given[key].double() - right).norm()) <= limit, key
        return
    dresidual = None
    if case.operation == "add_rms_norm":
        x = found[name].results[1]
        dresidual = tensors["dh"].to(x.dtype)
    alone = oracle.rms_norm_backward(dy, x, weight, spec=spec, ndim=case.ndim, dresidual=dresidual)
    rows = (-1, math.prod(case.shape[len(case.shape) - case.ndim :]))
    unit = max(coarse, torch.finfo(torch.float32).eps if coarse > 1e-10 else coarse)
    wider = 4 * unit if case.dtype == torch.float64 or not KERNELS else 2.0**-24
    sizes = alone.dx_size if dresidual is None else alone.dx_size + abs(oracle.to_array(dresidual))
    slack = wider * row_norms(sizes.reshape(rows))
    for key, factor in (("x", case.options.get("alpha", 1.0)), ("beside", 1.0)):
        if key in given:
            exact_rows = factor * alone.dx.reshape(rows)
            assert_close_rows(given[key].reshape(rows), exact_rows, unit, slack)
    relative = 8 * torch.finfo(torch.float32).eps
    for key, right, size in (
        ("weight", alone.dweight, alone.dweight_size),
        ("bias", alone.dbias, alone.dbias_size),
    ):
        if key in given:
            assert_sums(given[key], right, size, relative)


def _grouped(case: Case) -> NormSpec:
    size = case.options.get("group_size", case.shape[-1])
    return replace(case.spec, groups=case.shape[-1] // size)


class TestCommunication:
    def test_whole_rows_need_none(self, found: dict[str, Whole]) -> None:
        for operation in ("norm", "add", "mamba2"):
            for words in ("S0", "S1", "R"):
                one = found[f"{operation}: {words}, weight R"]
                assert (one.forward, one.backward) == ({}, {})

    def test_cut_rows_need_one_sum_forward_and_one_more_backward(
        self, found: dict[str, Whole]
    ) -> None:
        for operation in ("norm", "add", "mamba2", "qwen3_next bf16"):
            weight = "R" if "bf16" in operation else "S0"
            one = found[f"{operation}: S2, weight {weight}"]
            assert one.forward == {"all_reduce": 1}
            assert one.backward == {"all_reduce": 1}
        wide = found["float64 1.0 mean_square 0.0"]
        assert (wide.forward, wide.backward) == ({"all_reduce": 1}, {"all_reduce": 2})

    def test_whole_groups_need_none(self, found: dict[str, Whole]) -> None:
        for name in ("groups of 5, before", "groups of 1, after"):
            assert (found[name].forward, found[name].backward) == ({}, {})
        assert found["groups of 4, before"].forward == {"all_reduce": 1}


class TestPlacements:
    @pytest.mark.parametrize(
        ("name", "y", "dx", "dweight"),
        [
            ("norm: S0, weight R", "S0", "S0", "P"),
            ("norm: S1, weight S0", "S1", "S1", "P"),
            ("norm: S2, weight R", "S2", "S2", "S0"),
            ("norm: R, weight R", "R", "R", "R"),
            ("norm: P, weight R", "R", "R", "R"),
            ("norm: mesh S0 S2", "S0 S2", "S0 S2", "P S0"),
            ("norm: mesh S2 S2", "S2 S2", "S2 S2", "S0 S0"),
            ("mamba2: S1, weight R", "S1", "S1", "P"),
            ("two dimensions: S1", "S1", "S1", "S0"),
        ],
    )
    def test_follow_x(
        self, name: str, y: str, dx: str, dweight: str, found: dict[str, Whole]
    ) -> None:
        placements = found[name].placements
        assert (placements["y"], placements["x"], placements["weight"]) == (y, dx, dweight)

    def test_a_pending_x_goes_to_where_the_residual_is(self, found: dict[str, Whole]) -> None:
        placements = found["add: P beside S1"].placements
        assert (placements["y"], placements["h"]) == ("S1", "S1")
        assert found["add: P beside S1"].forward == {"reduce_scatter_tensor": 1}


@pytest.fixture(scope="module")
def in_place() -> dict[str, object]:
    first, *rest = ranks.run(2, sharding_ranks.run_in_place)
    assert all(other["wrong"] == first["wrong"] for other in rest)
    return dict(first)


def test_what_is_written(in_place: dict[str, object]) -> None:
    assert in_place["wrong"] == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("plain weight", "RuntimeError: weight is a plain tensor beside distributed ones"),
        ("plain x", "RuntimeError: x is a plain tensor beside distributed ones"),
        ("another mesh", "RuntimeError: weight is on DeviceMesh"),
        ("pending out", "RuntimeError: out is written to, but it is a sum that is pending"),
        ("pending in place", "RuntimeError: x is written to, but it is a sum that is pending"),
        ("weight's shape", "ValueError: weight has shape (7,); expected (20,)"),
        ("gradient in place", "RuntimeError: add_rms_norm(inplace=True) overwrites"),
    ],
)
def test_refused(call: str, error: str, in_place: dict[str, object]) -> None:
    assert str(in_place[call]).startswith(error)


def test_modules_transforms_and_compile() -> None:
    assert ranks.run(2, sharding_ranks.run_modules) == [[], []]
