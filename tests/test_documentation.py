"""README and docs: what they point to is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
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
