"""The parameters of a model's norms, which optimizers should not decay.

Weight decay pulls a parameter towards 0. For the matrices of a model that is a prior; for the
weight of a norm it is a scale pulled towards nothing (or, where 1 is added to it, towards 1).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from rmsnorm import modules
from rmsnorm.rewrite.probe import SEED, NotProvenError, copied, fingerprint, original_class, quiet

# _NormBase: every BatchNorm, SyncBatchNorm and InstanceNorm.
_TORCH = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, _NormBase)

# No weight of one element for each channel is larger, nor one for the channels of several heads.
_MOST_ELEMENTS = 2**16
# For a norm whose only parameter is one number.
_USUAL_WIDTH = 64
# A norm may hold an activation, a dropout, a parametrization.
_MOST_MODULES = 8
# Far above eps and float32's rounding, far below what any other function of a row does.
_TOLERANCE = 1e-2


def no_decay(model: nn.Module) -> list[str]:
    """The names of the parameters of every norm in ``model``, patched or not.

    A norm is a module of this package, a norm of ``torch.nn`` (RMSNorm, LayerNorm, GroupNorm,
    BatchNorm and the rest), or any other module that behaves like one: RMSNorm and LayerNorm of any
    class, grouped and gated norms, norms over other axes, with and without dropout. Names are not
    looked at; a double of the module is asked whether its output is independent of the scale of its
    input. Only what cannot be asked (it runs on a GPU alone, or takes other arguments than a tensor
    and perhaps a gate) is judged by its name: a class that is called ``...Norm...``.

    Named are all parameters that a norm itself holds: its weight under any name, its bias. Other
    biases and one-dimensional parameters are not named, for not everybody wants them exempt;
    the second example adds them.

    The model is not changed and not called. It may hold no data (the meta device), distributed
    tensors (FSDP2), parametrized weights, or wrappers (DDP, ``torch.compile``, PEFT). Where
    parameters have been flattened into others (FSDP1 without ``use_orig_params``), ask before.

    Args:
        model: any module; it may be a norm itself.

    Returns:
        The names, as in ``model.named_parameters()`` and in its order, so a shared parameter is
        named once.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8))
        >>> no_decay(model)
        ['1.weight', '1.bias', '2.weight']
        >>> exempt = set(no_decay(model))
        >>> exempt |= {name for name, p in model.named_parameters() if p.ndim < 2}
        >>> sorted(exempt)
        ['0.bias', '1.bias', '1.weight', '2.weight']
        >>> parameters = list(model.named_parameters())
        >>> optimizer = torch.optim.AdamW([
        ...     {"params": [p for name, p in parameters if name not in exempt]},
        ...     {"params": [p for name, p in parameters if name in exempt], "weight_decay": 0.0},
        ... ], weight_decay=0.1)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 4]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"no_decay() was given a {type(model).__name__}; expected a torch module")
    known: dict[Any, bool] = {}
    found = {
        id(parameter)
        for module in model.modules()
        if _is_norm(module, known)
        for parameter in _own_parameters(module)
    }
    return [name for name, parameter in model.named_parameters() if id(parameter) in found]


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those that ``module`` itself holds, parametrized ones as they are trained."""
    yield from module.parameters(recurse=False)
    for child in _parametrizations(module).values():
        yield from child.parameters(recurse=False)


def _parametrizations(module: nn.Module) -> dict[str, nn.Module]:
    """The parametrizations by the name of the tensor that each makes."""
    if not is_parametrized(module):
        return {}
    return dict(module.get_submodule("parametrizations").named_children())


def _is_norm(module: nn.Module, known: dict[Any, bool]) -> bool:
    """Whether ``module`` is a norm that holds parameters; ``known`` has the kinds seen so far."""
    if isinstance(module, (*_TORCH, modules.RMSNorm, modules.GatedRMSNorm)):
        return True
    cls = _class(module)
    if cls.__module__.startswith("torch.nn.") or not _may_be_norm(module):
        return False
    kind = fingerprint(module, shared=True)
    if kind is None or kind not in known:
        try:
            answer = _behaves_like_norm(module)
        except NotProvenError:
            answer = "norm" in cls.__name__.lower()
        if kind is None:
            return answer
        known[kind] = answer
    return known[kind]


def _class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` before it was patched or parametrized."""
    cls = original_class(module)
    if cls is type(module) and is_parametrized(module):
        cls = next(base for base in cls.__mro__[1:] if issubclass(base, nn.Module))
    return cls


