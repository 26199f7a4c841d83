"""Reads and writes models: runs of the trainer, Hugging Face folders, ``.pth`` state dicts.

A model with RMSNorm before each sublayer has the form of Hugging Face's ``LlamaForCausalLM``, and
with norms of queries and keys that of ``Qwen3ForCausalLM``: the parameters have the same names and
the same meaning, so only the configuration is translated. What the model here does not have (scaled
rotary positions, biases, other activations, experts) is refused, not ignored.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm.lm import checkpoint
from rmsnorm.lm.checkpoint import Checkpoint
from rmsnorm.lm.config import PRESETS, ConfigError, ModelConfig
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.models.files import (
    INDEX,
    PICKLED,
    WEIGHTS,
    ModelError,
    check_safetensors,
    some,
    weight_files,
)
from rmsnorm.models.load import PACKAGED, load_model
from rmsnorm.ops.rms_norm import FLOATING
from rmsnorm.progress import Say

if TYPE_CHECKING:
    from rmsnorm.lm.tokenizer import Tokenizer

__all__ = [
    "MIND",
    "difference",
    "end_ids",
    "export",
    "import_pth",
    "load",
    "model_folder",
    "read_config",
    "save",
]

MIND, _CONFIG, _GENERATION = "mind.json", "config.json", "generation_config.json"
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def model_folder(path: str | os.PathLike[str], *, say: Say | None = None) -> Path:
    """The folder that ``path`` means: itself, or what a GGUF file or a package was converted to.

    Args:
        path: a folder, a ``.gguf`` file, or the name of an installed model, such as ``"smollm2"``.
        say: called with a few words whenever a longer step begins.

    Raises:
        ModelError: there is nothing, or something else.

    Example:
        >>> model_folder("no/such/folder")
        Traceback (most recent call last):
        ...
        rmsnorm.models.files.ModelError: no/such/folder does not exist; expected the folder of a run
        or of a model, a GGUF file, or one of the names smollm2, gemma3
    """
    folder = Path(path)
    if os.fspath(path) in PACKAGED or (folder.suffix.lower() == ".gguf" and folder.is_file()):
        # Their conversion is a folder in the cache, which transformers remembers.
        return Path(load_model(path, say=say)[0].name_or_path)
    if folder.is_dir():
        return folder
    if not folder.exists():
        raise ModelError(
            f"{path} does not exist; expected the folder of a run or of a model, a GGUF file, or "
            f"one of the names {', '.join(PACKAGED)}"
        )
    what = "a file of pickled weights" if folder.suffix in PICKLED else "not a folder"
    raise ModelError(f"{path} is {what}; `rmsnorm lm import` makes a folder of .pth files")


def load(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    say: Say | None = None,
) -> tuple[MindForCausalLM, Tokenizer]:
    """A model on the CPU, in eval mode, and its tokenizer.

    Args:
        path: the folder of a run, whose newest checkpoint is taken; one that :func:`save` wrote;
            one with a ``LlamaForCausalLM`` or ``Qwen3ForCausalLM`` as transformers saves them; or
            what else :func:`model_folder` understands.
        dtype: of the weights; as they are stored if ``None``.
        say: called with a few words whenever a longer step begins.

    Raises:
        ModelError: nothing is there, it is damaged, the model here cannot compute it, or the
            tokenizer is another model's.
        CheckpointError: the newest checkpoint of a run is damaged.
        TokenizerError: the tokenizer cannot be read.

    Example:
        >>> import tempfile
        >>> from rmsnorm.lm.config import preset
        >>> from rmsnorm.lm.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["In the beginning"], 300)
        >>> model = MindForCausalLM(preset("tiny", vocab_size=tokenizer.vocab_size))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export(model, tokenizer, folder)
        ...     again, _ = load(folder)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> torch.equal(again(ids).logits, model(ids).logits)
        True
    """
    from rmsnorm.lm.tokenizer import Tokenizer

    folder = model_folder(path, say=say)
    if say is not None:
        say("loading the model")
    newest: Checkpoint | None = None
    if (folder / MIND).is_file():
        config = read_config(folder / MIND)
        newest = checkpoint.newest(folder)
        files = [_run_weights(folder, newest)]
    elif (folder / _CONFIG).is_file():
        config = read_config(folder / _CONFIG)
        files = weight_files(folder)
    else:
        raise ModelError(f"{folder} is not a model folder: it has no {MIND} and no {_CONFIG}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(check_safetensors(file))
    _check_shapes(config, shapes, folder)
    state = _read(files)
    _check_kinds(state, folder)
    model = _assemble(config, state, dtype, folder)
    tokenizer = Tokenizer.load(folder)
    _check_vocabulary(tokenizer, config, folder)
    if newest is not None:
        _check_run(folder, newest, config, tokenizer)
    return model, tokenizer


def save(model: MindForCausalLM, tokenizer: Tokenizer | None, folder: str | Path) -> None:
    """Writes a folder that :func:`load` reads, whatever the model's norms.

    Transformers reads it too, where :func:`export` would not refuse the model.

    Raises:
        ModelError: the tokenizer has tokens that the model lacks.
        OSError: it cannot be written.
    """
    mind = {MIND: _json(model.config.to_dict())}
    hugging_face = {} if _without_form(model.config) else _hugging_face(model, tokenizer)
    _write(model, tokenizer, Path(folder), {**mind, **hugging_face})


def export(model: MindForCausalLM, tokenizer: Tokenizer | None, folder: str | Path) -> None:
    """Writes a folder that ``transformers.AutoModelForCausalLM`` loads, with the same logits.

    Args:
        model: with RMSNorm before each sublayer; with norms of queries and keys it becomes a
            Qwen3, without them a LLaMA.
        tokenizer: saved beside it, if there is one.
        folder: made if it does not exist; files that are there already are replaced.

    Raises:
        ModelError: the model has no such form, or the tokenizer has tokens that it lacks.
        OSError: the folder cannot be written.
    """
    reason = _without_form(model.config)
    if reason:
        raise ModelError(f"transformers has no model of this form: {reason}")
    _write(model, tokenizer, Path(folder), _hugging_face(model, tokenizer))


def import_pth(
    path: str | os.PathLike[str],
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
) -> MindForCausalLM:
    """The model of a state dict with LLaMA's names, as minimind's training scripts save it.

    The file is a pickle; it is read by a reader that makes tensors and nothing else.

    Args:
        path: the file.
        config: the model's; the preset whose shapes are the file's if ``None``.
        dtype: of the weights; as they are stored if ``None``.

    Raises:
        ModelError: the file is missing, damaged, holds something else than tensors, or another
            model than ``config`` says.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch explains at length how to open the file nevertheless, which is not advised here.
        reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise ModelError(
            f"{path} cannot be read as a state dict of tensors ({type(error).__name__}: "
            f"{reason[:200]})"
        ) from None
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise ModelError(f"{path} holds no state dict: expected tensors by the names of parameters")
    state = {_plain(name): value for name, value in state.items()}
    _check_kinds(state, path)
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if config is None:
        config = _guess(shapes, path)
    else:
        _check_shapes(config, shapes, path)
    return _assemble(config, state, dtype, path)


