"""rmsnorm.RMSNorm in the place of torch.nn.RMSNorm, and GatedRMSNorm in that of transformers'."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from calls import FLOATS, UNGATED, rows_of, same_bits, weight_of
from rmsnorm import GatedRMSNorm, NormSpec, RMSNorm, gated_rms_norm, rms_norm, specs

SHAPES = (8, (8,), [3, 8], (2, 3, 8), torch.Size([3, 8]))


def test_signature() -> None:
    theirs = list(inspect.signature(nn.RMSNorm.__init__).parameters.values())
    ours = list(inspect.signature(RMSNorm.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert [p.name for p in ours[len(theirs) :]] == ["spec"]
    assert ours[-1].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-5, 0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_torch(
    shape: int | tuple[int, ...], eps: float | None, affine: bool, dtype: torch.dtype
) -> None:
    theirs = nn.RMSNorm(shape, eps, affine, None, dtype)
    ours = RMSNorm(shape, eps, affine, None, dtype)
    assert ours.normalized_shape == theirs.normalized_shape
    assert ours.eps == theirs.eps
    assert ours.elementwise_affine == theirs.elementwise_affine
    if affine:
        weight = weight_of(dtype, theirs.weight.numel(), 0).view_as(theirs.weight)
        theirs.weight.data.copy_(weight)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert ours.load_state_dict(theirs.state_dict()) == theirs.load_state_dict(ours.state_dict())
    x = rows_of(dtype, 5, 48, 0).view(5, 2, 3, 8)
    with torch.no_grad():
        assert same_bits(ours(x), theirs(x))
    y = ours(x.requires_grad_())
    assert same_bits(y, theirs(x))
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", UNGATED)
def test_every_spec(name: str) -> None:
    spec = specs[name]
    for given in (name, spec):
        norm = RMSNorm(8, spec=given)
        assert norm.weight is not None
        assert bool((norm.weight == 1.0 - spec.offset).all())
        norm.weight.data.copy_(weight_of(torch.float32, 8, 0))
        x = rows_of(torch.bfloat16, 4, 8, 0)
        with torch.no_grad():
            assert same_bits(norm(x), rms_norm(x, norm.weight, spec=spec))
            assert same_bits(
                RMSNorm(8, 0.5, spec=given)(x),
                rms_norm(x, torch.full((8,), 1.0 - spec.offset), 0.5, spec=spec),
            )
            assert same_bits(
                RMSNorm(8, 0.5, False, spec=given)(x), rms_norm(x, None, 0.5, spec=spec)
            )
        assert f"spec={name!r}" in repr(norm) or name == "torch"
        neutral = RMSNorm(8, spec=spec)
        assert torch.allclose(neutral(x.float()), rms_norm(x.float(), spec=spec))


def test_reset_parameters() -> None:
    for name in ("torch", "gemma"):
        norm = RMSNorm((3, 8), spec=name)
        assert norm.weight is not None
        initial = norm.weight.detach().clone()
        norm.weight.data.normal_()
        norm.reset_parameters()
        assert torch.equal(norm.weight, initial)
    RMSNorm(8, elementwise_affine=False).reset_parameters()


def test_meta_device() -> None:
    with torch.device("meta"):
        inside = RMSNorm(8, spec="gemma")
    for norm in (inside, RMSNorm(8, device="meta", dtype=torch.bfloat16)):
        assert norm.weight is not None
        assert norm.weight.is_meta
        y = norm(torch.ones(2, 8, device="meta", dtype=torch.bfloat16))
        assert y.is_meta
        assert y.shape == (2, 8)
        norm.to_empty(device="cpu")
        norm.reset_parameters()
        assert bool((norm.weight == 1.0 - norm.spec.offset).all())
        assert torch.isfinite(norm(torch.ones(2, 8))).all()


def test_copies_compute_with_their_own_weight() -> None:
    norm = RMSNorm(8, 1e-3, spec="llama")
    x = torch.randn(4, 8)
    before = norm(x).detach()
    buffer = io.BytesIO()
    torch.save(norm, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(norm),
        copy.copy(norm),
        pickle.loads(pickle.dumps(norm)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is RMSNorm
        assert other.spec == norm.spec
        assert other.eps == norm.eps
        assert same_bits(other(x).detach(), before)
        assert repr(other) == repr(norm)
    deep = copy.deepcopy(norm)
    assert deep.weight is not None
    deep.weight.data.mul_(2)
    assert same_bits(norm(x).detach(), before)
    assert not torch.equal(deep(x), before)


def test_state_dict_through_a_file() -> None:
    model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8), RMSNorm(8, elementwise_affine=False))
    theirs = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.RMSNorm(8, elementwise_affine=False))
    model[1].weight.data.normal_()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    theirs.load_state_dict(torch.load(buffer), strict=True)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert same_bits(model(x), theirs(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        RMSNorm(9).load_state_dict(RMSNorm(8).state_dict())


def test_moves_and_the_weight_of_the_moment() -> None:
    norm = RMSNorm(8)
    x = torch.randn(3, 8)
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        norm = norm.to(dtype)
        assert norm.weight is not None
        assert norm.weight.dtype == dtype
        assert norm(x.to(dtype)).dtype == dtype
        assert norm(x).dtype == torch.float32
    norm = norm.float()
    norm.weight = nn.Parameter(torch.full((8,), 3.0))
    assert same_bits(norm(x).detach(), rms_norm(x, torch.full((8,), 3.0)))
    norm.eps = 1.0
    assert same_bits(norm(x).detach(), rms_norm(x, torch.full((8,), 3.0), 1.0))


def test_parametrized_weight() -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    norm = RMSNorm(8)
    nn.utils.parametrize.register_parametrization(norm, "weight", Double())
    x = torch.randn(3, 8)
    assert same_bits(norm(x).detach(), rms_norm(x, torch.full((8,), 2.0)))
    swapped = torch.func.functional_call(RMSNorm(8), {"weight": torch.full((8,), 2.0)}, (x,))
    assert same_bits(swapped, rms_norm(x, torch.full((8,), 2.0)))


def test_training() -> None:
    norms = nn.RMSNorm(8), RMSNorm(8)
    x = torch.randn(16, 8)
    weights = []
    for norm in norms:
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            norm(x).sin().sum().backward()
            optimizer.step()
        weights.append(norm.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])


def test_repr() -> None:
    assert repr(RMSNorm(8)) == repr(nn.RMSNorm(8))
    assert repr(RMSNorm((2, 8), 1e-5, False)) == repr(nn.RMSNorm((2, 8), 1e-5, False))
    assert "spec='gemma'" in repr(RMSNorm(8, spec="gemma"))
    assert "groups=2" in repr(RMSNorm(8, spec=NormSpec(groups=2)))


def test_hooks_are_called() -> None:
    norm, seen = RMSNorm(8), []
    norm.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    norm(torch.ones(2, 8))
    assert seen == [(2, 8)]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"normalized_shape": -1}, ValueError, "normalized_shape is -1"),
        ({"normalized_shape": ()}, ValueError, "at least one size"),
        ({"normalized_shape": 8.0}, TypeError, "normalized_shape is 8.0"),
        ({"normalized_shape": "8"}, TypeError, "normalized_shape is '8'"),
        ({"normalized_shape": 8, "eps": -1.0}, ValueError, "eps is -1.0"),
        ({"normalized_shape": 8, "eps": "1"}, TypeError, "eps is '1'"),
        ({"normalized_shape": 8, "spec": "nope"}, ValueError, "nope"),
        ({"normalized_shape": 8, "spec": "mamba2"}, ValueError, "gate"),
        ({"normalized_shape": 8, "spec": NormSpec(groups=3)}, ValueError, "3 equal groups"),
        (
            {"normalized_shape": 8, "dtype": torch.int64},
            (TypeError, RuntimeError),
            "int64|floating",
        ),
    ],
)
def test_refused(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RMSNorm(**arguments)  # type: ignore[arg-type]


def test_refused_inputs() -> None:
    norm = RMSNorm((3, 8))
    for shape in ((8,), (3, 7), (8, 3), (2, 8)):
        for refusing in (norm, RMSNorm((3, 8), elementwise_affine=False)):
            with pytest.raises(ValueError, match="shape"):
                refusing(torch.ones(shape))
    with pytest.raises(TypeError, match=r"x is torch\.int64"):
        norm(torch.ones(3, 8, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="meta"):
        norm(torch.ones(3, 8, device="meta"))


def test_no_width_and_no_rows() -> None:
    assert RMSNorm(0)(torch.ones(3, 0)).shape == (3, 0)
    assert RMSNorm(8)(torch.ones(0, 8)).shape == (0, 8)


def test_traces_as_torchs_own_does() -> None:
    norm, x = RMSNorm(8, eps=1e-6), torch.randn(3, 8)
    assert torch.equal(torch.jit.trace(norm, (x,))(x), norm(x))
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), norm))
    assert torch.equal(graph(x), norm(graph.get_submodule("0")(x)))


def test_refuses_dtypes_that_have_no_norm() -> None:
    with pytest.raises(TypeError, match="float8"):
        RMSNorm(8, dtype=torch.float8_e4m3fn)


GATED = [name for name in specs if specs[name].gate is not None]


def gated(name: str, group_size: int | None = 4) -> NormSpec:
    return specs[name] if group_size is None else replace(specs[name], groups=8 // group_size)


class TestGated:
    def test_signature(self) -> None:
        parameters = inspect.signature(GatedRMSNorm.__init__).parameters
        assert list(parameters) == [
            "self",
            "hidden_size",
            "eps",
            "group_size",
            "device",
            "dtype",
            "spec",
            "elementwise_affine",
        ]
        assert [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values()] == [
            False,
            False,
            False,
            *[True] * 5,
        ]
        forward = list(inspect.signature(GatedRMSNorm.forward).parameters.values())
        assert [p.name for p in forward] == ["self", "hidden_states", "gate"]
        assert forward[2].default is None

    @pytest.mark.parametrize("group_size", [None, 1, 4, 8])
    @pytest.mark.parametrize("name", GATED)
    def test_values(self, name: str, group_size: int | None) -> None:
        spec = gated(name, group_size)
        x, gate = rows_of(torch.bfloat16, 4, 8, 0), rows_of(torch.bfloat16, 4, 8, 1)
        for given in (name, specs[name]):
            for eps in (None, 0.5):
                norm = GatedRMSNorm(8, eps, group_size=group_size, spec=given)
                assert torch.equal(norm.weight, torch.ones(8))
                norm.weight.data.copy_(weight_of(torch.float32, 8, 0))
                with torch.no_grad():
                    y = norm(x, gate)
                    assert same_bits(y, gated_rms_norm(x, gate, norm.weight, eps, spec=spec))
                    ungated = replace(spec, gate=None)
                    assert same_bits(norm(x), rms_norm(x, norm.weight, eps, spec=ungated))
                    bare = GatedRMSNorm(
                        8, eps, group_size=group_size, spec=given, elementwise_affine=False
                    )
                    assert same_bits(bare(x, gate), gated_rms_norm(x, gate, None, eps, spec=spec))
                    assert same_bits(bare(x), rms_norm(x, None, eps, spec=ungated))
        norm(x, gate).float().sum().backward()
        assert norm.weight.grad is not None

    def test_the_spec_can_have_the_groups(self) -> None:
        x, gate = torch.randn(3, 8), torch.randn(3, 8)
        spec = gated("mamba2", 2)
        norm = GatedRMSNorm(8, spec=spec)
        assert norm.spec.groups == 4
        assert same_bits(norm(x, gate), GatedRMSNorm(8, group_size=2)(x, gate))
        assert "groups=4" in repr(norm)

    def test_centred_weights_start_at_zero(self) -> None:
        norm = GatedRMSNorm(8, spec=replace(specs.falcon_h1, offset=1.0))
        assert torch.equal(norm.weight, torch.zeros(8))
        norm.weight.data.normal_()
        norm.reset_parameters()
        assert torch.equal(norm.weight, torch.zeros(8))
        GatedRMSNorm(8, elementwise_affine=False).reset_parameters()

    @pytest.mark.parametrize("name", GATED)
    @pytest.mark.parametrize("affine", [True, False])
    def test_copies_and_files(self, name: str, affine: bool) -> None:
        norm = GatedRMSNorm(8, 1e-3, group_size=4, spec=name, elementwise_affine=affine)
        x, gate = torch.randn(4, 8), torch.randn(4, 8)
        before = norm(x, gate).detach()
        assert list(norm.state_dict()) == (["weight"] if affine else [])
        assert len(list(norm.parameters())) == affine
        buffer = io.BytesIO()
        torch.save(norm, buffer)
        buffer.seek(0)
        for other in (
            copy.deepcopy(norm),
            pickle.loads(pickle.dumps(norm)),
            torch.load(buffer, weights_only=False),
        ):
            assert type(other) is GatedRMSNorm
            assert same_bits(other(x, gate).detach(), before)
            assert same_bits(other(x).detach(), norm(x).detach())
            assert repr(other) == repr(norm)
        model = nn.Sequential(nn.Linear(8, 8), norm)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        fresh = GatedRMSNorm(8, 1e-3, group_size=4, spec=name, elementwise_affine=affine)
        loaded = nn.Sequential(nn.Linear(8, 8), fresh)
        loaded.load_state_dict(torch.load(buffer), strict=True)
        assert same_bits(fresh(x, gate).detach(), before)

    @pytest.mark.parametrize(
        ("model", "name", "spec"),
        [
            ("mamba2", "MambaRMSNormGated", "mamba2"),
            ("qwen3_next", "Qwen3NextRMSNormGated", "qwen3_next"),
            ("kimi_linear", "KimiLinearRMSNormGated", "kimi_linear"),
        ],
    )
    def test_the_state_dicts_of_transformers_load(self, model: str, name: str, spec: str) -> None:
        modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
        grouped = spec == "mamba2"
        theirs = getattr(modeling, name)(8, *([4] if grouped else []), eps=1e-4)
        theirs.weight.data.normal_()
        ours = GatedRMSNorm(8, 1e-4, group_size=4 if grouped else None, spec=spec)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        x, gate = torch.randn(5, 8), torch.randn(5, 8)
        torch.testing.assert_close(ours(x, gate), theirs(x, gate), rtol=1e-6, atol=1e-6)
        if grouped:
            assert same_bits(ours(x).detach(), theirs(x).detach())

    def test_meta_device(self) -> None:
        norm = GatedRMSNorm(8, device="meta", dtype=torch.bfloat16)
        assert norm.weight.is_meta
        x = torch.ones(2, 8, device="meta")
        assert norm(x, x).shape == (2, 8)
        norm.to_empty(device="cpu")
        norm.reset_parameters()
        assert torch.equal(norm.weight, torch.ones(8, dtype=torch.bfloat16))

    def test_parametrized_and_swapped_weights(self) -> None:
        class Double(nn.Module):
            def forward(self, weight: torch.Tensor) -> torch.Tensor:
                return weight * 2

        x, gate, twos = torch.randn(3, 8), torch.randn(3, 8), torch.full((8,), 2.0)
        norm = GatedRMSNorm(8)
        nn.utils.parametrize.register_parametrization(norm, "weight", Double())
        expected = gated_rms_norm(x, gate, twos)
        assert same_bits(norm(x, gate).detach(), expected)
        swapped = torch.func.functional_call(GatedRMSNorm(8), {"weight": twos}, (x, gate))
        assert same_bits(swapped, expected)

    def test_repr(self) -> None:
        assert repr(GatedRMSNorm(8)) == (
            "GatedRMSNorm(8, eps=None, group_size=None, elementwise_affine=True, spec='mamba2')"
        )
        assert repr(GatedRMSNorm(8, 1e-3, group_size=2, spec="qwen3_next")) == (
            "GatedRMSNorm(8, eps=0.001, group_size=2, elementwise_affine=True, spec='qwen3_next')"
        )

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"hidden_size": -1}, ValueError, "-1"),
            ({"hidden_size": (4, 8)}, ValueError, "one size"),
            ({"hidden_size": 8.0}, TypeError, r"8\.0"),
            ({"hidden_size": 8, "eps": -1.0}, ValueError, r"eps is -1\.0"),
            ({"hidden_size": 8, "spec": "torch"}, ValueError, "no gate"),
            ({"hidden_size": 8, "spec": "nope"}, ValueError, "nope"),
            ({"hidden_size": 8, "group_size": 3}, ValueError, "group_size is 3"),
            ({"hidden_size": 8, "group_size": 0}, ValueError, "group_size is 0"),
            ({"hidden_size": 8, "group_size": 2.0}, TypeError, r"group_size is 2\.0"),
            (
                {"hidden_size": 8, "spec": replace(specs.mamba2, groups=3)},
                ValueError,
                "3 equal groups",
            ),
            ({"hidden_size": 8, "dtype": torch.float8_e4m3fn}, TypeError, "float8"),
        ],
    )
    def test_refused(
        self, arguments: dict[str, object], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            GatedRMSNorm(**arguments)  # type: ignore[arg-type]

    def test_refused_inputs(self) -> None:
        for affine in (True, False):
            norm = GatedRMSNorm(8, elementwise_affine=affine)
            with pytest.raises(ValueError, match="shape"):
                norm(torch.ones(3, 7), torch.ones(3, 7))
            with pytest.raises(ValueError, match="shape"):
                norm(torch.ones(3, 7))
            with pytest.raises(ValueError, match=r"gate has shape \(8,\).*\(3, 8\)"):
                norm(torch.ones(3, 8), torch.ones(8))
            with pytest.raises(TypeError, match=r"gate is torch\.int64"):
                norm(torch.ones(3, 8), torch.ones(3, 8, dtype=torch.int64))
            with pytest.raises(RuntimeError, match="meta"):
                norm(torch.ones(3, 8), torch.ones(3, 8, device="meta"))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_with_a_residual_it_normalises_the_sum(dtypes: tuple[str, str]) -> None:
    x, residual = (torch.randn(3, 5, 24, dtype=getattr(torch, name)) for name in dtypes)
    for norm in (RMSNorm(24, 1e-5, spec="llama"), RMSNorm((5, 24), elementwise_affine=False)):
        y, h = norm(x, residual)
        assert torch.equal(h, residual + x)
        assert torch.equal(y, norm(residual + x))
        assert y.dtype == torch.float32
    with pytest.raises(ValueError, match=r"residual \(3, 5, 23\)"):
        norm(x, residual[..., :-1])
    for wrong in (residual.long(), residual.bool(), [1.0], 2.0):
        with pytest.raises(TypeError, match="residual is"):
            norm(x, wrong)
