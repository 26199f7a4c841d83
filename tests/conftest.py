"""What every test gets: the same random numbers, and no memory that happens to be zero.

What some ask for: a small language model in a folder.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# glibc's M_PERTURB: fresh memory is filled with the complement of the byte given. 0xfe is nan in
# float16 and about -1.7e38 in bfloat16 and float32, which no right result is. It reaches what the
# kernels allocate, which torch.utils.deterministic does not.
_M_PERTURB = -6
_COMPLEMENT_OF_FE = 0x01
# Speed is measured there, or whole models run.
_UNPOISONED = {"bench", "real"}


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _UNPOISONED & set(request.node.path.parts):
        yield
        return
    mallopt(_M_PERTURB, _COMPLEMENT_OF_FE)
    yield
    mallopt(_M_PERTURB, 0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small LLaMA without a tokenizer, its norms not trivial; not to be written."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    folder: Path = tmp_path_factory.mktemp("tiny") / "llama"
    model.save_pretrained(folder)
    return folder
