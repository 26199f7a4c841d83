"""The direct call: what it computes, and that it declines whatever is not plain."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rmsnorm
from calls import (
    FLOATS,
    KERNELS,
    UNGATED,
    rows_of,
    same_bits,
    weight_of,
    without_direct_call,
)
from rmsnorm import NormSpec, RMSNorm, add_rms_norm, rms_norm, specs
from rmsnorm.ops import direct, extension
from rmsnorm.ops import rms_norm as operation

entry: Any = direct.entry
needs_entry = pytest.mark.skipif(entry is None, reason="the direct call was not built")


def test_it_is_there() -> None:
    """With kernels, Python's headers and the torch that the project is tested with."""
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    wanted = os.environ.get("RMSNORM_DISABLE_DIRECT", "") in ("", "0")
    if KERNELS and headers and wanted and sys.platform == "linux":
        assert entry is not None
    elif not (KERNELS and wanted):
        assert entry is None


def call(
    x: Any,
    weight: Any = None,
    spec: Any = "torch",
    eps: Any = 1e-6,
    ndim: Any = 0,
    **out: Any,
) -> Any:
    return entry.rms_norm(x, weight, eps, spec, ndim, *out.values())


@needs_entry
@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bits_are_those_of_torch_ops(name: str, dtype: torch.dtype) -> None:
    spec = specs[name]
    for rows, d, weight_dtype in (1, 1, dtype), (3, 40, torch.float32), (700, 64, dtype):
        x, residual = rows_of(dtype, rows, d, 0), rows_of(dtype, rows, d, 1)
        weight, dy = weight_of(weight_dtype, d, 2), rows_of(dtype, rows, d, 3)
        arguments = (weight, 1e-5, spec, 1)
        with torch.no_grad():
            y, _, rstd = entry.forward(x, None, *arguments)
            expected = operation.op_fwd(x, weight, None, 1e-5, spec.encode(), 1)
            assert same_bits(y, expected[0])
            assert same_bits(rstd, expected[1])
            assert same_bits(entry.rms_norm(x, *arguments), expected[0])

            sums = entry.forward(x, residual, *arguments)
            op_add = torch.ops.rmsnorm.add_rms_norm_fwd.default
            added = op_add(x, residual, weight, 1e-5, spec.encode(), 1)
            assert all(map(same_bits, sums, added))
            assert all(map(same_bits, entry.add_rms_norm(x, residual, *arguments), added[:2]))

            for needs in (True, True), (True, False), (False, True), (False, False):
                found = entry.backward(dy, x, weight, rstd, residual, 1e-5, spec, 1, *needs)
                expected = operation.op_bwd(
                    dy, x, weight, rstd, residual, 1e-5, spec.encode(), 1, *needs, False
                )
                for gradient, right, needed in zip(found, expected, needs, strict=False):
                    assert same_bits(gradient, right) if needed else gradient is None


@needs_entry
def test_layouts_and_shapes() -> None:
    x = torch.randn(4, 6, 8)
    for view in (x, x.transpose(0, 1), x[:, ::2], x[..., 1:7], x[:0], x[0, 0], x.expand(4, 6, 8)):
        weight = torch.randn(view.shape[-1])
        assert same_bits(call(view, weight), operation.op(view, weight, None, 1e-6))
    weight = torch.randn(6, 8)
    assert same_bits(call(x, weight), operation.op(x, weight, None, 1e-6, "", 2))
    assert same_bits(call(x, None, ndim=2), operation.op(x, None, None, 1e-6, "", 2))
    assert same_bits(call(x, torch.randn(8, 8)[:, 0]), call(x, torch.randn(8))) is False


@needs_entry
def test_gradients_stand_in_the_way() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    tracked = torch.randn(8, requires_grad=True)
    recorded = extension.autograd_table() != 0
    saving = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    for around in (contextlib.nullcontext(), saving):
        with around:  # which the node in C++ leaves to an autograd.Function
            x = x.detach()
            found = [call(x, tracked), call(x.requires_grad_(), weight)]
            added = entry.add_rms_norm(torch.randn(3, 8), x, weight, None, "torch", 0)
        if recorded and around is not saving:
            assert all(y.requires_grad for y in (*found, *added))
        else:
            assert [*found, added] == [True] * 3
    assert entry.forward(x, None, weight, None, "torch", 0) is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = call(x, tracked)
            assert y.is_inference() is (mode is torch.inference_mode)
            assert same_bits(y, operation.op(x, tracked, None, 1e-6))
            assert not y.requires_grad


