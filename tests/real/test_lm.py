"""SmolLM2 in the model of rmsnorm.lm: the tokens and logits that transformers' own model gives."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from rmsnorm.cli.generate import generate as generate_command
from rmsnorm.cli.inspect import GENESIS
from rmsnorm.lm import convert
from rmsnorm.lm.generate import Conversation, generate
from rmsnorm.lm.model import MindForCausalLM
from rmsnorm.lm.tokenizer import Tokenizer
from rmsnorm.models.load import PACKAGED, load_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGED["smollm2"].module) is None,
        reason=f"SmolLM2 is not installed: {PACKAGED['smollm2'].install}",
    ),
]

# Of 'The capital of France is', and what transformers' float32 model continues it with, greedily.
PROMPT = [504, 3575, 282, 4649, 314]
CONTINUATION = [
    *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34),
    *(32, 33, 40, 29, 32, 33, 29, 34, 34, 216),
]
TEXT = " Paris.\n\nThe answer is: 2018-01-22 "


class Loaded(NamedTuple):
    folder: Path
    model: MindForCausalLM
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    folder = convert.model_folder("smollm2")
    return Loaded(folder, *convert.load(folder))


def test_reference_tokens(loaded: Loaded) -> None:
    _, model, tokenizer = loaded
    assert tokenizer.encode("The capital of France is") == PROMPT
    heard: list[str] = []
    [done] = generate(
        model,
        [PROMPT],
        max_new_tokens=20,
        tokenizer=tokenizer,
        on_token=lambda row, token, text: heard.append(text),
    )
    assert done.ids == CONTINUATION
    assert done.text == "".join(heard) == TEXT
    # The same without a cache, and in a batch with a longer prompt.
    [again] = generate(model, [PROMPT], max_new_tokens=8, use_cache=False)
    assert again.ids == CONTINUATION[:8]
    genesis = tokenizer.encode(GENESIS)
    [again, _] = generate(model, [PROMPT, genesis], max_new_tokens=8)
    assert again.ids == CONTINUATION[:8]


def test_reference_logits(loaded: Loaded) -> None:
    _, model, tokenizer = loaded
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits
    assert logits.argmax(dim=-1).tolist() == [[29, 282, 260, 314, 7042]]
    found = [float(logits.mean()), float(logits.std()), float(logits.min()), float(logits.max())]
    assert found == pytest.approx([3.468829, 6.157396, -19.793102, 27.353374], abs=1e-4)
    ids = torch.tensor([tokenizer.encode(GENESIS)])
    assert ids.shape == (1, 58)
    with torch.no_grad():
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
    assert float(loss) == pytest.approx(1.885666, abs=1e-5)


def test_logits_are_those_of_transformers(loaded: Loaded) -> None:
    _, model, tokenizer = loaded
    theirs, _ = load_model("smollm2")
    ids = torch.tensor([tokenizer.encode(GENESIS)])
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids).logits, theirs(input_ids=ids).logits, rtol=0, atol=1e-5
        )


def test_exported_and_imported_it_is_the_same(loaded: Loaded, tmp_path: Path) -> None:
    _, model, tokenizer = loaded
    convert.export(model, tokenizer, tmp_path / "out")
    apart, largest = convert.difference(model, tmp_path / "out")
    assert apart <= 1e-5 < 10.0 < largest
    again, its_tokenizer = convert.load(tmp_path / "out")
    assert again.config == model.config
    assert its_tokenizer.encode(GENESIS) == tokenizer.encode(GENESIS)
    [done] = generate(again, [PROMPT], max_new_tokens=8)
    assert done.ids == CONTINUATION[:8]


def test_command(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["smollm2", "-p", "The capital of France is", "--temperature", "0", "-n", "20"]
    assert generate_command.main(arguments, standalone_mode=False) == 0
    out, err = capsys.readouterr()
    assert out == f"The capital of France is{TEXT}\n"
    assert "tokens/s" in err
    stop = ["--stop", "ans", "--json"]
    assert generate_command.main([*arguments, *stop], standalone_mode=False) == 0
    [found] = json.loads(capsys.readouterr().out)["completions"]
    assert (found["text"], found["reason"]) == (" Paris.\n\nThe ", "stop")


def test_chat(loaded: Loaded) -> None:
    folder, model, tokenizer = loaded
    talk = Conversation(
        model, tokenizer, eos_ids=convert.end_ids(folder, tokenizer), max_new_tokens=40
    )
    answer = talk.ask("What is the capital of France?")
    assert "Paris" in answer.text
    assert answer.reason == "eos"
    assert "<|im_end|>" not in answer.text
