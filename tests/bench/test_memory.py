import os
import sys

import pytest
import torch

from rmsnorm.bench import memory
from rmsnorm.bench.grid import Cell
from rmsnorm.bench.memory import MeasurementError, Usage, allocated_peak, measure_memory

MEBIBYTE = 2**20
CELL = Cell("train", 1024, 2048, "bfloat16")


def test_the_cell_is_a_training_step_of_4096x4096_bfloat16():
    assert str(memory.CELL) == "4096x4096 bfloat16 hot train"
    assert {"ours torch", "ours llama", "eager llama"} < set(memory.NAMES)


@pytest.mark.parametrize(
    ("name", "resident", "ok"),
    [
        ("ours torch", 1020, True),
        ("ours llama", 1021, False),
        ("eager torch", 9000, True),
        ("compiled torch", 1021, True),
    ],
)
def test_only_ours_is_limited(name, resident, ok):
    usage = Usage(name, results=1000, allocated=1000, resident=resident)
    assert usage.ok is ok
    assert usage.ratio == resident / 1000


def test_without_resident_memory_the_allocations_count():
    usage = Usage("ours torch", results=1000, allocated=1021, resident=None)
    assert (usage.peak, usage.ok) == (1021, False)


def test_allocations_that_follow_each_other_do_not_add_up():
    def step():
        for _ in range(3):
            kept = torch.ones(MEBIBYTE)
        return kept

    # The next is made before the one before is let go.
    assert allocated_peak(step) == 8 * MEBIBYTE
    assert allocated_peak(lambda: None) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps and resets the peak")
def test_the_resident_peak_of_a_fresh_process_is_that_of_its_tensors():
    """Two ways to count that know nothing of each other, on a norm that allocates a lot."""
    (usage,) = measure_memory(["eager llama"], CELL)
    assert usage.results == 2 * CELL.nbytes == 8 * MEBIBYTE
    assert usage.resident is not None
    assert usage.allocated > 3 * usage.results
    assert abs(usage.resident - usage.allocated) < 0.02 * usage.allocated


@pytest.mark.skipif(not hasattr(os, "fork"), reason="names of shared libraries differ")
def test_scratch_memory_outside_of_torch_is_seen(tmp_path):
    code = """
import ctypes
from rmsnorm.bench import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def step():
    scratch = libc.malloc(16 << 20)
    ctypes.memset(scratch, 1, 16 << 20)
    libc.free(scratch)

memory._prepare_process()
step()
peak = memory.resident_peak(step)
# Linux adds up the pages of a process in batches, of 32 or more for each processor, so that with
# two of them each of the two readings may be off by 256 KiB.
assert peak is None or abs(peak - (16 << 20)) < 1 << 19, peak
assert memory.allocated_peak(step) == 0
"""
    run(code)


def run(code):
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_that_fails_is_named():
    with pytest.raises(MeasurementError, match="memory of eager torch could not be measured: "):
        measure_memory(["eager torch"], Cell("train", 4, 8, "no_such_dtype"))


def test_a_compiled_candidate_that_cannot_be_made_is_left_out(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    assert measure_memory(["compiled torch"], Cell("train", 4, 72, "float32")) == []
