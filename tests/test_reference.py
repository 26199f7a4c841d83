"""The definition in plain Python: its values, its gradient, and that it needs nothing else."""

from __future__ import annotations

import doctest
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import rmsnorm.reference
from rmsnorm.reference import rms_norm, rms_norm_backward
from rmsnorm.spec import NormSpec, specs

NAMES = list(specs)
SHAPES: list[dict[str, Any]] = [{}, {"groups": 3}, {"partial": 0.3}]


def test_check_value() -> None:
    y = rms_norm([3.0, 4.0], [1.0, 1.0], eps=0)
    assert y == pytest.approx([0.6 * math.sqrt(2), 0.8 * math.sqrt(2)], rel=1e-15)


@pytest.mark.parametrize(
    ("x", "kwargs", "expected"),
    [
        # eps stands under the root, beside it, or under the norm as a floor.
        ([3.0, 4.0], {"eps": 1.0}, [3 / math.sqrt(13.5), 4 / math.sqrt(13.5)]),
        (
            [3.0, 4.0],
            {"eps": 1.0, "spec": "original"},
            [3 / (math.sqrt(12.5) + 1), 4 / (math.sqrt(12.5) + 1)],
        ),
        ([3.0, 4.0], {"eps": 1.0, "spec": "l2"}, [0.6 * math.sqrt(2), 0.8 * math.sqrt(2)]),
        ([3.0, 4.0], {"eps": 10.0, "spec": "l2"}, [0.3 * math.sqrt(2), 0.4 * math.sqrt(2)]),
        ([3.0, 4.0], {"eps": 11.0, "spec": "l2_sum"}, [0.5, 4 / 6]),
        # The mean of the squares, never the variance.
        ([1.0, 3.0], {"eps": 0.0}, [1 / math.sqrt(5), 3 / math.sqrt(5)]),
        ([1.0, -1.0, 5.0, 5.0], {"eps": 0.0, "spec": NormSpec(groups=2)}, [1.0, -1.0, 1.0, 1.0]),
        ([2.0, 2.0, 6.0, -8.0], {"eps": 0.0, "spec": NormSpec(partial=0.5)}, [1.0, 1.0, 3.0, -4.0]),
        ([2.0, 2.0], {"eps": 0.0, "weight": [3.0, 0.5]}, [3.0, 0.5]),
        ([2.0, 2.0], {"eps": 0.0, "weight": [3.0, 0.5], "spec": "gemma"}, [4.0, 1.5]),
        ([2.0, 2.0], {"eps": 0.0, "weight": [3.0, 0.5], "bias": [1.0, -1.0]}, [4.0, -0.5]),
        ([2.0, 2.0], {"eps": 0.0, "bias": [1.0, -1.0]}, [2.0, 0.0]),
        # eps=None is the spec's, and 2**-52 where that is None too.
        ([0.0, 2.0**-26], {}, [0.0, math.sqrt(2 / 3)]),
        ([0.0, 1e-8], {"spec": "original"}, [0.0, 1e-8 / (1e-8 / math.sqrt(2) + 1e-8)]),
        ([7.0], {"eps": 0.0}, [1.0]),
        ([], {}, []),
    ],
)
def test_values(x: list[float], kwargs: dict[str, Any], expected: list[float]) -> None:
    assert rms_norm(x, **kwargs) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("d", [1, 2, 7, 100, 4097])
def test_the_last_bits(d: int) -> None:
    generator = random.Random(d)
    x = [generator.gauss(0, 1) for _ in range(d)]
    mean = sum(Fraction(v) ** 2 for v in x) / d + Fraction(1e-6)
    for value, y in zip(x, rms_norm(x, eps=1e-6), strict=True):
        # y^2 = x^2 / mean, compared exactly.
        exact = Fraction(value) ** 2 / mean
        assert abs(Fraction(y) ** 2 - exact) <= exact * Fraction(2) ** -49


