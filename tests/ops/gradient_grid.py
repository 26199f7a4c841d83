"""Prints a hash of the gradients of each case of a grid, as JSON: to be equal wherever it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calls import ALL_SPECS, FLOATS, gradients, rows_of, weight_of
from rmsnorm import add_rms_norm, cpu_isa, gated_rms_norm, rms_norm, specs

_WIDTHS = (1, 2, 5, 7, 8, 9, 15, 17, 31, 33, 64, 100, 257, 1031)
_ROWS = (3, 70)
_SPECS = {
    **{name: ALL_SPECS[name] for name in ("torch", "llama", "gemma", "t5", "original", "l2")},
    "l2_sum": specs.l2_sum,
    "partial": replace(specs.torch, partial=0.3),
}
_GATED = [name for name in specs if specs[name].gate is not None]


def _cases() -> Iterator[tuple[str, Sequence[Tensor | None]]]:
    for dtype in FLOATS:
        for d in _WIDTHS:
            for rows in _ROWS:
                x, dy = rows_of(dtype, rows, d, d), rows_of(dtype, rows, d, d + 1)
                x[0] *= 2.0**-40 if dtype == torch.float16 else 2.0**-100
                for name, spec in _SPECS.items():
                    w = weight_of(dtype if rows == 3 else torch.float32, d, d)
                    yield f"{name} {dtype} {w.dtype}", _plain(x, w, dy, spec.encode())
                w, b = weight_of(dtype, d, d), weight_of(dtype, d, d + 7)
                yield f"bias {dtype}", gradients(_biased, (x, w, b), (dy,))
                yield f"dy {dtype}", gradients(rms_norm, (x, w), (w * x + dy / 4096,))
                yield f"add {dtype}", _with_results(add_rms_norm, (x, dy, w), (dy, x))
                for name in _GATED:
                    inputs = (x, dy, w)
                    yield f"{name} {dtype}", _with_results(_gated(name), inputs, (dy,))
    for dtype in (torch.float32, torch.bfloat16):
        for rows, d in ((4097, 33), (1025, 1024), (3, 65537)):
            x, dy, w = (
                rows_of(dtype, rows, d, 0),
                rows_of(dtype, rows, d, 1),
                weight_of(dtype, d, 0),
            )
            yield f"many {dtype} {d}", _plain(x, w, dy, "")


def _biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rms_norm(x, weight, bias=bias)


def _gated(name: str):  # type: ignore[no-untyped-def]
    return lambda x, gate, w: gated_rms_norm(x, gate, w, spec=name)


def _plain(x: Tensor, w: Tensor, dy: Tensor, spec: str) -> list[Tensor]:
    """The result, rstd and the gradients, straight from the operations."""
    y, rstd = torch.ops.rmsnorm.rms_norm_fwd(x, w, None, None, spec, 1)
    rest = (x, w, rstd, None, None, spec, 1, True, True, True)
    return [y, rstd, *torch.ops.rmsnorm.rms_norm_bwd(dy.to(y.dtype), *rest)]


def _with_results(f, inputs, dys):  # type: ignore[no-untyped-def]
    results = f(*inputs)
    results = (results,) if isinstance(results, Tensor) else results
    return [*results, *gradients(f, inputs, dys)]


def main() -> None:
    hashes: dict[str, hashlib._Hash] = {}
    for name, tensors in _cases():
        found = hashes.setdefault(name, hashlib.blake2b(digest_size=8))
        for t in tensors:
            if t is not None:
                found.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    answer = {name: found.hexdigest() for name, found in hashes.items()}
    print(json.dumps({"isa": str(cpu_isa()), "threads": str(torch.get_num_threads()), **answer}))


if __name__ == "__main__":
    main()