@needs_entry
def test_into_a_tensor_that_is_given() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = operation.op(x, weight, None, 1e-6)
    out = torch.full((3, 8), torch.nan)
    assert call(x, weight, out=out) is out
    assert same_bits(out, expected)
    assert out._version == 1
    strided = torch.full((8, 3), torch.nan).T
    assert call(x, weight, out=strided) is None
    assert same_bits(rms_norm(x, weight, 1e-6, out=strided), expected)
    assert strided._version == 1
    assert call(weight[None], weight, out=weight[None]) is None
    own = x.clone()
    assert same_bits(call(own, weight, out=own), expected)
    # Autograd has saved what is overwritten.
    leaf = torch.randn(3, 8, requires_grad=True)
    base = leaf * 1
    squared = base.square()
    call(x, weight, out=base.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    with torch.inference_mode():
        inference = torch.full((3, 8), torch.nan)
        assert same_bits(call(x, weight, out=inference), expected)
        assert call(x, weight, out=out) is out
    assert out._version == 2
    declined = {
        "inference tensor": inference,
        "gradient": leaf,
        "shape": torch.zeros(3, 7),
        "dtype": torch.zeros(3, 8, dtype=torch.float64),
        "expanded": torch.zeros(8).expand(3, 8),
        "no tensor": None,
        "meta": torch.zeros(3, 8, device="meta"),
    }
    for name, wrong in declined.items():
        before = None if wrong is None or wrong.is_meta else wrong.clone()
        assert call(x, weight, out=wrong) is None, name
        assert before is None or torch.equal(wrong, before), name
    assert call(x, weight.requires_grad_(), out=out) is True


def in_place(x: Any, residual: Any, weight: Any = None, spec: Any = "torch") -> Any:
    return entry.add_rms_norm_(x, residual, weight, 1e-6, spec, 0)


@needs_entry
@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_addition_in_place_has_the_bits_of_the_two_steps(name: str, dtype: torch.dtype) -> None:
    for rows, d in (1, 1), (3, 40), (700, 64), (0, 8), (3, 0):
        x, residual = rows_of(dtype, rows, d, 0), rows_of(dtype, rows, d, 1)
        for weight in None, weight_of(dtype, d, 2):
            sums = x + residual
            expected = operation.op(sums, weight, None, 1e-6, specs[name].encode(), 1)
            y, h = x.clone(), residual.clone()
            assert in_place(y, h, weight, specs[name]) is True
            assert same_bits(y, expected)
            assert same_bits(h, sums)


@needs_entry
def test_the_addition_in_place_to_a_wider_residual() -> None:
    op_add = torch.ops.rmsnorm.add_rms_norm.default
    for narrow, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    ):
        x, residual = rows_of(narrow, 5, 40, 0), rows_of(wide, 5, 40, 1)
        weight = weight_of(narrow, 40, 2)
        y, h = op_add(x, residual, weight, 1e-6)
        sums = x.to(wide) + residual
        assert in_place(x, residual, weight) is True
        assert same_bits(x, y)
        assert same_bits(residual, h)
        assert same_bits(residual, sums)


@needs_entry
def test_the_addition_in_place_counts_as_a_change() -> None:
    whole, residual = torch.randn(2, 3, 8), torch.randn(3, 8)
    x = whole[1]
    assert in_place(x, residual, torch.ones(8)) is True
    assert (whole._version, x._version, residual._version) == (1, 1, 1)
    assert in_place(x[:0], residual[:0]) is True  # as x[:0].zero_() is counted
    assert (x._version, residual._version) == (2, 2)
    with torch.inference_mode():
        assert in_place(x, residual) is True
        made = torch.randn(3, 8)
        assert in_place(made, residual) is True
    assert (x._version, residual._version) == (3, 4)
    for which in 0, 1:  # autograd has saved one of the two
        saved = [torch.randn(3, 8), torch.randn(3, 8)]
        weights = torch.ones(3, 8, requires_grad=True)
        loss = (weights * saved[which]).sum()
        assert in_place(*saved) is True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _overlapping() -> tuple[Tensor, Tensor]:
    memory = torch.randn(40)
    return memory[:24].view(3, 8), memory[8:32].view(3, 8)


