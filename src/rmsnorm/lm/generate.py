"""Writes text with a model: greedy or sampled, one prompt or many, with a key-value cache.

Sampling, in this order: the repetition penalty (Keskar et al. 2019, section 4.1,
https://arxiv.org/abs/1909.05858), temperature, top-k (Fan et al. 2018, section 5.1,
https://arxiv.org/abs/1805.04833) and top-p (Holtzman et al. 2020, section 3.1,
https://arxiv.org/abs/1904.09751).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from rmsnorm.lm.model import KVCache, MindForCausalLM

if TYPE_CHECKING:
    from rmsnorm.lm.tokenizer import Message, TextStream, Tokenizer

__all__ = ["Completion", "Conversation", "GenerateError", "OnToken", "generate"]

OnToken = Callable[[int, "int | None", str], None]
"""Called with the row, the token (``None`` at the end) and the text that is certain by now."""


class GenerateError(ValueError):
    """A parameter, a prompt or a model that nothing can be written with."""


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    Attributes:
        ids: the new tokens, without the end token.
        text: their text, up to the stop string; empty if no tokenizer was given.
        reason: ``"eos"``: the model ended it; ``"stop"``: a stop string came; ``"length"``.
    """

    ids: list[int]
    text: str
    reason: Literal["eos", "stop", "length"]


def generate(
    model: MindForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] = (),
    use_cache: bool = True,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """Continues each prompt with at most ``max_new_tokens`` tokens.

    Row i draws from its own generator, seeded with ``seed + i``: its text is the one that the
    prompt gets alone with that seed, but for the last bits of matrix products, which may depend on
    the batch.

    Args:
        model: the model; it is used in eval mode and left in the mode it was in.
        prompts: token ids, at least one for each prompt; shorter ones are padded on the left.
        max_new_tokens: the most tokens to add.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: sample from the ``top_k`` likeliest tokens only; 0: from all.
        top_p: sample from the fewest likeliest tokens that have this probability together.
        repetition_penalty: positive logits of tokens that occurred, in the prompt too, are divided
            by it, negative ones multiplied.
        seed: what the draws depend on.
        tokenizer: makes the text; needed for ``stop``. Rows of the embedding beyond its vocabulary
            are padding and are never picked.
        stop: strings to end at; they may begin and end within tokens.
        eos_ids: tokens to end at.
        use_cache: keep keys and values; without, every step computes the whole sequence again.
        on_token: called for every token; after the last with ``None`` where text was held back,
            because a stop string or a character of several tokens could have begun there.

    Returns:
        The completions, in the order of the prompts.

    Raises:
        GenerateError: a parameter out of range, an empty prompt, a token that the model's
            vocabulary lacks, more tokens than its context takes, or logits that are nan.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> model = MindForCausalLM(preset("tiny", num_hidden_layers=1))
        >>> [first, second] = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
        >>> len(first.ids), second.reason
        (5, 'length')
    """
    _check(max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed, stop, tokenizer)
    _check_prompts(model, prompts, max_new_tokens)
    draw = _Draw(temperature, top_k, top_p)
    vocabulary = model.config.vocab_size
    if tokenizer is not None:
        vocabulary = min(vocabulary, tokenizer.vocab_size)
    rows = [
        _Row(_StopText(stop), tokenizer.stream() if tokenizer is not None else None, seed + number)
        for number in range(len(prompts))
    ]
    was_training = model.training
    model.eval()
    try:
        # Not inference_mode: what the model keeps for later calls must still do for training.
        with torch.no_grad():
            steps = _Steps(model, prompts, max_new_tokens, repetition_penalty, use_cache)
            for _ in range(max_new_tokens if rows else 0):
                logits = steps.logits()[:, :vocabulary]  # (batch, vocabulary)
                tokens = draw(logits, rows)
                for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                    if row.reason is None:
                        row.push(token, eos_ids, number, on_token)
                if all(row.reason for row in rows):
                    break
                steps.append(tokens)
    finally:
        model.train(was_training)
    return [row.completion(number, on_token) for number, row in enumerate(rows)]


