"""Small models with random weights, one for each kind of architecture, made without a download.

They have what their families have, and little of it: sizes are tiny, and everything that parts one
family's norms from another's is as it is in the large models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rmsnorm.models.files import ModelError

if TYPE_CHECKING:
    import torch

PREFIX = "random:"
"""How the names of these models begin, in ``load_model`` and on the command line."""

_SEED = 0


@dataclass(frozen=True)
class Small:
    """How a small model is made.

    Args:
        config: the name of its config class in transformers.
        model: the name of its class.
        sizes: what the config is given.
    """

    config: str
    model: str
    sizes: dict[str, Any] = field(default_factory=dict)


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_SPECIAL,
}

SMALL = {
    "llama4": Small(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_DECODER,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 512,
            "attention_chunk_size": 64,
        },
    ),
    "qwen3": Small("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}),
    "qwen3-next": Small(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_DECODER,
            "num_hidden_layers": 4,  # the fourth is the first with attention
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "deepseek-v3": Small(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "olmo2": Small("Olmo2Config", "Olmo2ForCausalLM", _DECODER),
    "gpt-oss": Small(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_DECODER,
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 8,
        },
    ),
    "t5": Small(
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    ),
    "mamba2": Small(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "gemma3n": Small(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **_DECODER,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "sliding_window": 8,
        },
    ),
    "whisper": Small(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 128,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 128,
            "decoder_start_token_id": 1,
            **_SPECIAL,
        },
    ),
    "modernbert": Small(
        "ModernBertConfig",
        "ModernBertModel",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "cls_token_id": 1,
            "sep_token_id": 2,
            **_SPECIAL,
        },
    ),
}
"""The models by name, without :data:`PREFIX`."""


def small_model(name: str, dtype: torch.dtype) -> Any:
    """A small model with random weights, the same ones each time, in eval mode on the CPU.

    The weights of its norms, which a fresh model would have all alike, are random too. Random
    states are left as they were.

    Args:
        name: one of :data:`SMALL`.
        dtype: of its weights.

    Returns:
        A ``transformers.PreTrainedModel``. All but ``"modernbert"``, an encoder, predict tokens.

    Raises:
        ModelError: there is no such model, here or in the transformers that is installed.

    Example:
        >>> import torch
        >>> model = small_model("qwen3", torch.bfloat16)
        >>> type(model).__name__, model.dtype
        ('Qwen3ForCausalLM', torch.bfloat16)
    """
    import torch
    import transformers

    if name not in SMALL:
        raise ModelError(f"{PREFIX}{name} is not known; expected {PREFIX} and one of {_names()}")
    small = SMALL[name]
    try:
        config = getattr(transformers, small.config)(**small.sizes)
        make = getattr(transformers, small.model)
    except AttributeError:
        raise ModelError(
            f"{PREFIX}{name} needs a transformers with {small.model}; found "
            f"{transformers.__version__}"
        ) from None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(_SEED)
        model = make(config)
        for path, parameter in model.named_parameters():
            if "norm" in path and path.endswith("weight"):
                torch.nn.init.uniform_(parameter, -0.5, 2.0)
    return model.to(dtype).eval()


def _names() -> str:
    return ", ".join(SMALL)