def _inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.randn(*shape)


def _on_its_weight() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3, 8)
    return x, torch.randn(3, 8), x[1]


def _residual_on_the_weight() -> tuple[Tensor, Tensor, Tensor]:
    residual = torch.randn(3, 8)
    return torch.randn(3, 8), residual, residual[2]


# What the direct call must leave alone, and what add_rms_norm(inplace=True) makes of it: the words
# of its error, or None where it has a result.
DECLINED: dict[str, tuple[Callable[[], tuple[Tensor, ...]], str | None]] = {
    "columns of x": (lambda: (torch.randn(3, 16)[:, ::2], torch.randn(3, 8)), None),
    "columns of the residual": (lambda: (torch.randn(3, 8), torch.randn(8, 3).T), None),
    "expanded x": (lambda: (torch.randn(8).expand(3, 8), torch.randn(3, 8)), "expanded"),
    "expanded residual": (lambda: (torch.randn(3, 8), torch.randn(3, 1).expand(3, 8)), "expanded"),
    "overlap": (_overlapping, "overlap"),
    "one tensor": (lambda: (torch.randn(3, 8),) * 2, "overlap"),
    "weight in x": (_on_its_weight, None),
    "weight in the residual": (_residual_on_the_weight, None),
    "rounded sum": (lambda: (torch.randn(3, 8), torch.randn(3, 8).half()), "inplace: residual is"),
    "sum of neither's dtype": (
        lambda: (torch.randn(3, 8).half(), torch.randn(3, 8).bfloat16()),
        "inplace: residual is",
    ),
    "wider result": (
        lambda: (torch.randn(3, 8).half(), torch.randn(3, 8).half(), torch.randn(8).double()),
        "inplace: x is torch.float16",
    ),
    "inference x": (lambda: (_inference(3, 8), torch.randn(3, 8)), "inference tensor"),
    "inference residual": (lambda: (torch.randn(3, 8), _inference(3, 8)), "inference tensor"),
    "leaf x": (lambda: (torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)), "overwrites"),
    "leaf residual": (
        lambda: (torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)),
        "overwrites",
    ),
    "no leaf": (
        lambda: (torch.randn(3, 8, requires_grad=True) * 1, torch.randn(3, 8)),
        "overwrites",
    ),
    "trained weight": (
        lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, requires_grad=True)),
        "overwrites",
    ),
    "other shape": (lambda: (torch.randn(3, 8), torch.randn(4, 8)), "expected the same shape"),
    "other width": (lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(7)), "weight has"),
    "integers": (lambda: (torch.ones(3, 8).long(), torch.randn(3, 8)), "x is torch.int64"),
    "no dimension": (lambda: (torch.randn(()), torch.randn(())), "at least 1 dimension"),
    "meta": (lambda: (torch.ones(3, 8, device="meta"), torch.randn(3, 8)), "meta"),
}


@needs_entry
@pytest.mark.parametrize("name", DECLINED)
def test_the_addition_in_place_declines_and_writes_nothing(name: str) -> None:
    make, words = DECLINED[name]
    tensors = make()
    x, residual, *rest = tensors
    weight = rest[0] if rest else None
    spec = "llama" if name == "wider result" else "torch"  # its result takes the weight's dtype
    before = [tensor.clone() for tensor in tensors]
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]

    def untouched() -> bool:
        now = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        pairs = [pair for pair in zip(tensors, before, strict=True) if not pair[0].is_meta]
        return now == versions and all(torch.equal(*pair) for pair in pairs)

    assert in_place(*tensors, *() if rest else (None,), spec) is None
    assert untouched()
    if words is not None:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
            add_rms_norm(x, residual, weight, 1e-6, spec=spec, inplace=True)
        assert untouched()
        return
    sums = before[0] + before[1]
    expected = operation.op(sums, before[2] if rest else None, None, 1e-6)
    y, h = add_rms_norm(x, residual, weight, 1e-6, spec=spec, inplace=True)
    assert y is x
    assert h is residual
    assert same_bits(y, expected)
    assert same_bits(h, sums)


