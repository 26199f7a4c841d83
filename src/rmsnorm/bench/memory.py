"""Peak memory of forward and backward, each candidate in a process of its own.

What counts is what the process really occupies, so the peak of its resident memory is taken, which
Linux keeps and lets a process reset (proc_pid_status(5), proc_pid_clear_refs(5)). It includes what
no allocator of tensors sees, such as a kernel's own scratch memory. Four things make it exact
enough for a limit of two percent:

* a full pass first, after which every page of code and every thread's memory is there;
* each larger block in a mapping of its own, which goes back to the system when it is freed, and
  what else is free given back before each measured pass;
* no huge pages, which may round every tensor up to 2 MiB;
* the median of three passes, which then differ by less than a thousandth.

Beside it stands the peak of what torch allocates for tensors, from its profiler: a cross-check, and
what is judged where the system does not tell.
"""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rmsnorm
from rmsnorm.bench.goals import MEMORY
from rmsnorm.bench.grid import Cell
from rmsnorm.bench.limit import Memory
from rmsnorm.bench.peers import Compiler, train_candidates
from rmsnorm.libc import c_function
from rmsnorm.progress import Say

CELL = Cell("train", 4096, 4096, "bfloat16")
NAMES = ("ours torch", "ours llama", "eager torch", "eager llama", "compiled torch")
# y, dx and two percent: for what is kept of each row, the gradient of the weight and its parts.
LIMIT = MEMORY.ratio

_PASSES = 3
_PR_SET_THP_DISABLE = 41  # <linux/prctl.h>
_M_MMAP_THRESHOLD = -3  # <malloc.h> of glibc
_OWN_MAPPING_FROM = 128 * 1024

Step = Callable[[], object]


class MeasurementError(RuntimeError):
    """A candidate's process failed."""


@dataclass(frozen=True)
class Usage:
    """What a forward and backward of one candidate needed.

    Attributes:
        results: the bytes of y and dx.
        allocated: the most bytes of tensors at one time above x, dy and the weight.
        resident: by how much the process's memory grew; None where the system does not tell.

    Example:
        >>> usage = Usage("ours torch", results=100, allocated=101, resident=102)
        >>> usage.ratio, usage.limit, usage.ok
        (1.02, 1.02, True)
    """

    name: str
    results: int
    allocated: int
    resident: int | None

    @property
    def peak(self) -> int:
        return self.allocated if self.resident is None else self.resident

    @property
    def ratio(self) -> float:
        """The peak relative to what has to be there, y and dx."""
        return self.peak / self.results

    @property
    def limit(self) -> float | None:
        """The largest ratio that is allowed; peers may take what they want."""
        return LIMIT if self.name.startswith("ours") else None

    @property
    def ok(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


def measure_memory(
    names: Iterable[str] = NAMES, cell: Cell = CELL, say: Say = lambda text: None
) -> list[Usage]:
    """Starts one process for each candidate; compiled ones that cannot be made are left out.

    Raises:
        MeasurementError: a process failed.
    """
    found = []
    for name in names:
        say(f"{cell}: memory of {name}")
        usage = _in_fresh_process(name, cell)
        if usage is not None:
            found.append(usage)
    return found


def _in_fresh_process(name: str, cell: Cell) -> Usage | None:
    package = str(Path(rmsnorm.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    request = [name, str(cell.rows), str(cell.d), cell.dtype, str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *request],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise MeasurementError(f"the memory of {name} could not be measured: {reason}")
    answer: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    return None if answer is None else Usage(**answer)


def measure_here(name: str, cell: Cell) -> Usage | None:
    """The peak in this process, which should be fresh; None where the candidate is absent."""
    _prepare_process()
    weight = nn.Parameter(torch.linspace(0.5, 1.5, cell.d, dtype=getattr(torch, cell.dtype)))
    first = Memory(cell.dtype, rotating=0).buffers(cell).first()
    compiler = Compiler(enabled=name.startswith("compiled"))
    by_name = {one.name: one for one in train_candidates(cell, weight, compiler, first)}
    if name not in by_name:
        return None
    call, arguments = by_name[name].call, by_name[name].bind(*first)
    call(*arguments)
    resident = resident_peak(lambda: call(*arguments))
    allocated = allocated_peak(lambda: call(*arguments))
    return Usage(name, 2 * cell.nbytes, allocated, resident)


def resident_peak(step: Step) -> int | None:
    """By how many bytes ``step`` raises this process's memory; None where nobody counts."""
    peaks = []
    for _ in range(_PASSES):
        _give_back_free_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            before = _high_water_mark()
            results = step()
            peaks.append(_high_water_mark() - before)
        except OSError:
            return None
        del results
    return int(statistics.median(peaks))


def allocated_peak(step: Step) -> int:
    """The most bytes that the tensors of ``step`` have at one time, as torch's profiler sees it.

    Example:
        >>> allocated_peak(lambda: [torch.ones(1024), torch.ones(1024)])
        8192
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        results = step()
    del results
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: float(event["ts"]))
    totals = accumulate(int(event["args"]["Bytes"]) for event in changes)
    return max(totals, default=0)


def _high_water_mark() -> int:
    """The largest resident memory since it was last reset."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise OSError("the system does not tell VmHWM")
    return int(match[1]) * 1024


def _give_back_free_memory() -> None:
    gc.collect()
    trim = c_function("malloc_trim")
    if trim is not None:
        trim(0)


def _prepare_process() -> None:
    prctl, mallopt = c_function("prctl"), c_function("mallopt")
    if prctl is not None:
        prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if mallopt is not None:
        # glibc raises this by itself as blocks are freed, and then keeps them.
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_FROM)


def _main(name: str, rows: str, d: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    usage = measure_here(name, Cell("train", int(rows), int(d), dtype))
    print(json.dumps(None if usage is None else vars(usage)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
