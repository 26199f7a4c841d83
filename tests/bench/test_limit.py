import pytest
import torch

from rmsnorm.bench.grid import Cell
from rmsnorm.bench.limit import Memory, copies, last_level_cache_bytes, rotating_bytes


def test_last_level_cache_is_the_highest_level(tmp_path):
    for index, (level, size) in enumerate([(1, "32K"), (3, "12M"), (2, "1M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    (tmp_path / "index9").mkdir()
    assert last_level_cache_bytes(str(tmp_path)) == 12 * 2**20


def test_rotation_is_bounded():
    assert rotating_bytes(2**20) == 96 * 2**20
    assert rotating_bytes(64 * 2**20) == 192 * 2**20
    assert rotating_bytes(2**40) == 512 * 2**20


def test_rotating_buffers_walk_through_all_memory():
    memory = Memory("float32", rotating=10 * 16 * 4)
    buffers = memory.buffers(Cell("forward", 2, 8, "float32", "rotating", "given"))

    def pointers(x, out):
        return x.data_ptr(), out.data_ptr()

    batch = list(buffers.batch(pointers, 7)) + list(buffers.batch(pointers, 5))
    assert len({x for x, _ in batch}) == len({out for _, out in batch}) == 10
    assert batch[10:] == batch[:2]


def test_large_inputs_rotate_through_at_least_two_buffers():
    memory = Memory("bfloat16", rotating=1)
    buffers = memory.buffers(Cell("forward", 4, 64, "bfloat16", "rotating"))
    assert len(set(buffers.batch(lambda x, out: x.data_ptr(), 4))) == 2


def test_hot_buffers_are_one_and_fresh_cells_are_given_none():
    memory = Memory("bfloat16", rotating=1024)
    buffers = memory.buffers(Cell("forward", 4, 64, "bfloat16", "hot", "fresh"))
    batch = list(buffers.batch(lambda x, out: (x.data_ptr(), out), 5))
    assert len(batch) == 5
    assert set(batch) == {batch[0]}
    assert batch[0][1] is None


@pytest.mark.parametrize("output", ["fresh", "given"])
@pytest.mark.parametrize("number", [0, 1])
def test_copies_copy(output, number):
    cell = Cell("forward", 3, 32, "bfloat16", "hot", output)
    x, out = Memory("bfloat16", 1024).buffers(cell).first()
    candidate = copies(cell)[number]
    result = candidate.call(*candidate.bind(x, out))
    assert torch.equal(out if output == "given" else result, x)
