"""The direct call, compiled from kernels/cpu/python_entry.cpp; see rmsnorm/ops/direct.py."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from rmsnorm.spec import NormSpec

_State = tuple[int, int, int]

def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec | str,
    ndim: int,
    out: Tensor = ...,
    /,
) -> Tensor | Literal[True] | None: ...
def module_norm(module: nn.Module, x: Tensor, /) -> Tensor | Literal[True] | None: ...
def proven(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /
) -> Tensor | Literal[True] | None: ...
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec | str,
    ndim: int,
    /,
) -> tuple[Tensor, Tensor] | Literal[True] | None: ...
def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec | str,
    ndim: int,
    /,
) -> Literal[True] | None: ...
def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float | None,
    spec: NormSpec | str,
    ndim: int,
    /,
) -> tuple[Tensor, Tensor | None, Tensor] | None: ...
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    eps: float | None,
    spec: NormSpec | str,
    ndim: int,
    need_dx: bool,
    need_dweight: bool,
    /,
) -> tuple[Tensor | None, Tensor | None] | None: ...
def keys() -> tuple[int, int]: ...
def built_with() -> str: ...
def connect(
    table: int,
    autograd: int,
    tensor_type: type,
    parameter_type: type,
    encode: Callable[[NormSpec | str], str],
    handle_offset: int,
    keys_offset: int,
    plain: _State,
    inference: _State,
    /,
) -> None: ...
