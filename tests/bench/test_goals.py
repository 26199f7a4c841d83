from pathlib import Path

import pytest

from rmsnorm.bench.goals import (
    AHEAD,
    GOALS,
    HUGE_PAGES,
    KEPT_MEMORY,
    MEMORY,
    STEP,
    Limit,
    has_figure,
    limits,
)
from rmsnorm.bench.grid import (
    SPECS,
    SWEEP_WIDTHS,
    Cell,
    call_cells,
    grid_cells,
    heads_cells,
    sweep_cells,
)
from rmsnorm.bench.memory import LIMIT

GRID = grid_cells(["forward", "train", "add", "add_train"])
EVERY = [*GRID, *call_cells(), *heads_cells(), *sweep_cells()]


def of(cell, rival):
    """The ratio to ``rival`` of each of ours, where it is limited."""
    return {one.ours: one.ratio for one in limits(cell) if one.rival == rival}


def test_every_goal_is_asked_somewhere_and_has_a_name_of_its_own():
    for goal in GOALS:
        if goal not in (MEMORY, STEP):
            covered = [cell for cell in EVERY if goal.covers(cell)]
            assert covered, goal.name
            assert all(goal.limits(cell) for cell in covered), goal.name
    assert len({goal.name for goal in GOALS}) == len(GOALS)
    assert MEMORY.ratio == LIMIT == 1.02


@pytest.mark.parametrize(
    ("cell", "torch", "llama"),
    [
        # Beyond the last-level cache, in both states of the memory.
        (Cell("forward", 4096, 4096, "float32", "hot", "given"), 1.15, 1.15),
        (Cell("forward", 2048, 8192, "float32", "rotating", "given"), 1.15, 1.15),
        (Cell("forward", 16384, 1024, "bfloat16", "rotating", "given"), 1.2, 1.2),
        (Cell("add", 2048, 8192, "float32", "hot", "inplace"), 1.2, 1.2),
        (Cell("train", 4096, 4096, "bfloat16", "hot", "recycled"), 1.5, 1.5),
        # Rotating.
        (Cell("forward", 512, 4096, "float32", "rotating", "given"), 1.3, 1.3),
        (Cell("forward", 4096, 768, "bfloat16", "rotating", "given"), 1.3, 1.3),
        (Cell("forward", 32768, 128, "bfloat16", "rotating", "given"), 1.25, 1.25),
        (Cell("heads", 32768, 128, "bfloat16", "rotating", "given"), 1.3, 1.3),
        # In the cache.
        (Cell("forward", 512, 4096, "bfloat16", "hot", "given"), 2.3, 2.9),
        (Cell("forward", 512, 4096, "float32", "hot", "given"), 1.8, 1.8),
        (Cell("forward", 8, 4096, "float32", "hot", "given"), 2.6, 2.6),
        (Cell("forward", 32, 2048, "bfloat16", "hot", "given"), 2.6, 2.6),
        (Cell("forward", 32768, 128, "bfloat16", "hot", "given"), 2.8, 2.8),
        (Cell("train", 512, 4096, "bfloat16", "hot", "fresh"), 4.0, 4.0),
        # Where no figure is asked.
        (Cell("forward", 512, 4096, "float32", "hot", "fresh"), None, None),
        (Cell("forward", 32768, 128, "float32", "hot", "given"), None, None),
        (Cell("heads", 32768, 128, "bfloat16", "hot", "given"), None, None),
        (Cell("train", 512, 4096, "bfloat16", "rotating", "fresh"), None, None),
        (Cell("add", 512, 4096, "float32", "hot", "inplace"), None, None),
    ],
)
def test_the_distance_from_the_copy(cell, torch, llama):
    expected = {"ours torch": torch, "ours llama": llama} if torch else {}
    assert of(cell, "limit") == expected
    assert has_figure(cell) is bool(expected)


def test_fresh_results_beyond_the_cache_are_compared_with_a_clone_where_pages_are_huge():
    cell = Cell("forward", 2048, 8192, "bfloat16", "rotating", "fresh")
    assert set(of(cell, "copy").values()) == {1 / 2}
    assert of(cell, "compiled torch") == {"ours torch": 1 / 2.5}
    without = {one.rival: one.ratio for one in limits(cell, {HUGE_PAGES})}
    assert "copy" not in without
    assert without["compiled torch"] == 1.0
    recycled = Cell("train", 2048, 8192, "bfloat16", "hot", "recycled")
    assert any(one.rival == "limit" for one in limits(recycled))
    assert not any(one.rival == "limit" for one in limits(recycled, {KEPT_MEMORY}))


