import pytest

from rmsnorm.bench.grid import (
    DTYPES,
    SHAPES,
    Cell,
    Limit,
    call_cells,
    grid_cells,
    limits,
    parse_shape,
)


@pytest.mark.parametrize(("kind", "states"), [("forward", 4), ("train", 2), ("add", 4)])
def test_the_grid_has_every_shape_dtype_and_state_once(kind, states):
    cells = grid_cells([kind])
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


def test_training_is_limited_by_eager_from_512_rows_on_and_by_compiled_from_32():
    for cell in grid_cells(["train"]):
        bounds = {(one.ours, one.rival): (one.ratio, one.strict) for one in limits(cell)}
        assert bounds == {
            ("ours torch", "eager torch"): (0.25, False) if cell.rows >= 512 else (1.0, True),
            ("ours torch", "compiled torch"): (2 / 3, False) if cell.rows >= 32 else (1.0, True),
            ("ours llama", "eager llama"): (1.0, True),
            ("ours llama", "compiled llama"): (1.0, True),
        }


def test_the_fused_addition_is_faster_than_each_way_to_add_and_normalise():
    for cell in grid_cells(["add", "add_train"]):
        assert all(one.strict and one.ratio == 1.0 for one in limits(cell))
        assert {(one.ours, one.rival) for one in limits(cell)} == {
            ("ours torch", "separate torch"),
            ("ours torch", "eager torch"),
            ("ours torch", "compiled torch"),
            ("ours llama", "separate llama"),
            ("ours llama", "eager llama"),
        }


def test_every_forward_cell_is_compared_with_every_peer_of_its_spec():
    for cell in grid_cells(["forward"]):
        pairs = {(one.ours, one.rival) for one in limits(cell) if one.strict}
        assert pairs == {
            ("ours torch", "eager torch"),
            ("ours torch", "compiled torch"),
            ("ours llama", "eager llama"),
            ("ours llama", "compiled llama"),
        }


def test_the_copy_limit_is_on_bfloat16_4096x4096_given_alone():
    with_copy = [
        str(cell)
        for cell in grid_cells(["forward", "train", "add", "add_train"])
        if any(one.rival == "copy" and one.ratio == 1.3 for one in limits(cell))
    ]
    assert with_copy == [
        "4096x4096 bfloat16 hot given",
        "4096x4096 bfloat16 rotating given",
    ]


def test_call_cells_are_limited_against_torch_add():
    cells = call_cells()
    assert {(cell.shape, cell.grad_mode) for cell in cells} == {
        ("1x4096", "inference"),
        ("1x4096", "no_grad"),
    }
    for cell in cells:
        assert limits(cell) == [Limit("op torch", "add", 1.9, strict=False)]


@pytest.mark.parametrize(
    ("strict", "ratio", "holds"),
    [(True, 0.99, True), (True, 1.0, False), (False, 1.0, True), (False, 1.01, False)],
)
def test_strict_limits_are_broken_by_equality(strict, ratio, holds):
    assert Limit("a", "b", 1.0, strict).holds(ratio) is holds


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
