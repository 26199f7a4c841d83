"""The way from Python straight to the kernels, past ``torch.ops``, where this torch has one.

``entry`` is the module ``rmsnorm._direct`` (kernels/cpu/python_entry.cpp), or ``None``. Its
functions return ``None`` for every call that is not plain, and ``True`` where only its gradient
stands in the way; such calls then take the usual way.

It compares the dispatch keys of a tensor with those of a plain one. Where they lie in memory no
header tells, so this file looks for them in tensors whose keys are known, and goes without the
entry where it does not find them beyond doubt.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rmsnorm.ops import extension
from rmsnorm.spec import NormSpec, as_spec

_WORD = 8
# The object of a Python tensor, and the beginning of a TensorImpl, which is larger.
_OBJECT_BYTES = 48
_IMPL_BYTES = 192


# The dtypes as the kernels number them (DType in kernels/cpu/types.h); no weight is the last.
_NUMBERS: dict[torch.dtype | None, int] = {
    dtype: number
    for number, dtype in enumerate(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16, None)
    )
}


def dtype_bits(pairs: Iterable[tuple[torch.dtype | None, ...]]) -> int:
    """Pairs of the dtypes of row and weight, as ``entry.proven`` takes them: a bit for each.

    Example:
        >>> dtype_bits([(torch.float32, torch.float32), (torch.float32, None)])
        17
    """
    return sum(1 << (len(_NUMBERS) * _NUMBERS[x] + _NUMBERS[weight]) for x, weight in pairs)


def _encode(spec: NormSpec | str) -> str:
    return as_spec(spec).encode()


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _keys(tensor: Tensor) -> int:
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def _only_offset(pairs: list[tuple[int, int]], size: int) -> int | None:
    """The one offset at which every address of ``pairs`` holds the value beside it.

    Example:
        >>> words = (ctypes.c_uint64 * 2)(5, 7)
        >>> _only_offset([(ctypes.addressof(words), 7)], 16)
        8
    """
    found = [
        offset
        for offset in range(0, size, _WORD)
        if all(_word(address + offset) == value for address, value in pairs)
    ]
    return found[0] if len(found) == 1 else None


def _connect(entry: Any) -> bool:
    """Tell the module what plain tensors and threads look like; whether that could be seen."""
    ones = functools.partial(torch.ones, device="cpu")
    plain = ones(2)
    thread = entry.keys()
    with torch.inference_mode():
        inference = ones(2)
        inference_thread = entry.keys()
    tensors = [
        plain,
        inference,
        torch.nn.Parameter(ones(2, 3)),
        ones(2, 0, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(2, device="meta"),
        ones(2, dtype=torch.complex64).conj(),
        ones(2, dtype=torch.complex64).conj().imag,
    ]
    impls = [tensor._cdata for tensor in tensors]
    handle = _only_offset(list(zip(map(id, tensors), impls, strict=True)), _OBJECT_BYTES)
    keys = _only_offset(list(zip(impls, map(_keys, tensors), strict=True)), _IMPL_BYTES)
    table = extension.direct_table()
    if handle is None or keys is None or not table:
        return False
    entry.connect(
        table,
        extension.autograd_table(),
        Tensor,
        torch.nn.Parameter,
        _encode,
        handle,
        keys,
        (_keys(plain), *thread),
        (_keys(inference), *inference_thread),
    )
    return True


def _load() -> Any:
    if os.environ.get("RMSNORM_DISABLE_DIRECT", "") not in ("", "0") or not extension.load():
        return None
    try:
        from rmsnorm import _direct
    except ImportError:  # not built, or this torch lacks a name that it needs
        return None
    if torch.__version__.split(".")[:2] != _direct.built_with().split("."):
        return None  # what it takes for granted of another release may not hold
    connected = []

    def connect() -> None:
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            connected.append(_connect(_direct))

    # In a thread of its own: a new one is in no mode, whatever this one is in.
    thread = threading.Thread(target=connect)
    with contextlib.suppress(RuntimeError):  # no more threads can be had
        thread.start()
        thread.join()
    return _direct if connected == [True] else None


entry = _load()
