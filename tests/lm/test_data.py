"""From files to batches: what is refused and how, what is held out, what is packed and drawn."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm.lm import data
from rmsnorm.lm.data import (
    Batches,
    Corpus,
    DataError,
    Document,
    Packed,
    prepare,
    read_documents,
    split,
)
from rmsnorm.lm.model import IGNORED
from rmsnorm.lm.tokenizer import Tokenizer, train_tokenizer

WORDS = ["the", "and", "of", "to", "that", "in", "he", "shall", "unto", "for", "lord", "they"]


def text_of(lines: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return "".join(
        f"{number} {' '.join(draw.choices(WORDS, k=draw.randint(3, 30)))}.\n"
        for number in range(lines)
    )


def jsonl(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def chat(user: str, assistant: str) -> dict[str, Any]:
    return {
        "conversations": [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]
    }


TOKENIZER = train_tokenizer([text_of(50), "user\nassistant\n"], 320)


def test_a_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xe4\xb8\xad\n")
    assert read_documents(file) == [Document(str(file), "one\r\ntwo 中\n")]


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c", ".hidden", ".git/x", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    jsonl(tmp_path / "d.jsonl", {"text": "first"}, {"text": "second"})
    found = [
        (str(Path(document.name).relative_to(tmp_path)), document.text)
        for document in read_documents(tmp_path)
    ]
    assert found == [
        *((name, name) for name in ("a/b/c", "a/z.txt", "a.txt", "b.txt")),
        ("d.jsonl:1", "first"),
        ("d.jsonl:2", "second"),
    ]


def test_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    turns = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "\u2028?", "more": 1},
        {"role": "assistant", "content": "!"},
    ]
    file.write_text(
        '{"text": "line\\nend\u2028", "id": 3}\r\n\n'
        + json.dumps({"conversations": turns})
        + "\n"
        + json.dumps({"messages": turns}),
    )
    text, first, second = read_documents(file)
    assert (text.text, text.messages, text.name) == ("line\nend\u2028", None, f"{file}:1")
    assert first.text is None
    assert first.texts == ["", "\u2028?", "!"]
    assert first.messages == second.messages
    assert (first.name, second.name) == (f"{file}:3", f"{file}:4")
    assert first.digest == second.digest != text.digest


USER = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: empty; expected text"),
        ("a.txt", b" \n\t\n", "a.txt: empty; expected text"),
        ("a.jsonl", b"\n\n", "a.jsonl: empty; expected text"),
        ("a.txt", b"a\nb\n\x00\x01", "a.txt:3: a zero byte, so it is binary; expected text"),
        ("a.txt", "a".encode("utf-16"), "a.txt:1: UTF-16; expected text in UTF-8"),
        ("a.txt", b"a\n\nb\xe4\xb8\n", "a.txt:3: byte 0xe4 is not UTF-8; expected text in UTF-8"),
        (
            "a.txt",
            b"\xef\xbb\xbfa\n\xff",
            "a.txt:2: byte 0xff is not UTF-8; expected text in UTF-8",
        ),
        ("a.jsonl", b'{"text": "\xff"}', "a.jsonl:1: byte 0xff is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text" "b"}', "a.jsonl:2: not JSON: Expecting ':'"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"', "a.jsonl:3: not JSON: Expecting ','"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: "),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl:1: "),
        ("a.jsonl", b'["text"]', "a.jsonl:1: a list; expected a JSON object"),
        ("a.jsonl", b"null", "a.jsonl:1: null; expected a JSON object"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):  # a folder is no better than its files
        with pytest.raises(DataError) as error:
            read_documents(path)
        assert str(error.value).startswith(f"{tmp_path}/{message}")
        assert len(str(error.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "the fields []; expected one of 'text', 'conversations' and 'messages'"),
        ({"body": "x", "id": 1}, "the fields ['body', 'id']; expected one of 'text', 'conv"),
        ({"text": "x", "messages": []}, "the fields ['text', 'messages']; expected one of"),
        ({"text": None}, "text is null; expected a string"),
        ({"text": ["x"]}, "text is a list; expected a string"),
        ({"text": " "}, "text is empty; expected text"),
        ({"text": "x\ud800"}, "text has half a surrogate pair, '\\ud800'; expected Unicode"),
        ({"conversations": []}, "conversations is an empty list; expected a list of messages"),
        ({"messages": "x"}, "messages is a string; expected a list of messages"),
        ({"messages": ["x"]}, "messages[0] is a string; expected an object"),
        (
            {"conversations": [USER, {"from": "gpt", "value": "x"}]},
            "conversations[1] has the fields ['from', 'value']; expected role and content",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0] has the fields ['role']; expected role"),
        (
            {"messages": [{"role": "human", "content": "x"}]},
            "messages[0] has the role 'human'; expected system, user, assistant, tool",
        ),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0] has the role []; expected"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content is a number"),
        ({"messages": [USER]}, "no turn of the assistant; expected one, to learn from"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "messages[1].content is empty; expected text",
        ),
    ],
)
def test_wrong_lines(tmp_path: Path, record: Any, message: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "fine"}, record, {"text": "fine"})
    with pytest.raises(DataError) as error:
        read_documents(file)
    assert str(error.value).startswith(f"{file}:2: {message}")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such file or folder; expected text, JSONL"):
        read_documents(tmp_path / "none")
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(DataError, match="no file in the folder"):
        read_documents(tmp_path)


def texts(number: int) -> list[Document]:
    return [Document(f"{n}.txt", text_of(3, seed=n)) for n in range(number)]


@pytest.mark.parametrize(
    ("number", "fraction", "held"), [(500, 0.05, 25), (20, 0.05, 1), (3, 0.5, 2)]
)
def test_documents_are_held_out_whole(number: int, fraction: float, held: int) -> None:
    documents = texts(number)
    train, held_out = split(documents, fraction)
    assert len(held_out) == held
    for side in (train, held_out):
        assert side == [document for document in documents if document in side]  # in their order
    assert len(train) + len(held_out) == number
    assert not [document for document in held_out if document in train]


def test_the_choice_is_by_content_and_seed() -> None:
    documents = texts(200)
    _, held_out = split(documents, 0.1)
    renamed = [Document(f"x{document.name}", document.text) for document in reversed(documents)]
    assert {one.text for one in split(renamed, 0.1)[1]} == {one.text for one in held_out}
    assert split(documents, 0.1, seed=1)[1] != held_out
    # No part of the order is preferred.
    places = [documents.index(document) for document in held_out]
    assert 60 < np.mean(places) < 140


@pytest.mark.parametrize("size", ["large", "small", "two lines"])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_text_is_held_out_by_blocks(size: str, seed: int) -> None:
    text = {"large": text_of(9000), "small": text_of(50), "two lines": "a\nb" + "c" * 99}[size]
    train, held_out = split([Document("a.txt", text)], 0.1, seed)
    assert sorted("".join(one.text or "" for one in (*train, *held_out)).splitlines()) == sorted(
        text.splitlines()
    )
    for one in (*train, *held_out):
        assert (one.text or "") in text
        assert text.endswith(one.text or "") or (one.text or "").endswith("\n")
    sizes = [len(one.text or "") for one in held_out]
    if size != "two lines":
        assert 0.05 * len(text) < sum(sizes) < 0.15 * len(text)
    if size == "large":
        assert 2**14 - 200 < max(sizes) <= 2**14
        assert len(held_out) == round(len(text) / 2**14 / 10)
        assert len(train) - len(held_out) in (0, 1)  # they take turns


def test_each_of_few_texts_is_cut() -> None:
    train, held_out = split(texts(3), 0.1)
    for side in (train, held_out):
        assert {one.name for one in side} == {"0.txt", "1.txt", "2.txt"}


def test_what_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.txt:1: one line only; expected more"):
        split([Document("a.txt", "x" * 10**6 + "\n")], 0.1)
    one = read_documents(jsonl(tmp_path / "a.jsonl", chat("a", "b")))
    with pytest.raises(DataError, match=r"a.jsonl:1: one chat only; expected more"):
        split(one, 0.1)
    for fraction in (0.0, -0.1, 0.6, 5.0, float("nan")):
        with pytest.raises(DataError, match="to hold out; expected a part above 0"):
            split(texts(2), fraction)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(text_of(400))
    return file


def make(path: Path, folder: Path, tokenizer: Tokenizer | None = TOKENIZER, **more: Any) -> Corpus:
    return prepare(
        path, folder, tokenizer, **{"vocab_size": 300, "held_out": 0.1, "seq_len": 8} | more
    )


def unpacked(packed: Packed, tokenizer: Tokenizer) -> list[str]:
    ids = packed.tokens.tolist()
    assert ids[-1] == tokenizer.eos_id
    found: list[list[int]] = [[]]
    for token in ids:
        if token == tokenizer.eos_id:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(one) for one in found[:-1]]


def test_packed_text_is_the_text(text_file: Path, tmp_path: Path) -> None:
    corpus = make(text_file, tmp_path / "data", None)
    train, held_out = split(read_documents(text_file), 0.1)
    assert unpacked(corpus.train, corpus.tokenizer) == [one.text for one in train]
    assert unpacked(corpus.held_out, corpus.tokenizer) == [one.text for one in held_out]
    assert corpus.train.tokens.dtype == np.uint16
    assert corpus.train.mask is None
    text = "".join(one.text or "" for one in held_out).encode()
    assert (tmp_path / "data/held_out.txt").read_bytes() == text
    assert corpus.held_out.bytes == len(text)
    assert corpus.train.bytes == text_file.stat().st_size - len(text)
    assert corpus.tokenizer.vocab_size == 300
    # The tokenizer has seen nothing of what is held out.
    seen = train_tokenizer((one.text or "" for one in train), 300)
    assert corpus.tokenizer.fingerprint == seen.fingerprint


def test_xz_is_the_program_s(text_file: Path, tmp_path: Path) -> None:
    if shutil.which("xz") is None:
        pytest.skip("there is no xz to compare with")
    corpus = make(text_file, tmp_path / "data")
    file = tmp_path / "data/held_out.txt"
    packed = subprocess.run(["xz", "-9ec", str(file)], capture_output=True, check=True).stdout
    assert corpus.xz_bits_per_byte == len(packed) * 8 / file.stat().st_size


def test_a_large_vocabulary_has_wider_tokens(text_file: Path, tmp_path: Path) -> None:
    state = json.loads(TOKENIZER._backend.to_str())
    state["model"]["vocab"]["Ġthe"] = 70_000
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), {})
    corpus = make(text_file, tmp_path / "data", tokenizer)
    assert corpus.train.tokens.dtype == np.uint32
    assert corpus.train.tokens.max() == tokenizer.vocab_size - 1 == 70_000
    assert unpacked(corpus.held_out, tokenizer)[0] in text_file.read_text()


def test_long_texts_are_tokenised_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    signs = ["the", " ", "  ", "\n", "\n\n", "\r\n", ".", "中", "\t", "12"]
    whole = "".join(draw.choices(signs, k=3000)) + "."
    monkeypatch.setattr(data, "_PIECE_CHARACTERS", 10)
    pieces = data._pieces(whole)
    assert len(pieces) > 50
    assert "".join(pieces) == whole
    tokenizer = train_tokenizer([whole], 400)  # knows spaces with line ends among them
    joined = [token for piece in tokenizer.encode_batch(pieces) for token in piece]
    assert joined == tokenizer.encode(whole)
    # As documents, in batches of a few.
    monkeypatch.setattr(data, "_BATCH_BYTES", 100)
    documents = [*texts(30), Document("whole", whole)]
    packed = list(data._tokenised(documents, TOKENIZER))
    assert [ids for _, ids, _ in packed] == [
        [*TOKENIZER.encode(document.text or ""), TOKENIZER.eos_id] for document in documents
    ]


def test_chats_are_masked(tmp_path: Path) -> None:
    records = [chat(f"user {n}", f"the answer {n}") for n in range(12)]
    records.insert(5, {"text": "and a text"})
    corpus = make(jsonl(tmp_path / "a.jsonl", *records), tmp_path / "data", held_out=0.2)
    said = 0
    for packed in (corpus.train, corpus.held_out):
        assert packed.mask is not None
        assert packed.mask.shape == packed.tokens.shape
        start, end = (TOKENIZER.token_id(name) for name in ("<|im_start|>", "<|im_end|>"))
        learned = packed.tokens[packed.mask == 1].tolist()
        assert start not in learned
        ended = TOKENIZER.eos_id
        parts = "".join("|" if one in (end, ended) else TOKENIZER.decode([one]) for one in learned)
        found = parts.split("|")[:-1]
        assert all(one.startswith("the answer ") or one == "and a text" for one in found)
        assert packed.bytes == len("".join(found))
        said += len(found)
        ids, labels = Batches(packed, 8, 4, seed=0).batch(3)
        assert (labels[:, :-1] == ids[:, 1:])[labels[:, :-1] != IGNORED].all()
    assert said == 13
    assert len((tmp_path / "data/held_out.txt").read_text()) == corpus.held_out.bytes


def test_bytes_are_those_that_the_tokens_spell(text_file: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER._backend.to_str())
    backend.normalizer = tokenizers.normalizers.Replace(" ", "")
    corpus = make(text_file, tmp_path / "data", Tokenizer(backend, {}))
    held_out = "".join(one.text or "" for one in split(read_documents(text_file), 0.1)[1])
    assert corpus.held_out.bytes == len(held_out.replace(" ", ""))
    backend.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(r"[\s\S]"), "")
    with pytest.raises(DataError, match="makes nothing of the held-out text"):
        make(text_file, tmp_path / "data", Tokenizer(backend, {}), seq_len=1)


def written(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in folder.iterdir()}


def test_what_is_there_is_taken(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    first = make(text_file, folder, None)
    files = written(folder)
    for tokenizer in (None, first.tokenizer, Tokenizer.load(folder)):
        again = make(text_file, folder, tokenizer)
        assert written(folder) == files
        assert again.fingerprint == first.fingerprint
    assert Corpus.load(folder).fingerprint == first.fingerprint
    elsewhere = make(text_file, tmp_path / "other", first.tokenizer)
    assert elsewhere.fingerprint == first.fingerprint
    assert (tmp_path / "other/train.bin").read_bytes() == (folder / "train.bin").read_bytes()
    # It moves with the folder, and the source with its file.
    text_file.rename(tmp_path / "moved.txt")
    assert make(tmp_path / "moved.txt", folder, None).fingerprint == first.fingerprint
    assert written(folder) == files


def remade(change: Callable[[Path, Path], dict[str, Any]], text_file: Path, folder: Path) -> Corpus:
    before = make(text_file, folder, None)
    tokens = before.train.tokens.copy()
    more = change(text_file, folder)
    after = make(text_file, folder, more.pop("tokenizer", None), **more)
    assert (before.train.tokens == tokens).all()  # what is in use is not written to
    train, _ = split(read_documents(text_file), more.get("held_out", 0.1))
    assert unpacked(after.train, after.tokenizer) == [one.text for one in train]
    return after


def test_another_text_another_corpus(text_file: Path, tmp_path: Path) -> None:
    def change(file: Path, folder: Path) -> dict[str, Any]:
        file.write_text(file.read_text().replace("1", "2"))
        return {}

    fingerprint = make(text_file, tmp_path / "data", None).fingerprint
    assert remade(change, text_file, tmp_path / "data").fingerprint != fingerprint


@pytest.mark.parametrize("more", [{"held_out": 0.2}, {"vocab_size": 310}, {"tokenizer": TOKENIZER}])
def test_other_settings_another_corpus(
    text_file: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    fingerprint = make(text_file, tmp_path / "data", None).fingerprint
    after = remade(lambda *_: dict(more), text_file, tmp_path / "data")
    assert after.fingerprint != fingerprint


@pytest.mark.parametrize(
    "name", ["train.bin", "held_out.bin", "held_out.txt", "tokenizer.json", "corpus.json"]
)
@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
def test_a_damaged_corpus_is_refused_and_made_again(
    text_file: Path, tmp_path: Path, name: str, how: str
) -> None:
    def change(file: Path, folder: Path) -> dict[str, Any]:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if how != "missing":
            middle = len(content) // 2
            new = content[:middle] + (
                b"" if how == "truncated" else b"\x01" + content[middle + 1 :]
            )
            (folder / name).write_bytes(new)
        with pytest.raises(ValueError, match=str(folder)):
            Corpus.load(folder)
        return {}

    fingerprint = make(text_file, tmp_path / "data", None).fingerprint
    assert remade(change, text_file, tmp_path / "data").fingerprint == fingerprint


def test_an_interruption_leaves_nothing_that_is_taken(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    expected = make(text_file, tmp_path / "other", None).fingerprint
    old = tmp_path / "old.txt"
    old.write_text(text_of(300, seed=1))
    rename = Path.replace
    interrupted = 0
    for last in range(20):
        make(old, folder, None)
        renamed = 0

        def stop(file: Path, target: Path, last: int = last) -> Path:
            nonlocal renamed
            if renamed == last:
                raise KeyboardInterrupt
            renamed += 1
            return rename(file, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", stop)
            try:
                make(text_file, folder, None)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
        with pytest.raises(DataError):
            Corpus.load(folder)
    assert interrupted == 6  # two of the tokenizer, train, held out, its text, the manifest
    assert make(text_file, folder, None).fingerprint == expected
    assert not list(folder.glob("*.new"))


def test_too_short(text_file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a\nb\n")
    with pytest.raises(DataError, match=r"short.txt: too short, \d+ tokens to train on; expected"):
        make(short, tmp_path / "data", None, seq_len=8)
    one_line = tmp_path / "line.txt"
    one_line.write_text("the lord " * 1000)
    with pytest.raises(DataError, match=r"line.txt:1: one line only"):
        make(one_line, tmp_path / "data", None)


def numbers(folder: Path, count: int, mask: np.ndarray[Any, Any] | None = None) -> Packed:
    """Tokens that are their own positions."""
    np.arange(count, dtype=np.uint32).tofile(folder / "n.bin")
    mapped = None
    if mask is not None:
        mask.astype(np.uint8).tofile(folder / "m.bin")
        mapped = np.memmap(folder / "m.bin", np.uint8, "r")
    return Packed(np.memmap(folder / "n.bin", np.uint32, "r"), mapped, count)


@pytest.mark.parametrize("count", [1000, 17, 32, 33, 48, 49, 990])
def test_an_epoch_has_each_window_once(tmp_path: Path, count: int) -> None:
    batches = Batches(numbers(tmp_path, count), 16, 1, seed=5)
    first_tokens = set()
    orders = set()
    for epoch in range(20):
        rows = [batches.batch(epoch * batches.windows + n) for n in range(batches.windows)]
        for ids, labels in rows:
            assert ids.shape == labels.shape == (1, 16)
            assert ids.dtype == labels.dtype == torch.int64
            assert (ids[0] == torch.arange(16) + ids[0, 0]).all()
            assert (labels == ids + 1).all()
            assert int(labels.max()) < count
        starts = [int(ids[0, 0]) for ids, _ in rows]
        assert sorted(starts) == list(range(min(starts), min(starts) + 16 * len(starts), 16))
        assert count - 1 - (max(starts) + 16) < 2 * 16
        first_tokens.add(min(starts))
        orders.add(tuple(start // 16 for start in starts))
    if count == 1000:
        assert len(orders) == 20
        assert len(first_tokens) > 8
        assert first_tokens <= set(range(16))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_ranks_share_the_batch_of_one(tmp_path_factory: Any, data: st.DataObject) -> None:
    packed = numbers(tmp_path_factory.mktemp("ranks"), data.draw(st.integers(9, 200)))
    world = data.draw(st.integers(1, 5))
    size = data.draw(st.integers(1, 7))
    steps = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=5))
    together = Batches(packed, 8, size * world, seed=1)
    for step in steps:  # in any order: a batch is a function of its step
        parts = [Batches(packed, 8, size, seed=1).batch(step, rank, world) for rank in range(world)]
        for which in (0, 1):
            joined = torch.cat([part[which] for part in parts])
            assert torch.equal(joined, together.batch(step)[which])


def test_another_seed_another_order(tmp_path: Path) -> None:
    packed = numbers(tmp_path, 1000)
    rows = {tuple(Batches(packed, 8, 8, seed).batch(0)[0][:, 0].tolist()) for seed in range(5)}
    assert len(rows) == 5


def test_labels_follow_the_mask(tmp_path: Path) -> None:
    mask = np.arange(300) % 3 == 0
    ids, labels = Batches(numbers(tmp_path, 300, mask), 16, 8, seed=0).batch(0)
    assert (labels == torch.where((ids + 1) % 3 == 0, ids + 1, -100)).all()


def test_wrong_batches(tmp_path: Path) -> None:
    packed = numbers(tmp_path, 16)
    with pytest.raises(DataError, match="16 tokens; expected at least 17"):
        Batches(packed, 16, 1, seed=0)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(DataError, match="is 0; expected at least 1"):
            Batches(packed, *sizes, seed=0)
    batches = Batches(packed, 4, 1, seed=0)
    for wrong in ((-1, 0, 1), (0, 1, 1), (0, -1, 2), (0, 0, 0)):
        with pytest.raises(DataError, match="expected a step from 0 and a rank"):
            batches.batch(*wrong)


def test_steps_are_said(text_file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    make(text_file, tmp_path / "data", None, say=said.append)
    assert said == ["reading", "training the tokenizer", "tokenising"]


def test_another_split_with_the_same_tokenizer_is_another_corpus(
    text_file: Path, tmp_path: Path
) -> None:
    a, b = (make(text_file, tmp_path / "data", held_out=part).fingerprint for part in (0.1, 0.2))
    assert a != b