def test_a_call_is_limited_by_each_way_to_make_it():
    for cell in call_cells():
        inference = {"ours torch": 1.0, "module torch": 1.6} if "inference" in str(cell) else {}
        assert of(cell, "add") == {**inference, "op torch": 1.9}


def test_the_plain_tensor_copy_bounds_bfloat16_4096x4096_given_alone():
    found = [str(cell) for cell in EVERY if 1.3 in of(cell, "copy").values()]
    assert found == ["4096x4096 bfloat16 hot given", "4096x4096 bfloat16 rotating given"]


def test_training_is_limited_by_eager_from_512_rows_on_and_by_compiled_from_32():
    for cell in grid_cells(["train"]):
        bounds = {
            (one.ours, one.rival): (one.ratio, one.strict)
            for one in limits(cell)
            if one.rival != "limit"
        }
        compiled = (1 / 3, False) if cell.rows >= 32 else (1.0, True)
        assert bounds == {
            ("ours torch", "eager torch"): (0.25, False) if cell.rows >= 512 else (1.0, True),
            ("ours torch", "compiled torch"): compiled,
            ("ours llama", "eager llama"): (1.0, True),
            ("ours llama", "compiled llama"): compiled,
        }


def test_the_fused_addition_is_faster_than_each_way_to_add_and_normalise():
    for cell in grid_cells(["add", "add_train"]):
        found = [one for one in limits(cell) if one.rival != "limit"]
        assert all(one.strict and one.ratio == 1.0 for one in found)
        engine = {("ours torch", "onnxruntime torch")} if cell.kind == "add" else set()
        assert {(one.ours, one.rival) for one in found} == engine | {
            ("ours torch", "separate torch"),
            ("ours torch", "eager torch"),
            ("ours torch", "compiled torch"),
            ("ours llama", "separate llama"),
            ("ours llama", "eager llama"),
        }


def test_every_cell_is_compared_with_every_peer_of_its_spec():
    for cell in (*grid_cells(["forward"]), *heads_cells()):
        pairs = {(one.ours, one.rival) for one in limits(cell, {HUGE_PAGES}) if one.strict}
        engines = ["onnxruntime", "openvino"] if cell.kind == "forward" else []
        assert pairs == {
            *(
                (f"ours {spec}", f"{peer} {spec}")
                for spec in SPECS
                for peer in ("eager", "compiled")
            ),
            *(("ours torch", f"{peer} torch") for peer in engines),
        }


def test_every_width_of_the_sweep_is_compared_with_its_neighbours():
    for cell in sweep_cells():
        found = limits(cell)
        assert len(found) == 2 * (len(SWEEP_WIDTHS) - 1)
        for limit in found:
            one, other = (int(name.removeprefix("ours d=")) for name in (limit.ours, limit.rival))
            assert one in (2 * other, other / 2)
            assert (limit.ratio, limit.strict) == (1.3, False)


def test_one_limit_for_each_pair():
    for cell in EVERY:
        pairs = [(one.ours, one.rival) for one in limits(cell)]
        assert len(pairs) == len(set(pairs))


def test_being_ahead_is_asked_of_the_whole_grid():
    cells = [cell for cell in EVERY if AHEAD.covers(cell)]
    assert len(cells) == len(GRID) + len(heads_cells())
    assert (AHEAD.share, AHEAD.at_most) == (0.03, 1.1)


@pytest.mark.parametrize(
    ("strict", "ratio", "holds"),
    [(True, 0.99, True), (True, 1.0, False), (False, 1.0, True), (False, 1.01, False)],
)
def test_strict_limits_are_broken_by_equality(strict, ratio, holds):
    assert Limit("a", "b", 1.0, strict).holds(ratio) is holds


def test_the_document_lists_every_goal():
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = [line for line in text.splitlines() if line.endswith("` |") and " / " in line]
    assert rows == [
        f"| {one.name} | `{one.ours} / {one.rival} {'<' if one.strict else '<='} {one.ratio:.3g}` |"
        for one in GOALS
    ]
