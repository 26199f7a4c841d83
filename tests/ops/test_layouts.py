"""Any rank, any strides, any place in memory: the bits of the contiguous input."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from calls import FLOATS, normalise, rows_of, same_bits, weight_of
from rmsnorm import cpu_isa, rms_norm

SPECS = ("torch", "llama", "gemma", "t5", "original")


def _numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return rows_of(dtype, 1, max(count, 1), count).flatten()[:count].view(shape)


# Each gives a view of fresh numbers.
VIEWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rank 1": lambda t: _numbers(t, 37),
    "rank 1, step 3": lambda t: _numbers(t, 99)[::3],
    "rank 2": lambda t: _numbers(t, 5, 37),
    "transposed": lambda t: _numbers(t, 37, 5).t(),
    "columns stepped": lambda t: _numbers(t, 5, 40)[:, 1::3],
    "rows stepped": lambda t: _numbers(t, 9, 16)[::2],
    "columns sliced": lambda t: _numbers(t, 5, 40)[:, 3:36],
    "rank 3, permuted": lambda t: _numbers(t, 8, 3, 5).permute(2, 1, 0),
    "rank 3, middle transposed": lambda t: _numbers(t, 4, 3, 16).transpose(0, 1),
    "q of a fused qkv": lambda t: _numbers(t, 5, 24).split(8, -1)[1].view(5, 2, 4),
    "heads": lambda t: _numbers(t, 2, 5, 3, 16).transpose(1, 2),
    "channels last": lambda t: _numbers(t, 2, 8, 3, 5).to(memory_format=torch.channels_last),
    "rank 5": lambda t: _numbers(t, 2, 3, 2, 3, 10).permute(3, 0, 2, 1, 4),
    "rank 5, last moved": lambda t: _numbers(t, 2, 3, 2, 3, 10).permute(4, 0, 3, 1, 2),
    "rank 7": lambda t: _numbers(t, 2, 1, 3, 2, 1, 2, 9).permute(5, 0, 1, 3, 4, 2, 6),
    "expanded rows": lambda t: _numbers(t, 1, 33).expand(6, 33),
    "expanded inside": lambda t: _numbers(t, 4, 1, 33).expand(4, 3, 33),
    "expanded columns": lambda t: _numbers(t, 6, 1).expand(6, 17),
    "expanded all over": lambda t: _numbers(t, 1, 1).expand(6, 17),
    "sizes of 1": lambda t: _numbers(t, 1, 4, 1, 33, 1).transpose(3, 4),
    "size 1 with an odd stride": lambda t: _numbers(t, 64).as_strided((1, 5, 12), (999, 12, 1)),
    "width 1": lambda t: _numbers(t, 6, 1),
    "width 1 of a wider row": lambda t: _numbers(t, 6, 9)[:, 4:5],
    "overlapping windows": lambda t: _numbers(t, 64).unfold(0, 16, 4),
    "diagonal": lambda t: _numbers(t, 12, 12).diagonal()[None],
    "zero rows": lambda t: _numbers(t, 0, 8),
    "zero rows inside": lambda t: _numbers(t, 3, 0, 8),
    "zero width": lambda t: _numbers(t, 3, 0),
    "flipped": lambda t: _numbers(t, 5, 16).flip(-1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](dtype)
    dense = x.clone(memory_format=torch.contiguous_format)
    before = x.clone()
    d = x.shape[-1]
    for name in SPECS:
        for w_dtype in (dtype, torch.float32):
            weight = weight_of(w_dtype, d, d)
            stepped = torch.stack([weight, -weight], -1)[:, 0]
            expected = normalise(dense, weight, spec=name)
            assert same_bits(normalise(x, weight, spec=name), expected)
            assert same_bits(normalise(x, stepped, spec=name), expected)
            bias = stepped.flip(0)
            with_bias = normalise(dense, weight, bias=bias.contiguous(), spec=name)
            assert same_bits(normalise(x, stepped, bias=bias, spec=name), with_bias)
        assert same_bits(normalise(x, spec=name), normalise(dense, spec=name))
    assert same_bits(x, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("view", [v for v in VIEWS if "rank 1" not in v])
def test_views_over_two_dimensions(view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](dtype)
    shape = tuple(x.shape[-2:])
    weight = weight_of(dtype, shape[0] * shape[1], 7).view(shape)
    expected = normalise(x.contiguous(), weight)
    assert same_bits(normalise(x, weight), expected)
    assert same_bits(normalise(x, weight.t().contiguous().t()), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_ranks_have_equal_bits(dtype: torch.dtype) -> None:
    x, weight = rows_of(dtype, 24, 16, 0), weight_of(dtype, 16, 0)
    expected = normalise(x, weight)
    for shape in ((24,), (2, 12), (2, 3, 4), (1, 2, 3, 4), (2, 1, 3, 1, 4), (1,) * 20 + (24,)):
        assert same_bits(normalise(x.view(*shape, 16), weight).view(24, 16), expected)
    assert same_bits(normalise(x[5], weight), expected[5])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_most_dimensions_that_torch_has(dtype: torch.dtype) -> None:
    # torch expressions need one dimension more than x has.
    ones = 61 if cpu_isa() else 60
    x = rows_of(dtype, 6, 16, 0).view(2, *(1,) * ones, 3, 16)
    expected = normalise(x.reshape(6, 16))
    assert same_bits(normalise(x).view(6, 16), expected)
    assert same_bits(normalise(x.transpose(0, -2)).transpose(0, -2).reshape(6, 16), expected)


def _unaligned(dtype: torch.dtype, count: int, offset: int, guard: float) -> tuple[Tensor, Tensor]:
    """A flat buffer full of ``guard``, and the view of ``count`` elements from 8 + offset on."""
    buffer = torch.full((count + 32,), guard, dtype=dtype)
    return buffer, buffer[8 + offset : 8 + offset + count]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unaligned_views_between_guards(dtype: torch.dtype) -> None:
    for d in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 513, 769):
        for offset in range(0, 8) if d < 70 else (0, 1, 3):
            dense, dense_weight = rows_of(dtype, 5, d, d), weight_of(dtype, d, d)
            expected = normalise(dense, dense_weight)
            for guard in (torch.nan, 7.0):
                x_buffer, x = _unaligned(dtype, 5 * d, offset, guard)
                w_buffer, weight = _unaligned(dtype, d, (offset * 3) % 8, guard)
                y_buffer, y = _unaligned(dtype, 5 * d, (offset * 5) % 8, guard)
                x.copy_(dense.flatten())
                weight.copy_(dense_weight)
                before = x_buffer.clone(), w_buffer.clone()
                rms_norm(x.view(5, d), weight, out=y.view(5, d))
                assert same_bits(y.view(5, d), expected)
                assert same_bits(x_buffer, before[0])
                assert same_bits(w_buffer, before[1])
                outside = torch.cat(
                    [y_buffer[: y.storage_offset()], y_buffer[y.storage_offset() + 5 * d :]]
                )
                assert same_bits(outside, torch.full_like(outside, guard))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_address_that_is_no_multiple_of_the_element_size(dtype: torch.dtype) -> None:
    x, weight = rows_of(dtype, 3, 21, 0), weight_of(dtype, 21, 0)
    expected = normalise(x, weight)
    raw = bytearray(1) + bytearray(x.view(torch.uint8).numpy().tobytes())
    shifted = torch.frombuffer(raw, dtype=dtype, offset=1).view(3, 21)
    assert shifted.data_ptr() % dtype.itemsize
    assert same_bits(rms_norm(shifted, weight), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_out_of_any_layout(dtype: torch.dtype) -> None:
    x, weight = rows_of(dtype, 6, 20, 0), weight_of(dtype, 20, 0)
    expected = normalise(x, weight)
    buffer = torch.full((20, 6, 2), torch.nan, dtype=dtype)
    for out in (buffer.permute(1, 0, 2)[..., 0], torch.empty(6, 40, dtype=dtype)[:, 10:30]):
        assert rms_norm(x, weight, out=out) is out
        assert same_bits(out.contiguous(), expected)
    assert buffer[..., 1].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_out_that_shares_memory_with_an_input(dtype: torch.dtype) -> None:
    x, weight = rows_of(dtype, 6, 20, 0), weight_of(dtype, 20, 0)
    expected = normalise(x, weight)
    itself = x.clone()
    assert rms_norm(itself, weight, out=itself) is itself
    assert same_bits(itself, expected)
    # One row further on: writing it in place would overwrite rows that are still to be read.
    for shift in (1, 5, 20, 40):
        memory = torch.zeros(240, dtype=dtype)
        for x_at, y_at in ((0, shift), (shift, 0)):
            moved = memory[x_at : x_at + 120].view(6, 20)
            moved.copy_(x)
            out = memory[y_at : y_at + 120].view(6, 20)
            assert same_bits(rms_norm(moved, weight, out=out), expected)
    square = rows_of(dtype, 20, 20, 4)
    expected = normalise(square, weight)
    copy = square.clone()
    assert same_bits(rms_norm(copy, weight, out=copy.t()), expected)
    stretched = torch.empty(20, 20, dtype=dtype)
    stretched[0] = square[0]
    assert same_bits(
        rms_norm(stretched[:1].expand(20, 20), weight, out=stretched),
        expected[:1].repeat(20, 1),
    )
    # The weight is one of the rows that are written.
    shared = square.clone()
    shared[3] = weight
    expected = normalise(shared, weight)
    assert same_bits(rms_norm(shared, shared[3], out=shared), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_output_never_shares_memory_with_an_input(dtype: torch.dtype) -> None:
    for x in (torch.ones(4, 8, dtype=dtype), torch.ones(4, 1, dtype=dtype)):
        for weight in (None, torch.ones(x.shape[-1], dtype=dtype)):
            y = rms_norm(x, weight)
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_zero_width_and_zero_rows() -> None:
    for dtype in FLOATS:
        for shape in ((0,), (3, 0), (0, 3), (0, 0), (2, 0, 4)):
            x = torch.empty(shape, dtype=dtype)
            y = normalise(x, torch.ones(shape[-1], dtype=dtype))
            assert y.shape == x.shape
            assert y.dtype == F.rms_norm(x, shape[-1:]).dtype


@pytest.mark.skipif(cpu_isa() is None, reason="without the kernels each step makes a tensor")
def test_heads_are_read_in_place() -> None:
    qkv = torch.randn(2, 64, 3 * 8 * 32)
    q = qkv.split(8 * 32, -1)[1].view(2, 64, 8, 32).transpose(1, 2)
    with torch.no_grad(), torch.profiler.profile() as profile:
        y = rms_norm(q, torch.ones(32))
    seen = {event.name for event in profile.events()}
    assert "rmsnorm::rms_norm" in seen
    assert not seen & {"aten::clone", "aten::copy_", "aten::contiguous", "aten::empty_like"}
    assert same_bits(y, rms_norm(q.contiguous(), torch.ones(32)))


# Memory that is mapped but not touched costs nothing: 2**31 elements and more are reached this way.
@pytest.fixture
def huge() -> Iterator[Tensor]:
    try:
        memory = mmap.mmap(-1, 2 * (2**32 + 2**20))
    except OSError:
        pytest.skip("this machine does not map 8 GiB of memory that is never used")
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16)
    yield tensor
    del tensor


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 64), (2**31 + 64, 1)),
        ((3, 65), (2**31 - 1, 1)),
        ((2, 2, 33), (2**31, 2**20 - 33, 1)),
        ((3, 2, 5), (1, 8, 2**30 + 1)),
        ((2, 3), (2**20 - 1, 2**31)),
    ],
)
def test_offsets_beyond_31_bits(
    huge: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    x = huge.as_strided(shape, strides)
    numbers = _numbers(torch.bfloat16, *shape)
    x.copy_(numbers)
    weight = weight_of(torch.bfloat16, shape[-1], 0)
    expected = normalise(numbers, weight)
    assert same_bits(normalise(x, weight), expected)
    assert same_bits(rms_norm(numbers, weight, out=x).contiguous(), expected)


def _free_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return 1024 * found[0] if found else 0


@pytest.mark.skipif(
    cpu_isa() is None or _free_bytes() < 8 * 2**30, reason="needs the kernels and 8 GiB of memory"
)
def test_more_than_31_bits_of_elements() -> None:
    rows = 2**31 // 4096 + 3
    row = rows_of(torch.bfloat16, 1, 4096, 0)
    memory = mmap.mmap(-1, 2 * rows * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    out = torch.frombuffer(memory, dtype=torch.bfloat16).view(rows, 4096)
    weight = weight_of(torch.bfloat16, 4096, 0)
    expected = rms_norm(row, weight)
    rms_norm(row.expand(rows, 4096), weight, out=out)
    for index in (0, 1, rows // 2, rows - 4, rows - 3, rows - 2, rows - 1):
        assert same_bits(out[index : index + 1], expected)
    # Every row, eight bytes at a time, without temporaries of this size.
    pattern = expected.view(torch.int64)
    for start in range(0, rows, 2**15):
        assert bool((out[start : start + 2**15].view(torch.int64) == pattern).all())


@pytest.mark.parametrize("name", SPECS)
def test_lazy_signs_and_conjugates_are_resolved(name: str) -> None:
    z = torch.view_as_complex(torch.randn(6, 12, 2)).conj()
    x = z.imag
    assert x.is_neg()
    assert same_bits(normalise(x, spec=name), normalise(x.resolve_neg().contiguous(), spec=name))
    weight = torch.view_as_complex(torch.randn(12, 2)).conj().imag
    expected = normalise(x.resolve_neg(), weight.resolve_neg(), spec=name)
    assert same_bits(normalise(x, weight, spec=name), expected)
