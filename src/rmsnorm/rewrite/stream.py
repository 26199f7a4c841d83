"""The residual stream while a block runs: it joins each addition to it with the norm of the sum.

:mod:`rmsnorm.rewrite.residual` gives a block's own forward a :class:`Stream` in the place of its
input. The block does with it what it was seen to do with a tensor: it normalises it, and adds to
it what comes out of attention and MLP. The addition knows which norm is next and computes both in
one pass; the norm, when it is called, finds its result done. Attention, MLP, their hooks and their
caches see plain tensors only.

A block's last sum leaves it as a plain tensor, and the norm that follows is in the next block, or
after all of them. Which one it is is learnt by watching: the norm that was given that very tensor.
From then on its result is left in its :class:`Slot`, where it takes it if it is given that tensor,
unchanged, and nothing else has changed either. So nothing depends on how the blocks are called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rmsnorm.ops import add_rms_norm as operation
from rmsnorm.ops.transforms import in_autocast, needs_gradient, with_versions

if TYPE_CHECKING:
    from rmsnorm.rewrite.plan import Plan

# The attributes of a swapped norm that hold its plan and its slot.
PLAN = "_rmsnorm_plan"
SLOT = "_rmsnorm_slot"

# What is saved is to read the sum once more, which takes no time in a cache; what it costs is a few
# microseconds in Python. For fewer elements the block's own code is faster.
LEAST_ELEMENTS = 2**20

# How often a block's last addition computes the norm of another module than the one that follows.
_PATIENCE = 8

_ADDITIONS: frozenset[Any] = frozenset({Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add})
_ADDITIONS_IN_PLACE: frozenset[Any] = frozenset({Tensor.add_, Tensor.__iadd__})
# What a block may ask of its stream; the answers are no tensors.
SHAPES = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel", "requires_grad"})


class Tail:
    """The norm that follows a block's last addition, as far as it is known.

    A copy knows none: it belongs to another model.
    """

    __slots__ = ("norm", "patience")

    def __init__(self) -> None:
        self.norm: weakref.ref[nn.Module] | None = None
        self.patience = _PATIENCE

    def missed(self) -> None:
        """Take note that another module was given the sum, or it was changed before."""
        self.norm = None
        self.patience -= 1

    def __reduce__(self) -> tuple[type[Tail], tuple[()]]:
        return Tail, ()


class _Handed:
    """A norm's result and what it was computed from."""

    __slots__ = (
        "address",
        "eps",
        "plan",
        "tail",
        "total",
        "version",
        "weight",
        "weight_version",
        "y",
    )

    y: Tensor
    total: weakref.ref[Tensor]
    version: int
    address: int
    plan: Plan
    weight: Tensor | None
    weight_version: int
    eps: Any
    tail: Tail

    def is_for(self, module: nn.Module, plan: Plan, x: Tensor) -> bool:
        """Whether ``module`` would compute the same from ``x``."""
        weight = self.weight
        return (
            self.total() is x
            and x._version == self.version
            and x.data_ptr() == self.address  # setting x.data counts as no change
            and self.plan is plan
            and (
                weight is None
                or (_weight_of(module, plan) is weight and weight._version == self.weight_version)
            )
            and plan.eps_of(module) == self.eps
            and not needs_gradient(x, weight)
            and not in_autocast()
        )


class Slot:
    """Where a norm finds its result if it was computed with the addition before it.

    A copy is empty.

    Args:
        least: tensors of fewer elements come from no stream, so C++ need not look here for them.
    """

    __slots__ = ("handed", "least")

    def __init__(self, least: int = 0) -> None:
        self.handed: _Handed | None = None
        self.least = least

    def __reduce__(self) -> tuple[type[Slot], tuple[int]]:
        return Slot, (self.least,)

    def put(self, handed: _Handed) -> None:
        """Leave a result; one that is still there was left for nothing."""
        before = self.handed
        if before is not None:
            before.tail.missed()
        self.handed = handed

    def drop(self, total: weakref.ref[Tensor]) -> None:
        """Free a result that nobody can ask for: its sum is gone."""
        handed = self.handed
        if handed is not None and handed.total is total:
            self.handed = None
            handed.tail.missed()

    def take(self, module: nn.Module, plan: Plan, x: Tensor) -> Tensor | None:
        """The result for ``x``, once, or ``None`` if it must be computed."""
        handed = self.handed
        if handed is None:
            _learn(module, x)
            return None
        self.handed = None
        if handed.is_for(module, plan, x):
            return handed.y
        handed.tail.missed()
        return None


