"""README and docs: what they point to is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaconv import registry
from megaconv.families import Family
from megaconv.model import config, features, subjects

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def prose(page: Path) -> str:
    """The text of a page without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of each that stays in the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        there = (page.parent / path) if path else page
        assert there.exists(), path
        assert not anchor or anchor in anchors(there), f"{path}#{anchor}"


def test_every_page_can_be_found_from_the_readme() -> None:
    found = {(ROOT / path).resolve() for path, _ in links(ROOT / "README.md") if path}
    assert {page for page in PAGES if page != ROOT / "README.md"} <= found


def test_the_order_of_detection_is_the_one_that_is_documented() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    documented = page[page.index("**Detection**") : page.index("`--loader` names a loader")]
    names = [
        word
        for word in re.findall(r"`(\w+)`|the (plugins)", documented.split("So a plugin")[0])
        if any(word)
    ]
    order = [name or "plugins" for name, _ in names]
    ours = [name for name in registry.LOADERS if name != "config"]
    before = ours.index("hf")
    assert order == [*ours[:before], "plugins", *ours[before:]]


def test_the_guide_lists_only_real_fields_of_family() -> None:
    page = (ROOT / "docs" / "add-a-model.md").read_text()
    listed = re.findall(r"^\* `(\w+)`:", page, re.MULTILINE)
    assert {"keys", "fixed", "only", "aliases", "recognized"} <= set(listed)
    assert set(listed) <= set(Family.__dataclass_fields__)


def test_fields_live_where_the_documentation_says() -> None:
    page = (ROOT / "docs" / "add-a-model.md").read_text()
    assert "fields are in `megaconv/model/subjects.py`" in page
    for kind in (subjects.Attention, subjects.Norm, subjects.Positions, subjects.Experts):
        assert kind.__module__ == "megaconv.model.subjects"
    assert "`OF_MODEL` or `OF_LAYER`" in page
    assert features.OF_MODEL
    assert features.OF_LAYER
    assert config.SIZES
