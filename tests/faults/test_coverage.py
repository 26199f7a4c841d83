"""Every known fault has its test, or a word on what the test is waiting for."""

from __future__ import annotations

import json
import re
from pathlib import Path

_HERE = Path(__file__).parent

LATER = {
    "A24": "needs fold()",
    "A25": "needs the ONNX export",
    "P56": "needs watch()",
    "P58": "needs watch()",
    "P60": "needs watch()",
}


def test_every_fault_is_tested_or_waits_for_something() -> None:
    cases = {case["id"] for case in json.loads((_HERE / "cases.json").read_text())}
    text = "".join(path.read_text() for path in sorted(_HERE.glob("test_*.py")))
    tested = set(re.findall(r"^def test_([ABP]\d+)_", text, flags=re.MULTILINE))
    assert cases - tested == set(LATER)
    assert tested <= cases
