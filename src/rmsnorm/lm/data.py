"""Real text to batches: read, split, tokenised, packed into memory-mapped files, cut into windows.

The files in a corpus's folder: ``train.bin`` and ``held_out.bin`` are token ids, one after another
(little-endian uint16, or uint32 for a large vocabulary), an end-of-text after each document;
``*.mask.bin``, if there are chats, has a byte for each token, 1 where it is to be learned;
``held_out.txt`` is the text that those tokens of ``held_out.bin`` spell; ``corpus.json`` says what
the files are made of, with their checksums.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import lzma
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rmsnorm.lm.model import IGNORED
from rmsnorm.lm.tokenizer import ROLES, Message, Tokenizer, train_tokenizer
from rmsnorm.models.files import sha256
from rmsnorm.progress import Say

Tokens: TypeAlias = "np.memmap[Any, np.dtype[Any]]"

_FORMAT = 1
_MANIFEST = "corpus.json"
# Text is held out in blocks: long enough to have context, short enough to come from all over.
_BLOCK_BYTES = 2**14
# What is tokenised at once.
_BATCH_BYTES = 2**22
_PIECE_CHARACTERS = 2**20
# More text makes a small vocabulary no better, and merging Chinese takes seconds a megabyte.
_TOKENIZER_BYTES = 2**22
_CUT = re.compile(r"(?<=\S)\n")


class DataError(ValueError):
    """Data that cannot be used; the message is ``FILE:LINE: what was found; what was expected``."""


@dataclass(frozen=True)
class Document:
    """A text, or a chat.

    Attributes:
        name: the file, with the line for a line of JSON.
        text: the text, or ``None``.
        messages: the turns of a chat, or ``None``.
    """

    name: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None

    @functools.cached_property
    def digest(self) -> str:
        """A SHA-256 of the content, in hexadecimal; the name is not in it."""
        content = [self.text, self.messages]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def texts(self) -> list[str]:
        """The text, or what is said in the chat."""
        if self.messages is None:
            return [self.text or ""]
        return [message["content"] for message in self.messages]

    @functools.cached_property
    def bytes(self) -> int:
        """How long :attr:`texts` are together, in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)


