"""Prints a hash of the result of each case of a grid, as JSON: to be equal wherever it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from calls import ALL_SPECS, FLOATS, bits, rows_of, weight_of
from rmsnorm import NormSpec, cpu_isa, rms_norm

_WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 63, 65, 128, 257, 513, 1031)


def _layouts(dtype: torch.dtype, d: int) -> Iterator[tuple[str, Tensor]]:
    dense = rows_of(dtype, 5, d, d)
    yield "dense", dense
    yield "shifted", rows_of(dtype, 1, 5 * d + 1, d).flatten()[1:].view(5, d)
    yield "stepped", rows_of(dtype, 5, 2 * d, d)[:, ::2]
    # Some rows leave the range of float32, or are not finite.
    wild = dense.clone()
    wild[0] *= 2.0**-100
    wild[1] *= 2.0**100
    wild[2, d // 2] = torch.inf
    wild[3, d // 3] = torch.nan
    yield "wild", wild


def _cases() -> Iterator[tuple[str, Tensor]]:
    for dtype in FLOATS:
        for d in _WIDTHS:
            for layout, x in _layouts(dtype, d):
                weights = {w_dtype: weight_of(w_dtype, d, d) for w_dtype in FLOATS}
                bias = weight_of(dtype, d, d + 1)
                for name, spec in ALL_SPECS.items():
                    for w_dtype in (None, *FLOATS):
                        w = None if w_dtype is None else weights[w_dtype]
                        yield f"{name} {dtype} {w_dtype} {layout}", _call(x, w, None, spec)
                    yield f"{name} {dtype} bias {layout}", _call(x, weights[dtype], bias, spec)
        for d in (4096, 8193, 65537):
            x, w = rows_of(dtype, 9, d, d), weight_of(dtype, d, d)
            for name, spec in ALL_SPECS.items():
                yield f"{name} {dtype} {d}", _call(x, w, None, spec)
    # Enough elements for several threads, and for stores that pass the cache by.
    for dtype in (torch.float32, torch.bfloat16):
        rows = 2**23 // 1024
        yield f"many {dtype}", rms_norm(rows_of(dtype, rows, 1024, 0), weight_of(dtype, 1024, 0))


def _call(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    return rms_norm(x, weight, spec=spec, bias=bias)


def main() -> None:
    hashes: dict[str, hashlib._Hash] = {}
    with torch.no_grad():
        for name, y in _cases():
            found = hashes.setdefault(name, hashlib.blake2b(digest_size=8))
            found.update(bits(y).numpy().tobytes())
    answer = {name: found.hexdigest() for name, found in hashes.items()}
    print(json.dumps({"isa": str(cpu_isa()), "threads": str(torch.get_num_threads()), **answer}))


if __name__ == "__main__":
    main()