@needs_entry
def test_the_addition_in_place_needs_no_more_than_no_gradient_asked_for() -> None:
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (3, 8), (8,))]
    x, residual, weight = (tensor.detach().clone() for tensor in tensors)
    expected = operation.op(x + residual, weight, None, 1e-6)
    with torch.no_grad():
        assert in_place(*tensors) is True
    assert same_bits(tensors[0].detach(), expected)
    with torch.inference_mode():
        x, residual = torch.zeros(3, 8), torch.ones(3, 8)
        assert in_place(x, residual) is True
    assert same_bits(x, operation.op(torch.ones(3, 8), None, None, 1e-6))


PAIRED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, None)


def bit(x: torch.dtype | None, weight: torch.dtype | None) -> int:
    return 1 << (5 * PAIRED.index(x) + PAIRED.index(weight))


class Module:
    """Has what C++ reads of a module: its attributes."""

    def __init__(self, weight: Any, **attributes: Any) -> None:
        self._parameters = {"weight": weight}
        self.__dict__.update(attributes)


def swapped(
    weight: Any, width: Any, dtypes: Any, trained: Any = 0, eps: Any = 1e-6, **attributes: Any
) -> Module:
    name = None if weight is None else "weight"
    found = (name, None, eps, specs["torch"], width, dtypes, trained)
    plan = types.SimpleNamespace(direct=found)
    return Module(weight, **{"_rmsnorm_plan": plan} | attributes)


def proven(x: Any, *arguments: Any) -> Any:
    return entry.proven(swapped(*arguments), (x,), {})


