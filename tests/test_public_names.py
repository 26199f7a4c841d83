"""What ``import rmsnorm`` gives, and what it does not load."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import rmsnorm


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", rmsnorm.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rmsnorm, name) is not None
    assert name in dir(rmsnorm)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'rmsnorm' has no attribute 'nonsense'"):
        _ = rmsnorm.nonsense


def test_version_is_that_of_the_distribution() -> None:
    try:
        installed = importlib.metadata.version("rmsnorm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package runs from its sources, uninstalled")
    assert installed == rmsnorm.__version__


def test_import_loads_nothing_else() -> None:
    run(
        "import sys, rmsnorm\n"
        "assert not {'torch', 'numpy', 'transformers', 'click'} & set(sys.modules)\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch, rmsnorm",
        "import rmsnorm, torch; rmsnorm.rms_norm(torch.ones(2))",
        "import torch; import rmsnorm.ops.rms_norm; import rmsnorm.ops.add_rms_norm",
    ],
)
def test_the_operations_are_there_once_torch_is(code: str) -> None:
    run(
        f"{code}\n"
        "operations = torch.ops.rmsnorm\n"
        "for name in ('rms_norm', 'rms_norm_fwd', 'rms_norm_bwd', 'add_rms_norm',\n"
        "             'add_rms_norm_fwd', 'add_rms_norm_', 'gated_rms_norm'):\n"
        "    getattr(operations, name)\n"
    )


def test_lists_are_normalised_without_torch() -> None:
    run(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from rmsnorm import NormSpec, rms_norm, specs\n"
        "y = rms_norm([3.0, 4.0], [1.0, 1.0])\n"
        "assert [round(v, 4) for v in y] == [0.8485, 1.1314], y\n"
    )
