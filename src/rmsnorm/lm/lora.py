"""Low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685), by ``peft``.

The matrices of the blocks stay as they are; a product of two narrow ones is trained beside each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.lm.config import ConfigError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER = "default"
_BASE = ".base_layer"


def add(model: Any, rank: int, alpha: int | None = None, source: str = "") -> Any:
    """Put low-rank additions beside the matrices of the blocks; only these are trained then.

    Args:
        model: a :class:`~rmsnorm.lm.model.MindForCausalLM`; it is changed in place.
        rank: of the additions.
        alpha: their scale is ``alpha / rank``; twice the rank if ``None``.
        source: where the weights come from, for the adapter's configuration.

    Returns:
        The ``peft.PeftModel`` around ``model``; its ``save_pretrained`` writes the adapter.

    Raises:
        ConfigError: peft is not installed.

    Example:
        >>> from rmsnorm.lm.config import preset
        >>> from rmsnorm.lm.model import MindForCausalLM
        >>> model = MindForCausalLM(preset("tiny", num_hidden_layers=1))
        >>> adapted = add(model, rank=2)
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        4864
    """
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError("lora_rank needs peft; install rmsnorm[lora]") from None
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=list(TARGETS),
    )
    model.name_or_path = source  # from here peft takes the name that it writes down
    return peft.get_peft_model(model, settings)


@torch.no_grad()
def merged(model: nn.Module) -> dict[str, Tensor]:
    """The weights with the additions added, by their names in a model without additions.

    ``model`` is left as it is: adding in place and subtracting again would change its last bits.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        if _BASE in name:
            layer: Any = model.get_submodule(name[: name.index(_BASE)])
            tensors[name.replace(_BASE, "")] = parameter + layer.get_delta_weight(_ADAPTER)
        else:
            tensors[name] = parameter
    return tensors


def save(adapted: Any, folder: Path) -> None:
    """Write the adapter as peft does: ``adapter_model.safetensors``, ``adapter_config.json``."""
    adapted.save_pretrained(folder, save_embedding_layers=False)