@needs_entry
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", [*FLOATS, None], ids=str)
def test_a_pair_of_dtypes_has_one_bit(
    x_dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = rows_of(x_dtype, 3, 8, 0)
    weight = None if weight_dtype is None else weight_of(weight_dtype, 8, 1)
    own = bit(x_dtype, weight_dtype)
    every = sum(bit(a, b) for a in FLOATS for b in PAIRED)
    expected = operation.op(x, weight, None, 1e-6)
    for width in 8, 0:
        assert same_bits(proven(x, weight, width, own), expected)
        assert same_bits(proven(x, weight, width, every), expected)
        assert proven(x, weight, width, every & ~own) is None
        assert proven(x, weight, width, 0, every) is None
    for width in 1, 7, 9, 16:
        assert proven(x, weight, width, every) is None


@needs_entry
def test_what_is_proven_for_values_is_not_for_gradients() -> None:
    own = bit(torch.float32, torch.float32)
    recorded = extension.autograd_table() != 0
    for of_x, of_weight in (True, False), (False, True), (True, True):
        x = torch.randn(3, 8, requires_grad=of_x)
        weight = torch.rand(8, requires_grad=of_weight)
        assert proven(x, weight, 8, own) is None
        assert proven(x, weight, 8, own, bit(torch.float32, None)) is None
        y = proven(x, weight, 8, 0, own)  # the other mask is that of values
        assert y.requires_grad if recorded else y is True
        expected = operation.op(x.detach(), weight.detach(), None, 1e-6)
        with torch.no_grad():
            values = proven(x, weight, 8, own)
            assert proven(x, weight, 8, 0, own) is None
        assert same_bits(values, expected)
        assert not values.requires_grad


@needs_entry
def test_what_is_not_proven() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    every = sum(bit(a, b) for a in FLOATS for b in PAIRED)
    for wrong in (
        (torch.tensor(1.0), None, 0),
        (x, torch.rand(7), 8),
        (x, torch.rand(3, 8), 8),
        (x, torch.rand(()), 8),
        (x, weight.long(), 8),
        (x.long(), weight, 8),
        (x.to_sparse(), weight, 8),
        (x.as_subclass(Subclass), weight, 8),
        ([1.0], None, 0),
        (None, weight, 8),
        (x, "weight", 8),
        (x, weight, 2**70),
        (x, weight, "8"),
    ):
        assert proven(*wrong, every, every) is None, wrong[1:]
    for eps in 1, True, -1e-6, float("nan"), float("inf"), 1e300, torch.tensor(1e-6), "1":
        assert proven(x, weight, 8, every, every, eps) is None, eps
    for around in AROUND.values():
        with around():
            assert proven(x, weight, 8, every, every) is None
    assert same_bits(proven(x, weight, 8, every), operation.op(x, weight, None, 1e-6))


class Raises:
    @property
    def direct(self) -> Any:
        raise ValueError("no plan")


class Interrupts:
    @property
    def direct(self) -> Any:
        raise KeyboardInterrupt


@needs_entry
def test_swapped_modules_that_are_not_proven() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    own = bit(torch.float32, torch.float32)
    module = swapped(weight, 8, own)
    expected = operation.op(x, weight, None, 1e-6)
    assert same_bits(entry.proven(module, (x,), {}), expected)
    for arguments in (
        (),
        (module,),
        (module, (x,)),
        (module, x, {}),
        (module, (), {}),
        (module, (x, x), {}),
        (module, (x,), {"x": x}),
        (module, (), {"x": x}),
        (module, (x,), None),
        (None, (x,), {}),
        (5, (x,), {}),
    ):
        assert entry.proven(*arguments) is None, arguments[1:]
    found = module._rmsnorm_plan.direct  # type: ignore[attr-defined]
    for attributes in (
        {"_rmsnorm_plan": None},
        {"_rmsnorm_plan": types.SimpleNamespace()},
        {"_rmsnorm_plan": types.SimpleNamespace(direct=None)},
        {"_rmsnorm_plan": types.SimpleNamespace(direct=found[:-1])},
        {"_rmsnorm_plan": types.SimpleNamespace(direct=list(found))},
        {"_rmsnorm_plan": types.SimpleNamespace(direct=(["weight"], *found[1:]))},
        {"_rmsnorm_plan": types.SimpleNamespace(direct=("other", *found[1:]))},
        {"_rmsnorm_plan": types.SimpleNamespace(direct=("weight", "eps", *found[2:]))},
        {"_rmsnorm_plan": Raises()},
        {"_rmsnorm_slot": object()},
        {"_rmsnorm_slot": types.SimpleNamespace(least="25")},
        {"_rmsnorm_slot": types.SimpleNamespace(least=24)},
        {"_parameters": {}},
        {"_parameters": {"weight": None}},
        {"_parameters": None},
    ):
        assert entry.proven(swapped(weight, 8, own, **attributes), (x,), {}) is None, attributes
    for slot in None, types.SimpleNamespace(least=25):  # there are 24 elements
        module = swapped(weight, 8, own, _rmsnorm_slot=slot)
        assert same_bits(entry.proven(module, (x,), {}), expected)
    with pytest.raises(KeyboardInterrupt):
        entry.proven(swapped(weight, 8, own, _rmsnorm_plan=Interrupts()), (x,), {})
    named = types.SimpleNamespace(direct=("weight", "variance_epsilon", 0.0, *found[3:]))
    for eps in 1e-6, None, 1, "1", -1.0, float("inf"):
        module = swapped(weight, 8, own, _rmsnorm_plan=named, variance_epsilon=eps)
        y = entry.proven(module, (x,), {})
        assert same_bits(y, expected) if eps == 1e-6 else y is None, eps


@needs_entry
def test_a_spec_that_its_module_gives_up_while_it_is_read() -> None:
    """Known specs are told by their identity, so one must not die while it is made known."""

    class Forgotten(NormSpec):
        def encode(self) -> str:
            text = super().encode()
            module.__dict__["spec"] = None
            return text

    given = {"eps": 1e-6, "normalized_shape": (8,)}
    module = Module(torch.rand(8), spec=Forgotten(eps=1e-3), **given)
    spec = weakref.ref(module.__dict__["spec"])
    entry.module_norm(module, torch.ones(3, 8))
    assert module.__dict__["spec"] is None
    assert spec() is not None


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_derived_module_may_have_properties(where: str) -> None:
    class Derived(RMSNorm):
        eps = property(  # type: ignore[assignment]
            lambda self: 100.0, lambda self, value: self.__dict__.update(eps=value)
        )
        spec = property(  # type: ignore[assignment]
            lambda self: specs["gemma"], lambda self, value: self.__dict__.update(spec=value)
        )

    module = Derived(8, eps=1e-6) if where == "class" else RMSNorm(8, eps=1e-6)
    module.__class__ = Derived
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = rms_norm(x, module.weight, 100.0, spec="gemma")
        assert same_bits(module(x), expected)


@needs_entry
def test_modules_whose_attributes_are_not_plain() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    plain = {"eps": 1e-6, "spec": specs["torch"], "normalized_shape": (8,)}
    expected = operation.op(x, weight, None, 1e-6)
    assert same_bits(entry.module_norm(Module(weight, **plain), x), expected)
    assert same_bits(entry.module_norm(Module(weight, **plain | {"spec": "torch"}), x), expected)
    for wrong in (
        {"eps": 1},
        {"eps": -1.0},
        {"eps": torch.tensor(1e-6)},
        {"spec": None},
        {"spec": "none such"},
        {"spec": []},
        {"normalized_shape": [8]},
        {"normalized_shape": 8},
        {"normalized_shape": ()},
        {"normalized_shape": (3, 8)},
        {"_parameters": {"weight": None}},
        {"_parameters": {}},
        {"_parameters": []},
    ):
        assert entry.module_norm(Module(weight, **plain | wrong), x) is None, wrong
    for name in plain:
        fewer = {key: value for key, value in plain.items() if key != name}
        assert entry.module_norm(Module(weight, **fewer), x) is None, name
    for arguments in ((), (Module(weight, **plain),), (None, x), (5, x), (Module(weight), None)):
        assert entry.module_norm(*arguments) is None
    for around in AROUND.values():
        with around():
            assert entry.module_norm(Module(weight, **plain), x) is None


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    with torch.profiler.profile():
        yield


AROUND: dict[str, Callable[[], Any]] = {
    "dispatch mode": Seen,
    "function mode": SeenFunctions,
    "default device": lambda: torch.device("cpu"),
    "forward mode": forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "profiler": profiler,
    "fake mode": lambda: torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
    "below autograd": torch._C._AutoDispatchBelowAutograd,
}


@needs_entry
@pytest.mark.parametrize("name", AROUND)
def test_surroundings_that_are_not_plain(name: str) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    rstd = torch.ones(3, 1)
    for _ in range(2):
        assert call(x, weight) is not None
        with AROUND[name]():
            assert call(x, weight) is None
            assert entry.add_rms_norm(x, x, weight, None, "torch", 0) is None
            with torch.no_grad():
                assert entry.forward(x, None, weight, None, "torch", 0) is None
                gradients = (None, None, "torch", 0, True, True)
                assert entry.backward(x, x, weight, rstd, *gradients) is None
    assert call(x, weight) is not None


@needs_entry
def test_transforms() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    declined = []

    def norm(row: Tensor) -> Tensor:
        declined.append(call(row, weight) is None and call(x, weight) is None)
        return rms_norm(row, weight)

    assert torch.allclose(torch.func.vmap(norm)(x), rms_norm(x, weight))
    torch.func.grad(lambda row: norm(row).sum())(x[0])
    torch.func.jvp(norm, (x[0],), (x[1],))
    torch.func.functionalize(norm)(x)
    torch.jit.trace(norm, (x,), check_trace=False)
    assert declined == [True] * 5


@needs_entry
def test_a_wrapper_that_outlived_its_transform() -> None:
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row)(torch.randn(3, 8))
    assert call(kept[0]) is None


