"""Text to tokens and back: byte-level BPE, and chats as ChatML."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import tokenizers

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
ROLES = ("system", "user", "assistant", "tool")

# A byte that is no token yet, or bytes that are no character, are decoded to this.
_REPLACEMENT = "\ufffd"
_BYTES = 256
# The trainer's time grows with the square of a word's length, and nothing is learned from a word of
# thousands of letters: longer ones, as in base64, are cut where the merges are learned.
_LONG_WORD = re.compile(r"\S{256}")

# What Tokenizer.render writes, in the language of transformers' apply_chat_template.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, made or used so; the message names it and says why."""


class Message(TypedDict):
    """One turn of a chat; ``role`` is one of :data:`ROLES`."""

    role: str
    content: str


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with the few things that a language model needs.

    Text is only text: where it holds the name of a special token, such as ``<|im_end|>``, it is
    split like any other, so nothing that a user writes can end a turn.

    Args:
        backend: the tokenizer itself; its truncation and padding are switched off.
        config: what is in ``tokenizer_config.json``; ``eos_token`` is needed there, or
            ``<|endoftext|>`` in the vocabulary. ``pad_token`` is ``eos_token`` if not given.
        source: names the tokenizer in errors.

    Raises:
        TokenizerError: there is no end of text, or it is not in the vocabulary.

    Example:
        >>> tokenizer = train_tokenizer(["In the beginning God created"], vocab_size=270)
        >>> ids = tokenizer.encode("In the end: \u7d42")
        >>> tokenizer.decode(ids)
        'In the end: \u7d42'
        >>> tokenizer.vocab_size, tokenizer.eos_id
        (270, 0)
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        source: str = "the tokenizer",
    ) -> None:
        self._backend = backend
        self._config = dict(config)
        self._source = source
        self._headers: dict[str, list[int]] = {}
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        """One more than the largest id: what the rows of an embedding must at least be."""
        self.eos_id: int = self._special("eos_token", END_OF_TEXT)
        """Ends a text."""
        self.pad_id: int = self._special("pad_token", self._text_of(self.eos_id))
        """Fills a shorter text of a batch; never looked at."""

    def _special(self, key: str, default: str) -> int:
        token = self._config.get(key) or default
        if isinstance(token, Mapping):  # as transformers 4 writes it
            token = token.get("content")
        found = None
        if isinstance(token, str):
            with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair
                found = self._backend.token_to_id(token)
        if found is None:
            raise TokenizerError(
                f"{self._source}: {key} is {token!r}, which is not in the vocabulary; expected "
                "tokenizer_config.json to name a token of tokenizer.json"
            )
        return found

    def _text_of(self, token_id: int) -> str:
        return str(self._backend.id_to_token(token_id))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, special ones too, or ``None``."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of ``text``.

        Args:
            text: any text; special tokens in it are not looked for.
            add_special_tokens: whether to add what the tokenizer itself puts around a text, such
                as the ``<s>`` of LLaMA; ours, SmolLM2's and Qwen's put nothing.
        """
        with self._encoding():
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as :meth:`encode` gives them, on every core."""
        with self._encoding():
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    @contextlib.contextmanager
    def _encoding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library raises no narrower class
            raise TokenizerError(f"{self._source}: the text has no tokens: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, without the special tokens.

        Raises:
            TokenizerError: an id is not of this tokenizer.
        """
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(
                    f"{self._source}: token {token}; expected 0 to {self.vocab_size - 1}: "
                    "it is a token of another model"
                )
        return self._backend.decode(ids, skip_special_tokens=True)

    def stream(self) -> TextStream:
        """Decodes tokens one by one; see :class:`TextStream`."""
        return TextStream(self)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> tuple[list[int], list[int]]:
        """A chat as ChatML: ``<|im_start|>role``, a line end, the content, ``<|im_end|>``, another.

        Args:
            messages: the turns, in order.
            add_generation_prompt: whether to begin the assistant's next turn.

        Returns:
            The ids, and a mask of the same length that is 1 on what the assistant says and the
            ``<|im_end|>`` after it.

        Raises:
            TokenizerError: the tokenizer has no such tokens, or a role is unknown.

        Example:
            >>> tokenizer = train_tokenizer(["user\\nassistant\\nHi Yes"], vocab_size=300)
            >>> ids, mask = tokenizer.render(
            ...     [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
            ... )
            >>> tokenizer.decode([token for token, said in zip(ids, mask) if said])
            'Yes'
        """
        ids, mask = self.render_batch([messages])[0]
        if add_generation_prompt:
            prompt = [self._chat_tokens[0], *self._header("assistant")]
            ids, mask = ids + prompt, mask + [0] * len(prompt)
        return ids, mask

    def render_batch(self, chats: Sequence[Sequence[Message]]) -> list[tuple[list[int], list[int]]]:
        """What :meth:`render` gives for each chat, on every core."""
        start, end, newline = self._chat_tokens
        for message in (message for chat in chats for message in chat):
            if message["role"] not in ROLES:
                raise TokenizerError(
                    f"the role {message['role']!r}; expected one of {', '.join(ROLES)}"
                )
        contents = iter(
            self.encode_batch([message["content"] for chat in chats for message in chat])
        )
        rendered = []
        for chat in chats:
            ids: list[int] = []
            mask: list[int] = []
            for message in chat:
                head = [start, *self._header(message["role"])]
                # Encoded by itself, so that a turn has the same tokens when it is generated.
                said = [*next(contents), end]
                ids += [*head, *said, *newline]
                spoken = int(message["role"] == "assistant")
                mask += [0] * len(head) + [spoken] * len(said) + [0] * len(newline)
            rendered.append((ids, mask))
        return rendered

    @functools.cached_property
    def _chat_tokens(self) -> tuple[int, int, list[int]]:
        start, end = self.token_id(IM_START), self.token_id(IM_END)
        if start is None or end is None:
            raise TokenizerError(
                f"{self._source}: no {IM_START} and {IM_END} in the vocabulary, so it has no chats"
            )
        return start, end, self.encode("\n")

    def _header(self, role: str) -> list[int]:
        if role not in self._headers:
            self._headers[role] = self.encode(f"{role}\n")
        return self._headers[role]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of everything that decides which ids a text gets, in hexadecimal."""
        state = {
            "tokenizer": json.loads(self._backend.to_str()),
            "eos": self.eos_id,
            "pad": self.pad_id,
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``.

        transformers' ``AutoTokenizer.from_pretrained(folder)`` reads them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self._config, indent=2, ensure_ascii=False, sort_keys=True)
        for name, text in (
            ("tokenizer.json", self._backend.to_str(pretty=True)),
            ("tokenizer_config.json", config + "\n"),
        ):
            new = folder / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(folder / name)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder, ours or a Hugging Face one, or of a ``tokenizer.json``.

        Raises:
            TokenizerError: a file is missing, or is not what it should be.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(
                f"{path}: no tokenizer here; expected a tokenizer.json or a folder with one"
            )
        text = _read_json(file)[0]
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower class
            raise TokenizerError(
                f"{file}: not a tokenizer of the tokenizers library: {error}"
            ) from None
        config: dict[str, Any] = {}
        if (beside := file.with_name("tokenizer_config.json")).is_file():
            config = _read_json(beside)[1]
        if (template := file.with_name("chat_template.jinja")).is_file():
            config["chat_template"] = _read_text(template, "a template")
        return cls(backend, config, str(path))


class TextStream:
    """Tokens to text as they come: the parts put together are what ``decode`` gives for all.

    A token may end within a character. What is not certain yet is held back, so no part ends with
    half a character.

    Example:
        >>> tokenizer = train_tokenizer(["a"], vocab_size=259)  # a token is a byte
        >>> stream = tokenizer.stream()
        >>> [stream.push(token) for token in tokenizer.encode("a\u4e2d")]
        ['a', '', '', '\u4e2d']
        >>> stream.flush()
        ''
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers write the first token of a text otherwise than the same token later, so
        # the tokens of the last part are decoded once more before the new ones.
        self._before: list[int] = []
        self._new: list[int] = []
        self._given = 0  # characters of the text of both that have been given out

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` has come, after what was given before.

        Raises:
            TokenizerError: the token is not of this tokenizer.
        """
        self._new.append(token)
        try:
            text = self._tokenizer.decode(self._before + self._new)
        except TokenizerError:
            self._new.pop()
            raise
        certain = text.rstrip(_REPLACEMENT)
        part = certain[self._given :]
        self._given = max(self._given, len(certain))
        if part and certain == text:
            self._before, self._new = self._new, []
            self._given = len(self._tokenizer.decode(self._before))
        return part

    def flush(self) -> str:
        """What was held back, when no more tokens will come; the stream may then be used anew."""
        part = self._tokenizer.decode(self._before + self._new)[self._given :]
        self._before, self._new, self._given = [], [], 0
        return part


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE for ``texts``: any text can be encoded, and decoded to the same bytes.

    The first tokens are ``<|endoftext|>`` (end and padding), ``<|im_start|>`` and ``<|im_end|>``,
    then the 256 bytes, then what merging the most frequent pairs gives. Merges stay within words,
    numbers and runs of signs, as in GPT-2 (Radford et al. 2019, section 2.2).

    Args:
        texts: what to learn the merges from.
        vocab_size: how many tokens; fewer come out where the texts have no more pairs.

    Raises:
        TokenizerError: ``vocab_size`` is below 259, or there is no text.

    Example:
        >>> tokenizer = train_tokenizer(["low lower lowest"], vocab_size=262)
        >>> [tokenizer.decode([token]) for token in tokenizer.encode("slowly")]
        ['s', 'low', 'l', 'y']
    """
    smallest = _BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise TokenizerError(f"a vocabulary of {vocab_size}; expected at least {smallest}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizer.alphabet(),
        show_progress=False,
    )
    size = 0

    def counted() -> Iterable[str]:
        nonlocal size
        for text in texts:
            size += len(text)
            yield _LONG_WORD.sub(r"\g<0> ", text)

    backend.train_from_iterator(counted(), trainer)
    if not size:
        raise TokenizerError("no text to train a tokenizer on")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    return Tokenizer(backend, config)


def _read_text(file: Path, expected: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TokenizerError(f"{file}:{line}: not UTF-8; expected {expected}") from None


def _read_json(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file and the JSON object that it is."""
    try:
        text = _read_text(file, "JSON")
        value = json.loads(text)
    except RecursionError:
        raise TokenizerError(f"{file}: not JSON: lists too deep") from None
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: a JSON {type(value).__name__}; expected an object")
    return text, value