class Conversation:
    """A chat: what was said so far, and the model's next answer to it.

    When the conversation outgrows the model's context, its oldest questions and answers are left
    out; ``forgotten`` counts them.

    Args:
        model: the model.
        tokenizer: renders the messages as ChatML.
        system: what the model is told first.
        eos_ids: tokens that end an answer.
        max_new_tokens: the most tokens of an answer.
        seed: of the first answer; each later one adds 1.
        sampling: further arguments of :func:`generate`.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> from rmsnorm.lm.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["user assistant"], vocab_size=270)
        >>> changes = {"vocab_size": tokenizer.vocab_size, "num_hidden_layers": 1}
        >>> model = MindForCausalLM(preset("tiny", **changes))
        >>> chat = Conversation(model, tokenizer, eos_ids=[tokenizer.eos_id], max_new_tokens=4)
        >>> answer = chat.ask("Who are you?")
        >>> [message["role"] for message in chat.messages], chat.forgotten
        (['user', 'assistant'], 0)
    """

    def __init__(
        self,
        model: MindForCausalLM,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        eos_ids: Sequence[int],
        max_new_tokens: int,
        seed: int = 0,
        **sampling: Any,
    ) -> None:
        self.messages: list[Message] = []
        self.forgotten = 0
        self._model, self._tokenizer = model, tokenizer
        self._system: list[Message] = []
        if system is not None:
            self._system = [{"role": "system", "content": system}]
        self._eos_ids, self._max_new_tokens = eos_ids, max_new_tokens
        self._seed, self._sampling = seed, sampling

    def ask(self, text: str, on_token: OnToken | None = None) -> Completion:
        """The model's answer to ``text``; both become part of the conversation.

        Args:
            text: what the user says.
            on_token: as :func:`generate`'s; the row is 0.

        Raises:
            GenerateError: as :func:`generate`; the context does not even take this question.
            TokenizerError: the tokenizer has no chats.
        """
        kept: list[Message] = [*self.messages, {"role": "user", "content": text}]
        context = self._model.config.max_position_embeddings
        forgotten = 0
        while True:
            ids, _ = self._tokenizer.render([*self._system, *kept], add_generation_prompt=True)
            if len(ids) + self._max_new_tokens <= context or len(kept) == 1:
                break
            kept, forgotten = kept[2:], forgotten + 1
        answer = generate(
            self._model,
            [ids],
            max_new_tokens=self._max_new_tokens,
            seed=self._seed,
            tokenizer=self._tokenizer,
            eos_ids=self._eos_ids,
            on_token=on_token,
            **self._sampling,
        )[0]
        self.messages = [*kept, {"role": "assistant", "content": answer.text}]
        self.forgotten += forgotten
        self._seed += 1
        return answer