@needs_entry
def test_tensors_that_are_not_plain() -> None:
    weight = torch.randn(8)
    plain = torch.randn(3, 8)
    complex_view = torch.randn(3, 8, dtype=torch.complex64).conj()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = torch.randn(3, 8)
    strange = {
        "pending minus": complex_view.imag,
        "pending conjugation": complex_view,
        "meta": torch.randn(3, 8, device="meta"),
        "sparse": plain.to_sparse(),
        "csr": plain.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([plain, plain]),
        "zeros without memory": torch._efficientzerotensor(3, 8),
        "functional": torch._to_functional_tensor(plain),
        "subclass": plain.as_subclass(Subclass),
        "fake": fake,
        "lazy parameter": torch.nn.parameter.UninitializedParameter(),
    }
    if torch.backends.mkldnn.is_available():
        strange["mkldnn"] = plain.to_mkldnn()
    for name, x in strange.items():
        assert call(x, weight) is None, name
        assert call(plain, x) is None, name
        assert entry.add_rms_norm(plain, x, weight, None, "torch", 0) is None, name
    assert complex_view.imag.is_neg()
    assert same_bits(rms_norm(complex_view.imag, weight), rms_norm(complex_view.imag + 0, weight))


@needs_entry
def test_arguments_that_the_usual_way_complains_of() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    for arguments in (
        (None, weight),
        ([3.0, 4.0], None),
        (x, "weight"),
        (x, weight, "nobody"),
        (x, weight, "mamba2"),
        (x, weight, 3),
        (x, weight, [[]]),
        (x, weight, "torch", -1.0),
        (x, weight, "torch", float("nan")),
        (x, weight, "torch", float("inf")),
        (x, weight, "torch", 1e300),
        (x, weight, "torch", "1"),
        (x, weight, "torch", 1e-6, 3),
        (x, weight, "torch", 1e-6, -1),
        (x, weight, "torch", 1e-6, 2**70),
        (x, weight, "torch", 1e-6, "1"),
        (x, torch.randn(7)),
        (x.long(), weight),
        (x, weight.long()),
        (torch.tensor(1.0), None),
    ):
        assert call(*arguments) is None, arguments
    assert entry.rms_norm() is None
    assert entry.backward(x, x) is None
    with pytest.raises(ValueError, match=r"expected \(8,\)"):
        rms_norm(x, torch.randn(7))
    with pytest.raises(ValueError, match="eps is -1"):
        rms_norm(x, weight.requires_grad_(), -1.0)
    with pytest.raises(ValueError, match=r"eps is 1e\+300"):
        rms_norm(x, weight, 1e300)
    with pytest.raises(TypeError, match=r"x is torch\.int64"):
        rms_norm(x.long(), weight)


