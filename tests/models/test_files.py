"""Damaged model files are recognised before anything is loaded from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rmsnorm.models.files import ModelError, check_gguf, check_safetensors


def safetensors(data: int = 24) -> bytes:
    """A file of one (2, 3) float32 tensor, whose header promises 24 bytes of data."""
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(
    kind: int = 0,
    version: int = 3,
    data: int = 4 * 32,
    alignment: int | None = None,
    elements: int = 32,
) -> bytes:
    """A file of one tensor of 32 elements; ``kind`` 0 is float32, 3 is Q4_1."""
    values = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        string("list.words") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("bc"),
        string("list.numbers") + struct.pack("<IIQ", 9, 5, 2) + struct.pack("<ii", 1, -1),
        string("flag") + struct.pack("<I?", 7, True),
    ]
    if alignment is not None:
        values.append(string("general.alignment") + struct.pack("<II", 4, alignment))
    tensor = string("w") + struct.pack("<IQIQ", 1, elements, kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(values)) + b"".join(values) + tensor
    unit = alignment or 32
    return head + bytes(-len(head) % unit) + bytes(data)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_whole_safetensors_file(tmp_path: Path) -> None:
    shapes = check_safetensors(written(tmp_path / "a.safetensors", safetensors()))
    assert shapes == {"w": (2, 3)}


@pytest.mark.parametrize("length", [0, 5, 8, 30, len(safetensors()) - 24, len(safetensors()) - 1])
def test_safetensors_file_cut_anywhere(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "a.safetensors", safetensors()[:length])
    with pytest.raises(ModelError, match=r"a\.safetensors is truncated"):
        check_safetensors(path)


def test_safetensors_file_with_more_than_its_header_says(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", safetensors(data=25))
    with pytest.raises(ModelError, match="bytes after its data"):
        check_safetensors(path)


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html>not found</html>",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 8) + b'{"w": 1}',
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_other_content_as_safetensors(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path / "a.safetensors", content)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        check_safetensors(path)


@pytest.mark.parametrize("alignment", [None, 8, 64])
@pytest.mark.parametrize(("kind", "data"), [(0, 128), (3, 20), (1, 64)])
def test_whole_gguf_file(tmp_path: Path, kind: int, data: int, alignment: int | None) -> None:
    path = written(tmp_path / "a.gguf", gguf(kind, data=data, alignment=alignment))
    check_gguf(path)
    with pytest.raises(ModelError, match="is truncated"):
        check_gguf(written(path, path.read_bytes()[:-1]))


@pytest.mark.parametrize("length", range(4, len(gguf()) - 128))
def test_gguf_file_cut_within_its_header(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "a.gguf", gguf()[:length])
    with pytest.raises(ModelError, match=r"a\.gguf is truncated"):
        check_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (gguf(version=1), "is GGUF version 1"),
        (gguf(kind=999), "tensor 'w' has the unknown type 999"),
        (gguf(alignment=0), "general.alignment is 0"),
        (gguf(elements=2**62), "is truncated"),
        (gguf().replace(struct.pack("<I?", 7, True), struct.pack("<I?", 77, True)), "type 77"),
    ],
)
def test_other_content_as_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = written(tmp_path / "a.gguf", content)
    with pytest.raises(ModelError, match=message):
        check_gguf(path)
