"""What rms_norm accepts and refuses, and every way in which PyTorch can call it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import rmsnorm
from calls import ALL_SPECS, FLOATS, normalise, rows_of, same_bits, weight_of
from rmsnorm import RMSNorm, cpu_isa, rms_norm, specs
from rmsnorm.ops import composite
from rmsnorm.ops.rms_norm import op, op_out

ENCODED = specs.torch.encode()
X = torch.ones(2, 3, 8)
W = torch.ones(8)


def _raises(error: type[Exception], *words: str) -> Any:
    """The error, with each of the words in its message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight": torch.ones(7)}, [r"weight has shape \(7,\)", r"\(8,\)", r"\(2, 3, 8\)"]),
        ({"weight": torch.ones(2, 8)}, [r"\(2, 8\)", r"\(3, 8\)"]),
        ({"weight": torch.ones(())}, [r"\(\)", r"\(8,\)"]),
        ({"weight": torch.ones(1, 2, 3, 8)}, [r"\(2, 3, 8\)", "4 dimension"]),
        ({"weight": W, "bias": torch.ones(4)}, [r"bias has shape \(4,\)", r"\(8,\)"]),
        ({"bias": torch.ones(3, 8)}, [r"bias has shape \(3, 8\)"]),
        ({"normalized_shape": 7}, [r"\(7,\)", r"\(2, 3, 8\)"]),
        ({"normalized_shape": (2, 8)}, [r"\(2, 8\)", r"\(2, 3, 8\)"]),
        ({"normalized_shape": ()}, [r"\(\)"]),
        ({"normalized_shape": (3, 8), "weight": W}, [r"\(8,\)", r"\(3, 8\)"]),
        ({"eps": -1e-6}, ["eps is -1e-06", "at least 0"]),
        ({"eps": float("nan")}, ["eps is nan"]),
        ({"eps": float("inf")}, ["eps is inf"]),
        ({"spec": "lamma"}, ["lamma", "llama"]),
        ({"spec": "mamba2"}, ["mamba2", "gate"]),
        ({"spec": rmsnorm.NormSpec(groups=3)}, ["8 elements", "3 equal groups"]),
        ({"out": torch.ones(3, 2, 8)}, [r"out has shape \(3, 2, 8\)", r"\(2, 3, 8\)"]),
        ({"out": torch.ones(8)}, [r"out has shape \(8,\)"]),
    ],
)
def test_value_errors(arguments: dict[str, Any], words: list[str]) -> None:
    with _raises(ValueError, *words):
        rms_norm(X, **arguments)
    if "out" in arguments:
        return
    needs_grad = X.clone().requires_grad_()
    with _raises(ValueError, *words):
        rms_norm(needs_grad, **arguments)


def test_a_scalar_has_no_row() -> None:
    with _raises(ValueError, r"x has shape \(\)"):
        rms_norm(torch.tensor(1.0))


