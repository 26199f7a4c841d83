import pytest

from rmsnorm.bench.grid import (
    DTYPES,
    SHAPES,
    Cell,
    Limit,
    call_cells,
    forward_cells,
    limits,
    parse_shape,
)


def test_the_grid_has_every_shape_dtype_and_state_once():
    cells = forward_cells()
    assert len(SHAPES) == 10
    assert len(cells) == len(set(cells)) == len(SHAPES) * len(DTYPES) * 4
    assert {(cell.rows, cell.d) for cell in cells} == set(SHAPES)
    assert all(cell.kind == "forward" and cell.grad_mode == "inference" for cell in cells)


def test_selection():
    cells = forward_cells([(1, 576)], ["bfloat16"], ["hot"], ["fresh", "given"])
    assert [str(cell) for cell in cells] == [
        "1x576 bfloat16 hot fresh",
        "1x576 bfloat16 hot given",
    ]


def test_every_forward_cell_is_compared_with_every_peer_of_its_spec():
    for cell in forward_cells():
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
        for cell in forward_cells()
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


@pytest.mark.parametrize("text", ["", "4096", "0x5", "5x0", "1x2x3", "-1x5", "1 x 5", "ax5"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected ROWSxWIDTH"):
        parse_shape(text)
