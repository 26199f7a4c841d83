"""Finds the files of a model, and checks them before anything is loaded from them.

A file that was cut short by a broken download still opens: its header is intact and the loader
fails late, or not at all. Here the header's own account of the tensors is compared with the size of
the file. Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from pathlib import Path
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth")
"""How the names of files end that can run code when they are opened."""


class ModelError(ValueError):
    """A model that cannot be loaded; the message says which, and why."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model that transformers saved, in one piece or in several.

    Raises:
        ModelError: there are none, or not all that the index names, or the index is damaged.
        OSError: the folder or the index cannot be read.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ModelError(f"{index} is not an index of safetensors files") from None
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelError(f"{folder} lacks weight files that its index names: {some(absent)}")
    else:
        files = [file for file in (folder / WEIGHTS,) if file.is_file()]
    if not files:
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
        if pickled:
            raise ModelError(
                f"{folder} has only pickled weights ({some(pickled)}), which can run code when "
                f"they are opened; expected {WEIGHTS}"
            )
        raise ModelError(f"{folder} is not a model folder: it has no {WEIGHTS}")
    return files


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def some(names: list[str], most: int = 4) -> str:
    """The first names of a list that may be too long for a message.

    Example:
        >>> some(["q", "k", "v", "o"], most=2)
        'q, k and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def check_safetensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Checks that ``path`` is a safetensors file with all of its data; the shapes of its tensors.

    Raises:
        ModelError: it is another kind of file, or shorter than its header says.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise ModelError(f"{path} is truncated: {size} bytes are no safetensors file")
        (length,) = struct.unpack("<Q", head)
        if length > size - 8:
            # A file of another format reads as an absurd length; a header never nears 100 MB.
            what = "is truncated" if length < 100_000_000 else "is not a safetensors file"
            raise ModelError(f"{path} {what}: its header takes {length} bytes, it has {size - 8}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
            shapes = {
                name: tuple(int(size) for size in entry["shape"]) for name, entry in header.items()
            }
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise ModelError(f"{path} is not a safetensors file: its header is not valid") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "is truncated" if size < expected else "has bytes after its data"
        raise ModelError(f"{path} {what}: its header describes {expected} bytes, it has {size}")
    return shapes


def check_gguf(path: Path) -> None:
    """Checks that ``path`` is a GGUF file with all of its data.

    Raises:
        ModelError: it is another kind of file, of an unknown version or tensor type, or shorter
            than its header says.
        OSError: it cannot be read.
    """
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): block for kind, block in GGML_QUANT_SIZES.items()}
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                start, tensors = _gguf_header(data, path)
            except (struct.error, UnicodeDecodeError, RecursionError):
                raise ModelError(
                    f"{path} is truncated: its {size} bytes end within the header"
                ) from None
    end = start
    for name, count, kind, offset in tensors:
        if kind not in sizes:
            raise ModelError(f"{path}: tensor {name!r} has the unknown type {kind}")
        elements, width = sizes[kind]
        end = max(end, start + offset + count // elements * width)
    if end > size:
        raise ModelError(f"{path} is truncated: its header describes {end} bytes, it has {size}")


_ARRAY, _STRING, _UINT32 = 9, 8, 4
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type -> bytes


def _gguf_header(data: mmap.mmap, path: Path) -> tuple[int, list[tuple[str, int, int, int]]]:
    """Where the tensor data starts, and (name, elements, type, offset) of each tensor.

    Raises:
        struct.error: the file ends too early.
    """
    at = 4

    def read(layout: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + layout, data, at)
        at += struct.calcsize("<" + layout)
        return value

    def skip(count: int) -> None:
        nonlocal at
        at += count
        if at > len(data):
            raise struct.error("the file ends here")

    def string() -> str:
        nonlocal at
        length = read("Q")
        skip(length)
        return data[at - length : at].decode()

    def skip_value(kind: int) -> None:
        if kind in _SCALARS:
            skip(_SCALARS[kind])
        elif kind == _STRING:
            skip(read("Q"))
        elif kind == _ARRAY:
            item, count = read("I"), read("Q")
            if item in _SCALARS:
                skip(_SCALARS[item] * count)
            else:
                for _ in range(count):
                    skip_value(item)
        else:
            raise ModelError(f"{path}: the header holds a value of the unknown type {kind}")

    version = read("I")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 are known")
    tensor_count, value_count = read("Q"), read("Q")
    alignment = 32
    for _ in range(value_count):
        key, kind = string(), read("I")
        if key == "general.alignment" and kind == _UINT32:
            alignment = read("I")
        else:
            skip_value(kind)
    tensors: list[tuple[str, int, int, int]] = []
    for _ in range(tensor_count):
        name = string()
        count = 1
        for _ in range(read("I")):
            count *= read("Q")
        tensors.append((name, count, read("I"), read("Q")))
    if alignment < 1:
        raise ModelError(f"{path}: general.alignment is {alignment}; expected at least 1")
    return -(-at // alignment) * alignment, tensors