BAD_DTYPES = (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", BAD_DTYPES, ids=str)
def test_dtypes_that_have_no_norm(dtype: torch.dtype) -> None:
    bad_x, bad_w = torch.zeros(2, 8).to(dtype), torch.zeros(8).to(dtype)
    with _raises(TypeError, f"x is {dtype}", "float32", "bfloat16"):
        rms_norm(bad_x)
    with _raises(TypeError, f"weight is {dtype}"):
        rms_norm(torch.ones(2, 8), bad_w)
    with _raises(TypeError, f"bias is {dtype}"):
        rms_norm(torch.ones(2, 8), bias=bad_w)
    with _raises(TypeError, f"out is {dtype}", "torch.float32"):
        rms_norm(torch.ones(2, 8), out=bad_x)


def test_type_errors() -> None:
    with _raises(TypeError, "out is torch.bfloat16", "torch.float32"):
        rms_norm(X, W, out=torch.ones(2, 3, 8, dtype=torch.bfloat16))
    with _raises(TypeError, "out is torch.bfloat16", "torch.float32"):
        rms_norm(X.bfloat16(), W, spec="llama", out=torch.ones(2, 3, 8, dtype=torch.bfloat16))
    with _raises(TypeError, "x is a str"):
        rms_norm("abc")
    with _raises(TypeError, "weight is a list"):
        rms_norm(X, [1.0] * 8)
    with _raises(TypeError, "bias is a float"):
        rms_norm(X, W, bias=1.0)
    with _raises(TypeError, "out is a list"):
        rms_norm(X, W, out=[1.0])
    with _raises(TypeError, "spec is a int"):
        rms_norm(X, W, spec=3)
    with _raises(TypeError, "eps is '1e-6'"):
        rms_norm(X, W, "1e-6")
    with _raises(TypeError, "eps is '1e-6'"):
        rms_norm(X.clone().requires_grad_(), W, "1e-6")
    with _raises(TypeError, "normalized_shape is 8.0"):
        rms_norm(X, W, normalized_shape=8.0)
    with _raises(TypeError, "normalized_shape is"):
        rms_norm(X, W, normalized_shape=("8",))


def test_devices_must_agree() -> None:
    meta = torch.ones(8, device="meta")
    with _raises(RuntimeError, "weight is on meta", "x is on cpu"):
        rms_norm(X, meta)
    with _raises(RuntimeError, "bias is on meta", "x is on cpu"):
        rms_norm(X, W, bias=meta)
    with _raises(RuntimeError, "out is on meta", "x is on cpu"):
        rms_norm(X, W, out=torch.ones(2, 3, 8, device="meta"))
    with _raises(RuntimeError, "weight is on cpu", "x is on meta"):
        rms_norm(X.to("meta"), W)


def test_nothing_is_written_by_a_refused_call() -> None:
    out = torch.full((2, 3, 8), 7.0)
    for arguments in ({"weight": torch.ones(7)}, {"eps": -1.0}, {"weight": W.int()}):
        with pytest.raises((TypeError, ValueError)):
            rms_norm(X, **arguments, out=out)
    assert bool((out == 7.0).all())


def test_out_has_no_derivative() -> None:
    out = torch.empty(2, 3, 8)
    leaf = X.clone().requires_grad_()
    for call in (
        lambda: rms_norm(leaf, W, out=out),
        lambda: rms_norm(X, W.clone().requires_grad_(), out=out),
        lambda: rms_norm(X, W, out=torch.empty(2, 3, 8, requires_grad=True)),
    ):
        with _raises(RuntimeError, "out", "derivative"):
            call()
    with torch.no_grad():
        assert rms_norm(leaf, W, out=out) is out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_eps_none_is_the_epsilon_of_what_accumulates(dtype: torch.dtype) -> None:
    x = rows_of(dtype, 3, 16, 0) / 4096
    expected = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    assert same_bits(normalise(x), normalise(x, None, expected))
    assert same_bits(normalise(x, spec="llama"), normalise(x, None, 1e-6, spec="llama"))
    assert not torch.equal(normalise(x, None, 1e-3, spec="llama"), normalise(x, spec="llama"))


def test_numbers_that_are_not_floats_may_be_eps() -> None:
    expected = rms_norm(X, W, 1.0)
    for eps in (1, np.float32(1), np.float64(1), torch.tensor(1.0)):
        assert same_bits(rms_norm(X, W, eps), expected)


class TestArrays:
    """NumPy arrays in, NumPy arrays out."""

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_the_bits_of_tensors(self, dtype: type) -> None:
        x = np.random.default_rng(0).normal(size=(5, 33)).astype(dtype)
        weight = np.random.default_rng(1).normal(size=33).astype(dtype)
        y = rms_norm(x, weight, 1e-6, spec="llama")
        assert type(y) is np.ndarray
        assert y.dtype == dtype
        expected = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-6, spec="llama")
        assert same_bits(torch.from_numpy(y), expected)
        assert np.array_equal(
            rms_norm(x, weight, bias=weight), rms_norm(x, weight, None, bias=weight)
        )

    def test_out_is_written_in_place(self) -> None:
        x, out = np.ones((2, 4), np.float32), np.full((2, 8), np.nan, np.float32)
        target = out[:, ::2]
        assert rms_norm(x, out=target) is target
        assert np.array_equal(out[:, ::2], rms_norm(x))
        assert np.isnan(out[:, 1::2]).all()
        assert rms_norm(x, out=x) is x

    def test_read_only_and_reversed_arrays(self, recwarn: pytest.WarningsRecorder) -> None:
        x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
        expected = rms_norm(x)
        locked = x.copy()
        locked.flags.writeable = False
        assert np.array_equal(rms_norm(locked), expected)
        assert np.array_equal(rms_norm(x[::-1]), expected[::-1])
        assert np.array_equal(
            rms_norm(x[:, ::-1], x[0, ::-1]), rms_norm(x[:, ::-1].copy(), x[0, ::-1].copy())
        )
        assert np.array_equal(rms_norm(np.asfortranarray(x)), expected)
        assert not recwarn.list

    def test_refused(self) -> None:
        x = np.ones((2, 4), np.float32)
        locked = np.ones((2, 4), np.float32)
        locked.flags.writeable = False
        with _raises(ValueError, "read-only"):
            rms_norm(x, out=locked)
        with _raises(ValueError, "negative stride"):
            rms_norm(x, out=np.ones((2, 4), np.float32)[::-1])
        with _raises(TypeError, "x is int64"):
            rms_norm(np.ones((2, 4), np.int64))
        with _raises(TypeError, "x is complex64"):
            rms_norm(np.ones((2, 4), np.complex64))
        with _raises(TypeError, "weight is a Tensor"):
            rms_norm(x, torch.ones(4))
        with _raises(TypeError, "weight is a list"):
            rms_norm(x, [1.0] * 4)
        with _raises(ValueError, r"\(3,\)", r"\(2, 4\)"):
            rms_norm(x, np.ones(3, np.float32))
        with _raises(TypeError, "out is torch.float64|out is float64"):
            rms_norm(x, out=np.ones((2, 4)))

    def test_big_endian_arrays_are_refused_or_right(self) -> None:
        x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
        try:
            y = rms_norm(x.astype(">f4"))
        except (TypeError, ValueError):
            return
        assert np.array_equal(y, rms_norm(x))

    def test_empty_arrays(self) -> None:
        assert rms_norm(np.ones((0, 4), np.float32)).shape == (0, 4)
        assert rms_norm(np.ones((3, 0), np.float32)).shape == (3, 0)


