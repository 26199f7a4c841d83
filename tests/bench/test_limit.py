import resource

import pytest
import torch

from rmsnorm.bench.goals import HUGE_PAGES
from rmsnorm.bench.grid import HEADS, Cell
from rmsnorm.bench.limit import (
    COPIES,
    Memory,
    absent_conditions,
    copies,
    last_level_cache_bytes,
    limit_bytes,
    rotating_bytes,
)
from rmsnorm.bench.process import kept_memory
from rmsnorm.bench.stream import stream_copy
from rmsnorm.libc import c_function


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


@pytest.mark.parametrize(
    ("kind", "output", "count", "numbers"),
    [
        ("train", "fresh", 2, 2),
        ("train", "recycled", 2, 3),
        ("add", "fresh", 2, 2),
        ("add_train", "fresh", 3, 2),
    ],
)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_as_many_copies_as_results(kind, output, count, numbers, number):
    cell = Cell(kind, 3, 32, "bfloat16", "hot", output)
    tensors = Memory("bfloat16", 1024).buffers(cell).first()
    found = copies(cell)
    if number >= len(found):
        assert number >= numbers or stream_copy(1) is None
        return
    candidate = found[number]
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
def test_copies_copy(output):
    cell = Cell("forward", 3, 32, "bfloat16", "hot", output)
    x, out = Memory("bfloat16", 1024).buffers(cell).first()
    found = copies(cell)
    assert {"copy", "memcpy"} <= {one.name for one in found} <= set(COPIES)
    for candidate in found:
        if out is not None:
            out.zero_()
        result = candidate.call(*candidate.bind(x, out))
        assert torch.equal(out if output == "given" else result, x), candidate.name


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000, 4096, 100_003])
@pytest.mark.parametrize("offset", [0, 1, 17])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_copy_past_the_cache_copies_what_it_is_given_and_no_more(count, offset, threads):
    copy = stream_copy(threads)
    if copy is None:
        pytest.skip("this machine has no C compiler or no instruction for it")
    source = torch.randint(0, 256, (count,), dtype=torch.uint8)
    out = torch.full((count + 128,), 7, dtype=torch.uint8)
    copy(out.data_ptr() + offset, source.data_ptr(), count)
    expected = torch.full_like(out, 7)
    expected[offset : offset + count] = source
    assert torch.equal(out, expected)


def test_heads_lie_apart_in_their_projection_and_their_output_does_not():
    memory = Memory("bfloat16", rotating=2 * HEADS.rows * 8 * 2)
    cell = Cell("heads", HEADS.rows, 8, "bfloat16", "rotating", "given")
    buffers = memory.buffers(cell)
    x, out = buffers.first()
    assert x.shape == out.shape
    assert x.numel() == cell.rows * cell.d
    assert x.stride() == (512 * 32 * 8, 32 * 8, 8, 1)
    assert out.is_contiguous()
    batch = list(buffers.batch(lambda x, out: (x.data_ptr(), out.data_ptr()), 3))
    assert batch[0] == batch[2] != batch[1]
    for candidate in copies(cell):
        candidate.call(*candidate.bind(x, out))  # of as many bytes, and none of them elsewhere
    assert memory.buffers(Cell("heads", HEADS.rows, 8, "bfloat16")).first()[1] is None


@pytest.mark.parametrize(
    ("kind", "output", "tensors"),
    [
        ("forward", "given", 2),
        ("forward", "fresh", 2),
        ("heads", "given", 2),
        ("sweep", "given", 2),
        # x and dy read twice, y and dx written once.
        ("train", "fresh", 6),
        ("train", "recycled", 6),
        ("add", "fresh", 4),
        ("add", "inplace", 4),
        ("add_train", "fresh", 6),
    ],
)
def test_the_bytes_of_the_limit(kind, output, tensors, monkeypatch):
    """Counted in the copies themselves: every byte that one of them reads or writes."""
    rows = HEADS.rows if kind == "heads" else 4
    cell = Cell(kind, rows, 8, "float32", "hot", output)
    assert limit_bytes(cell) == tensors * cell.nbytes
    first = Memory("float32", 1024).buffers(cell).first()
    (candidate, *_) = copies(cell)
    moved = 0

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal moved
            result = function(*arguments, **(keywords or {}))
            if function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
                moved += 2 * result.nbytes
            if function.overloadpacket is torch.ops.aten.add_:
                moved += 2 * result.nbytes
            return result

    arguments = candidate.bind(*first)
    with Counter():
        candidate.call(*arguments)
    assert moved == limit_bytes(cell)


@pytest.mark.parametrize(
    ("text", "variable", "absent"),
    [
        ("always [madvise] never\n", None, False),
        ("always [madvise] never\n", "1", False),
        ("always [madvise] never\n", "0", True),
        ("[always] madvise never\n", None, True),
        ("always madvise [never]\n", None, True),
    ],
)
def test_huge_pages_are_an_advantage_where_one_has_to_ask(
    tmp_path, monkeypatch, text, variable, absent
):
    monkeypatch.delenv("RMSNORM_HUGE_PAGES", raising=False)
    if variable is not None:
        monkeypatch.setenv("RMSNORM_HUGE_PAGES", variable)
    path = tmp_path / "enabled"
    path.write_text(text)
    assert (HUGE_PAGES in absent_conditions(str(path))) is absent


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(c_function("mallopt") is None, reason="the allocator cannot be told")
def test_kept_memory_is_touched_once():
    def allocate():
        before = faults()
        torch.full((2**24,), 1.0)  # 64 MiB: 16384 pages, or 32 huge ones
        return faults() - before

    with kept_memory():
        # The first two may lie beside each other.
        kept = min(allocate() for _ in range(4))
    allocate()
    assert kept < 16
    assert allocate() > kept
