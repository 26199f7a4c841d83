"""Compiles the peers of many cells at once, one process for each core.

A whole run has over a hundred compilations of a few seconds each, and one process makes one after
the other. Here others make them first, and what they leave in the compiler's cache on disk is what
the measuring process finds. Nothing is measured meanwhile.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from rmsnorm.bench.grid import Cell
from rmsnorm.progress import Say

# Torch is imported in the functions, and first. The key of the compiler's cache holds the name of
# the first module ever imported that has an attribute ``torch``; that has to be the same module,
# one of torch's own, in the processes that write and in the one that reads.

# Starting the processes takes as long as about this many compilations.
_WORTHWHILE = 8


def compile_ahead(cells: Iterable[Cell], say: Say = lambda text: None) -> int:
    """Fills the cache with the compiled peers of ``cells``; how many were asked for.

    What fails here is tried again, and reported, when it is needed.
    """
    import torch

    from rmsnorm.bench.peers import compiled_for

    distinct = {compiled_for(cell): cell for cell in cells if cell.kind not in ("call", "sweep")}
    workers = min(os.cpu_count() or 1, 8)
    if len(distinct) < _WORTHWHILE or workers < 2:
        return 0
    with (
        contextlib.suppress(BrokenProcessPool, OSError),
        ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare_process,
            # The compiled code depends on the number of threads.
            initargs=(torch.get_num_threads(),),
        ) as pool,
    ):
        futures = [pool.submit(compile_peers, cell) for cell in distinct.values()]
        for number, _ in enumerate(as_completed(futures), start=1):
            say(f"compiling the peers, {number} of {len(futures)}")
    return len(distinct)


def _prepare_process(threads: int) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool in each process of this pool
    import torch

    torch.set_num_threads(threads)


def compile_peers(cell: Cell) -> bool:
    """Compiles the peers of ``cell`` in this process; whether they could be."""
    import torch

    from rmsnorm.bench.limit import Memory
    from rmsnorm.bench.peers import Compiler, candidates
    from rmsnorm.bench.run import grad_mode

    compiler = Compiler()
    weight = torch.nn.Parameter(torch.ones(cell.d, dtype=getattr(torch, cell.dtype)))
    first = Memory(cell.dtype, rotating=0).buffers(cell).first()
    with grad_mode(cell):
        candidates(cell, weight, compiler, first)
    return compiler.failure is None