def difference(model: MindForCausalLM, folder: str | Path) -> tuple[float, float]:
    """How far apart the logits of ``model`` and of what transformers loads from ``folder`` are.

    Both compute in float32, on 64 tokens that are spread over the vocabulary.

    Returns:
        The largest absolute difference, and the largest absolute logit.

    Raises:
        ModelError: transformers cannot load the folder, or is not installed.
    """
    theirs, _ = load_model(folder, "float32")
    vocab = model.config.vocab_size
    ids = (torch.arange(64) * 40503 % vocab)[None]
    ours = model
    if next(model.parameters()).dtype is not torch.float32:
        ours = _assemble(model.config, model.state_dict(), torch.float32, Path(folder))
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits
        logits = ours(ids).logits
    return float((logits - wanted).abs().max()), float(wanted.abs().max())


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The model's configuration in a ``mind.json``, or in the ``config.json`` of transformers.

    Raises:
        ModelError: the file is missing or damaged, a field is missing or wrong, or the model here
            cannot compute what it describes; the message says what.
    """
    path = Path(path)
    fields = _read_json(path)
    try:
        if "model_type" in fields or "architectures" in fields:
            return ModelConfig.from_dict(_translated(fields))
        return ModelConfig.from_dict(fields)
    except ConfigError as error:
        raise ModelError(f"{path}: {error}") from None


def end_ids(folder: str | os.PathLike[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text: those of ``generation_config.json``, and the tokenizer's own.

    Raises:
        ModelError: the file is damaged.
    """
    path = Path(folder) / _GENERATION
    found = _read_json(path).get("eos_token_id") if path.is_file() else None
    listed = found if isinstance(found, list) else [found]
    if not all(type(token) is int or token is None for token in listed):
        raise ModelError(f"{path}: eos_token_id is {found!r}; expected token ids")
    return _distinct([*listed, *_ends(tokenizer)])