def _may_be_norm(module: nn.Module) -> bool:
    """Whether the parameters, at a glance, could be those of a norm: one number per channel."""
    own = list(_own_parameters(module))
    if not own or len(list(module.modules())) > _MOST_MODULES:
        return False
    try:
        return all(
            _is_one_dimensional(parameter) or any(parameter is one for one in own)
            for parameter in module.parameters()
        ) and all(parameter.numel() <= _MOST_ELEMENTS for parameter in own)
    except RuntimeError:  # a lazy module knows no shapes yet
        return False


def _is_one_dimensional(parameter: Tensor) -> bool:
    return sum(size != 1 for size in parameter.shape) <= 1


def _behaves_like_norm(module: nn.Module) -> bool:
    """Whether a double of ``module``, asked in some layout and mode, normalises.

    Raises:
        NotProvenError: no question was understood.
    """
    understood = False
    try:
        with quiet(torch.device("cpu")), torch.random.fork_rng(devices=[]):
            double = _double(module, {})
            for x in _inputs(double):
                for ask in _questions(double):
                    answer = _normalises(ask, double, x)
                    if answer:
                        return True
                    understood = understood or answer is not None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # as in rewrite.probe: a module may do anything when asked
        raise NotProvenError(f"asking it raises {type(error).__name__}") from error
    if not understood:
        raise NotProvenError("it takes no tensor")
    return False


