"""`plan --html`: one page without scripts and other addresses, with bars of memory and time and the pipeline's schedule."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megaconv.commands.views.bars import LABEL
from megaconv.planning.bubble import bubble, timeline
from tests.browsers import PHONE, Page, fits, opened, shown
from tests.commands.test_plan import LLAMA_8B
from tests.runs import assert_refused, run

SEARCH = ("--gpus", 16, "--seq-length", 4096, "--global-batch-size", 64)


class Balanced(HTMLParser):
    """Checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "a <b>model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    return path


def page(path: Path, *options: object) -> str:
    target = path.parent / "plan.html"
    outcome = run("plan", path, *options, "--html", target)
    assert (outcome.status, outcome.err) == (0, "")
    assert f"{target}: " in outcome.out
    return target.read_text()


def drawings(text: str) -> list[ElementTree.Element]:
    """The drawings, without the keys of legends."""
    return [ElementTree.fromstring(each) for each in re.findall(r'<svg viewBox="0 0 1000.*?</svg>', text, re.S)]  # fmt: skip


def widths(drawing: ElementTree.Element) -> dict[float, float]:
    """The y of each bar -> the width of its parts together."""
    found: dict[float, float] = {}
    for box in drawing.iter("rect"):
        y = float(box.attrib["y"])
        found[y] = found.get(y, 0.0) + float(box.attrib["width"])
    return found


@pytest.mark.parametrize(
    "options",
    [(*SEARCH, "--pp", 4), (*SEARCH, "--pp", 1), ("--for", "infer", "--gpus", 4), ()],
    ids=["pipeline", "one stage", "server", "without times"],
)
def test_a_page_is_complete_and_makes_no_requests(llama: Path, options: tuple[object, ...]) -> None:
    text = page(llama, *options)
    checked = Balanced()
    checked.feed(text)
    assert checked.open == []
    assert not checked.tags & {"script", "link", "img", "iframe", "object", "b"}
    assert "://" not in text
    assert "default-src 'none'" in text
    assert "__" not in text
    assert "a &lt;b&gt;model" in text


def test_bars_have_the_lengths_of_memory_and_time(llama: Path) -> None:
    layouts = json.loads(run("plan", llama, *SEARCH, "--json").out)["layouts"]
    memory, time, *_ = drawings(page(llama, *SEARCH))
    for drawing, totals in (
        (memory, [one["memory"]["total"] for one in layouts]),
        (time, [one["step_seconds"] for one in layouts]),
    ):
        found = [width for _, width in sorted(widths(drawing).items())]
        assert [width / found[0] for width in found] == pytest.approx(
            [total / totals[0] for total in totals], rel=2e-3
        )
    line = memory.find("line")
    assert line is not None
    room = (float(line.attrib["x1"]) - LABEL) / 80
    assert widths(memory)[18.0] / room == pytest.approx(layouts[0]["memory"]["total"] / 2**30, rel=2e-3)  # fmt: skip


def test_the_schedule_shows_each_pass_once_and_no_two_at_a_time(llama: Path) -> None:
    text = page(llama, *SEARCH, "--pp", 4, "--vpp", 2)
    drawn = drawings(text)[-1]
    tips = [tip.text or "" for tip in drawn.iter("title")]
    assert len(tips) == len(set(tips)) == 2 * 4 * 2 * 12
    assert "the first 12 of " in text
    assert sum("pp 3, chunk 1: backward pass of microbatch 11" in tip for tip in tips) == 1
    by_rank: dict[str, list[tuple[float, float]]] = {}
    for tip in tips:
        rank, start, end = re.findall(r"pp (\d+), .*, (\S+) to (\S+) s", tip)[0]
        by_rank.setdefault(rank, []).append((float(start), float(end)))
    for passes in by_rank.values():
        ordered = sorted(passes)
        assert all(a[1] <= b[0] * 1.001 + 1e-9 for a, b in pairwise(ordered))


def test_the_schedule_shows_uneven_stages_by_their_length(llama: Path) -> None:
    # With a small vocabulary, the head takes much less time than a layer.
    config = LLAMA_8B | {"num_hidden_layers": 30, "vocab_size": 4096}
    (llama / "config.json").write_text(json.dumps(config))
    text = page(llama, *SEARCH, "--pp", 4, "--vpp", 2)
    drawn = drawings(text)[-1]
    assert "interleaved 1F1B schedule" in drawn.attrib["aria-label"]
    layers = [int(each) for each in re.findall(r"in the order of the model: ([\d, ]+)\.", text)[0].split(", ")]  # fmt: skip
    assert sum(layers) == 30
    widths_of_stages: dict[int, float] = {}
    for box in drawn.iter("rect"):
        found = re.match(r"pp (\d+), chunk (\d+): forward", box[0].text or "")
        if found:
            stage = int(found[2]) * 4 + int(found[1])
            widths_of_stages[stage] = float(box.attrib["width"]) + 0.5
    for stage, width in widths_of_stages.items():
        assert width / widths_of_stages[1] == pytest.approx(layers[stage] / layers[1], rel=0.06)


def test_a_browser_shows_a_plan_on_a_phone_and_in_the_dark(llama: Path, browser: Page) -> None:
    page(llama, *SEARCH, "--pp", 4)
    with opened(llama.parent / "plan.html", browser) as tab:
        for drawing in ("figure:nth-of-type(1) svg", "figure:nth-of-type(3) svg", "table", "pre"):
            assert shown(tab, drawing), drawing
        tab.resize(*PHONE)
        tab.prefer("dark")
        assert fits(tab)
        assert shown(tab, "figure.drawing")
        assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        # Drawings scroll inside of their frame, with letters that can still be read.
        assert tab.run("document.querySelector('figure svg').getBoundingClientRect().width") >= 760
        assert "a <b>model" in tab.run("document.querySelector('h1').textContent")


def test_the_timeline_ends_where_the_bubble_says() -> None:
    passes = timeline(4, 2, 8, lambda _: 1.0)
    busy = 8 * 2 * 3.0
    assert len(passes) == 4 * 2 * 8 * 2
    assert 1 - busy / max(each.end for each in passes) == pytest.approx(bubble(4, 2, 8, [1] * 8))


def test_a_place_that_no_file_can_have_is_refused_before_the_search(
    llama: Path, tmp_path: Path
) -> None:
    assert_refused(run("plan", llama, "--html", tmp_path), 2, "--html", "directory")
    absent = tmp_path / "absent" / "plan.html"
    assert_refused(run("plan", llama, "--html", absent), 2, "no such directory")