class TestLists:
    def test_nested(self) -> None:
        rows = [[3.0, 4.0], [0.0, 2.0]]
        y = rms_norm(rows, [1.0, 2.0], 0.0)
        assert y == rmsnorm.reference.rms_norm(rows, [1.0, 2.0], 0.0)
        exact = rms_norm(torch.tensor(rows).double(), torch.tensor([1.0, 2.0]).double(), 0.0)
        assert torch.allclose(torch.tensor(y).double(), exact, rtol=1e-7)
        assert rms_norm((3.0, 4.0), eps=0.0, normalized_shape=2) == rms_norm([3.0, 4.0], eps=0.0)

    def test_refused(self) -> None:
        with _raises(TypeError, "weight is a Tensor"):
            rms_norm([3.0, 4.0], torch.ones(2))
        with _raises(TypeError, "out"):
            rms_norm([3.0, 4.0], out=[0.0, 0.0])
        with pytest.raises(TypeError):
            rms_norm(3.0)
        with _raises(ValueError, "2", "3"):
            rms_norm([3.0, 4.0], [1.0] * 3)
        with _raises(ValueError, "normalized_shape"):
            rms_norm([3.0, 4.0], normalized_shape=3)
        with pytest.raises(ValueError):
            rms_norm([[1.0, 2.0], [1.0]])
        with pytest.raises((TypeError, ValueError)):
            rms_norm([3.0, 4.0], normalized_shape=(1, 2))
        with pytest.raises((TypeError, ValueError)):
            rms_norm(5.0, normalized_shape=2)

    def test_torch_is_not_imported_for_them(self) -> None:
        code = (
            "import sys; from rmsnorm import rms_norm; rms_norm([3.0, 4.0], [1.0, 1.0]);"
            "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
        )
        env = {"PYTHONPATH": str(rmsnorm.__path__[0] + "/.."), "PATH": ""}
        subprocess.run([sys.executable, "-c", code], check=True, env=env)