def read_documents(path: str | Path) -> list[Document]:
    """The documents of a file, or of all files below a folder, in the order of their names.

    A line of a ``.jsonl`` file is a document: ``{"text": ...}``, or a chat: ``{"conversations":
    [{"role": ..., "content": ...}, ...]}`` (or ``"messages"``) with the roles system, user,
    assistant and tool. Any other file is one document, in UTF-8. Hidden files are passed over.

    Raises:
        DataError: a file is missing, empty, binary or no UTF-8, or a line of JSON is not as above.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "two.jsonl")
        ...     _ = file.write_text('{"text": "In the beginning"}\\n{"text": "God created"}\\n')
        ...     [document.text for document in read_documents(folder)]
        ['In the beginning', 'God created']
    """
    path = Path(path)
    if path.is_dir():
        below = sorted(file for file in path.rglob("*") if file.is_file())
        files = [
            file
            for file in below
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not files:
            raise DataError(f"{path}: no file in the folder; expected text or JSONL files")
    elif path.exists():
        files = [path]
    else:
        raise DataError(
            f"{path}: no such file or folder; expected text, JSONL, or a folder of them"
        )
    documents: list[Document] = []
    for file in files:
        text = _read_text(file)
        if file.suffix == ".jsonl":
            documents += _read_lines(file, text)
        else:
            documents.append(Document(str(file), text))
    return documents


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; expected a file that can be read") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{file}:1: UTF-16; expected text in UTF-8")
    if (nul := data.find(b"\0")) >= 0:
        raise DataError(f"{file}:{_line(data, nul)}: a zero byte, so it is binary; expected text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec counts from behind the byte order mark.
        start = error.start + len(data) - len(error.object)
        raise DataError(
            f"{file}:{_line(data, start)}: byte 0x{data[start]:02x} is not UTF-8; "
            "expected text in UTF-8"
        ) from None
    if not text.strip():
        raise DataError(f"{file}: empty; expected text")
    return text


def _line(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _read_lines(file: Path, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: not JSON: {error.msg} at column {error.colno}; "
                "expected a JSON object on each line"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
            raise DataError(f"{where}: {error}; expected a JSON object on each line") from None
        yield _document(where, record)


def _document(where: str, record: object) -> Document:
    if not isinstance(record, dict):
        raise DataError(f"{where}: {_kind(record)}; expected a JSON object")
    fields = [name for name in ("text", "conversations", "messages") if name in record]
    if len(fields) != 1:
        found = reprlib.repr(fields or list(record))
        raise DataError(
            f"{where}: the fields {found}; expected one of 'text', 'conversations' and 'messages'"
        )
    if fields == ["text"]:
        return Document(where, _string(where, "text", record["text"], empty=False))
    turns = record[fields[0]]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: {fields[0]} is {_kind(turns)}; expected a list of messages")
    messages = tuple(_message(where, f"{fields[0]}[{n}]", turn) for n, turn in enumerate(turns))
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no turn of the assistant; expected one, to learn from")
    return Document(where, messages=messages)


def _message(where: str, name: str, turn: object) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {name} is {_kind(turn)}; expected an object")
    for field in ("role", "content"):
        if field not in turn:
            found = reprlib.repr(list(turn))
            raise DataError(f"{where}: {name} has the fields {found}; expected role and content")
    role = turn["role"]
    if role not in ROLES:
        raise DataError(
            f"{where}: {name} has the role {reprlib.repr(role)}; expected {', '.join(ROLES)}"
        )
    # A turn of the assistant that says nothing would teach to say nothing.
    content = _string(where, f"{name}.content", turn["content"], empty=role != "assistant")
    return {"role": role, "content": content}


def _string(where: str, name: str, value: object, *, empty: bool) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {_kind(value)}; expected a string")
    if not (empty or value.strip()):
        raise DataError(f"{where}: {name} is empty; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {name} has half a surrogate pair, {value[error.start]!a}; expected Unicode"
        ) from None
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return names.get(type(value), "a number")


def split(
    documents: Sequence[Document], fraction: float, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """The documents to train on, and those to hold out, each in their order.

    Many documents, or chats: whole documents are held out, chosen by a hash of their content, so
    the choice does not change with their names. So few texts that ``fraction`` of them is less
    than one: each is cut at line ends into blocks of about 16 KiB (less for a small text), and
    every n-th is held out, ``n = round(1 / fraction)``.

    Args:
        documents: at least one.
        fraction: how much to hold out, above 0 and at most 0.5.
        seed: another choice of the same size.

    Raises:
        DataError: nothing can be held out: one line only, one chat only.

    Example:
        >>> documents = [Document(f"{n}.txt", f"text {n}") for n in range(20)]
        >>> train, held_out = split(documents, 0.1)
        >>> len(train), len(held_out)
        (18, 2)
    """
    if not 0 < fraction <= 0.5:
        raise DataError(f"{fraction} to hold out; expected a part above 0 and at most 0.5")
    chats = any(document.messages is not None for document in documents)
    if not chats and len(documents) * fraction < 1:
        parts = [_split_text(document, fraction, seed) for document in documents]
        return [one for part in parts for one in part[0]], [
            one for part in parts for one in part[1]
        ]
    if len(documents) < 2:
        raise DataError(f"{documents[0].name}: one chat only; expected more, to hold one out")
    ranked = sorted(
        range(len(documents)),
        key=lambda n: (hashlib.sha256(f"{seed} {documents[n].digest}".encode()).digest(), n),
    )
    chosen = set(ranked[: max(1, round(len(documents) * fraction))])
    train = [document for n, document in enumerate(documents) if n not in chosen]
    return train, [documents[n] for n in sorted(chosen)]


def _split_text(
    document: Document, fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Neighbouring blocks that are on the same side stay together as one document."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", document.text or "")
    if len(lines) < 2:
        raise DataError(
            f"{document.name}:1: one line only; expected more, since text is held out by lines"
        )
    period = round(1 / fraction)
    # At least one block to hold out.
    size = min(_BLOCK_BYTES, math.ceil(document.bytes / period))
    blocks: list[str] = []
    block: list[str] = []
    length = 0
    for line in lines:
        line_length = len(line.encode())
        if block and length + line_length > size:
            blocks.append("".join(block))
            block, length = [], 0
        block.append(line)
        length += line_length
    blocks.append("".join(block))
    chosen = set(range((period // 2 + seed) % period, len(blocks), period)) or {len(blocks) - 1}
    sides: tuple[list[Document], list[Document]] = [], []
    run: list[str] = []
    for n, text in enumerate(blocks):
        run.append(text)
        if n + 1 == len(blocks) or (n + 1 in chosen) != (n in chosen):
            sides[n in chosen].append(Document(document.name, "".join(run)))
            run = []
    return sides


@dataclass(frozen=True)
class Packed:
    """Documents one after another, each with an end-of-text.

    Attributes:
        tokens: (n,) uint16 or uint32, memory-mapped, read only.
        mask: (n,) uint8, 1 on each token that is to be learned, or ``None``: all are.
        bytes: how many bytes of text the tokens to be learned spell.
    """

    tokens: Tokens
    mask: Tokens | None
    bytes: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Corpus:
    """Text, ready to train on.

    Attributes:
        folder: where the files are.
        tokenizer: what made the tokens.
        train: what to learn.
        held_out: what to measure on.
        fingerprint: a SHA-256 of the documents, the split and the tokenizer, in hexadecimal.
    """

    folder: Path
    tokenizer: Tokenizer
    train: Packed
    held_out: Packed
    fingerprint: str

    @functools.cached_property
    def xz_bits_per_byte(self) -> float:
        """What ``xz -9e`` needs for ``held_out.txt``."""
        text = (self.folder / "held_out.txt").read_bytes()
        return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) * 8 / len(text)

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        """The corpus that :func:`prepare` left in ``folder``.

        Raises:
            DataError: a file is missing or is not as it was written.
        """
        folder = Path(folder)
        file = folder / _MANIFEST
        try:
            manifest = json.loads(file.read_bytes())
            if manifest["format"] != _FORMAT:
                raise DataError(f"{file}: format {manifest['format']}; expected {_FORMAT}")
            for name, checksum in manifest["files"].items():
                _check(folder / name, checksum)
            tokenizer = Tokenizer.load(folder)
            if tokenizer.fingerprint != manifest["tokenizer"]:
                raise DataError(f"{folder}: the tokenizer is another; expected that of the tokens")
            return cls(
                folder,
                tokenizer,
                _open(folder, "train", manifest),
                _open(folder, "held_out", manifest),
                manifest["fingerprint"],
            )
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise DataError(f"{file}: no manifest of a corpus ({error!r})") from None
        except UnicodeDecodeError:
            raise DataError(f"{file}: not UTF-8; expected the manifest of a corpus") from None


def prepare(
    path: str | Path,
    folder: str | Path,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    held_out: float,
    seq_len: int,
    say: Say | None = None,
) -> Corpus:
    """Reads, splits, tokenises and packs the documents of ``path`` into ``folder``.

    What is there already is taken if it is what would be made, and replaced if not. Files are
    written under another name and renamed, the manifest last, so an interruption leaves nothing
    that could be taken for a corpus.

    Args:
        path: a file or a folder; see :func:`read_documents`.
        folder: where the files of the corpus go; made if it is not there.
        tokenizer: makes the tokens; ``None``: one is trained on the part to train on.
        vocab_size: of the tokenizer to train.
        held_out: the part to hold out; see :func:`split`.
        seq_len: the tokens of a window; the part to train on must have one more.
        say: called with a few words whenever a longer step begins.

    Returns:
        The corpus in ``folder``; :class:`Batches` cuts it, with an example.

    Raises:
        DataError: the data cannot be read or split, or is too short.
        TokenizerError: ``vocab_size`` is too small, or the tokenizer has no chats.
    """
    say = say or (lambda _: None)
    folder = Path(folder)
    say("reading")
    documents = read_documents(path)
    train, held = split(documents, held_out)
    source = {
        "documents": _digest(document.digest for document in documents),
        "fraction": held_out,
    }
    corpus = _reused(folder, source, tokenizer, vocab_size)
    if corpus is None:
        trained = vocab_size if tokenizer is None else None
        if tokenizer is None:
            say("training the tokenizer")
            tokenizer = train_tokenizer(_sample(train), vocab_size)
        say("tokenising")
        corpus = _make(folder, tokenizer, train, held, {**source, "trained": trained})
    if len(corpus.train) <= seq_len:
        raise DataError(
            f"{path}: too short, {len(corpus.train)} tokens to train on; expected at least "
            f"{seq_len + 1}, one more than the length of a sequence"
        )
    if not corpus.held_out.bytes:
        raise DataError(f"{path}: the tokenizer makes nothing of the held-out text; expected text")
    return corpus


def _reused(
    folder: Path, source: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int
) -> Corpus | None:
    """The corpus in ``folder``, if it is of this source and tokenizer and is whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if any(manifest[key] != value for key, value in source.items()):
            return None
        if tokenizer is None and manifest["trained"] != vocab_size:
            return None
        if tokenizer is not None and manifest["tokenizer"] != tokenizer.fingerprint:
            return None
        return Corpus.load(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make(
    folder: Path,
    tokenizer: Tokenizer,
    train: list[Document],
    held: list[Document],
    source: dict[str, Any],
) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MANIFEST).unlink(missing_ok=True)
    tokenizer.save(folder)
    masked = any(document.messages is not None for document in (*train, *held))
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    manifest: dict[str, Any] = {
        **source,
        "format": _FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype,
        "files": {},
    }
    manifest["fingerprint"] = _digest(
        [source["documents"], repr(source["fraction"]), tokenizer.fingerprint]
    )
    for side, documents in (("train", train), ("held_out", held)):
        with _Writer(folder, manifest["files"]) as files:
            text_bytes = 0
            for document, ids, mask in _tokenised(documents, tokenizer):
                files.write(f"{side}.bin", np.array(ids, dtype).tobytes())
                if masked:
                    files.write(f"{side}.mask.bin", bytes(mask))
                if side == "held_out":
                    # What the tokens spell is what their bits are compared with, even if a
                    # tokenizer that was given changes the text.
                    learned = itertools.compress(ids[:-1], mask)
                    spelt = tokenizer.decode(list(learned)).encode()
                    files.write("held_out.txt", spelt)
                    text_bytes += len(spelt)
                else:
                    text_bytes += _learned_bytes(document)
            manifest[side] = {"masked": masked, "bytes": text_bytes}
    with _Writer(folder, {}) as files:
        files.write(_MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return Corpus.load(folder)


def _tokenised(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, list[int], list[int]]]:
    """Each document with its tokens, an end-of-text after them, and which are to be learned."""
    end = tokenizer.eos_id
    for batch in _batches(documents):
        pieces = [_pieces(document.text or "") for document in batch if document.messages is None]
        texts = iter(tokenizer.encode_batch([piece for text in pieces for piece in text]))
        counts = iter([len(text) for text in pieces])
        chats = [document.messages for document in batch if document.messages is not None]
        rendered = iter(tokenizer.render_batch(chats) if chats else [])
        for document in batch:
            if document.messages is None:
                parts = itertools.islice(texts, next(counts))
                ids = [*itertools.chain.from_iterable(parts), end]
                yield document, ids, [1] * len(ids)
            else:
                ids, mask = next(rendered)
                yield document, [*ids, end], [*mask, 0]


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> list[str]:
    """``text`` in parts that can be tokenised on several cores, cut before line ends.

    Byte-level tokenizers join no tokens across these, so the tokens are those of the whole text.
    """
    cuts = [0]
    while found := _CUT.search(text, cuts[-1] + _PIECE_CHARACTERS):
        cuts.append(found.start())
    return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _sample(documents: Sequence[Document]) -> Iterator[str]:
    """As much text from all over as a tokenizer needs."""
    step = math.ceil(sum(document.bytes for document in documents) / _TOKENIZER_BYTES)
    for document in documents[:: max(step, 1)]:
        for text in document.texts:
            yield from _pieces(text)


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()


def _learned_bytes(document: Document) -> int:
    if document.messages is None:
        return document.bytes
    said = (one["content"] for one in document.messages if one["role"] == "assistant")
    return sum(len(text.encode()) for text in said)


class _Writer:
    """Files of a folder that get their names, and their checksums in ``checksums``, at the end."""

    def __init__(self, folder: Path, checksums: dict[str, str]) -> None:
        self._folder = folder
        self._checksums = checksums
        self._open: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> _Writer:
        return self

    def write(self, name: str, data: bytes) -> None:
        if name not in self._open:
            self._open[name] = ((self._folder / f"{name}.new").open("wb"), hashlib.sha256())
        file, checksum = self._open[name]
        file.write(data)
        checksum.update(data)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for name, (file, checksum) in self._open.items():
            file.close()
            new = self._folder / f"{name}.new"
            if error is None:
                new.replace(self._folder / name)
                self._checksums[name] = checksum.hexdigest()
            else:
                new.unlink()


def _check(file: Path, checksum: str) -> None:
    if sha256(file) != checksum:
        raise DataError(f"{file}: changed since it was written; remove the folder to make it again")


def _open(folder: Path, side: str, manifest: dict[str, Any]) -> Packed:
    about = manifest[side]
    tokens = np.memmap(folder / f"{side}.bin", manifest["dtype"], "r")
    mask = np.memmap(folder / f"{side}.mask.bin", "u1", "r") if about["masked"] else None
    return Packed(tokens, mask, about["bytes"])


class Batches:
    """Windows of a packed text, in an order that is a function of the seed alone.

    An epoch cuts the tokens into windows of ``seq_len``, beginning at a random token of the first
    ``seq_len``, and takes them in a random order. Batches run on from one epoch to the next.

    Args:
        packed: the tokens.
        seq_len: length of a window.
        batch_size: rows of a batch, on each rank.
        seed: another order.

    Raises:
        DataError: there is not one window, or a size is below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder, "text.txt")
        ...     _ = text.write_text("In the beginning was the Word.\\n" * 40)
        ...     corpus = prepare(text, folder + "/data", None, 300, held_out=0.1, seq_len=16)
        ...     ids, labels = Batches(corpus.train, 16, batch_size=4, seed=0).batch(7)
        >>> ids.shape, ids.dtype, torch.equal(ids[:, 1:], labels[:, :-1])
        (torch.Size([4, 16]), torch.int64, True)
    """

    def __init__(self, packed: Packed, seq_len: int, batch_size: int, seed: int) -> None:
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
            if value < 1:
                raise DataError(f"{name} is {value}; expected at least 1")
        if len(packed) <= seq_len:
            raise DataError(
                f"{len(packed)} tokens; expected at least {seq_len + 1}, one more than seq_len"
            )
        self._packed = packed
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._seed = seed
        self.windows: int = max(1, (len(packed) - seq_len) // seq_len)
        """Windows of an epoch."""
        self._order = functools.lru_cache(maxsize=2)(self._starts)

    def _starts(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the windows of an epoch begin, in their order."""
        generator = np.random.default_rng([self._seed, epoch])
        # What the last window leaves; the same number of windows fits at every offset.
        spare = len(self._packed) - 1 - self.windows * self._seq_len
        offset = int(generator.integers(min(self._seq_len - 1, spare) + 1))
        return generator.permutation(self.windows) * self._seq_len + offset

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """The batch of a step: a function of ``step`` alone, whatever was asked before.

        Each rank gets other rows; those of all ranks, in order, are the batch that one rank with
        ``world`` times the batch size gets.

        Args:
            step: from 0.
            rank: of the ranks that share a batch.
            world: how many they are.

        Returns:
            ``(input_ids, labels)``, (batch_size, seq_len) int64 each; ``labels[:, t]`` is the token
            after ``input_ids[:, t]``, or -100 where that is not to be learned.
        """
        if step < 0 or not 0 <= rank < world:
            raise DataError(
                f"step {step}, rank {rank} of {world}; expected a step from 0 and a rank from 0 to "
                f"{world - 1}"
            )
        first = (step * world + rank) * self._batch_size
        starts = [
            int(self._order(row // self.windows)[row % self.windows])
            for row in range(first, first + self._batch_size)
        ]
        # (batch_size, seq_len + 1)
        tokens = self._rows(self._packed.tokens, starts)
        labels = tokens[:, 1:].clone()
        if self._packed.mask is not None:
            labels[self._rows(self._packed.mask, starts)[:, 1:] == 0] = IGNORED
        return tokens[:, :-1].contiguous(), labels

    def _rows(self, values: Tokens, starts: Sequence[int]) -> Tensor:
        rows = np.stack([values[start : start + self._seq_len + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))
