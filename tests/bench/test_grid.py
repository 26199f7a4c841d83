from itertools import pairwise

import pytest

from rmsnorm.bench.grid import (
    BEYOND_CACHE,
    DTYPES,
    SHAPES,
    SWEEP_WIDTHS,
    Cell,
    call_cells,
    grid_cells,
    heads_cells,
    parse_shape,
    sweep_cells,
    tiny,
)


@pytest.mark.parametrize(("kind", "states"), [("forward", 4), ("train", 2), ("add", 4)])
def test_the_grid_has_every_shape_dtype_and_state_once(kind, states):
    cells = grid_cells([kind], outputs=["fresh", "given", "inplace"])
    assert len(SHAPES) == 10
    assert len(cells) == len(set(cells)) == len(SHAPES) * len(DTYPES) * states
    assert {(cell.rows, cell.d) for cell in cells} == set(SHAPES)
    assert all(cell.kind == kind and cell.grad_mode == "inference" for cell in cells)
    assert len({str(cell) for cell in cells}) == len(cells)


def test_add_and_backward_has_a_few_shapes_or_those_asked_for():
    shapes = {(cell.rows, cell.d) for cell in grid_cells(["add_train"])}
    assert shapes < set(SHAPES)
    assert [cell.shape for cell in grid_cells(["add_train"], [(2, 8)], ["float32"], ["hot"])] == [
        "2x8"
    ]


def test_selection():
    kinds = ["forward", "train", "add", "add_train"]
    cells = grid_cells(kinds, [(1, 576)], ["bfloat16"], ["hot"])
    assert [str(cell) for cell in cells] == [
        "1x576 bfloat16 hot fresh",
        "1x576 bfloat16 hot given",
        "1x576 bfloat16 hot train",
        "1x576 bfloat16 hot fresh add",
        "1x576 bfloat16 hot inplace add",
        "1x576 bfloat16 hot add train",
    ]
    assert {cell.kind for cell in grid_cells(kinds, outputs=["given"])} == {"forward"}
    assert {cell.kind for cell in grid_cells(kinds, outputs=["inplace"])} == {"add"}


def test_recycled_memory_is_timed_where_no_cache_holds_it():
    cells = grid_cells(["forward", "train", "add", "add_train"], outputs=["recycled"])
    assert {(cell.rows, cell.d) for cell in cells} == set(BEYOND_CACHE) < set(SHAPES)
    assert len(cells) == len(BEYOND_CACHE) * len(DTYPES)
    assert {cell.kind for cell in cells} == {"train"}


def test_the_cells_of_single_calls():
    assert {(cell.shape, cell.grad_mode) for cell in call_cells()} == {
        ("1x576", "inference"),
        ("1x576", "no_grad"),
        ("1x4096", "inference"),
        ("1x4096", "no_grad"),
    }


def test_heads_are_timed_in_every_state():
    cells = heads_cells()
    assert len(cells) == len(set(cells)) == 8
    assert {cell.shape for cell in cells} == {"32768x128"}
    assert len({str(cell) for cell in cells}) == 8


def test_the_sweep_has_the_same_bytes_at_every_width():
    assert SWEEP_WIDTHS[0] == 64
    assert SWEEP_WIDTHS[-1] == 1_048_576
    assert all(wider == 2 * one for one, wider in pairwise(SWEEP_WIDTHS))
    for cell in sweep_cells():
        assert cell.nbytes == 32 * 2**20
        assert all(cell.rows * cell.d % d == 0 for d in SWEEP_WIDTHS)


def test_the_tiny_cell_goes_the_same_way():
    for cell in (*grid_cells(["forward", "train", "add", "add_train"]), *heads_cells()):
        small = tiny(cell)
        assert small.nbytes <= 32
        assert small.dtype == cell.dtype
        assert small.kind == ("forward" if cell.kind == "heads" else cell.kind)
        assert small.output == ("fresh" if cell.output == "recycled" else cell.output)


def test_bytes():
    assert Cell("forward", 512, 4096, "bfloat16").nbytes == 4 * 2**20
    assert Cell("forward", 512, 4096, "float32").nbytes == 8 * 2**20


@pytest.mark.parametrize(
    ("kind", "output", "tensors"),
    [
        ("forward", "fresh", 2),
        ("forward", "given", 2),
        ("train", "fresh", 4),
        ("add", "fresh", 4),
        ("add", "inplace", 2),
        ("add_train", "fresh", 7),
    ],
)
def test_touched_bytes(kind, output, tensors):
    cell = Cell(kind, 2, 8, "float32", "hot", output)
    assert cell.touched_bytes == tensors * 64


@pytest.mark.parametrize("text", ["", "4096", "0x5", "5x0", "1x2x3", "-1x5", "1 x 5", "ax5"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected ROWSxWIDTH"):
        parse_shape(text)
