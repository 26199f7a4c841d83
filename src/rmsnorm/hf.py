"""The Hugging Face switch: models that transformers makes have their norms computed here.

:func:`register` uses transformers' own patch mapping, which puts a class of ours in the place of
each norm class while a model is made. That class makes the norm that it stands for and lets
:func:`rmsnorm.rewrite.patch.patch_later` examine it once it has its weights: what a norm computes
is decided by its behaviour, instance by instance, and names only say which classes to ask.

:class:`RMSNormLayer` and :class:`RMSNormGatedLayer` do the same by way of the ``kernels`` package:
classes without a state, whose forward becomes a method of the model's own module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.rewrite.patch import patch_later
from rmsnorm.rewrite.swap import Swapped

__all__ = ["RMSNormGatedLayer", "RMSNormLayer", "kernel_mapping", "register", "unregister"]

_MODELING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
_NORM_CLASS = re.compile(r"^ *class (\w*norm\w*)\((?:torch\.)?nn\.Module\)", re.MULTILINE | re.I)


@dataclass
class _Switch:
    """Whether models are changed, and how.

    Args:
        on: whether :func:`register` was called and not taken back.
        exact: as in :func:`rmsnorm.patch`.
        names: the classes that transformers was told to replace, and what stands for them.
    """

    on: bool
    exact: bool
    names: dict[str, type[nn.Module]]


_switch = _Switch(on=False, exact=True, names={})


def register(*, exact: bool = True) -> None:
    """Let this package compute the norms of every model that transformers makes from now on.

    ``from_pretrained`` and ``from_config``, of the Auto classes and of a model's own class, then
    give models whose norms are as :func:`rmsnorm.patch` leaves them: proven to compute alike, or
    untouched. State dicts and class names stay the same. Norms are examined when
    ``from_pretrained`` has loaded the weights, or else when the model is put into a mode or called.

    It may be called again, to change ``exact``. If the ``kernels`` package is there in a version
    that transformers accepts, its mapping for the CPU is extended by :func:`kernel_mapping`; what
    an earlier call put there stays.

    Args:
        exact: change only norms that agree bit for bit, so that logits stay identical; those with a
            gate never do.

    Raises:
        ImportError: transformers is not installed, or has no patch mapping.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
        ...                      num_hidden_layers=1, num_attention_heads=1)
        >>> register()
        >>> AutoModelForCausalLM.from_config(config).eval().model.norm
        LlamaRMSNorm((8,), eps=1e-06, rmsnorm: llama in bfloat16, float16, float32)
        >>> unregister()
        >>> AutoModelForCausalLM.from_config(config).eval().model.norm
        LlamaRMSNorm((8,), eps=1e-06)
    """
    _patching()
    _switch.exact = exact
    available = importlib.import_module("transformers.utils.import_utils").is_kernels_available
    if available():
        importlib.import_module("kernels").register_kernel_mapping(kernel_mapping(exact=exact))
    if _switch.on:
        return
    _switch.on = True
    sys.meta_path.insert(0, _finder)
    for name, module in list(sys.modules.items()):
        if _MODELING.fullmatch(name):
            _replace_norms_of(name, Path(getattr(module, "__file__", None) or ""))


def unregister() -> None:
    """Let transformers make models with its own norms again.

    Models that were made before keep theirs; :func:`rmsnorm.unpatch` gives these back. An entry in
    the mapping of ``kernels`` stays, for there is no way to take it out.

    Raises:
        ImportError: transformers is not installed, or has no patch mapping.

    Example:
        >>> unregister()  # does nothing if there is nothing to take back
    """
    patching = _patching()
    if not _switch.on:
        return
    _switch.on = False
    sys.meta_path.remove(_finder)
    mapping = patching.get_patch_mapping()
    ours = [name for name, stand_in in _switch.names.items() if mapping.get(name) is stand_in]
    patching.unregister_patch_mapping(ours)
    _switch.names.clear()


def _patching() -> Any:
    """The module of transformers that has the patch mapping.

    Raises:
        ImportError: there is none.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "rmsnorm.hf needs transformers, which is not installed: pip install transformers"
        )
    try:
        return importlib.import_module("transformers.monkey_patching")
    except ModuleNotFoundError as error:
        if error.name != "transformers.monkey_patching":
            raise
        version = importlib.import_module("transformers").__version__
        raise ImportError(
            f"rmsnorm.hf needs a transformers with a patch mapping, as 5.24.0 has it; found "
            f"{version}. rmsnorm.patch(model) works with any"
        ) from None


