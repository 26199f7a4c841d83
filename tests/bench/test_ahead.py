import pytest
import torch

from rmsnorm.bench import ahead, peers
from rmsnorm.bench.ahead import compile_ahead
from rmsnorm.bench.grid import Cell, call_cells, grid_cells


def test_a_few_cells_are_left_to_the_measuring_process():
    said = []
    assert compile_ahead(grid_cells(["train"], [(2, 8)]), said.append) == 0
    assert compile_ahead(call_cells(), said.append) == 0
    assert not said


@pytest.fixture
def sequential(monkeypatch):
    """A pool whose processes are this one; what it was told and given."""
    log = []

    class Future:
        def __init__(self, value):
            self.value = value

    class Pool:
        def __init__(self, workers, *, mp_context, initializer, initargs):
            log.append((workers, initargs))

        def __enter__(self):
            return self

        def __exit__(self, *details):
            return None

        def submit(self, function, cell):
            log.append(cell)
            return Future(function(cell))

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(ahead, "as_completed", iter)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    return log


def test_what_is_compiled_differs(sequential):
    kinds = ["forward", "train", "add", "add_train"]
    cells = grid_cells(kinds, [(2, 8), (3, 8)], outputs=["fresh"])
    said = []
    assert len(cells) == 32
    assert compile_ahead([*call_cells(), *cells], said.append) == 16
    (workers, threads), *compiled = sequential
    assert (workers, threads) == (2, (torch.get_num_threads(),))
    assert len({peers.compiled_for(cell) for cell in compiled}) == len(compiled) == 16
    assert said[-1] == "compiling the peers, 16 of 16"


def test_every_kind_can_be_compiled_here(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    for kind in ("forward", "train", "add", "add_train"):
        assert ahead.compile_peers(Cell(kind, 2, 8, "float32", "rotating"))
    assert ahead.compile_peers(Cell("add", 512, 1024, "float32", "hot", "inplace"))