class _Steps:
    """Logits of the next token of every row, given the tokens appended so far."""

    def __init__(
        self,
        model: MindForCausalLM,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        repetition_penalty: float,
        use_cache: bool,
    ) -> None:
        self._model, self._penalty = model, repetition_penalty
        parameter = next(model.parameters())
        device = parameter.device
        batch, longest = len(prompts), max(map(len, prompts), default=0)
        most = longest + max_new_tokens
        ids = torch.zeros(batch, longest, dtype=torch.int64)
        padding = torch.zeros(batch, 1, dtype=torch.int64)
        self._seen = torch.zeros(batch, model.config.vocab_size, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            padding[row] = longest - len(prompt)
            self._seen[row, torch.tensor(prompt)] = True
        self._seen = self._seen.to(device)
        self._ids = ids.to(device)  # (batch, seq); with a cache only what it does not hold
        self._end = longest
        self._mask: torch.Tensor | None = None
        if padding.any():
            # (batch, most); the model counts positions from it.
            self._mask = (torch.arange(most) >= padding).to(torch.int64).to(device)
        self._cache = None
        if use_cache and batch:
            self._cache = KVCache(model.config, batch, most, device, parameter.dtype)

    def logits(self) -> torch.Tensor:
        """Logits (batch, vocab) in float32, with the repetition penalty."""
        output = self._model(
            self._ids,
            attention_mask=None if self._mask is None else self._mask[:, : self._end],
            cache=self._cache,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        if torch.isnan(logits).any():
            raise GenerateError(
                "the model's logits are nan: its weights are not finite, or overflow in "
                f"{str(next(self._model.parameters()).dtype).removeprefix('torch.')}"
            )
        if self._penalty != 1.0:
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(self._seen, penalised, logits)
        return logits

    def append(self, tokens: list[int]) -> None:
        """Appends one token to every row."""
        new = torch.tensor(tokens, device=self._ids.device)[:, None]  # (batch, 1)
        self._seen.scatter_(1, new, True)
        self._ids = new if self._cache is not None else torch.cat((self._ids, new), dim=1)
        self._end += 1


class _Draw:
    """Picks a token of each row."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def __call__(self, logits: torch.Tensor, rows: Sequence[_Row]) -> list[int]:
        if self._temperature == 0.0:
            greedy: list[int] = logits.argmax(dim=-1).tolist()
            return greedy
        if 0 < self._top_k < logits.shape[-1]:
            values, ids = logits.topk(self._top_k)
        else:
            values, ids = logits.sort(dim=-1, descending=True, stable=True)
        # In float64 and from the largest: a small temperature must not overflow.
        values = (values.double() - values[:, :1].double()) / self._temperature
        cumulative = values.softmax(dim=-1).cumsum(dim=-1).cpu()  # (batch, k)
        return [
            int(ids[number, self._place(cumulative[number], row)])
            for number, row in enumerate(rows)
        ]

    def _place(self, cumulative: torch.Tensor, row: _Row) -> int:
        """Where in the sorted tokens the row's draw falls."""
        if self._top_p < 1.0:
            # Up to and including the first token with which top_p is reached.
            cumulative = cumulative[: int((cumulative < self._top_p).sum()) + 1]
        drawn = torch.rand((), generator=row.generator, dtype=torch.float64) * cumulative[-1]
        place = int(torch.searchsorted(cumulative, drawn, right=True))
        return min(place, len(cumulative) - 1)


@dataclass
class _Row:
    """One prompt's continuation while it grows."""

    stop_text: _StopText
    stream: TextStream | None
    seed: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: Literal["eos", "stop"] | None = None

    def __post_init__(self) -> None:
        # On the CPU whatever the model's device is: the draws are the same everywhere.
        self.generator = torch.Generator().manual_seed(self.seed)

    def push(
        self, token: int, eos_ids: Sequence[int], number: int, on_token: OnToken | None
    ) -> None:
        if token in eos_ids:
            self.reason = "eos"
            return
        self.ids.append(token)
        text = ""
        if self.stream is not None:
            text = self.stop_text.push(self.stream.push(token))
            self.text += text
        if self.stop_text.found:
            self.reason = "stop"
        if on_token is not None:
            on_token(number, token, text)

    def completion(self, number: int, on_token: OnToken | None) -> Completion:
        if self.stream is not None and self.reason != "stop":
            text = self.stop_text.push(self.stream.flush()) + self.stop_text.flush()
            self.text += text
            if self.stop_text.found:
                self.reason = "stop"
            if text and on_token is not None:
                on_token(number, None, text)
        return Completion(self.ids, self.text, self.reason or "length")


class _StopText:
    """Lets text through up to a stop string, holding back what may be the beginning of one.

    Example:
        >>> text = _StopText(["###"])
        >>> text.push("one #"), text.push("# two ##"), text.push("# three"), text.found
        ('one ', '## two ', '', True)
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        held = self._held + text
        places = [place for stop in self._stop if (place := held.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return held[: min(places)]
        longest = max(map(len, self._stop), default=0) - 1
        keep = 0
        for size in range(1, min(longest, len(held)) + 1):
            if any(stop.startswith(held[-size:]) for stop in self._stop):
                keep = size
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _check(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    seed: int,
    stop: Sequence[str],
    tokenizer: Tokenizer | None,
) -> None:
    for name, value, fits, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, 0.0 <= temperature < math.inf, "a number of at least 0"),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("top_p", top_p, 0.0 < top_p <= 1.0, "more than 0 and at most 1"),
        (
            "repetition_penalty",
            repetition_penalty,
            0.0 < repetition_penalty < math.inf,
            "a number above 0",
        ),
        ("seed", seed, 0 <= seed < 2**62, "at least 0 and below 2**62"),
    ):
        if not fits:
            raise GenerateError(f"{name} is {value}; expected {expected}")
    if isinstance(stop, str) or "" in stop:
        raise GenerateError(f"stop is {stop!r}; expected a list of strings that are not empty")
    if stop and tokenizer is None:
        raise GenerateError("stop strings need a tokenizer")


def _check_prompts(
    model: MindForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    config = model.config
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise GenerateError(f"prompt {number} is empty; expected at least one token")
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise GenerateError(
                    f"prompt {number} has the token {token}, and the model's vocabulary "
                    f"{config.vocab_size}: the tokenizer is another model's"
                )
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise GenerateError(
                f"prompt {number} has {len(prompt)} tokens; with {max_new_tokens} new ones it "
                f"exceeds the model's context of {config.max_position_embeddings}"
            )
