"""Finds every norm of a language model, replaces them in a copy, and compares the copy with it.

The copy shares the weights, so a model is compared with itself: the same tokens go through both, in
one pass (prefill) and one at a time behind a cache (decoding), and the logits must be the same
bits. What a wrong convention would have changed is measured beside it. An encoder-decoder model
gets the tokens in both parts; of an encoder alone the hidden states are compared, in one pass.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.bench.alone import calls_of
from rmsnorm.ops.route import gated_rms_norm, rms_norm
from rmsnorm.progress import Say
from rmsnorm.rewrite.patch import patch
from rmsnorm.rewrite.probe import dtype_name
from rmsnorm.rewrite.report import Entry, name_pattern
from rmsnorm.spec import NormSpec, Rounding

# Of a model without a tokenizer: as many as a short text has.
_RANDOM_TOKENS = 58


@dataclass(frozen=True)
class NormGroup:
    """Norms that differ only in the number of their layer."""

    pattern: str
    """Their names, with ``*`` for the numbers."""
    cls: str
    convention: str
    """The named spec, or what parts it from the nearest one."""
    eps: float | None
    shape: tuple[int, ...]
    count: int
    swapped: bool
    reason: str
    """Why they were left; empty if they were swapped."""
    bit_identical: bool


@dataclass(frozen=True)
class Proof:
    """The patched model's logits, or hidden states, against the unpatched model's."""

    prefill_tokens: int
    prefill_identical: bool
    decode_tokens: int
    decode_identical: bool
    max_abs_diff: float
    """The largest difference of a logit, prefill and decoding; 0.0 where both are identical."""
    wrong_max_abs_diff: float
    """The same for prefill, had every norm rounded on the other side of its weight."""
    compared: str = "logits"
    """What was compared: ``"logits"``, or ``"hidden states"`` of a model without a head."""

    @property
    def holds(self) -> bool:
        """Whether all logits are identical."""
        return self.prefill_identical and self.decode_identical


@dataclass(frozen=True)
class Timing:
    """Median seconds of one piece of work, before and after, measured in turns."""

    what: str
    before: float
    after: float
    rounds: int


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect_model` found, for one dtype."""

    dtype: str
    groups: tuple[NormGroup, ...]
    proof: Proof
    timings: tuple[Timing, ...]
    fused_blocks: int = 0
    """How many blocks have their residual additions joined with their norms."""
    blocks: int = 0
    """How many were looked at for that; 0 unless it was asked for."""

    @property
    def swapped(self) -> int:
        """How many norms were replaced."""
        return sum(group.count for group in self.groups if group.swapped)

    @property
    def norms(self) -> int:
        """How many norms there are."""
        return sum(group.count for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain lists, strings and numbers, for JSON."""
        return {**asdict(self), "norms": self.norms, "swapped": self.swapped}


def token_ids(model: Any, tokenizer: Any | None, text: str, most: int) -> Tensor:
    """The ids of the first tokens of ``text``; random ones for a model without a tokenizer.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer, or ``None``.
        text: any text.
        most: how many tokens at most.

    Returns:
        (1, n) int64 with n <= ``most``; n may be too small for :func:`inspect_model`.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        return torch.randint(vocabulary, (1, min(most, _RANDOM_TOKENS)), generator=generator)
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"][:, :most]
    return ids


def inspect_model(
    model: nn.Module,
    tokens: Tensor,
    *,
    decode_tokens: int = 8,
    seconds: float = 10.0,
    exact: bool = False,
    fuse_residual: bool = False,
    say: Say | None = None,
) -> Inspection:
    """Identifies, patches, proves and times the norms of ``model``, which is left as it is.

    Args:
        model: a language model of transformers, in eval mode: a decoder, with attention or a state
            space, an encoder and a decoder of text or of speech, or an encoder, which decodes
            nothing. Speech is random.
        tokens: (1, n) int64, the token ids of a text, n >= 2.
        decode_tokens: how many tokens at the end of the text are decoded one at a time.
        seconds: about how long to measure times; 0 leaves them out.
        exact: replace only norms that agree bit for bit, as in :func:`rmsnorm.patch`.
        fuse_residual: join additions and norms, as there.
        say: called with a few words whenever a longer step begins.

    Returns:
        The norms in groups, the proof, and the medians of the times.

    Raises:
        ValueError: ``tokens`` is not one row of at least two tokens, or the model takes something
            that is neither tokens nor a mel spectrogram.
    """
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 2:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected (1, n) with n >= 2")
    say = say or (lambda _: None)
    say("finding the norms")
    patched = twin_of(model)
    report = patch(patched, exact=exact, fuse_residual=fuse_residual)
    entries = report.entries
    swapped = [entry for entry in entries if entry.swapped]
    steps = min(decode_tokens, tokens.shape[1] - 1) if decodes(model) else 0
    with torch.inference_mode():
        say("comparing the logits")
        expected = prefill(model, tokens), _decode(model, tokens, steps)
        actual = prefill(patched, tokens), _decode(patched, tokens, steps)
        say("trying the wrong convention")
        wrong = prefill(_wrong(model, swapped), tokens)
        proof = Proof(
            prefill_tokens=tokens.shape[1],
            prefill_identical=torch.equal(expected[0], actual[0]),
            decode_tokens=steps,
            decode_identical=torch.equal(expected[1], actual[1]),
            max_abs_diff=max(map(_max_abs_diff, expected, actual)),
            wrong_max_abs_diff=_max_abs_diff(expected[0], wrong),
            compared=_compared(model),
        )
        timings: tuple[Timing, ...] = ()
        if seconds > 0 and swapped and steps:
            say("timing")
            names = [entry.name for entry in swapped]
            timings = _time(model, patched, names, tokens, steps, seconds)
    dtype = dtype_name(next(model.parameters()).dtype)
    blocks = [block.fused for block in report.blocks]
    return Inspection(dtype, _group(entries), proof, timings, sum(blocks), len(blocks))


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that shares its parameters and buffers."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def decodes(model: Any) -> bool:
    """Whether the model predicts one token after another."""
    return bool(model.can_generate())


def _compared(model: Any) -> str:
    return "hidden states" if model.get_output_embeddings() is None else "logits"


def inputs_of(model: Any, tokens: Tensor) -> dict[str, Any]:
    """What the model is called with for one pass over ``tokens``.

    Raises:
        ValueError: it takes something else.
    """
    name = model.main_input_name
    given: dict[str, Any] = {name: tokens}
    if name == "input_features" and hasattr(model.config, "max_source_positions"):
        # The spectrogram is twice as long as what the encoder makes of it.
        shape = (len(tokens), model.config.num_mel_bins, 2 * model.config.max_source_positions)
        features = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        given = {name: features.to(model.device, model.dtype)}
    elif name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {name}; expected a model of tokens or mel spectrograms"
        )
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    return given