@needs_entry
def test_compiled_code_holds_the_operation() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    norm = RMSNorm(8, eps=1e-6)
    x = torch.randn(3, 8)

    def both(x: Tensor) -> Tensor:
        return rms_norm(norm(x), norm.weight, 1e-6)

    compiled = torch.compile(both, backend=keep, fullgraph=True)
    with torch.no_grad():
        assert same_bits(compiled(x), both(x))
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets.count("rmsnorm.rms_norm.default") == 2


@needs_entry
def test_specs_are_told_apart() -> None:
    """More of them than are remembered, made and dropped, so that addresses come again."""
    x, weight = torch.randn(3, 8), torch.rand(8)
    for round_ in range(3):
        for i in range(40):
            spec = rmsnorm.NormSpec(eps=10.0 ** -(i % 20), offset=float(i % 2))
            expected = operation.op(x, weight, None, None, spec.encode(), 1)
            assert same_bits(call(x, weight, spec, None), expected), (round_, i)


@needs_entry
def test_a_spec_outlives_the_thread_that_first_used_it() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    spec = rmsnorm.NormSpec(eps=0.03125, offset=1.0)
    run_in_thread(lambda: call(x, weight, spec, None))
    for i in range(50):  # whatever that thread freed is used again
        run_in_thread(lambda i=i: call(x, weight, rmsnorm.NormSpec(eps=1.0 + i), None))
        rmsnorm.NormSpec(eps=2.0 + i)
    expected = operation.op(x, weight, None, None, spec.encode(), 1)
    assert same_bits(call(x, weight, spec, None), expected)


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@needs_entry
def test_the_specs_of_a_patched_model_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """More norms than specs are remembered: they share one."""
    norms = nn.Sequential(*(nn.RMSNorm(8, eps=1e-5) for _ in range(40)))
    assert len(rmsnorm.patch(norms).swapped) == 40
    x = torch.randn(3, 8)
    asked = []
    encode = rmsnorm.NormSpec.encode
    monkeypatch.setattr(rmsnorm.NormSpec, "encode", lambda spec: asked.append(spec) or encode(spec))
    with torch.no_grad():
        norms(x)
        norms(x)
    assert len(asked) <= 1


@needs_entry
def test_a_tensor_that_changes_hands_while_it_is_read() -> None:
    """Another thread may put other data into the object as soon as it gets to run."""
    stop = threading.Event()
    x, other = torch.ones(400, 256), torch.full((400, 256), 2.0)
    expected = call(x.clone(), None, ndim=1)

    def swap() -> None:
        while not stop.is_set():
            with contextlib.suppress(RuntimeError):  # it is held by the call
                torch.utils.swap_tensors(x, other)

    thread = threading.Thread(target=swap)
    thread.start()
    for _ in range(200):
        assert torch.allclose(call(x, None, ndim=1), expected)
    stop.set()
    thread.join()