def _ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens with which a text, and a turn of a chat, end."""
    from rmsnorm.lm.tokenizer import IM_END

    return _distinct([tokenizer.eos_id, tokenizer.token_id(IM_END)])


def _distinct(tokens: list[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in tokens if token is not None))


def _run_weights(folder: Path, newest: Checkpoint | None) -> Path:
    """The weights of a run's newest checkpoint, or those beside its configuration."""
    if newest is not None:
        newest.verify()
        return newest.folder / checkpoint.MODEL
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no checkpoint yet")
    return folder / WEIGHTS


def _check_run(folder: Path, newest: Checkpoint, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Refuses a configuration or a tokenizer that was changed since the checkpoint was written."""
    for name, now, key in (
        (MIND, config.to_dict(), "model"),
        ("tokenizer.json", tokenizer.fingerprint, "tokenizer"),
    ):
        if newest.state.get(key, now) != now:
            raise ModelError(
                f"{folder / name} is another model's, or was changed: {newest.folder} was written "
                "with another"
            )


def _read(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files, mapped, not copied."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except SafetensorError as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    return state


def _check_kinds(state: Mapping[str, Tensor], source: Path) -> None:
    """Refuses tensors that are no weights of a model here, whatever their shapes."""
    for name, value in state.items():
        if _ignored(name):
            continue
        if value.dtype not in FLOATING:
            raise ModelError(
                f"{source}: {name} is {str(value.dtype).removeprefix('torch.')}; expected float32, "
                "float64, bfloat16 or float16: quantised weights are not read"
            )
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise ModelError(f"{source}: {name} is no dense tensor with values; expected one")


def _assemble(
    config: ModelConfig, state: Mapping[str, Tensor], dtype: torch.dtype | None, source: Path
) -> MindForCausalLM:
    """The model with the weights of ``state``, which has been checked."""
    model = MindForCausalLM(config, device="meta", dtype=dtype or state[_EMBEDDING].dtype)
    # Into the model's own memory: a mapped file changes with the file, and its alignment can change
    # the last bits of matrix products.
    model.to_empty(device="cpu")
    model.tie_weights()
    if config.tie_word_embeddings:
        head = state.get(_LM_HEAD)
        if head is not None and not torch.equal(head, state[_EMBEDDING]):
            raise ModelError(
                f"{source}: the configuration ties {_LM_HEAD} to {_EMBEDDING}, but they differ"
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    return model.eval()


def _check_shapes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Refuses ``shapes`` that are not those of the parameters of ``config``.

    Raises:
        ModelError: weights are missing, of other shapes, or not part of the model.
    """
    # One layer more than there are is enough to miss its weights: to make as many as a damaged
    # configuration asks for may take hours.
    layers = len({found[1] for name in shapes if (found := _LAYER.match(name))})
    config = replace(config, num_hidden_layers=min(config.num_hidden_layers, layers + 1))
    expected = {
        name: tuple(parameter.shape)
        for name, parameter in MindForCausalLM(config, device="meta").named_parameters()
    }
    wrong = [
        f"{name} has shape {shapes[name]}; expected {shape}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if wrong:
        raise ModelError(f"{source} does not fit its configuration: {some(wrong)}")
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelError(f"{source} lacks weights of its model: {some(missing)}")
    known = {*expected, _LM_HEAD}
    unknown = [name for name in shapes if name not in known and not _ignored(name)]
    if unknown:
        raise ModelError(f"{source} has weights that the model here lacks: {some(unknown)}")


def _guess(shapes: Mapping[str, tuple[int, ...]], source: Path) -> ModelConfig:
    """The preset that ``shapes`` are of: the shapes alone do not tell how many heads there are."""
    for config in PRESETS.values():
        try:
            _check_shapes(config, shapes, source)
        except ModelError:
            continue
        return config
    raise ModelError(
        f"{source} has the shapes of none of the presets {', '.join(PRESETS)}; give the model's "
        "configuration"
    )


def _ignored(name: str) -> bool:
    """Whether a tensor is a table of rotary positions, which are computed when needed."""
    return name.rpartition(".")[2] in ("inv_freq", "freqs_cos", "freqs_sin")


def _plain(name: str) -> str:
    """The name without what ``torch.compile`` and DistributedDataParallel put before it."""
    for prefix in ("_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, source: object) -> None:
    """Refuses a tokenizer with more tokens than the embedding has rows, or with many fewer.

    Rows of padding make the number round; they are a few in a hundred at most.
    """
    if not 15 / 16 * config.vocab_size <= tokenizer.vocab_size <= config.vocab_size:
        raise ModelError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens and the model "
            f"{config.vocab_size}: it is another model's"
        )


# Fields of config.json with which the model here computes what transformers does, and only with
# these values; a field that is missing has the first.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_FORMS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONTEXTS = {"llama": 2048, "qwen3": 32768}


def _translated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that say what transformers' ``fields`` do.

    Fields that are missing have the defaults of transformers' LlamaConfig and Qwen3Config.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _FORMS:
        raise ConfigError(f"model_type is {kind!r}; expected one of {', '.join(_FORMS)}")
    architectures = fields.get("architectures")
    if architectures not in (None, [_FORMS[kind]]):
        raise ConfigError(f"architectures is {architectures!r}; expected {_FORMS[kind]}")
    for name, values in _NEEDED.items():
        if fields.get(name, values[0]) not in values:
            raise ConfigError(
                f"{name} is {fields[name]!r}; the model here computes {values[0]!r} only"
            )
    layers = fields.get("layer_types") or []
    if not isinstance(layers, list):
        raise ConfigError(f"layer_types is {layers!r}; expected a list")
    for layer in layers:
        if layer != "full_attention":
            raise ConfigError(f"layer_types has {layer!r}; the model here has full_attention only")
    for name in _SIZES:
        if fields.get(name) is None:
            raise ConfigError(f"{name} is missing")
    heads = fields["num_attention_heads"]
    width = fields.get("head_dim")
    if width is None:
        width = 128 if kind == "qwen3" else _even_share(fields["hidden_size"], heads)
    key_value_heads = fields.get("num_key_value_heads")
    if key_value_heads is None:
        key_value_heads = 32 if kind == "qwen3" and "num_key_value_heads" not in fields else heads
    return {
        **{name: fields[name] for name in _SIZES},
        "num_key_value_heads": key_value_heads,
        "head_dim": width,
        "max_position_embeddings": fields.get("max_position_embeddings", _CONTEXTS[kind]),
        "rope_theta": _rope_theta(fields),
        "rms_norm_eps": fields.get("rms_norm_eps", 1e-6),
        "initializer_range": fields.get("initializer_range", 0.02),
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
        "qk_norm": kind == "qwen3",
    }


def _even_share(hidden_size: Any, heads: Any) -> Any:
    """The width of a head where none is given."""
    for name, value in (("hidden_size", hidden_size), ("num_attention_heads", heads)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; expected a positive int")
    if hidden_size % heads:
        raise ConfigError(
            f"hidden_size is {hidden_size}; expected a multiple of num_attention_heads, {heads}"
        )
    return hidden_size // heads


def _rope_theta(fields: Mapping[str, Any]) -> Any:
    """The base of the rotary frequencies, which must not be scaled.

    Transformers 5 has it in ``rope_parameters``; earlier ones beside a ``rope_scaling``.
    """
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"rope_parameters is {rope!r}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"rope_parameters has rope_type {kind!r}; the model here does not scale rotary "
            "positions: expected 'default'"
        )
    for place in (rope, fields):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError(
                f"partial_rotary_factor is {place['partial_rotary_factor']!r}; the model here "
                "turns whole heads: expected 1.0"
            )
    return rope.get("rope_theta", fields.get("rope_theta", 10000.0))


def _without_form(config: ModelConfig) -> str | None:
    """Why transformers has no model like this; ``None`` if it has one."""
    if config.norm != "rms":
        return f"norm is {config.norm!r}; expected 'rms'"
    if config.placement != "pre":
        return f"placement is {config.placement!r}; expected 'pre'"
    if not config.qk_norm and config.hidden_size % config.num_attention_heads:
        return (
            f"hidden_size is {config.hidden_size}, which LLaMA's configuration wants to be a "
            f"multiple of num_attention_heads, {config.num_attention_heads}"
        )
    return None


def _hugging_face(model: MindForCausalLM, tokenizer: Tokenizer | None) -> dict[str, str]:
    """The contents of config.json and generation_config.json."""
    config = model.config
    kind = "qwen3" if config.qk_norm else "llama"
    ours = {"qk_norm", "norm", "partial", "placement", "fuse_residual", "rope_theta"}
    ends = None if tokenizer is None else list(_ends(tokenizer))
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id if tokenizer is not None else None,
        "pad_token_id": tokenizer.pad_id if tokenizer is not None else None,
    }
    fields: dict[str, Any] = {
        "architectures": [_FORMS[kind]],
        "model_type": kind,
        **{name: value for name, value in config.to_dict().items() if name not in ours},
        # Where transformers 5 looks, and where earlier ones do.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({"use_sliding_window": False} if kind == "qwen3" else {"mlp_bias": False}),
        **special,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "use_cache": True,
    }
    generation = {**special, "eos_token_id": ends}
    return {_CONFIG: _json(fields), _GENERATION: _json(generation)}


def _write(
    model: MindForCausalLM, tokenizer: Tokenizer | None, folder: Path, texts: Mapping[str, str]
) -> None:
    """Writes the weights, the tokenizer and ``texts``, by file name, each file at once."""
    if tokenizer is not None:
        _check_vocabulary(tokenizer, model.config, "the model")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        new = Path(name)
        if tokenizer is not None:
            tokenizer.save(new)
        # A tied output layer is no parameter of its own.
        checkpoint.write_tensors(
            new / WEIGHTS, dict(model.named_parameters()), metadata={"format": "pt"}
        )
        for file, text in texts.items():
            (new / file).write_text(text, encoding="utf-8")
        written = {path.name for path in new.iterdir()}
        for name in sorted(written):
            (new / name).replace(folder / name)
    # Those of a model that was here before would be believed.
    for name in (INDEX, MIND, "config.json", "generation_config.json"):
        if name not in written:
            (folder / name).unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} holds no JSON object")
    return fields


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"