def prefill(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of all tokens in one pass, (1, n, vocabulary), or the hidden states of a model
    without a head, (1, n, hidden_size)."""
    cache = {"use_cache": False} if decodes(model) else {}
    output = model(**inputs_of(model, tokens), **cache)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result


def _decode(model: nn.Module, tokens: Tensor, steps: int) -> Tensor:
    """The logits of the last ``steps`` tokens, each fed alone behind a cache of those before it:
    (1, steps, vocabulary); nothing if ``steps`` is 0."""
    if steps == 0:
        return torch.empty(0)
    cache = cache_after(model, tokens, steps)
    return torch.cat(
        [decode_step(model, token, cache) for token in tokens[:, -steps:].split(1, 1)], 1
    )


def cache_after(model: nn.Module, tokens: Tensor, steps: int) -> dict[str, Any]:
    """What the model is called with beside the next token, after all but the last ``steps``: the
    cache, under the name that its forward has for it, and what its encoder gave."""
    given = inputs_of(model, tokens)
    given[_ids_name(model)] = tokens[:, :-steps]
    output = model(**given, use_cache=True)
    # The argument's name until transformers 5.24, and since.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    found = {name: output.cache if "cache" in output else output.past_key_values}
    if "encoder_last_hidden_state" in output:
        found["encoder_outputs"] = (output.encoder_last_hidden_state,)
    return found


def decode_step(model: nn.Module, token: Tensor, cache: dict[str, Any]) -> Tensor:
    logits: Tensor = model(**{_ids_name(model): token}, use_cache=True, **cache).logits
    return logits


def _ids_name(model: Any) -> str:
    return "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"


def _max_abs_diff(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _wrong(model: nn.Module, entries: Sequence[Entry]) -> nn.Module:
    """A twin of ``model`` whose norms round on the other side of the weight: xhat before it where
    the convention is to round the product only, and the reverse."""
    twin = twin_of(model)
    for entry in entries:
        module = twin.get_submodule(entry.name)
        spec = entry.spec
        assert spec is not None  # it was swapped
        if entry.weight_inside:
            continue  # its product is rounded on one side only
        other: Rounding = "before_weight" if spec.rounding == "after_weight" else "after_weight"
        module.register_forward_hook(
            functools.partial(
                _recompute,
                weight=_operand(module, entry.weight, entry.shape),
                bias=_operand(module, entry.bias, entry.shape),
                eps=entry.eps,
                spec=replace(spec, rounding=other),
            ),
            with_kwargs=True,
        )
    return twin


def _operand(module: nn.Module, name: str | None, shape: tuple[int, ...] | None) -> Tensor | None:
    """The weight or bias of that name, without leading dimensions of 1."""
    if name is None:
        return None
    tensor: Tensor = getattr(module, name)
    return tensor if shape is None else tensor.reshape(shape)


def _recompute(
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    spec: NormSpec,
) -> Tensor:
    """A forward hook: the norm of the module's input under ``spec``, in the dtype of its output."""
    x, *gate = (*args, *kwargs.values())
    if spec.gate is None:
        return rms_norm(x, weight, eps, spec=spec, bias=bias).to(output.dtype)
    if not gate:
        return output
    return gated_rms_norm(x, gate[0], weight, eps, spec=spec).to(output.dtype)


def _time(
    before: nn.Module,
    after: nn.Module,
    names: Sequence[str],
    tokens: Tensor,
    steps: int,
    seconds: float,
) -> tuple[Timing, ...]:
    """Times the norms alone, on the inputs that they get, and whole forward passes, in turns."""
    last = tokens[:, -1:]
    caches = {model: cache_after(model, tokens, 1) for model in (before, after)}
    inputs = {
        "prefill": calls_of(before, names, lambda: prefill(before, tokens)),
        "decoding": calls_of(
            before, names, lambda: decode_step(before, last, copy.deepcopy(caches[before]))
        ),
    }

    def norms(model: nn.Module, stage: str) -> Callable[[], object]:
        calls = [(model.get_submodule(name), call) for name, call in inputs[stage]]
        return lambda: [module(*args, **kwargs) for module, (args, kwargs) in calls]

    def forward(model: nn.Module, stage: str) -> Callable[[], object]:
        if stage == "prefill":
            return lambda: prefill(model, tokens)
        cache = copy.deepcopy(caches[model])
        return lambda: decode_step(model, last, cache)

    works = [
        (f"{kind}, {stage}", make, stage)
        for kind, make in (("norms", norms), ("forward", forward))
        for stage in inputs
    ]
    timings = []
    for what, make, stage in works:
        taken: tuple[list[float], list[float]] = ([], [])
        end = time.perf_counter() + seconds / len(works)
        while len(taken[0]) < 5 or (time.perf_counter() < end and len(taken[0]) < 100):
            # The side that goes first alternates, and decoding gets a fresh cache, which it grows.
            sides = list(zip((before, after), taken, strict=True))
            for model, times in sides if len(taken[0]) % 2 else reversed(sides):
                work = make(model, stage)
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
        old, new = map(statistics.median, taken)
        timings.append(Timing(what, old, new, rounds=len(taken[0])))
    return tuple(timings)


def _group(entries: Sequence[Entry]) -> tuple[NormGroup, ...]:
    groups: dict[NormGroup, int] = {}
    for entry in entries:
        group = NormGroup(
            pattern=name_pattern(entry.name),
            cls=entry.cls,
            convention=entry.convention,
            eps=entry.eps,
            shape=tuple(entry.shape or ()),
            count=0,
            swapped=entry.swapped,
            reason="" if entry.swapped else entry.reason,
            bit_identical=bool(entry.bit_identical),
        )
        groups[group] = groups.get(group, 0) + 1
    return tuple(replace(group, count=count) for group, count in groups.items())
