"""Every norm class of transformers: built, identified, patched, and compared with its own code.

What must hold is stated here by hand, class by class where it is not the same for all: the list of
classes says nothing of what they compute.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from rmsnorm.ops.rms_norm import has_kernels
from rmsnorm.rewrite import census
from rmsnorm.rewrite.census import PAIRS, Census, Finding, NormClass

_HERE = Path(__file__).parent
CENSUS = Census.load(_HERE / "classes.json")
PAGE = _HERE.parent.parent / "docs" / "census.md"

pytestmark = [
    pytest.mark.skipif(
        transformers.__version__ != CENSUS.transformers,
        reason=f"the list of classes is for transformers {CENSUS.transformers}",
    ),
    pytest.mark.skipif(not has_kernels, reason="without the kernels gradients are left"),
    pytest.mark.filterwarnings("ignore"),
]

# Classes that are swapped in float32 alone, and why not in the half types.
IN_FLOAT32 = {
    "DeepseekV4UnweightedRMSNorm": "it rounds 1/rms to the dtype of the row",
    "Glm5NextTextUnweightedRMSNorm": "it rounds 1/rms to the dtype of the row",
    "GradiumPhononTTSTimestepNorm": "its mean square is taken in the dtype of the row",
    "ImageGPTLayerNorm": "its mean square is taken in the dtype of the row",
    "MuseSparkTextCenteredRMSNorm": "it adds 1 to the weight in the weight's dtype",
    "xLSTMRMSNorm(force_float32_reductions=False)": "is taken in the dtype of the row",
}
# Classes that are left, and why.
LEFT = {
    "AXK2GatedRMSNorm": "it has modules inside",  # a gate that is an MLP of the normed row
    "HYV4UnweightedRMSNorm": "it returns one number for each row",
    "HYV4VLUnweightedRMSNorm": "it returns one number for each row",
    "PocketTTSTimestepNorm": "it does not divide each row by its root mean square",  # a variance
    "ZayaQKNorm": "its forward needs key_states too",  # two rows in, two out
}
# They divide by torch.sqrt, or multiply in another order.
NOT_SAME_BITS = {"GradiumPhononTTSTimestepNorm": 3.0, "ImageGPTLayerNorm": 4.0}

# Units of float32: a gate's activation is off by 2, and is in the mean square of all.
MOST_ULP = 16.0
# Of half types, which are rounded up to twice: where the activation's last bit decides a rounding.
MOST_ULP_IN_HALF, MOST_SHARE_IN_HALF = 2.0, 1e-3
# The norm of a gradient's difference: all in float32; with half types, four of their units, since
# the classes round their gradients at each step.
MOST_GRADIENT = {torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}

SPECS = {
    "llama": 145,
    "olmo2": 34,  # 8 without a weight of it, 1 of a weighted row, 8 with pow(-0.5)
    "gemma": 14,
    "t5": 10,
    "mamba2 with groups=4": 5,
    "qwen3_next": 5,
    "kimi_linear": 3,
    "qwen3_next with rounding=after_weight": 2,
    "olmo2 with reduce=sum": 1,
}


_found: dict[str, Finding] = {}


def finding(norm: NormClass) -> Finding:
    key = f"{norm.module} {norm}"
    if key not in _found:
        _found[key] = census.examine(norm, compare=norm not in CENSUS.other)
    return _found[key]


@pytest.mark.parametrize("norm", [*CENSUS.rms, *CENSUS.variants], ids=str)
def test_a_class_computes_what_it_did(norm: NormClass) -> None:
    found = finding(norm)
    if str(norm) in LEFT:
        assert not found.swapped_in_part
        assert LEFT[str(norm)] in found.reason
    elif str(norm) in IN_FLOAT32:
        assert found.swapped_in_part
        assert not found.swapped
        assert IN_FLOAT32[str(norm)] in found.reason
    else:
        assert found.swapped, found.reason
        assert found.entry is not None
        assert found.entry.training
        # Nothing is left to the class's own code: not one pair, not one gradient.
        assert all(comparison.computed for comparison in found.comparisons)
        assert all(comparison.trained for comparison in found.comparisons)
    compared = [(comparison.x, comparison.weight) for comparison in found.comparisons]
    assert compared == (list(PAIRS) if found.swapped_in_part or found.inside else [])

    for comparison in found.comparisons:
        if found.is_gated and comparison.x == torch.float32:
            assert comparison.ulp <= MOST_ULP
        elif found.is_gated:
            assert comparison.ulp <= MOST_ULP_IN_HALF
            assert comparison.share <= MOST_SHARE_IN_HALF
        elif comparison.computed and norm.name in NOT_SAME_BITS:
            assert comparison.ulp <= NOT_SAME_BITS[norm.name]
        else:
            assert comparison.same_bits
        assert comparison.gradient <= max(
            MOST_GRADIENT[comparison.x], MOST_GRADIENT[comparison.weight]
        )


def test_no_class_is_skipped() -> None:
    names = [norm.name for norm in CENSUS.rms]
    assert len(names) == len(set(names)) == 229
    findings = [finding(norm) for norm in CENSUS.rms]
    assert sum(found.swapped for found in findings) == 219
    assert sum(found.swapped_in_part for found in findings) == 224
    assert {found.norm.name for found in findings if not found.swapped_in_part} == set(LEFT)
    conventions = Counter(found.entry.convention for found in findings if found.swapped)
    weighted = conventions.pop("olmo2 of the weighted row")
    conventions["olmo2"] += weighted
    assert weighted == 1
    assert conventions == SPECS


def test_the_list_has_every_class_that_is_called_rmsnorm() -> None:
    listed = {norm.name for norm in (*CENSUS.rms, *CENSUS.other)}
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    called = {
        name
        for source in sources
        for name in re.findall(r"^class (\w*R[Mm][Ss]Norm\w*)\(", source.read_text(), re.M)
    }
    assert len(called) > 200
    assert called <= listed


@pytest.mark.parametrize("norm", CENSUS.other, ids=lambda norm: norm.name)
def test_what_is_called_a_norm_is_left_with_its_reason(norm: NormClass) -> None:
    found = finding(norm)
    assert not found.swapped_in_part
    assert found.reason
    if "NormedEmbedding" in norm.name:
        assert [entry.swapped for entry in found.inside] == [True]


def test_the_page_is_up_to_date() -> None:
    """Up to the columns of differences, which are a machine's own."""
    command = "python scripts/census.py docs/census.md"
    findings = [finding(norm) for norm in (*CENSUS.rms, *CENSUS.variants)]
    others = [finding(norm) for norm in CENSUS.other]
    page = census.markdown(CENSUS, findings, others, command)
    assert _without_differences(PAGE.read_text()) == _without_differences(page)


def _without_differences(page: str) -> list[str]:
    lines = page.splitlines()
    return [line.rsplit(" | ", 2)[0] if line.count(" | ") == 6 else line for line in lines]


def test_a_list_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "classes.json"
    path.write_text('{"rms": []}')
    with pytest.raises(ValueError, match="is no list of norm classes"):
        Census.load(path)
