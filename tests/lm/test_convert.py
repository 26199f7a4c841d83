"""Models in and out: the logits of plain transformers, and one clear error for each bad file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from rmsnorm.cli import lm as commands
from rmsnorm.cli.main import main
from rmsnorm.lm import checkpoint, convert
from rmsnorm.lm.config import PRESETS, ModelConfig
from rmsnorm.lm.generate import generate
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.lm.tokenizer import Tokenizer, train_tokenizer
from rmsnorm.models.files import ModelError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])

LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-wide-heads": {"head_dim": 16, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "rms_norm_eps": 1e-3},
    # Qwen3's configuration has nothing against heads that are not hidden_size wide together.
    "qwen3-tied": {"qk_norm": True, "tie_word_embeddings": True, "hidden_size": 36},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["In the beginning God created the heaven and the earth."] * 3, 280)


def small(tokenizer: Tokenizer, **changes: Any) -> MindForCausalLM:
    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = MindForCausalLM(dataclasses.replace(config, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def their_model(layout: dict[str, Any]) -> Any:
    """A model of plain transformers, its norms not trivial."""
    torch.manual_seed(5)
    changes = dict(layout)
    kind = "Qwen3" if changes.pop("qk_norm", False) else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 280,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": changes.pop("rope_theta", 1e4),
            },
            **changes,
        }
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_exported_folder_in_plain_transformers(
    layout: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ours = small(tokenizer, **layout)
    convert.export(ours, tokenizer, tmp_path / "out")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    kind = "Qwen3ForCausalLM" if ours.config.qk_norm else "LlamaForCausalLM"
    assert type(theirs).__name__ == kind
    assert theirs.dtype is torch.float32
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = logits(ours)
    assert found.std() > 0.5
    torch.testing.assert_close(logits(theirs.eval()), found, rtol=0, atol=1e-5)
    apart, largest = convert.difference(ours, tmp_path / "out")
    assert apart <= 1e-5 < 1.0 < largest

    text = "In the beginning"
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert their_tokenizer(text)["input_ids"] == tokenizer.encode(text)
    assert their_tokenizer.eos_token_id == tokenizer.eos_id
    written = theirs.generate(IDS, max_new_tokens=12, do_sample=False)[0, IDS.shape[1] :].tolist()
    ends = convert.end_ids(tmp_path / "out", tokenizer)
    assert tuple(theirs.generation_config.eos_token_id) == ends
    [done] = generate(ours, IDS.tolist(), max_new_tokens=12, eos_ids=ends)
    assert done.ids == [token for token in written if token not in ends]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shards", [False, True])
def test_imported_folder(
    layout: dict[str, Any], shards: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    theirs = their_model(layout)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    tokenizer.save(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file() is shards
    ours, _ = convert.load(tmp_path)
    assert not ours.training
    assert ours.config.rope_theta == layout.get("rope_theta", 1e4)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    # Exported again it is the same once more.
    convert.export(ours, tokenizer, tmp_path / "again")
    again, _ = convert.load(tmp_path / "again")
    assert torch.equal(logits(again), logits(ours))
    assert again.config == ours.config


def test_form_of_earlier_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = their_model({"rope_theta": 5e5})
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]
    fields |= {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": fields.pop("dtype")}
    path.write_text(json.dumps(fields))
    ours, _ = convert.load(tmp_path)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)


def test_defaults_are_those_of_transformers() -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    for kind in ("llama", "qwen3"):
        theirs = transformers.AutoConfig.for_model(kind, **sizes)
        ours = ModelConfig.from_dict(convert._translated({"model_type": kind, **sizes}))
        for name in (
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "initializer_range",
            "tie_word_embeddings",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype(dtype: torch.dtype, tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours = small(tokenizer, qk_norm=True).to(dtype)
    convert.export(ours, tokenizer, tmp_path)
    again, _ = convert.load(tmp_path)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype is dtype
    wide, _ = convert.load(tmp_path, torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.lm_head.weight, ours.lm_head.weight.float())
    assert convert.difference(ours, tmp_path)[0] <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layer"}, "norm is 'layer'; expected 'rms'"),
        ({"norm": "none"}, "norm is 'none'"),
        ({"norm": "scale"}, "norm is 'scale'"),
        ({"norm": "partial", "partial": 0.5}, "norm is 'partial'"),
        ({"placement": "post"}, "placement is 'post'; expected 'pre'"),
        ({"placement": "sandwich"}, "placement is 'sandwich'"),
        ({"hidden_size": 36, "num_attention_heads": 8}, "hidden_size is 36"),
    ],
)
def test_without_a_form_in_transformers(
    changes: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ours = small(tokenizer, **changes)
    with pytest.raises(ModelError, match=f"transformers has no model of this form: {message}"):
        convert.export(ours, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # Our own form has them all.
    convert.save(ours, tokenizer, tmp_path / "own")
    assert not (tmp_path / "own" / "config.json").exists()
    again, _ = convert.load(tmp_path / "own")
    assert again.config == ours.config
    assert torch.equal(logits(again), logits(ours))


def test_saved_folder_is_for_transformers_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours = small(tokenizer, fuse_residual=False)
    convert.save(ours, tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0, atol=1e-5)
    again, _ = convert.load(tmp_path)
    assert not again.config.fuse_residual  # which config.json does not know


def test_writing_over_another_model_leaves_nothing_of_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = small(tokenizer, rope_theta=77.0)
    convert.save(other, tokenizer, tmp_path)
    convert.export(small(tokenizer), tokenizer, tmp_path)
    assert convert.load(tmp_path)[0].config.rope_theta == small(tokenizer).config.rope_theta
    convert.save(small(tokenizer, norm="layer"), tokenizer, tmp_path)
    assert not (tmp_path / "config.json").exists()  # which transformers would believe


def test_writing_over_the_files_it_was_read_from(tokenizer: Tokenizer, tmp_path: Path) -> None:
    their_model({}).save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save(tmp_path)
    ours, _ = convert.load(tmp_path)
    before = logits(ours)
    convert.export(small(tokenizer), tokenizer, tmp_path)
    assert torch.equal(logits(ours), before)
    again, _ = convert.load(tmp_path)
    assert torch.equal(logits(again), logits(small(tokenizer)))
    assert not list(tmp_path.glob(".new-*"))


def test_run_with_checkpoints(tokenizer: Tokenizer, tmp_path: Path) -> None:
    old, new = small(tokenizer), small(tokenizer, initializer_range=0.1)
    (tmp_path / "mind.json").write_text(json.dumps(new.config.to_dict()))
    tokenizer.save(tmp_path)
    with pytest.raises(ModelError, match="has no checkpoint yet"):
        convert.load(tmp_path)

    def checkpoint_of(model: MindForCausalLM, step: int) -> Path:
        def write(folder: Path) -> None:
            checkpoint.write_tensors(folder / checkpoint.MODEL, checkpoint.weights(model))

        state = {"model": model.config.to_dict(), "tokenizer": tokenizer.fingerprint}
        return checkpoint.save(tmp_path, step, write, state).folder

    checkpoint_of(old, 1)
    newest = checkpoint_of(new, 2) / checkpoint.MODEL
    ours, _ = convert.load(tmp_path)
    assert torch.equal(logits(ours), logits(new))

    change(tmp_path / "mind.json", rope_theta=1e3)
    refused(tmp_path, r"mind\.json is another model's, or was changed: .*step-00000002 was written")
    change(tmp_path / "mind.json", rope_theta=new.config.rope_theta)
    train_tokenizer(["Another text of the same length."] * 3, 280).save(tmp_path)
    refused(tmp_path, r"tokenizer\.json is another model's, or was changed: .*step-00000002")

    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(checkpoint.CheckpointError, match=rf"{newest} has .* it was truncated"):
        convert.load(tmp_path)


@pytest.fixture(scope="module")
def whole(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convert") / "model"
    convert.export(small(tokenizer), tokenizer, path)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        convert.load(folder)
    assert "\n" not in str(caught.value)


def change(path: Path, **fields: Any) -> None:
    found = json.loads(path.read_text())
    for name, value in fields.items():
        if value is ...:
            del found[name]
        else:
            found[name] = value
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'; expected one of llama, qw"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; expected one of"),
        ({"architectures": ["LlamaModel"]}, r"architectures is \['LlamaModel'\]; expected Llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the model here computes 'silu' only"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_at"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
            "rope_type 'llama3'; the model here does not scale rotary positions",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'; expected int"),
        ({"hidden_size": 0}, "hidden_size is 0; expected more than 0"),
        ({"num_attention_heads": "4", "head_dim": None}, "num_attention_heads is '4'; expected a"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0; expected"),
        (
            {"hidden_size": 30, "head_dim": None},
            "hidden_size is 30; expected a multiple of num_attention_heads, 4",
        ),
        ({"layer_types": 3}, "layer_types is 3; expected a list"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; expected float"),
        ({"hidden_size": 16}, r"embed_tokens.weight has shape \(280, 32\); expected \(280, 16\)"),
        ({"num_hidden_layers": 3}, r"lacks weights of its model: model\.layers\.2.* and 5 more"),
        ({"num_hidden_layers": 10**7}, r"lacks weights of its model: model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"has weights that the model here lacks: model\.layers\.1"),
        ({"model_type": "qwen3", "architectures": None}, "lacks weights .*q_norm"),
        ({"tie_word_embeddings": True}, "ties lm_head.weight to model.embed_tokens.weight, but"),
    ],
)
def test_configuration_that_is_refused(fields: dict[str, Any], message: str, folder: Path) -> None:
    change(folder / "config.json", **fields)
    refused(folder, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": ...}, r"mind\.json: hidden_size is missing"),
        ({"colour": "red"}, r"mind\.json: unknown field 'colour'"),
        ({"norm": "batch"}, r"mind\.json: norm is 'batch'; expected one of rms"),
    ],
)
def test_own_configuration_that_is_refused(
    fields: dict[str, Any], message: str, folder: Path, tokenizer: Tokenizer
) -> None:
    (folder / "mind.json").write_text(json.dumps(small(tokenizer).config.to_dict()))
    change(folder / "mind.json", **fields)
    refused(folder, message)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def rename_weights(path: Path) -> None:
    safetensors_torch.save_file({"x": torch.zeros(2)}, path / "model.safetensors")


def as_integers(path: Path) -> None:
    file = path / "model.safetensors"
    state = safetensors_torch.load_file(file)
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)
    safetensors_torch.save_file(state, file)


def with_bias(path: Path) -> None:
    file = path / "model.safetensors"
    state = safetensors_torch.load_file(file)
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    safetensors_torch.save_file(state, file)


def only_pickled(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")


def without_a_shard(path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: cut(path / "model.safetensors"), "model.safetensors is truncated: its head"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "is truncated: 0 bytes"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 99), "is not a safetensors"),
        (lambda path: (path / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (only_pickled, r"has only pickled weights \(pytorch_model.bin\)"),
        (without_a_shard, r"files that its index names: model-00001-of-00002\.safetensors$"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text("{}"),
            "is not an index of safetensors files",
        ),
        (rename_weights, r"lacks weights of its model: model\.embed_tokens\.weight, "),
        (as_integers, r"model\.norm\.weight is int8; expected float32"),
        (with_bias, r"has weights that the model here lacks: .*q_proj\.bias$"),
        (lambda path: cut(path / "config.json"), "config.json is not valid JSON"),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe"), "is not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda path: (path / "config.json").unlink(), r"no mind\.json and no config\.json"),
    ],
)
def test_damaged_folder(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    refused(folder, message)


@pytest.mark.parametrize("size", [285, 260])
def test_tokenizer_of_another_model(size: int, folder: Path) -> None:
    other = train_tokenizer(["And the earth was without form, and void"] * 3, size)
    assert other.vocab_size == size
    other.save(folder)
    refused(folder, rf"the tokenizer has {size} tokens and the model 280: it is another model's")


def test_embedding_with_rows_of_padding(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer, vocab_size=288)
    convert.export(model, tokenizer, tmp_path)
    again, _ = convert.load(tmp_path)
    assert again.config.vocab_size == 288


def test_export_with_the_tokenizer_of_another_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer, vocab_size=270)
    with pytest.raises(ModelError, match="the tokenizer has 280 tokens and the model 270"):
        convert.export(model, tokenizer, tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no/such does not exist; expected the folder of a run"):
        convert.load("no/such")
    (tmp_path / "a.pth").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a\.pth is a file of pickled weights; `rmsnorm lm imp"):
        convert.load(tmp_path / "a.pth")


def test_end_ids(tokenizer: Tokenizer, folder: Path) -> None:
    # What transformers was told, and what the tokenizer ends texts and turns with.
    own = set(convert.end_ids(folder, tokenizer))
    assert own == {tokenizer.eos_id, tokenizer.token_id("<|im_end|>")}
    change(folder / "generation_config.json", eos_token_id=7)
    assert convert.end_ids(folder, tokenizer)[0] == 7
    change(folder / "generation_config.json", eos_token_id=[8, 7])
    assert set(convert.end_ids(folder, tokenizer)) == {8, 7} | own
    change(folder / "generation_config.json", eos_token_id="end")
    with pytest.raises(ModelError, match="eos_token_id is 'end'; expected token ids"):
        convert.end_ids(folder, tokenizer)


def minimind_state(config: ModelConfig) -> dict[str, Tensor]:
    """A state dict with the names that minimind's training scripts save, half precision."""
    torch.manual_seed(7)
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.05).half()

    state = {"model.embed_tokens.weight": weight(config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        kv = config.num_key_value_heads * width
        state |= {
            f"{layer}.self_attn.q_proj.weight": weight(config.num_attention_heads * width, hidden),
            f"{layer}.self_attn.k_proj.weight": weight(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": weight(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": weight(hidden, config.num_attention_heads * width),
            f"{layer}.mlp.gate_proj.weight": weight(inner, hidden),
            f"{layer}.mlp.up_proj.weight": weight(inner, hidden),
            f"{layer}.mlp.down_proj.weight": weight(hidden, inner),
            f"{layer}.input_layernorm.weight": 1 + weight(hidden),
            f"{layer}.post_attention_layernorm.weight": 1 + weight(hidden),
        }
        if config.qk_norm:
            state |= {
                f"{layer}.self_attn.{name}_norm.weight": 1 + weight(width) for name in ("q", "k")
            }
    return state | {
        "model.norm.weight": 1 + weight(hidden),
        "model.freqs_cos": torch.zeros(99, width),
        "model.freqs_sin": torch.zeros(99, width),
        "lm_head.weight": state["model.embed_tokens.weight"],
    }


def as_transformers(state: dict[str, Tensor], config: ModelConfig) -> Any:
    """Plain transformers with the same weights, in float32."""
    kind = "Qwen3" if config.qk_norm else "Llama"
    theirs = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    ).eval()
    weights = {name: value.float() for name, value in state.items() if "freqs" not in name}
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize("name", ["mind-26m", "mind-64m"])
def test_minimind_state_dict(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS[name], num_hidden_layers=2)
    state = minimind_state(config)
    torch.save(state, tmp_path / "model.pth")
    ours = convert.import_pth(tmp_path / "model.pth", config, torch.float32)
    theirs = as_transformers(state, config)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    wanted = theirs.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    [done] = generate(ours, IDS.tolist(), max_new_tokens=8)
    assert done.ids == wanted[0, IDS.shape[1] :].tolist()
    stored = convert.import_pth(tmp_path / "model.pth", config)
    assert stored.model.norm.weight.dtype is torch.float16


def test_state_dict_of_a_preset_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=1)
    presets = {"two": PRESETS["tiny"], "wide": dataclasses.replace(one, head_dim=64), "one": one}
    monkeypatch.setattr(convert, "PRESETS", presets)
    state = minimind_state(one)
    path = tmp_path / "model.pth"
    for prefix in ("", "_orig_mod.", "module."):
        torch.save({prefix + name: value for name, value in state.items()}, path)
        assert convert.import_pth(path).config == one
    state["model.norm.weight"] = torch.zeros(3)
    torch.save(state, path)
    with pytest.raises(ModelError, match="the shapes of none of the presets two, wide, one"):
        convert.import_pth(path)


class Touch:
    """Runs code where it is unpickled freely."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pth_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    for content, message in (
        ({"x": Touch(tmp_path / "hacked")}, r"cannot be read as a state dict of tensors \(Unpick"),
        ([torch.zeros(1)], "holds no state dict: expected tensors by the names of parameters"),
        ({"model": {"x": torch.zeros(1)}, "epoch": 3}, "holds no state dict"),
    ):
        torch.save(content, path)
        with pytest.raises(ModelError, match=message) as caught:
            convert.import_pth(path)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "hacked").exists()
    torch.save(minimind_state(dataclasses.replace(PRESETS["tiny"], num_hidden_layers=1)), path)
    for size in (0, 7, 5000, path.stat().st_size - 100):
        (tmp_path / "cut.pth").write_bytes(path.read_bytes()[:size])
        with pytest.raises(ModelError, match=r"cut\.pth cannot be read as a state dict"):
            convert.import_pth(tmp_path / "cut.pth")
    with pytest.raises(ModelError, match="no/such does not exist"):
        convert.import_pth("no/such")
    with pytest.raises(ModelError, match="is not a file"):
        convert.import_pth(tmp_path)
    with pytest.raises(ModelError, match=r"lacks weights of its model: model\.layers\.1"):
        convert.import_pth(path, PRESETS["tiny"])
    with pytest.raises(ModelError, match=r"does not fit its configuration: model\.embed_tokens"):
        convert.import_pth(path, PRESETS["mind-26m"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weight: weight.to(torch.float8_e4m3fn),
            "float8_e4m3fn; expected float32, float64,",
        ),
        (lambda weight: weight.to(torch.int8), "int8; expected .*: quantised weights are not read"),
        (lambda weight: weight.to(torch.complex64), "complex64; expected"),
        (lambda weight: weight.to_sparse(), "no dense tensor with values"),
        (lambda weight: weight.to("meta"), "no dense tensor with values"),
        (lambda weight: torch.nested.nested_tensor([weight]), "no dense tensor with values"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pth_with_weights_of_another_kind(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pth"
    config = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=1)
    state = minimind_state(config)
    state["model.norm.weight"] = change(state["model.norm.weight"])
    torch.save(state, path)
    with pytest.raises(ModelError, match=rf"model\.pth: model\.norm\.weight is .*{message}"):
        convert.import_pth(path, config)


def test_pth_with_experts_or_an_output_layer_of_its_own(tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS["tiny"], num_hidden_layers=1)
    path = tmp_path / "model.pth"
    state = minimind_state(config)
    torch.save({**state, "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match=r"the model here lacks: .*experts\.0"):
        convert.import_pth(path, config)
    state["lm_head.weight"] = torch.ones_like(state["lm_head.weight"])
    torch.save(state, path)
    with pytest.raises(ModelError, match=r"ties lm_head\.weight"):
        convert.import_pth(path, config)
    untied = convert.import_pth(path, dataclasses.replace(config, tie_word_embeddings=False))
    assert untied.lm_head.weight.eq(1).all()
    assert not untied.model.embed_tokens.weight.eq(1).all()


def run(command: str, *arguments: object) -> int:
    code = commands.lm.main(args=[command, *(str(one) for one in arguments)], standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_export_command(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = small(tokenizer, qk_norm=True)
    convert.save(ours, tokenizer, tmp_path / "run")
    out = tmp_path / "out"
    assert run("export", tmp_path / "run", "--out", out) == 0
    count = sum(parameter.numel() for parameter in ours.parameters())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out}: {count:,} parameters, loads in transformers as Qwen3ForCausalLM"
    assert lines[1].startswith("logits in float32 are equal: at most ")
    assert not (out / "mind.json").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0, atol=1e-5)
    with pytest.raises(click.ClickException, match="is not empty; expected a new folder"):
        run("export", tmp_path / "run", "--out", out)


def test_export_command_that_finds_a_difference(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(convert, "difference", lambda *_: (0.5, 3.0))
    assert run("export", whole, "--out", tmp_path / "a") == 1
    assert "DIFFERENT: at most 0.5 apart, the largest is 3" in capsys.readouterr().out
    assert run("export", whole, "--out", tmp_path / "b", "--no-check") == 0


def test_import_command(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tokenizer).config
    state = minimind_state(dataclasses.replace(config, tie_word_embeddings=True))
    torch.save(state, tmp_path / "model.pth")
    (tmp_path / "mind.json").write_text(json.dumps(config.to_dict()))
    tokenizer.save(tmp_path / "tokenizer")
    out = tmp_path / "out"
    arguments = (tmp_path / "model.pth", "--out", out, "--tokenizer", tmp_path / "tokenizer")
    assert run("import", *arguments, "--config", tmp_path / "mind.json") == 0
    assert "loads in transformers as LlamaForCausalLM" in capsys.readouterr().out
    ours, again = convert.load(out, torch.float32)
    assert ours.config == config
    assert again.fingerprint == tokenizer.fingerprint
    theirs = as_transformers(state, config)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)


def test_import_command_of_a_folder(whole: Path, tmp_path: Path) -> None:
    assert run("import", whole, "--out", tmp_path / "out", "--dtype", "bfloat16") == 0
    ours, _ = convert.load(tmp_path / "out")
    assert ours.lm_head.weight.dtype is torch.bfloat16
    assert (tmp_path / "out" / "mind.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "no/such", "--out", "OUT"], "no/such does not exist"),
        (["export", "WHOLE"], "Missing option '--out'"),
        (["import", "a.pth", "--out", "OUT"], "a.pth holds no tokenizer: give --tokenizer"),
        (["import", "WHOLE", "--out", "OUT", "--preset", "tiny"], "--preset is for .pth files"),
        (["import", "a.pth", "--out", "OUT", "--tokenizer", "WHOLE"], "a.pth does not exist"),
        (
            ["import", "a.pth", "--out", "OUT", "--tokenizer", "WHOLE", "--preset", "huge"],
            "preset is 'huge'; expected one of tiny",
        ),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"OUT": str(tmp_path / "out"), "WHOLE": str(whole)}
    assert main(["lm", *(places.get(one, one) for one in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
