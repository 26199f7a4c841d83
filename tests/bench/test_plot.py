import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib", reason="the plots need the extra bench")

from rmsnorm.bench import plot
from rmsnorm.bench.grid import SWEEP_WIDTHS, Cell, sweep_cells
from rmsnorm.bench.run import Result, Timing

MACHINE = "a machine <with> & in its name"


def result(cell, **medians):
    timings = {name.replace("_", " "): Timing((value,) * 3, 1) for name, value in medians.items()}
    return Result(cell, timings, (), 1, False)


def sweep(cell):
    found = result(cell, copy=90.0)
    widths = {f"ours d={d}": Timing((100.0 + d % 7,) * 3, 1) for d in SWEEP_WIDTHS}
    return Result(cell, {**found.timings, **widths}, (), 1, False)


RESULTS = [
    result(
        Cell("forward", 512, 4096, "float32", "hot", "given"),
        copy=4.0,
        memcpy=2.0,
        ours_torch=4.0,
        ours_llama=5.0,
        eager_torch=8.0,
        compiled_llama=20.0,
    ),
    result(
        Cell("forward", 8, 4096, "float32", "hot", "given"),
        copy=1.0,
        ours_torch=1.0,
        eager_torch=8.0,
    ),
    result(Cell("forward", 8, 4096, "float32"), copy=1.0, ours_torch=9.0),
    result(Cell("add", 8, 4096, "float32"), copy=1.0, ours_torch=2.0, separate_torch=3.0),
    *map(sweep, sweep_cells()),
]


def test_bars_are_geometric_means_over_the_cells_of_a_kind():
    found = {bar.label: bar for bar in plot.bars(RESULTS)}
    assert set(found) == {"forward: eager torch", "forward: compiled llama", "add: separate torch"}
    eager = found["forward: eager torch"]
    assert eager.mean == pytest.approx(4.0)  # of 2 and 8
    assert (eager.smallest, eager.largest, eager.cells) == (2.0, 8.0, 2)


def test_a_roofline_is_bytes_through_time():
    points = plot.roofline(RESULTS, "hot")
    assert plot.roofline(RESULTS, "rotating") == []
    moved = 2 * 512 * 4096 * 4
    rates = {point.name: point.rate for point in points if point.moved == moved}
    assert rates == pytest.approx(
        {
            "ours torch": moved / 4e-6,
            "ours llama": moved / 5e-6,
            "best peer": moved / 8e-6,
            "limit": moved / 2e-6,
        }
    )
    # The fresh output is left out beside those that are given.
    assert len(points) == 4 + 3


def words(path):
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return path.read_text()


def test_an_svg_is_written_and_parseable(tmp_path):
    path = tmp_path / "bench.svg"
    plot.draw(RESULTS, path, MACHINE)
    text = words(path)
    for words_ in ("forward: compiled llama", "cost over the width", "hot buffers", "best peer"):
        assert words_ in text, words_  # as a comment beside the glyphs


@pytest.mark.parametrize("results", [RESULTS[:1], RESULTS[2:4], RESULTS[4:], []])
def test_parts_that_were_not_measured_are_left_out(results, tmp_path):
    path = tmp_path / "bench.svg"
    plot.draw(results, path, MACHINE)
    assert ("cost over the width" in words(path)) is (results == RESULTS[4:])


def test_a_png(tmp_path):
    path = tmp_path / "bench.PNG"
    plot.draw(RESULTS[:1], path, MACHINE)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_page_holds_its_picture(tmp_path):
    path = tmp_path / "bench.html"
    plot.draw(RESULTS, path, MACHINE)
    seen = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attributes):
            seen.append(tag)
            assert not any(
                name in ("src", "href") and not value.startswith("#")
                for name, value in attributes
                if tag != "a"
            )

    Parser().feed(path.read_text())
    assert seen[:2] == ["html", "head"]
    assert seen.count("svg") == 1
    assert "a machine &lt;with&gt; &amp; in its name" in path.read_text()


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(plot.PlotError, match=r"bench\.pdf.*\.svg, \.png, \.html"):
        plot.require(tmp_path / "bench.pdf")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(plot.PlotError, match=r"pip install 'rmsnorm\[bench\]'"):
        plot.require(tmp_path / "bench.svg")
