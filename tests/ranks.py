"""A function run on several ranks at once, each a process with a gloo process group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# One process imports all of this, and every rank is a fork of it: importing takes seconds.
_PRELOADED = ["torch", "torch.distributed.tensor", "rmsnorm.ops.sharding", "rmsnorm.lm.parallel"]
# One thread each, and fresh memory that is not zero (see conftest.py).
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "1"}


def run(world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 240.0) -> Any:
    """What ``function(*arguments)`` returned, by rank.

    Args:
        world: how many ranks.
        function: of a module that can be imported by its name.
        arguments: for every rank the same; picklable.
        seconds: after which the ranks have failed.

    Raises:
        AssertionError: with the traceback of the first rank that raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    processes = []
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ends: dict[Any, int] = {}
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                job = (rank, world, str(Path(folder) / "store"), function, arguments, theirs)
                process = context.Process(target=_rank, args=job, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                ends[ours] = rank
            while ends:
                ready = wait(list(ends), timeout=seconds)
                if not ready:
                    raise AssertionError(f"ranks {sorted(ends.values())} did not end in {seconds}s")
                for end in ready:
                    rank = ends.pop(end)
                    try:
                        succeeded, result = pickle.loads(end.recv_bytes())
                    except EOFError:
                        succeeded, result = False, "it died"
                    if not succeeded:
                        raise AssertionError(f"rank {rank} of {world}: {result}")
                    results[rank] = result
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            for process in processes:
                if len(results) < world:
                    process.kill()
                process.join()
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    store: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    end: Connection,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=120),
        )
        answer = True, function(*arguments)
        dist.destroy_process_group()
    except BaseException:
        answer = False, traceback.format_exc()
    end.send_bytes(pickle.dumps(answer))
    end.close()