# The last sum that left a block whose successor is not known, and the block's tail.
_last: tuple[weakref.ref[Tensor], Tail] | None = None


def _learn(module: nn.Module, x: Tensor) -> None:
    """If ``x`` just left a block, ``module`` is the norm that follows it."""
    global _last
    if _last is not None and _last[0]() is x:
        _last[1].norm = weakref.ref(module)
        _last = None


def _weight_of(module: nn.Module, plan: Plan) -> Tensor | None:
    if plan.weight is None:
        return None
    name = plan.weight.name
    weight = module._parameters.get(name)
    return getattr(module, name, None) if weight is None else weight


class Course:
    """What a block does with its stream; index i is the stream after i additions.

    Args:
        norms: the names in the block of the modules that normalise it; of the last, ``None``.
        receivers: the names of all modules that are given it, swapped norms each.
        argument: the name of the forward's argument that it comes in.
        least: how many elements it must have to be worth it.
    """

    def __init__(
        self,
        norms: tuple[str | None, ...],
        receivers: frozenset[str],
        argument: str,
        least: int = LEAST_ELEMENTS,
    ) -> None:
        self.norms = norms
        self.receivers = tuple(sorted(receivers))
        self.argument = argument
        self.least = least
        self.tail = Tail()
        self._paths = tuple(tuple(name.split(".")) for name in self.receivers)
        order = [None if name is None else self.receivers.index(name) for name in norms]
        self._order = tuple(order)

    def __reduce__(self) -> tuple[type[Course], tuple[Any, ...]]:
        return Course, (self.norms, frozenset(self.receivers), self.argument, self.least)

    def modules(self, block: nn.Module) -> tuple[nn.Module | None, ...] | None:
        """The modules of ``norms``; ``None`` if one of the receivers is to see a plain tensor."""
        found = []
        for path in self._paths:
            module: Any = block
            for name in path:
                module = module._modules.get(name)
                if module is None:
                    return None
            state = module.__dict__
            if (
                state.get(PLAN) is None
                or state["_forward_pre_hooks"]
                or state["_forward_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or "forward" in state
                or state.get("_compiled_call_impl") is not None
            ):
                return None  # somebody sees what it is given, or has compiled it for tensors
            found.append(module)
        return tuple([None if i is None else found[i] for i in self._order])


class Stream:
    """A block's residual stream, in the place of a tensor.

    Whatever is asked of it beside additions is asked of the tensor.

    Args:
        tensor: the stream's value.
        norms: the module that normalises it after i additions, for each i; the last is not looked
            at.
        tail: what is known of the norm after the last addition.
        additions: how many there were so far.
        y: the stream's norm by ``norms[additions]``, if that is computed.
    """

    __slots__ = ("_additions", "_differentiated", "_norms", "_tail", "_y", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        norms: tuple[nn.Module | None, ...],
        tail: Tail,
        additions: int = 0,
        y: Tensor | None = None,
    ) -> None:
        self.tensor = tensor
        self._norms = norms
        self._tail = tail
        self._additions = additions
        self._y = y
        self._differentiated = y is not None and torch.is_grad_enabled()

    def take(self, module: nn.Module) -> Tensor | None:
        """The norm of the stream by ``module``, once, or ``None`` if it must be computed."""
        y = self._y
        if y is None or self._norms[self._additions] is not module:
            return None
        self._y = None
        return y if torch.is_grad_enabled() is self._differentiated else None

    def plus(self, branch: Any) -> Stream:
        """The stream after adding ``branch``."""
        h = self.tensor
        additions = self._additions + 1
        joined: tuple[Tensor | None, Tensor] | None = None
        if (
            type(branch) is Tensor
            and branch.dtype == h.dtype
            and branch.shape == h.shape
            and branch.is_contiguous()
            and h.is_contiguous()
        ):
            last = len(self._norms) - 1
            if additions < last:
                norm = self._norms[additions]
                if norm is not None:
                    joined = _joined(h, branch, norm)
            elif additions == last:
                joined = self._last(h, branch)
        y, total = (None, h + branch) if joined is None else joined
        return Stream(total, self._norms, self._tail, additions, y)

    def _last(self, h: Tensor, branch: Tensor) -> tuple[None, Tensor] | None:
        """The last addition, with the norm that follows the block left in its slot."""
        found = self._tail.norm
        norm = None if found is None else found()
        if norm is None:
            return None
        state = norm.__dict__
        plan: Plan | None = state.get(PLAN)
        slot: Slot | None = state.get(SLOT)
        if slot is None or plan is None or not plan.joins:
            return None
        operands = plan.operands(norm, branch)
        if operands is None:
            return None
        weight, _, eps = operands
        # Whoever asks for the gradient of a block's output means all that comes of it, and the norm
        # must be computed from it then.
        if needs_gradient(branch, h, weight) or (weight is not None and weight.is_inference()):
            return None
        y, total = with_versions(operation.forward, branch, h, weight, eps, plan.spec, plan.ndim)
        handed = _Handed()
        handed.y = y
        handed.total = weakref.ref(total, slot.drop)
        handed.version = total._version
        handed.address = total.data_ptr()
        handed.plan = plan
        handed.weight = weight
        handed.weight_version = 0 if weight is None else weight._version
        handed.eps = eps
        handed.tail = self._tail
        slot.put(handed)
        return None, total

    def __add__(self, branch: Any) -> Any:
        return self.plus(branch) if isinstance(branch, Tensor) else self._plain() + branch

    def __radd__(self, branch: Any) -> Any:
        return self.plus(branch) if isinstance(branch, Tensor) else branch + self._plain()

    def __iadd__(self, branch: Any) -> Stream:
        total = self._plain()
        total += _tensors(branch)
        return Stream(total, self._norms, self._tail, self._additions + 1)

    def _plain(self) -> Tensor:
        """The tensor, for an operation that may change it: the norm that is computed is void."""
        self._y = None
        return self.tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor if name in SHAPES else self._plain(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(args) == 2 and not kwargs:
            one, two = args
            if func in _ADDITIONS and type(one) is not type(two):
                if type(two) is Stream and isinstance(one, Tensor):
                    return two.plus(one)
                if type(one) is Stream and isinstance(two, Tensor):
                    return one.plus(two)
            if func in _ADDITIONS_IN_PLACE and type(two) is Stream and type(one) is not Stream:
                total = func(one, two._plain())
                return Stream(total, two._norms, two._tail, two._additions + 1)
        return func(*_tensors(args), **_tensors(kwargs or {}))


def plain(result: Any) -> Any:
    """What a block returns, with plain tensors for the streams in it."""
    global _last
    if type(result) is Stream:
        tail = result._tail
        if tail.norm is None and tail.patience > 0:
            _last = weakref.ref(result.tensor), tail
        return result.tensor
    if isinstance(result, tuple):
        items = map(plain, result)
        if type(result) is tuple:
            return tuple(items)
        make: Callable[..., Any] | None = getattr(type(result), "_make", None)
        return type(result)(items) if make is None else make(items)
    if type(result) is list:
        return [plain(item) for item in result]
    if type(result) is dict:
        return {key: plain(value) for key, value in result.items()}
    return result


def _tensors(value: Any) -> Any:
    """``value`` with plain tensors for the streams in it."""
    if type(value) is Stream:
        return value._plain()
    if type(value) in (tuple, list):
        return type(value)(map(_tensors, value))
    if type(value) is dict:
        return {key: _tensors(item) for key, item in value.items()}
    return value


def _joined(h: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The norm of the sum, and the sum; ``None`` for a call that is not proven."""
    plan: Plan | None = norm.__dict__.get(PLAN)
    if plan is None or not plan.joins:
        return None
    operands = plan.operands(norm, branch)
    if operands is None:
        return None
    weight, _, eps = operands
    if not needs_gradient(branch, h, weight) or plan.trains(branch, weight, None):
        return operation.forward(branch, h, weight, eps, plan.spec, plan.ndim)
    return None


# Python looks up operators on the type, not by __getattr__.
_OPERATORS = (
    "abs and array bool complex contains delitem eq float floordiv ge getitem gt iand ifloordiv "
    "ilshift imod imul index int invert ior ipow irshift isub iter itruediv ixor le len lshift lt "
    "matmul mod mul ne neg or pos pow rand reversed rfloordiv rlshift rmatmul rmod rmul ror rpow "
    "rrshift rshift rsub rtruediv rxor setitem sub truediv xor"
)


def _asked(name: str) -> Callable[..., Any]:
    def ask(self: Stream, *args: Any) -> Any:
        return getattr(self._plain(), name)(*_tensors(args))

    ask.__name__ = name
    return ask


for _name in _OPERATORS.split():
    setattr(Stream, f"__{_name}__", _asked(f"__{_name}__"))