class TestOperation:
    """torch.ops.rmsnorm.rms_norm: the registration."""

    @pytest.mark.parametrize("name", ["torch", "t5"])
    @pytest.mark.parametrize("w_dtype", [None, torch.bfloat16], ids=str)
    def test_opcheck(self, name: str, w_dtype: torch.dtype | None) -> None:
        weight = None if w_dtype is None else weight_of(w_dtype, 8, 0)
        for x in (torch.randn(3, 8), torch.randn(2, 8, 4).bfloat16().transpose(1, 2)):
            for bias in (None, torch.ones(8)):
                arguments = (x, weight, bias, 1e-6, specs[name].encode(), 1)
                torch.library.opcheck(op, arguments)
                # Compiled calls never reach the overload with out.
                out = {"out": torch.empty_like(op(*arguments))}
                checks = ("test_schema", "test_faketensor")
                torch.library.opcheck(op_out, arguments, out, test_utils=checks)

    def test_schemas(self) -> None:
        arguments = (
            "(Tensor x, Tensor? weight=None, Tensor? bias=None, float? eps=None, "
            'str spec="", int ndim=1'
        )
        assert str(op._schema) == f"rmsnorm::rms_norm{arguments}) -> Tensor"
        assert str(op_out._schema) == (
            f"rmsnorm::rms_norm.out{arguments}, *, Tensor(a!) out) -> Tensor(a!)"
        )
        x = torch.randn(3, 8)
        assert same_bits(torch.ops.rmsnorm.rms_norm(x), rms_norm(x))
        assert same_bits(torch.ops.rmsnorm.rms_norm(x, W), rms_norm(x, W))

    def test_direct_calls_are_checked(self) -> None:
        errors = (RuntimeError, TypeError, ValueError)
        for arguments in (
            (X, torch.ones(7), None, None, ENCODED),
            (X, None, torch.ones(7), None, ENCODED),
            (X, W, None, -1.0, ENCODED),
            (X, W, None, float("nan"), ENCODED),
            (X, W, None, None, "eps=zero"),
            (X, W, None, None, "rounding=sideways"),
            (X, W, None, None, "nonsense"),
            (X, W, None, None, ENCODED, 0),
            (X, W, None, None, ENCODED, 2),
            (X, None, None, None, ENCODED, 4),
            (X, None, None, None, ENCODED, -1),
            (X.int(), None, None, None, ENCODED),
            (X.to(torch.complex64), None, None, None, ENCODED),
            (X, W.int(), None, None, ENCODED),
            (torch.tensor(1.0), None, None, None, ENCODED),
            (X, None, None, None, "groups=3"),
        ):
            with pytest.raises(errors):
                op(*arguments)
        for out in (torch.ones(3, 2, 8), torch.ones(2, 3, 8).bfloat16()):
            with pytest.raises(errors):
                op_out(X, W, None, None, ENCODED, out=out)

    def test_a_short_encoded_spec_is_enough(self) -> None:
        x = torch.randn(3, 8).bfloat16()
        assert same_bits(
            op(x, W, None, 1e-6, "rounding=before_weight;output=promote"),
            rms_norm(x, W, 1e-6, spec="llama"),
        )

    def test_meta_and_fake_tensors(self) -> None:
        for spec in ("torch", "llama", "t5"):
            for x in (X, X.bfloat16(), torch.empty(4, 8, 3).transpose(1, 2)):
                weight = torch.ones(x.shape[-1], dtype=torch.bfloat16)
                real = rms_norm(x, weight, spec=spec)
                meta = rms_norm(x.to("meta"), weight.to("meta"), spec=spec)
                with FakeTensorMode() as mode:
                    fake = rms_norm(mode.from_tensor(x), mode.from_tensor(weight), spec=spec)
                for other in (meta, fake):
                    assert other.shape == real.shape
                    assert other.dtype == real.dtype
                    assert other.stride() == real.stride()

    @pytest.mark.skipif(cpu_isa() is None, reason="torch's own operations have derivatives")
    def test_backward_through_the_raw_operation_warns(self) -> None:
        x = torch.randn(3, 8, requires_grad=True)
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            op(x, W, None, 1e-6, ENCODED).sum().backward()
        assert x.grad is None