def test_nested_lists_are_rows() -> None:
    rows = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[0.5, 0.25], [1e3, 1e-3]]]
    y = rms_norm(rows, [2.0, 3.0], spec="gemma", bias=[1.0, 0.0])
    for outer, y_outer in zip(rows, y, strict=True):
        for row, y_row in zip(outer, y_outer, strict=True):
            assert y_row == rms_norm(row, [2.0, 3.0], spec="gemma", bias=[1.0, 0.0])
    assert rms_norm([[], []]) == [[], []]
    assert rms_norm(((1, 2), (3, 4)), (1, 1)) == rms_norm([[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0])


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-20, 1e20, 1e200, 1e307])
@pytest.mark.parametrize("spec", ["torch", "original", "l2", "l2_sum"])
def test_no_scale_overflows_or_underflows(scale: float, spec: str) -> None:
    # Multiples of the scale, which are exact where the scale is the smallest number there is.
    x = [3.0 * scale, -4.0 * scale, 0.0, 12.0 * scale]
    length = 13.0 if spec == "l2_sum" else 6.5
    ratios = [v / scale / length for v in x]
    assert rms_norm(x, eps=0.0, spec=spec) == pytest.approx(ratios, rel=1e-14)


def test_zero_rows_and_what_is_not_finite_follow_the_formula() -> None:
    inf, nan = math.inf, math.nan
    assert rms_norm([0.0, 0.0], eps=1e-6) == [0.0, 0.0]
    for got, expected in [
        (rms_norm([0.0, 0.0], eps=0.0), [nan, nan]),
        (rms_norm([inf, 1.0]), [nan, 0.0]),
        (rms_norm([-inf, 1.0], [2.0, 2.0]), [nan, 0.0]),
        (rms_norm([nan, 1.0]), [nan, nan]),
        (rms_norm([nan, inf]), [nan, nan]),
        (rms_norm([0.0, 5.0], eps=0.0, spec=NormSpec(partial=0.5)), [nan, inf]),
    ]:
        assert got == pytest.approx(expected, nan_ok=True)
    rows = rms_norm([[inf, 1.0], [3.0, 4.0], [nan, 1.0]])
    assert rows[1] == rms_norm([3.0, 4.0])


def loss(x: list[list[float]], dy: list[list[float]], **kwargs: Any) -> float:
    y = rms_norm(x, **kwargs)
    return math.fsum(
        a * b for row, dy_row in zip(y, dy, strict=True) for a, b in zip(row, dy_row, strict=True)
    )


def slope(function: Callable[[float], float], at: float) -> float:
    """A five-point finite difference: its error is of the order of h**4."""
    h = 2.0**-9
    near = function(at + h) - function(at - h)
    far = function(at + 2 * h) - function(at - 2 * h)
    return (8 * near - far) / (12 * h)


def bumped(values: list[float], i: int, value: float) -> list[float]:
    return [*values[:i], value, *values[i + 1 :]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [0.0, 0.5, 100.0])
def test_backward_against_finite_differences(name: str, shape: dict[str, Any], eps: float) -> None:
    spec = replace(specs[name], **shape)
    generator = random.Random(3)
    x, dy = ([[generator.uniform(1, 2) for _ in range(6)] for _ in range(2)] for _ in range(2))
    x[0][2] *= -1
    dy[1][0] *= -1
    g, b = ([generator.gauss(0, 1) for _ in range(6)] for _ in range(2))
    common = {"eps": eps, "spec": spec}
    dx, dg, db = rms_norm_backward(dy, x, g, **common)
    assert dg is not None
    for j in range(6):
        for r in range(2):

            def of_x(v: float, r: int = r, j: int = j) -> float:
                rows = [bumped(row, j, v) if i == r else row for i, row in enumerate(x)]
                return loss(rows, dy, weight=g, bias=b, **common)

            assert dx[r][j] == pytest.approx(slope(of_x, x[r][j]), rel=1e-6, abs=1e-8)

        def of_g(v: float, j: int = j) -> float:
            return loss(x, dy, weight=bumped(g, j, v), bias=b, **common)

        def of_b(v: float, j: int = j) -> float:
            return loss(x, dy, weight=g, bias=bumped(b, j, v), **common)

        assert dg[j] == pytest.approx(slope(of_g, g[j]), rel=1e-6, abs=1e-8)
        assert db[j] == pytest.approx(slope(of_b, b[j]), rel=1e-6, abs=1e-8)