class _Finder:
    """Learns which modules of transformers are about to be imported; it finds none itself.

    transformers compares every name in its modules with every name it was told to replace, which
    takes seconds for those of all families. So it is told those of the families in use.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _switch.on and path and _MODELING.fullmatch(fullname):
            _replace_norms_of(fullname, Path(path[0]) / f"{fullname.rpartition('.')[2]}.py")
        return None


_finder = _Finder()


def _replace_norms_of(module: str, source: Path) -> None:
    """Tells transformers to replace what may be a norm in the module with this source."""
    if not source.is_file():
        return
    patching = _patching()
    taken = patching.get_patch_mapping()
    made = {
        name: _stand_in(name, module)
        for name in _NORM_CLASS.findall(source.read_text(encoding="utf-8"))
        if name not in taken  # by somebody else, who goes first
    }
    patching.register_patch_mapping(made)
    _switch.names.update(made)


class _StandIn(type):
    """Makes classes that stand for one class, or for all of a name: calling one makes the norm.

    transformers replaces by name. Two of its modules, or a model's own code, may use one name for
    different classes, so the module that calls decides.
    """

    _home: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        module = _original(cls.__name__, caller, cls._home)(*args, **kwargs)
        if _switch.on:
            patch_later(module, exact=_switch.exact)
        return module

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return any(c.__name__ == cls.__name__ and _is_theirs(c) for c in subclass.__mro__)


def _stand_in(name: str, home: str) -> type[nn.Module]:
    made: Any = _StandIn(name, (nn.Module,), {"__module__": __name__, "_home": home})
    stand_in: type[nn.Module] = made
    return stand_in


@functools.cache
def _original(name: str, caller: str, home: str) -> type[nn.Module]:
    """The class that ``name`` means in the module ``caller``: its own, or that of ``home``."""
    found = {cls.__module__: cls for cls in _subclasses(nn.Module) if cls.__name__ == name}
    return found[caller] if caller in found else found[home]


def _subclasses(base: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for cls in base.__subclasses__():
        if _is_theirs(cls):
            yield cls
            yield from _subclasses(cls)


def _is_theirs(cls: type) -> bool:
    """Whether a class was written, not made here."""
    return not isinstance(cls, _StandIn) and "_rmsnorm_original" not in cls.__dict__


class RMSNormLayer(nn.Module):
    """A norm by the contract of ``kernels``: its forward becomes a method of the model's module.

    The first call examines that module, as :func:`rmsnorm.patch` does, and gives it the convention
    that it was found to have, or its own forward back. Weight and eps are read from it at each
    call, whatever their names.

    Example:
        >>> norm = nn.RMSNorm(4)
        >>> norm.forward = MethodType(RMSNormLayer.forward, norm)  # what kernelize() does
        >>> norm(torch.ones(2, 4)).shape
        torch.Size([2, 4])
        >>> norm
        RMSNorm((4,), eps=None, elementwise_affine=True, rmsnorm: torch in bfloat16, float16,
        float32)
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., d) -> (..., d), in the dtype that the module's own code gives."""
        return _adopt(self, hidden_states)


class RMSNormGatedLayer(nn.Module):
    """The same for a norm with a gate, which is changed though its last bits differ."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """hidden_states and gate (..., d) -> (..., d)."""
        return _adopt(self, hidden_states, gate)


def _adopt(module: nn.Module, *inputs: Tensor | None) -> Tensor:
    """A call of a module that has a layer's forward."""
    if not torch.compiler.is_compiling():
        # Unless somebody has put a wrapper around it by now, the class's forward takes over.
        forward = module.__dict__.get("forward")
        if isinstance(forward, MethodType) and forward.__func__ in _LAYER_FORWARDS:
            del module.__dict__["forward"]
        if not isinstance(module, Swapped):
            patch_later(module, exact=len(inputs) == 1)
    result: Tensor = type(module).forward(module, *inputs)
    return result


_LAYER_FORWARDS = (RMSNormLayer.forward, RMSNormGatedLayer.forward)


@dataclass(frozen=True)
class _Repository:
    """What ``kernels`` loads a layer from.

    Args:
        layer: what it loads.
    """

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"rmsnorm.hf.{self.layer.__name__}"


def kernel_mapping(*, exact: bool = True) -> dict[str, dict[str, Any]]:
    """The layers of this package for the CPU, by the names under which transformers looks for them.

    It is for ``kernels.register_kernel_mapping``, or for ``kernels.use_kernel_mapping``, which
    takes it back at the end of a block.

    Args:
        exact: without the layer for norms with a gate, whose last bits differ.

    Example:
        >>> for name, devices in kernel_mapping(exact=False).items():
        ...     print(name, devices["cpu"])
        RMSNorm rmsnorm.hf.RMSNormLayer
        RMSNormZeroCentered rmsnorm.hf.RMSNormLayer
        RMSNormGated rmsnorm.hf.RMSNormGatedLayer
    """
    layers: dict[str, type[nn.Module]] = dict.fromkeys(
        ("RMSNorm", "RMSNormZeroCentered"), RMSNormLayer
    )
    if not exact:
        layers["RMSNormGated"] = RMSNormGatedLayer
    return {name: {"cpu": _Repository(layer)} for name, layer in layers.items()}