def _double(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A module of the same class, with random tensors on the CPU, no hooks and no way back.

    Raises:
        NotProvenError: it holds something that has no copy.
    """
    double: nn.Module = object.__new__(_class(module))
    fresh = nn.Module().__dict__
    double.__dict__.update(fresh)
    memo[id(module)] = double
    generator = torch.Generator().manual_seed(SEED)

    def random(tensor: Tensor) -> Tensor:
        return 0.5 + torch.rand(tuple(tensor.shape), generator=generator)

    for name, value in module.__dict__.items():
        if name in fresh or name == "forward" or name.startswith("_rmsnorm_"):
            continue
        floating = isinstance(value, Tensor) and value.is_floating_point()
        double.__dict__[name] = random(value) if floating else copied(value, memo, 0)
    for name, parameter in module._parameters.items():
        made = None if parameter is None else nn.Parameter(random(parameter), requires_grad=False)
        double._parameters[name] = made
    for name, child in _parametrizations(module).items():
        largest = max(child.parameters(recurse=False), key=Tensor.numel)
        double._parameters[name] = nn.Parameter(random(largest), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is None or buffer.is_meta:
            double._buffers[name] = None if buffer is None else torch.zeros(buffer.shape)
        else:
            floating = buffer.is_floating_point()
            double._buffers[name] = random(buffer) if floating else copied(buffer, memo, 0)
    for name, inner in module._modules.items():
        if name != "parametrizations":
            double._modules[name] = None if inner is None else _double(inner, memo)
    return double


def _inputs(double: nn.Module) -> Iterator[Tensor]:
    """Rows, images and heads whose channels are as many as the parameters have."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = [tuple(parameter.shape) for parameter in double.parameters()]
    rows = [tuple(itertools.dropwhile(lambda size: size == 1, shape)) for shape in shapes]
    row = max(rows, key=math.prod)
    d = math.prod(row)
    layouts: list[tuple[int, ...]] = [(2, 3, d), (6, d), (2, d, 3, 5), (2, d, 3), (2, 3, 5, d)]
    if len(row) > 1:
        layouts = [(2, 3, *row), (6, *row), (2, row[0], 3, row[1]), *layouts]
    if d == 1:
        layouts += [(2, 3, _USUAL_WIDTH), (6, _USUAL_WIDTH)]
    for layout in layouts:
        # A shifted mean, so that only what subtracts it is independent of it.
        yield torch.randn(layout, generator=generator) * 8.0 + 2.0


_Ask = Callable[[Tensor, float], Tensor | None]


def _questions(double: nn.Module) -> Iterator[_Ask]:
    """Ways of calling ``double``: x alone, x and a gate, x and a residual of x's scale."""
    try:
        parameters = list(inspect.signature(type(double).forward).parameters.values())[2:]
    except (TypeError, ValueError):
        raise NotProvenError("its forward has no signature") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    required = sum(parameter.default is parameter.empty for parameter in positional)
    for count, scaled in ((0, False), (1, False), (1, True)):
        if required <= count <= len(positional):
            yield functools.partial(_call, double, count, scaled)


def _call(double: nn.Module, count: int, scaled: bool, x: Tensor, scale: float) -> Tensor | None:
    """What becomes of ``scale * x``, in float64; ``None`` if that is no tensor of x's shape.

    ``count`` more tensors are given beside it, multiplied by the same scale if ``scaled``.
    """
    generator = torch.Generator().manual_seed(SEED + 1)
    more = [torch.randn(x.shape, generator=generator) for _ in range(count)]
    torch.default_generator.manual_seed(SEED)  # of dropout
    try:
        returned = type(double).forward(
            double, x * scale, *(y * scale if scaled else y for y in more)
        )
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # these are not its arguments
        return None
    first = returned[0] if isinstance(returned, Sequence) and returned else returned
    if not isinstance(first, Tensor) or first.shape != x.shape or not first.is_floating_point():
        return None
    return first.to(torch.float64)


def _normalises(ask: _Ask, double: nn.Module, x: Tensor) -> bool | None:
    """Whether the output is a function of the direction of ``x`` alone; ``None`` if there is none.

    In evaluation, or in training: statistics of a batch are taken there alone.
    """
    answers = []
    for training in (False, True):
        double.train(training)
        answer = _is_independent_of_scale(ask, double, x)
        if answer:
            return True
        answers.append(answer)
    return None if answers == [None, None] else False


def _is_independent_of_scale(ask: _Ask, double: nn.Module, x: Tensor) -> bool | None:
    y, scaled = ask(x, 1.0), ask(x, 4.0)
    if y is None or scaled is None:
        return None
    tolerance = _TOLERANCE * y.abs().max()
    if not torch.isfinite(y).all() or not (scaled - y).abs().max() < tolerance:
        return False
    other = ask(x.flip(0) * 0.5 + 1.0, 1.0)
    if other is None or (other - y).abs().max() < tolerance:
        return False  # the same for all rows
    moved = x.clone()
    moved.view(-1)[0] *= -64.0
    elsewhere = ask(moved, 1.0)
    if elsewhere is None or not ((elsewhere - y).abs() > tolerance).view(-1)[1:].any():
        return False  # a function of each element by itself, such as its sign
    return all(_is_of_one_channel(ask, parameter, x, y) for parameter in double.parameters())


def _is_of_one_channel(ask: _Ask, parameter: nn.Parameter, x: Tensor, y: Tensor) -> bool:
    """Whether an element of a parameter of several dimensions moves no more than its channel."""
    if _is_one_dimensional(parameter):
        return True
    element = parameter.data.view(-1)[0]
    before = element.clone()
    element += 1.0
    changed = ask(x, 1.0)
    element.copy_(before)
    if changed is None:
        return False
    return int((changed != y).sum()) * parameter.numel() <= y.numel()
