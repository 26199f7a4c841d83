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


@pytest.mark.parametrize(
    ("kind", "output", "count"),
    [("train", "fresh", 2), ("add", "fresh", 2), ("add", "inplace", 2), ("add_train", "fresh", 4)],
)
@pytest.mark.parametrize("state", ["hot", "rotating"])
def test_every_input_has_numbers_of_its_own(kind, output, count, state):
    memory = Memory("float32", rotating=1024)
    cell = Cell(kind, 4, 64, "float32", state, output)
    tensors = memory.buffers(cell).first()
    assert len(tensors) == count
    for number, one in enumerate(tensors):
        assert one.shape == (4, 64)
        assert one.std() > 0.5
        assert not any(torch.equal(one, other) for other in tensors[:number])


def test_what_is_written_over_does_not_reach_the_next_cell():
    memory = Memory("float32", rotating=1024)
    cell = Cell("add", 4, 64, "float32", "rotating", "inplace")
    before = [tensor.clone() for tensor in memory.buffers(cell).first()]
    for tensor in memory.buffers(cell).first():
        tensor.zero_()
    assert all(map(torch.equal, memory.buffers(cell).first(), before))


@pytest.mark.parametrize(("kind", "count"), [("train", 2), ("add", 2), ("add_train", 3)])
@pytest.mark.parametrize("number", [0, 1])
def test_as_many_copies_as_results(kind, count, number):
    cell = Cell(kind, 3, 32, "bfloat16")
    tensors = Memory("bfloat16", 1024).buffers(cell).first()
    candidate = copies(cell)[number]
    results = candidate.call(*candidate.bind(*tensors))
    assert len(results) == count
    assert all(map(torch.equal, results, tensors))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewriting_in_place_changes_nothing(dtype):
    cell = Cell("add", 3, 32, dtype, "hot", "inplace")
    tensors = Memory(dtype, 1024).buffers(cell).first()
    before = [tensor.clone() for tensor in tensors]
    (candidate,) = copies(cell)
    arguments = candidate.bind(*tensors)
    candidate.call(*arguments)
    assert [one.data_ptr() for one in arguments] == [one.data_ptr() for one in tensors]
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("output", ["fresh", "given"])
@pytest.mark.parametrize("number", [0, 1])
def test_copies_copy(output, number):
    cell = Cell("forward", 3, 32, "bfloat16", "hot", output)
    x, out = Memory("bfloat16", 1024).buffers(cell).first()
    candidate = copies(cell)[number]
    result = candidate.call(*candidate.bind(x, out))
    assert torch.equal(out if output == "given" else result, x)