@needs_entry
def test_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert direct._load() is None


@needs_entry
def test_another_release_of_torch_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert direct._load() is None


@needs_entry
def test_an_interrupt_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(spec: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(rmsnorm.NormSpec, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(torch.ones(2), None, rmsnorm.NormSpec(eps=0.0625))


@needs_entry
def test_nothing_is_kept() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    dy = torch.randn(3, 8)
    with torch.no_grad():
        _, _, rstd = entry.forward(x, None, weight, None, "torch", 0)
    held = (x, weight, dy, rstd, None, True)
    before = [sys.getrefcount(value) for value in held]
    gc.collect()
    tensors = sum(isinstance(value, Tensor) for value in gc.get_objects())
    with torch.no_grad():
        for _ in range(100):
            call(x, weight)
            call(x.long(), weight)
            entry.add_rms_norm(x, x, weight, None, "torch", 0)
            entry.forward(x, x, weight, None, "torch", 0)
            entry.backward(dy, x, weight, rstd, None, None, "torch", 0, True, True)
    gc.collect()
    # Others may have gone meanwhile; a leak of one a call would be a hundred.
    assert sum(isinstance(value, Tensor) for value in gc.get_objects()) < tensors + 50
    after = [sys.getrefcount(value) for value in held]
    assert all(new - old < 50 for new, old in zip(after, before, strict=True))


@needs_entry
def test_threads() -> None:
    """Large calls let other threads run, and a new thread is plain too."""
    x, weight = torch.randn(300, 256), torch.randn(256)
    expected = rms_norm(x, weight)
    results: list[bool] = []

    def work() -> None:
        for _ in range(50):
            y = call(x, weight, eps=None)
            results.append(y is not None and same_bits(y, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200


@needs_entry
def test_training_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the gradients of the way through torch.ops, also where it is asked for twice."""
    x, residual = (torch.randn(6, 16, requires_grad=True) for _ in range(2))
    weight = torch.randn(16, requires_grad=True)
    dy = torch.randn(6, 16)

    def gradients() -> list[Tensor]:
        one = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), dy)
        y, h = add_rms_norm(x, residual, weight, 1e-6)
        two = torch.autograd.grad((y, h), (x, residual, weight), (dy, dy))
        (again,) = torch.autograd.grad(
            rms_norm(x, weight, 1e-6), x, dy.requires_grad_(), create_graph=True
        )
        return [*one, *two, again, *torch.autograd.grad(again.sum(), (x, weight, dy))]

    direct_ones = gradients()
    without_direct_call(monkeypatch)
    assert all(map(same_bits, direct_ones, gradients()))


def test_the_place_of_the_keys_must_be_plain_to_see() -> None:
    words = (ctypes.c_uint64 * 4)(5, 7, 7, 9)
    address = ctypes.addressof(words)
    assert direct._only_offset([(address, 5)], 32) == 0
    assert direct._only_offset([(address, 7)], 32) is None
    assert direct._only_offset([(address, 8)], 32) is None
    assert direct._only_offset([(address, 9)], 24) is None


@needs_entry
def test_a_torch_of_another_layout_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_only_offset", lambda pairs, size: None)
    assert direct._load() is None


@pytest.mark.skipif(not KERNELS, reason="without kernels there is nothing to switch off")
def test_it_can_be_switched_off() -> None:
    code = (
        "import torch; from rmsnorm import rms_norm; from rmsnorm.ops import direct\n"
        "assert direct.entry is None\n"
        "print(rms_norm(torch.tensor([3.0, 4.0])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RMSNORM_DISABLE_DIRECT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "tensor([0.8485, 1.1314])\n"


@needs_entry
@pytest.mark.parametrize("around", ["torch.autocast('cpu')", "torch.inference_mode()", "Mode()"])
def test_it_is_found_whatever_surrounds_the_import(around: str) -> None:
    code = (
        "import torch\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Mode(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, f, types, args=(), kwargs=None):\n"
        "        return f(*args, **(kwargs or {}))\n"
        f"with {around}:\n"
        "    from rmsnorm.ops import direct\n"
        "y = direct.entry.rms_norm(torch.ones(2), None, None, 'torch', 0)\n"
        "assert y is not None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