def test_backward_values() -> None:
    dx, dg, db = rms_norm_backward([1.0, 0.0, 0.0], [1.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0)
    # 1/rms is 1/sqrt(3); xhat is x/sqrt(3): dx = (dy*w - xhat * sum(dy*w*xhat)/3)/sqrt(3).
    root = math.sqrt(3.0)
    assert dx == pytest.approx([8 / 9 / root, -2 / 9 / root, -2 / 9 / root], rel=1e-15)
    assert dg == pytest.approx([1 / root, 0.0, 0.0], rel=1e-15)
    assert db == [1.0, 0.0, 0.0]


def test_backward_of_a_zero_row() -> None:
    dy, g = [1.0, -2.0], [3.0, 0.5]
    for spec, factor in [("torch", 100.0), ("original", 1e4), ("l2", math.sqrt(2) * 1e4)]:
        dx, dg, _ = rms_norm_backward(dy, [0.0, 0.0], g, 1e-4, spec=spec)
        assert dx == pytest.approx([3.0 * factor, -1.0 * factor], rel=1e-14)
        assert dg == [0.0, 0.0]


def test_backward_without_weight_and_at_far_scales() -> None:
    for scale in (1e-200, 1e200):
        dx, dg, db = rms_norm_backward([1.0, 0.0], [3.0 * scale, 4.0 * scale], eps=0.0)
        near, _, _ = rms_norm_backward([1.0, 0.0], [3.0, 4.0], eps=0.0)
        assert [v * scale for v in dx] == pytest.approx(near, rel=1e-14)
        assert dg is None
        assert db == [1.0, 0.0]


def test_backward_sums_over_all_rows() -> None:
    x = [[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [4.0, 4.0]]]
    dy = [[[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]]]
    dx, dg, db = rms_norm_backward(dy, x, [1.0, 1.0], 0.0)
    assert dg == [4.0, 8.0]
    assert db == [4.0, 8.0]
    assert [len(part) for part in dx] == [2, 2]
    assert dx[1][1] == rms_norm_backward([1.0, 2.0], [4.0, 4.0], [1.0, 1.0], 0.0)[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm([1.0, 2.0], [1.0]), ValueError, "weight has 1 elements; x has rows of 2"),
        (lambda: rms_norm([1.0], bias=[1.0, 2.0]), ValueError, "bias has 2 elements"),
        (lambda: rms_norm([[1.0], [1.0, 2.0]]), ValueError, "x is ragged: a row of 2"),
        (lambda: rms_norm([[1.0], 2.0]), ValueError, "x is ragged: 2.0"),
        (lambda: rms_norm([1.0, [2.0]]), TypeError, "x holds .2.0."),
        (lambda: rms_norm(3.0), TypeError, "x is a float"),
        (lambda: rms_norm("34"), TypeError, "x is a str"),
        (lambda: rms_norm(["3", "4"]), TypeError, "x holds '3'"),
        (lambda: rms_norm([1j]), TypeError, "x holds 1j"),
        (lambda: rms_norm([1.0], 1.0), TypeError, "weight is a float"),
        (lambda: rms_norm([1.0], [None]), TypeError, "weight holds None"),
        (lambda: rms_norm([1.0], eps=-1e-6), ValueError, "eps is -1e-06"),
        (lambda: rms_norm([1.0], eps="0"), TypeError, "eps is '0'"),
        (lambda: rms_norm([1.0], spec="lama"), ValueError, "lama"),
        (
            lambda: rms_norm([1.0, 2.0, 3.0], spec=NormSpec(groups=2)),
            ValueError,
            "3 elements cannot be cut into 2",
        ),
        (lambda: rms_norm_backward([1.0], [1.0, 2.0]), ValueError, r"dy has shape \(1,\)"),
        (lambda: rms_norm_backward([[1.0]], [1.0]), ValueError, r"dy has shape \(1, 1\)"),
        (lambda: rms_norm_backward([1.0], [1.0], [1.0, 2.0]), ValueError, "weight has 2"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_it_imports_nothing_third_party() -> None:
    """Runs in its own process, in which only the standard library and rmsnorm can be imported."""
    program = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"rmsnorm", *sys.stdlib_module_names}:
            raise ImportError(f"{name} is not part of the standard library")

sys.meta_path.insert(0, Refuse())
from rmsnorm.reference import rms_norm, rms_norm_backward
print(rms_norm([3.0, 4.0], [1.0, 1.0], eps=0.0), rms_norm_backward([1.0], [2.0]))
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    source = Path(rmsnorm.reference.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(source)!r})\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0.848528137423857, 1.1313708498984762]")
    assert done.stdout.splitlines()[1] == "False False"


def test_the_examples_run() -> None:
    result = doctest.testmod(rmsnorm.reference)
    assert result.attempted >= 4
    assert result.failed == 0
