"""Joining the additions to the residual stream with the norms that follow them.

A decoder block computes norm, sublayer, addition, norm, sublayer, addition. It is recognised by
what it does with its input, which ``torch.fx`` shows: each use of the stream is a swapped norm or
an addition, nothing else sees it, and it is returned. No class name is looked at. Sublayers may be
anything, since only the block's own code is concerned.

Such a block is given a class whose forward runs the block's own code on a
:class:`~rmsnorm.rewrite.stream.Stream`. That is proven on a double of the block, whose sublayers
are replaced by simple functions, beside the same code on a tensor: three lengths, batches of 1 and
3, with and without something that they keep between calls, two blocks and a norm in a row, and the
gradients of the stream and of the norms.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm.ops.transforms import is_plain_call
from rmsnorm.rewrite.probe import (
    SEED,
    NotProvenError,
    holds_own_forward,
    original_class,
    quiet,
)
from rmsnorm.rewrite.report import Block
from rmsnorm.rewrite.stream import PLAN, SHAPES, SLOT, Course, Slot, Stream, plain
from rmsnorm.rewrite.swap import Swapped, plan_of, rebase, reduces_to

_COURSE = "_rmsnorm_course"
_BLOCK = "block"  # the name of the traced block in the module that calls it

_LENGTHS = (1, 5, 17)
_BATCHES = (1, 3)
# Of norms that take rows of any width.
_USUAL_WIDTH = 64
# What the norm of a gradient may differ by; the joined backward rounds once where two round twice.
_MOST_GRADIENT_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
}

Chosen = Callable[[str, nn.Module], bool]
_T = TypeVar("_T")


def join(model: nn.Module, chosen: Chosen) -> tuple[Block, ...]:
    """Join additions and norms in every block of ``model`` where that is proven.

    Args:
        model: its norms are swapped already.
        chosen: whether a block of this name is wanted.

    Returns:
        One entry for each block, and for each module that adds to its input but was left.
    """
    forms: dict[Any, _Form | NotProvenError] = {}
    known: dict[Any, tuple[int, int] | NotProvenError] = {}
    found: dict[str, Block] = {}
    courses: dict[str, Course] = {}
    names = dict(model.named_modules())
    # Inner modules first: what holds a block is none.
    for name, module in reversed(names.items()):
        if any(other.startswith(f"{name}." if name else "") for other in courses):
            continue
        if not chosen(name, module) or not _may_be_block(module):
            continue
        cls = original_class(module).__name__
        try:
            holds_own_forward(module)
            form = _once(forms, _kind(module), _recognise, module)
            inside, additions = _once(known, form.key(module), _prove, module, form)
            course = Course(form.norms, form.receivers, form.argument)
            _give(module, course)
        except NotProvenError as error:
            if error.is_norm:
                found[name] = Block(name, cls, False, 0, 0, error.reason)
            continue
        courses[name] = course
        found[name] = Block(name, cls, True, additions, inside, "")
    _give_slots(names, courses)
    return tuple(found[name] for name in names if name in found)


def _once(
    known: dict[Any, _T | NotProvenError], key: Any, find: Callable[..., _T], *args: Any
) -> _T:
    """``find(*args)``, once for all blocks of a kind.

    Raises:
        NotProvenError: it did.
    """
    if key not in known:
        try:
            with quiet(torch.device("cpu")):
                known[key] = find(*args)
        except NotProvenError as error:
            known[key] = error
    outcome = known[key]
    if isinstance(outcome, NotProvenError):
        raise outcome
    return outcome


def part(model: nn.Module) -> int:
    """Undo :func:`join`; returns how many blocks there were."""
    count = 0
    for module in list(model.modules()):
        module.__dict__.pop(SLOT, None)
        if isinstance(module, Joined):
            _restore(module)
            count += 1
    return count


def _give_slots(names: dict[str, nn.Module], courses: dict[str, Course]) -> None:
    """Let every norm that may follow a block find a result there: the blocks' first norms, and
    those outside of blocks."""
    inside = tuple(f"{name}." if name else "" for name in courses)
    first = {
        f"{name}.{course.norms[0]}" if name else course.norms[0] for name, course in courses.items()
    }
    least = min((course.least for course in courses.values()), default=0)
    for name, module in names.items():
        plan = plan_of(module) if isinstance(module, Swapped) else None
        follows = name in first or not name.startswith(inside)
        if courses and plan is not None and plan.joins and follows:
            module.__dict__[SLOT] = Slot(least)


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has a swapped norm, and something else to call."""
    if isinstance(module, (Swapped, nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    children = [child for child in module.children() if child is not None]
    return len(children) > 1 and any(isinstance(child, Swapped) for child in children)


@dataclass(frozen=True)
class _Form:
    """What was seen in a block.

    Args:
        argument: the name of the forward's argument that the stream comes in.
        norms: the module that normalises it after i additions, for each i.
        receivers: all modules that are given it.
        called: the other modules that are called, and how many results of them are used as a
            tuple's items; 0 for a tensor.
        required: the other arguments without a default.
        optional: those whose default is ``None``.
        text: the code of the traces.
    """

    argument: str
    norms: tuple[str | None, ...]
    receivers: frozenset[str]
    called: tuple[tuple[str, int], ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    text: str

    def key(self, block: nn.Module) -> Any:
        """Equal for blocks that do the same."""
        norms = [block.get_submodule(name) for name in sorted(self.receivers)]
        plans = [plan_of(norm) for norm in norms]
        facts = [
            None if plan is None else (plan.spec, plan.shape, plan.ndim, plan.eps, plan.training)
            for plan in plans
        ]
        dtypes = [str(p.dtype) for norm in norms for p in norm.parameters()]
        return original_class(block), self, tuple(facts), tuple(dtypes)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks whose forwards do the same: the class, its attributes, what is in it."""
    cls = original_class(block)
    plain = nn.Module().__dict__
    own = [
        (name, repr(value) if isinstance(value, (int, float, str, tuple)) else id(value))
        for name, value in block.__dict__.items()
        if name not in plain and not name.startswith("_rmsnorm_")
    ]
    children = [
        (name, None if child is None else type(child)) for name, child in block._modules.items()
    ]
    return cls, cls.forward, tuple(own), tuple(children), *block._parameters, *block._buffers


def _recognise(block: nn.Module) -> _Form:
    """What a block does with its stream.

    Raises:
        NotProvenError: something else than normalising it and adding to it. It counts as a block
            (``is_norm``) if there are additions.
    """
    signature = _signature(original_class(block))
    try:
        made = _joined_class(original_class(block))
    except TypeError as error:
        raise NotProvenError(f"its class cannot be derived from: {error}") from error
    double = _double(block, made, block._modules)
    optional = {name: value for name, value in signature.optional.items() if value is None}
    flags = {name: True for name, value in signature.optional.items() if value is False}
    seen = []
    for training, names, constants in (
        (False, [], {}),
        (False, list(optional), {}),
        (True, list(optional), flags),
    ):
        double.__dict__["training"] = training
        seen.append(_trace(double, signature, [*signature.required, *names], constants))
    first = seen[0]
    for other in seen[1:]:
        if other.norms != first.norms or other.receivers != first.receivers:
            raise NotProvenError("its additions depend on how it is called", is_norm=True)
    called: dict[str, int] = {}
    for trace in seen:
        for name, items in trace.called.items():
            called[name] = max(items, called.get(name, 0))
    return _Form(
        argument=signature.stream,
        norms=first.norms,
        receivers=first.receivers,
        called=tuple(sorted(called.items())),
        required=tuple(signature.required),
        optional=tuple(optional),
        text="\n".join(trace.text for trace in seen),
    )


@dataclass(frozen=True)
class _Signature:
    """The arguments of a block's forward: the stream, and the others by name."""

    stream: str
    required: list[str]
    optional: dict[str, Any]


def _signature(cls: type[nn.Module]) -> _Signature:
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        raise NotProvenError("its forward has no signature") from None
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise NotProvenError("its forward takes nothing by position and name")
    required = []
    optional = {}
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise NotProvenError(f"its forward takes {parameter.name} by position only")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            optional[parameter.name] = parameter.default
    return _Signature(parameters[0].name, required, optional)


class _Caller(nn.Module):
    """Calls a block's own forward, with arguments by name.

    The signature of the block is not ``torch.fx``'s business: it cannot see through decorators.
    """

    def __init__(self, block: nn.Module, names: list[str], constants: dict[str, Any]) -> None:
        super().__init__()
        self.block = block
        self._names, self._constants = names, constants

    def forward(self, stream: Any, others: Any) -> Any:
        given = {name: others[name] for name in self._names}
        forward = original_class(self.block).forward
        return forward(self.block, stream, **{**given, **self._constants})


class _Tracer(fx.Tracer):
    """Records the calls of modules and does not look into them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@dataclass(frozen=True)
class _Trace:
    norms: tuple[str | None, ...]
    receivers: frozenset[str]
    called: dict[str, int]
    text: str


def _trace(
    double: nn.Module, signature: _Signature, names: list[str], constants: dict[str, Any]
) -> _Trace:
    """One trace of a block, with these arguments unknown and these constant.

    Raises:
        NotProvenError: as :func:`_recognise`.
    """
    tracer = _Tracer()
    failure = ""
    try:
        tracer.trace(_Caller(double, names, constants))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a forward may do anything with what is no tensor
        failure = f"its forward cannot be traced: {type(error).__name__}: {error}".splitlines()[0]
    graph: fx.Graph | None = getattr(tracer, "graph", None)
    if graph is None:
        raise NotProvenError(failure)
    reading = _Reading(double)
    for node in graph.nodes:
        reading.read(node)
    reason = reading.reason or failure
    if not reason and not reading.returned:
        reason = "it does not return its stream"
    if not reading.additions:
        raise NotProvenError(reason or "it adds nothing to its input")
    if reason:
        raise NotProvenError(reason, is_norm=True)
    norms = (*map(reading.norms.get, range(reading.additions)), None)
    return _Trace(norms, frozenset(reading.receivers), reading.called, str(graph))


class _Reading:
    """Follows the stream through a graph, node by node."""

    def __init__(self, double: nn.Module) -> None:
        self._double = double
        self._streams: dict[fx.Node, int] = {}
        self._tuples: set[fx.Node] = set()
        self.additions = 0
        self.norms: dict[int, str] = {}
        self.receivers: set[str] = set()
        self.called: dict[str, int] = {}
        self.returned = False
        self.reason = ""

    def read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if not self._streams and node.target == "stream":
                self._streams[node] = 0
            return
        streams = [other for other in node.all_input_nodes if other in self._streams]
        tuples = [other for other in node.all_input_nodes if other in self._tuples]
        if node.op == "output":
            self.returned = bool(tuples) or any(
                self._streams[stream] == self.additions for stream in streams
            )
        elif node.op == "call_module":
            self._call(node, str(node.target).removeprefix(f"{_BLOCK}."), streams, tuples)
        elif tuples and _adds(node):
            self._tuples.add(node)
        elif tuples:
            self._fail(node)
        elif streams:
            self._use(node, streams)

    def _call(
        self, node: fx.Node, name: str, streams: list[fx.Node], tuples: list[fx.Node]
    ) -> None:
        if not streams and not tuples:
            items = self.called.get(name, 0)
            for user in node.users:
                if user.op == "call_function" and user.target is operator.getitem:
                    index = user.args[1]
                    items = max(items, 2, index + 1 if isinstance(index, int) else 2)
            self.called[name] = items
            return
        module = self._double.get_submodule(name)
        plan = plan_of(module) if isinstance(module, Swapped) else None
        if tuples or node.kwargs or tuple(node.args) != tuple(streams) or plan is None:
            self._fail(node)
        elif not plan.joins:
            self._reason(f"its {name} cannot be joined with an addition")
        else:
            self.receivers.add(name)
            self.norms.setdefault(self._streams[streams[0]], name)

    def _use(self, node: fx.Node, streams: list[fx.Node]) -> None:
        target, args = node.target, node.args
        if node.op == "call_function" and target is getattr and args[1] in SHAPES:
            return
        if node.op == "call_method" and target in SHAPES:
            return
        if _adds(node):
            direct = [arg for arg in args if isinstance(arg, fx.Node) and arg in self._streams]
            if len(direct) == 1 and len(streams) == 1:
                if self._streams[direct[0]] != self.additions:
                    self._reason("it adds twice to the same stream")
                    return
                self.additions += 1
                self._streams[node] = self.additions
                return
            if not direct:
                self._tuples.add(node)  # a tuple with the stream in it, and another one
                return
        self._fail(node)

    def _fail(self, node: fx.Node) -> None:
        if node.op == "call_module":
            name = str(node.target).removeprefix(f"{_BLOCK}.")
            cls = original_class(self._double.get_submodule(name)).__name__
            self._reason(f"its stream goes to {name} ({cls}), which is no swapped norm")
        else:
            target = node.target if isinstance(node.target, str) else node.target.__name__
            self._reason(f"its stream goes through {target}")

    def _reason(self, reason: str) -> None:
        self.reason = self.reason or reason


def _adds(node: fx.Node) -> bool:
    """Whether it adds two things, and does nothing else."""
    if len(node.args) != 2 or node.kwargs:
        return False
    if node.op == "call_function":
        return node.target in (operator.add, operator.iadd, torch.add)
    return node.op == "call_method" and node.target in ("add", "add_")


def _double(block: nn.Module, cls: type[nn.Module], modules: dict[str, Any]) -> nn.Module:
    """A module of ``cls`` with the block's attributes and parameters, other children, no hooks."""
    double: nn.Module = object.__new__(cls)
    fresh = nn.Module().__dict__
    state = double.__dict__
    state.update(block.__dict__)
    state.update(fresh)
    for name in [name for name in state if name.startswith("_rmsnorm_") and name != PLAN]:
        del state[name]
    state.pop("forward", None)
    state["training"] = block.training
    state["_parameters"] = dict(block._parameters)
    state["_buffers"] = dict(block._buffers)
    state["_modules"] = dict(modules)
    return double


class _Memory:
    """Stands for a cache: what sublayers keep from one call to the next."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}


class _StandIn(nn.Module):
    """Stands for a sublayer: a function of its first tensor, and of what it kept.

    Args:
        number: sublayers are different functions.
        items: how many items of its result are used; 0 for a tensor.
    """

    def __init__(self, number: int, items: int) -> None:
        super().__init__()
        self._number, self._items = number, items

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(type(value) is Stream for value in given):
            raise RuntimeError("a sublayer was given the stream")
        x = next(v for v in given if isinstance(v, Tensor) and v.is_floating_point())
        y = torch.sin(x * (1.25 + 0.5 * self._number)) * 1.5
        for memory in given:
            if isinstance(memory, _Memory):
                kept = memory.kept.setdefault(self._number, [])
                kept.append(x.mean(dim=1, keepdim=True))
                y = y + sum(kept)
        return y if self._items == 0 else (y, *(y + float(i) for i in range(1, self._items)))


class _Count(TorchDispatchMode):
    """Counts the calls of this package's joined operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += "add_rms_norm" in str(func)
        return func(*args, **(kwargs or {}))


def _prove(block: nn.Module, form: _Form) -> tuple[int, int]:
    """Compare a block's own code on a stream and on a tensor.

    Returns:
        How many of its additions are one with a norm in the block, and how many there are.

    Raises:
        NotProvenError: they differ, or the block cannot be asked.
    """
    with _as_reason():
        inside = 0
        for training in (False, True):
            try:
                twins = _Twins(block, form, training, stand_ins=True)
                twins.plain.run(twins.example(1, 2))
            except Exception:  # the block's own code wants other shapes of what it calls
                twins = _Twins(block, form, training, stand_ins=False)
            inside = twins.prove_values()
            twins.prove_gradients()
    return inside, len(form.norms) - 1


@contextmanager
def _as_reason() -> Iterator[None]:
    try:
        yield
    except NotProvenError as error:
        raise NotProvenError(error.reason, is_norm=True) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a module may do anything when asked, and none may stop us
        reason = f"asking it raises {type(error).__name__}: {error}".splitlines()[0]
        raise NotProvenError(reason, is_norm=True) from error


class _Chain:
    """Two doubles of a block in a row, and a norm.

    Args:
        blocks: the doubles.
        norm: what follows them.
        form: what the block was seen to do.
    """

    def __init__(self, blocks: list[nn.Module], norm: nn.Module, form: _Form) -> None:
        self.blocks, self.norm, self._form = blocks, norm, form

    def run(self, x: Tensor, memories: list[_Memory] | None = None) -> list[Tensor]:
        """All tensors that the blocks return, and the norm of the last stream."""
        torch.manual_seed(SEED)
        results = []
        for index, block in enumerate(self.blocks):
            # Tensors that a block only passes on, or takes apart as the cosine and sine of angles.
            given: dict[str, Any] = dict.fromkeys(self._form.required, torch.ones(2, 1, 1))
            if memories is not None:
                names = (*self._form.required, *self._form.optional)
                given = dict.fromkeys(names, memories[index])
            result = block(x, **given)
            tensors = [value for value in _leaves(result) if isinstance(value, Tensor)]
            if any(type(value) is Stream for value in _leaves(result)):
                raise NotProvenError("its stream leaves it where it is not looked for")
            results += tensors
            x = tensors[0]
        return [*results, self.norm(x)]


def _leaves(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in _leaves(item)]
    if isinstance(result, dict):
        return [leaf for item in result.values() for leaf in _leaves(item)]
    return [result]


class _Twins:
    """The same chain of doubles with a block's own class and with the class that joins.

    Args:
        block: what is doubled; its parameters are shared.
        form: what it was seen to do.
        training: the doubles' mode.
        stand_ins: whether its sublayers are replaced by simple functions.
    """

    def __init__(self, block: nn.Module, form: _Form, training: bool, stand_ins: bool) -> None:
        self._norms = [block.get_submodule(name) for name in sorted(form.receivers)]
        self._first = form.norms[0]
        self.plain = self._chain(block, form, training, stand_ins)
        self.joined = self._chain(block, form, training, stand_ins)
        slots = [self.joined.norm]
        for double in self.joined.blocks:
            _give(double, Course(form.norms, form.receivers, form.argument, least=0))
            if form.norms[0] is not None:
                slots.append(double.get_submodule(form.norms[0]))
        for norm in slots:
            norm.__dict__[SLOT] = Slot()

    def _chain(self, block: nn.Module, form: _Form, training: bool, stand_ins: bool) -> _Chain:
        blocks = []
        for number in (0, 10):
            others: dict[str, nn.Module] = {
                name: _StandIn(number + index, items)
                if stand_ins
                else _unhooked(block.get_submodule(name))
                for index, (name, items) in enumerate(form.called)
            }
            norms = {name: _unhooked(block.get_submodule(name)) for name in form.receivers}
            double = _rebuilt(block, original_class(block), {**others, **norms})
            double.__dict__["training"] = training
            blocks.append(double)
        return _Chain(blocks, _unhooked(self._norms[0]), form)

    def example(self, batch: int, length: int) -> Tensor:
        """(batch, length, width), in the dtype of the block's norms."""
        plans = [plan for plan in map(plan_of, self._norms) if plan is not None]
        (width,) = next((plan.shape for plan in plans if plan.shape is not None), (_USUAL_WIDTH,))
        dtypes = (parameter.dtype for norm in self._norms for parameter in norm.parameters())
        generator = torch.Generator().manual_seed(SEED + length)
        x = torch.randn((batch, length, width), generator=generator) * 3.0
        return x.to(next(dtypes, torch.float32))

    def prove_values(self) -> int:
        """Compare bits, and return how many additions in a block were one with a norm.

        Raises:
            NotProvenError: they differ, or none was.
        """
        for batch in _BATCHES:
            for length in _LENGTHS:
                x = self.example(batch, length)
                self._compare([x], None)
                self._compare([x, self.example(batch, 1)], _Memory)
        with torch.inference_mode():
            self._compare([self.example(2, 3)], None)
        count = _Count()
        with count:
            self.joined.run(self.example(1, 2))
        if not count.calls:
            raise NotProvenError("its additions are all done in place, where none can be joined")
        # The last addition of each block is one with the norm of the next block, or the last one.
        across = len(self.joined.blocks) - (self._first is None)
        return (count.calls - across) // len(self.joined.blocks)

    def _compare(self, xs: list[Tensor], memory: type[_Memory] | None) -> None:
        memories = [None if memory is None else [memory(), memory()] for _ in range(3)]
        try:
            expected = [self.plain.run(x, memories[0]) for x in xs]
        except Exception:
            if memory is None:
                raise
            return  # its own code does something with the argument, which is no cache then
        # The first time, the blocks learn what follows them.
        for given in memories[1:]:
            for x, right in zip(xs, expected, strict=True):
                seen = self.joined.run(x.clone(), given)
                if len(seen) != len(right) or not all(map(torch.equal, seen, right)):
                    raise NotProvenError("its results differ when an addition and a norm are one")

    def prove_gradients(self) -> None:
        """Compare the gradients of the stream and of the norms.

        Raises:
            NotProvenError: they differ by more than roundings do.
        """
        parameters = [p for norm in self._norms for p in norm.parameters() if p.requires_grad]
        for batch, length in zip((1, 3, 3), _LENGTHS, strict=True):
            x = self.example(batch, length)
            found = []
            with torch.enable_grad():
                for chain in (self.plain, self.joined):
                    leaf = x.clone().requires_grad_()
                    results = [y for y in chain.run(leaf) if y.requires_grad]
                    generator = torch.Generator().manual_seed(SEED)
                    upstream = [
                        torch.randn(y.shape, generator=generator).to(y.dtype) for y in results
                    ]
                    wanted = [leaf, *parameters]
                    gradients = torch.autograd.grad(results, wanted, upstream, allow_unused=True)
                    found.append((results, gradients))
            (right_y, right), (seen_y, seen) = found
            if len(right_y) != len(seen_y) or not all(map(torch.equal, right_y, seen_y)):
                raise NotProvenError("its results differ where a gradient is needed")
            for a, b in zip(right, seen, strict=True):
                if (a is None) is not (b is None):
                    raise NotProvenError("its gradients differ")
                if a is not None and b is not None:
                    wide = a.to(torch.float64)
                    error = (b.to(torch.float64) - wide).norm() / wide.norm().clamp(min=1e-30)
                    if not float(error) <= _MOST_GRADIENT_ERROR[x.dtype]:
                        raise NotProvenError("its gradients differ")


def _unhooked(module: nn.Module) -> nn.Module:
    """A double of a module and of all that it holds, with the same parameters and no hooks."""
    children = {
        name: None if child is None else _unhooked(child) for name, child in module._modules.items()
    }
    return _double(module, type(module), children)


def _rebuilt(module: nn.Module, cls: type[nn.Module], replaced: dict[str, nn.Module]) -> nn.Module:
    """A double of ``module`` with other modules under these names, which may have dots."""
    children: dict[str, nn.Module | None] = dict(module._modules)
    inner: dict[str, dict[str, nn.Module]] = {}
    for name, other in replaced.items():
        head, _, rest = name.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = other
        else:
            children[head] = other
    for head, others in inner.items():
        child = module._modules[head]
        assert child is not None  # something in it was called
        children[head] = _rebuilt(child, type(child), others)
    return _double(module, cls, children)


class Joined:
    """Marks the classes of blocks whose additions are joined; see :func:`_joined_class`."""

    __slots__ = ()
    _rmsnorm_original: ClassVar[type[nn.Module]]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
# The forward of each class as it was when it was traced.
_traced: dict[type[nn.Module], Any] = {}


def _joined_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``original`` that runs its forward on a stream.

    It is derived in the usual way, so that what ``original`` does to its subclasses (checkpointing
    in transformers) is done to this one.

    Raises:
        TypeError: ``original`` cannot be derived from.
    """
    if original in _classes:
        return _classes[original]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        course: Course | None = getattr(self, _COURSE, None)
        if course is not None and not torch.compiler.is_compiling():
            x = args[0] if args else kwargs.get(course.argument)
            if (
                type(x) is Tensor
                and x.is_cpu
                and x.numel() >= course.least
                and original.forward is _traced.get(original)
                and is_plain_call()
            ):
                norms = course.modules(self)
                if norms is not None:
                    stream = Stream(x, norms, course.tail)
                    if args:
                        result = original.forward(self, stream, *args[1:], **kwargs)
                    else:
                        result = original.forward(self, **{**kwargs, course.argument: stream})
                    return plain(result)
        return original.forward(self, *args, **kwargs)

    forward.__qualname__ = f"{original.__qualname__}.forward"
    forward.__doc__ = original.forward.__doc__
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduces_to(original, _remake),
        "_rmsnorm_original": original,
        "forward": forward,
    }
    metaclass: Any = type(original)
    made: type[nn.Module] = metaclass(original.__name__, (original, Joined), namespace)
    _classes[original] = made
    return made


def _remake(original: type[nn.Module], *arguments: Any) -> nn.Module:
    """An empty block whose additions are joined, for pickle and copy, which fill it."""
    cls = _joined_class(original)
    _traced.setdefault(original, original.forward)
    made: nn.Module = cls.__new__(cls, *arguments)
    return made


def _give(block: nn.Module, course: Course) -> None:
    """Let ``block`` run on a stream.

    Raises:
        NotProvenError: its class forbids it.
    """
    original = original_class(block)
    try:
        object.__setattr__(block, "__class__", _joined_class(original))
    except TypeError as error:
        raise NotProvenError("its class cannot be derived from in place", is_norm=True) from error
    _traced[original] = original.forward
    block.__dict__[_COURSE] = course


def _restore(block: nn.Module) -> None:
    """Give ``block`` its own class back."""
    block.__dict__.pop(_COURSE, None)
    original = original_class(block)
    made = _classes.get(original)
    if type(block) is made:
        object.__setattr__(block, "__class__", original)
    elif made is not None:
        rebase(type(block), made, original)