class TestTransforms:
    def test_autograd_needs_no_other_call(self) -> None:
        for name, spec in ALL_SPECS.items():
            x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
            weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
            bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
            if spec.accumulate == "float32":
                y = rms_norm(x, weight, spec=spec, bias=bias)
                y.sum().backward()
                assert x.grad is not None, name
                assert x.grad.dtype == torch.float64
                continue
            assert torch.autograd.gradcheck(
                lambda x, w, b, spec=spec: rms_norm(x, w, 1e-3, spec=spec, bias=b),
                (x, weight, bias),
            ), name

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("name", ["torch", "llama", "gemma", "t5", "l2_sum"])
    def test_the_value_does_not_depend_on_who_asks_for_a_gradient(
        self, name: str, dtype: torch.dtype
    ) -> None:
        for d in (1, 8, 33, 100, 513):
            x, weight = rows_of(dtype, 5, d, d), weight_of(torch.float32, d, d)
            expected = normalise(x, weight, spec=name)
            for needs_x, needs_w in ((True, False), (False, True), (True, True)):
                y = rms_norm(
                    x.clone().requires_grad_(needs_x),
                    weight.clone().requires_grad_(needs_w),
                    spec=name,
                )
                assert y.requires_grad
                assert same_bits(y, expected)

    def test_vmap_and_friends(self) -> None:
        x, weight = torch.randn(5, 4, 3).double(), torch.tensor([1.0, 2.0, 3.0]).double()

        def f(x: Tensor, w: Tensor = weight) -> Tensor:
            return rms_norm(x, w, 1e-6)

        def plain(x: Tensor, w: Tensor = weight) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

        from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

        calls: list[Callable[[Callable[..., Tensor]], Any]] = [
            lambda g: vmap(g)(x),
            lambda g: vmap(vmap(g))(x),
            lambda g: vmap(g, in_dims=1, out_dims=1)(x),
            lambda g: vmap(g, in_dims=(None, 0))(x, torch.stack([weight, -weight])),
            lambda g: vmap(g, in_dims=(0, 0))(x, weight.expand(5, 3).clone()),
            lambda g: jacrev(g)(x[0]),
            lambda g: jacfwd(g)(x[0]),
            lambda g: vmap(jacrev(g))(x[0]),
            lambda g: vmap(jacfwd(g))(x[0]),
            lambda g: hessian(lambda t: g(t).pow(3).sum())(x[0, 0]),
            lambda g: grad(lambda t: vmap(g)(t).sin().sum())(x),
            lambda g: vmap(grad(lambda t: g(t).sin().sum()))(x),
            lambda g: jvp(g, (x,), (x.cos(),))[1],
            lambda g: jvp(g, (x, weight), (x.cos(), weight.sin()))[1],
            lambda g: vjp(g, x, weight)[1](x.cos()),
        ]
        for number, call in enumerate(calls):
            torch.testing.assert_close(
                call(f), call(plain), rtol=1e-12, atol=1e-12, msg=str(number)
            )

    def test_forward_mode(self) -> None:
        x, tangent = torch.randn(3, 8).double(), torch.randn(3, 8).double()
        with forward_ad.dual_level():
            y = rms_norm(forward_ad.make_dual(x, tangent), W.double(), 1e-6)
            found = forward_ad.unpack_dual(y).tangent
        step = 1e-6
        rise = rms_norm(x + step * tangent, None, 1e-6) - rms_norm(x - step * tangent, None, 1e-6)
        torch.testing.assert_close(found, rise / (2 * step), rtol=1e-6, atol=1e-8)
        with torch.no_grad(), forward_ad.dual_level():
            y = rms_norm(forward_ad.make_dual(x, tangent), W.double(), 1e-6)
            assert forward_ad.unpack_dual(y).tangent is not None

    def test_grad_modes(self) -> None:
        x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.randn(8))
        with torch.no_grad():
            expected = rms_norm(x, weight)
        assert not expected.requires_grad
        with torch.inference_mode():
            y = rms_norm(x, weight)
            assert y.is_inference()
        assert same_bits(y, expected)
        assert rms_norm(x, weight).requires_grad
        assert not rms_norm(x, weight.detach()).requires_grad

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_autocast_changes_nothing(self, dtype: torch.dtype) -> None:
        for x in (torch.randn(3, 8), torch.randn(3, 8).bfloat16()):
            for name in ("torch", "llama", "gemma", "t5"):
                expected = rms_norm(x, W, spec=name)
                with torch.autocast("cpu", dtype=dtype):
                    assert same_bits(rms_norm(x, W, spec=name), expected)
                    assert same_bits(rms_norm(x.clone().requires_grad_(), W, spec=name), expected)

    def test_subclasses_are_asked(self) -> None:
        class Counting(Tensor):
            calls = 0

            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                Counting.calls += 1
                return super().__torch_function__(function, types, args, kwargs or {})

        x = torch.randn(3, 8)
        y = rms_norm(x.as_subclass(Counting), W)
        assert Counting.calls
        assert isinstance(y, Counting)
        assert same_bits(y.as_subclass(Tensor), rms_norm(x, W))

    def test_a_dispatch_mode_sees_the_call(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        seen: list[str] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        with Watch():
            y = rms_norm(X, W)
        assert seen
        assert same_bits(y, rms_norm(X, W))


def _f(x: Tensor, weight: Tensor | None, spec: str = "torch") -> Tensor:
    return rms_norm(x, weight, 1e-6, spec=spec)


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize("name", ["torch", "llama", "gemma"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_inference(self, name: str, dtype: torch.dtype) -> None:
        compiled = torch.compile(_f, fullgraph=True, backend="aot_eager")
        x, weight = rows_of(dtype, 6, 40, 0), weight_of(torch.float32, 40, 0)
        with torch.no_grad():
            for view in (x, x.view(2, 3, 40), x.view(2, 3, 40).transpose(0, 1), x[:, ::2]):
                w = weight[: view.shape[-1]]
                y = compiled(view, w, name)
                assert same_bits(y, rms_norm(view, w, 1e-6, spec=name))
                assert y.is_contiguous()
            assert same_bits(compiled(x, None, name), rms_norm(x, None, 1e-6, spec=name))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_training(self, dtype: torch.dtype) -> None:
        compiled = torch.compile(_f, fullgraph=True, backend="aot_eager")
        results = []
        for f in (_f, compiled):
            x = rows_of(dtype, 6, 40, 0).requires_grad_()
            weight = weight_of(torch.float32, 40, 0).requires_grad_()
            y = f(x, weight)
            y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
            results.append((y, x.grad, weight.grad))
        for eager, other in zip(*results, strict=True):
            assert same_bits(eager, other)

    def test_out(self) -> None:
        def f(x: Tensor, out: Tensor) -> Tensor:
            return rms_norm(x, W, out=out) + 1

        x, out = torch.randn(3, 8), torch.full((8, 3), torch.nan).t()
        with torch.no_grad():
            y = torch.compile(f, fullgraph=True, backend="aot_eager")(x, out)
            assert same_bits(y, rms_norm(x, W) + 1)
            assert same_bits(out.contiguous(), rms_norm(x, W))

    def test_dynamic_shapes(self) -> None:
        compiled = torch.compile(_f, fullgraph=True, backend="aot_eager", dynamic=True)
        with torch.no_grad():
            for rows, d in ((2, 8), (3, 8), (5, 16), (7, 33)):
                x, w = torch.randn(rows, d), torch.randn(d)
                assert same_bits(compiled(x, w), _f(x, w))

    def test_module_under_inductor(self) -> None:
        norm = RMSNorm(40, 1e-6, spec="llama", dtype=torch.bfloat16)
        compiled = torch.compile(norm, fullgraph=True)
        x = rows_of(torch.bfloat16, 6, 40, 0)
        with torch.no_grad():
            try:
                y = compiled(x)
            except torch._inductor.exc.InductorError as error:
                pytest.skip(f"inductor has no working compiler here: {error}")
            assert same_bits(y, norm(x))

    def test_the_graph_holds_one_operation(self) -> None:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            graphs.append(graph)
            return graph

        with torch.no_grad():
            torch.compile(_f, fullgraph=True, backend=backend)(X, W)
        calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
        assert [node.target for node in calls] == [op]

    @pytest.mark.parametrize("name", ["torch", "llama"])
    def test_export(self, name: str) -> None:
        norm = RMSNorm(8, 1e-6, spec=name).requires_grad_(False)
        rows = torch.export.Dim("rows", min=2, max=64)
        x = torch.randn(5, 8).bfloat16()
        program = torch.export.export(norm, (x,), dynamic_shapes=({0: rows},))
        for graph in (program, program.run_decompositions()):
            other = torch.randn(9, 8).bfloat16()
            assert same_bits(graph.module()(other), norm(other))


def test_threads_that_call_at_the_same_time() -> None:
    cases = [(rows_of(t, 64, d, d), weight_of(t, d, d)) for t in FLOATS for d in (64, 1000)]
    expected = [rms_norm(x, w) for x, w in cases]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for turn in range(40):
            index = (turn + offset) % len(cases)
            if not same_bits(rms_norm(*cases[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_composite_has_the_bits_of_the_kernels(dtype: torch.dtype) -> None:
    for name, spec in ALL_SPECS.items():
        if spec.eps_in != "mean_square":
            continue  # torch.sqrt is not correctly rounded
        for w_dtype in (None, *FLOATS):
            for d in (1, 9, 64, 130):
                x, bias = rows_of(dtype, 5, d, d), weight_of(torch.bfloat16, d, 9)
                weight = None if w_dtype is None else weight_of(w_dtype, d, d)
                for b in (None, bias):
                    y = composite.rms_norm(x, weight, b, None, spec, 1)
                    assert same_bits(y, normalise(x, weight, bias=b, spec=spec)), (name, w_dtype, d)


def test_inputs_are_never_written() -> None:
    for dtype in FLOATS:
        x, weight, bias = rows_of(dtype, 5, 33, 0), weight_of(dtype, 33, 0), weight_of(dtype, 33, 1)
        before = [t.clone() for t in (x, weight, bias)]
        for spec in ALL_SPECS.values():
            normalise(x, weight, spec=spec, bias=bias)
        assert all(same_bits(a, b) for a, b in zip(before, (x, weight, bias), strict=True))


def test_the_extension_can_be_left_out() -> None:
    code = (
        "import torch, rmsnorm; assert rmsnorm.cpu_isa() is None;"
        "print(rmsnorm.rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2)).tolist())"
    )
    env = {"PYTHONPATH": str(rmsnorm.__path__[0] + "/.."), "RMSNORM_DISABLE_EXT": "1", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("[0.8485")


def test_cpu_isa_is_a_name() -> None:
    assert cpu_isa() in ("avx512", "avx2", "neon", "scalar", None)


def test_same_result_as_torch() -> None:
    x = torch.randn(2, 3, 8)
    assert same_bits(rms_norm(x, W), F.rms_norm(x, (8,), W))


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd"])
def test_a_compiled_function_transform_has_the_derivative(transform: str) -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def ours(x: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6).sin().sum()

    def plain(x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,), weight, 1e-6).sin().sum()

    take = getattr(torch.func, transform)
    compiled = torch.compile(take(ours), backend="aot_eager")
    torch.testing.assert_close(compiled(x), take(plain)(x))


def test_out_tells_autograd_that_it_was_written() -> None:
    a, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    loss = (a * weight).sum()
    with torch.no_grad():
        rms_norm(a, out=a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_is_no_inference_tensor_outside_inference_mode() -> None:
    with torch.inference_mode():
        out = torch.empty(3, 8)
    with pytest.raises(RuntimeError, match="inference tensor"):
        rms_norm(torch.randn(3, 8), out=out)
    with torch.inference_mode():
        rms_norm(torch.ones(3, 8), eps=0.0, out=out)
        assert torch.equal(out, torch.ones(3, 8))


@pytest.mark.skipif(cpu_isa() is None, reason="copy_ refuses such an out in its own words")
def test_out_is_not_expanded() -> None:
    with pytest.raises(RuntimeError, match="expanded"):
        rms_norm(torch.randn(3, 8), out=torch.empty(8).expand(3, 8))


def test_masked_arrays_are_refused() -> None:
    x = np.ma.masked_array(np.ones((2, 4), np.float32), mask=np.eye(2, 4))
    with pytest.raises(TypeError, match="masked"):
        rms_norm(x)


@pytest.mark.parametrize(
    "spec",
    ["offset=5", "offset=nan", "gate=xyz", "gate_order=zz", "eps=-1", "offset=1.0;offset=0.0"],
)
def test_the_operation_refuses_a_spec_that_normspec_refuses(spec: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"NormSpec|eps is"):
        op(torch.ones(2, 4), None, None, None, spec, 1)


@pytest.mark.skipif(cpu_isa() is None, reason="plain torch operations follow the thread's mode")
def test_flushing_subnormals_does_not_depend_on_the_thread() -> None:
    x = torch.randn(4096, 64)
    x[:, 1] = 1e-40
    expected = rms_norm(x, eps=1.0)
    assert expected[0, 1] != 0.0
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(rms_norm(x, eps=1.0).view(torch.int32), expected.view(torch.int32))
    finally:
        torch.set_flush_denormal(False)
