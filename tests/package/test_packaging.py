"""The content of a release: the source distribution has all files to build and test it, and documents name real
messages."""

import re
from importlib.metadata import metadata
from pathlib import Path

from tests.conftest import GRIDS

ROOT = Path(__file__).parents[2]


def test_the_source_distribution_has_everything_at_the_top() -> None:
    (listed,) = re.findall(
        r"\[tool\.hatch\.build\.targets\.sdist\]\ninclude = \[(.*?)\]",
        (ROOT / "pyproject.toml").read_text(),
        re.S,
    )
    included = set(re.findall(r'"([^"]+)"', listed)) | {"pyproject.toml"}
    tracked = {
        path.name
        for path in ROOT.iterdir()
        if path.suffix in (".md", ".txt", ".toml") or path.name in ("Makefile", "LICENSE")
    }
    packages = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and any(path.rglob("*.py")) and path.name[0] not in "._"
    }
    assert (tracked | packages) - included == set()


def test_grids_that_are_thinned_are_tests_that_there_are() -> None:
    """A test that is renamed would otherwise run whole again, and nobody would see why everything takes longer."""
    found = {grid: (ROOT / grid.partition("::")[0]).read_text() for grid in GRIDS}
    assert [
        grid for grid, text in found.items() if f"def {grid.partition('::')[2]}(" not in text
    ] == []


def test_torch_is_in_no_dependency_but_in_extras() -> None:
    required = (
        (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    )
    assert "torch" not in required
    assert '"safetensors' not in required


def test_the_page_of_a_package_index_has_no_link_that_leads_nowhere() -> None:
    page = str(metadata("megaconv").get_payload())
    targets = set(re.findall(r"\]\(([^)]+)\)", page))
    assert {target for target in targets if not target.startswith(("#", "https://"))} == set()
    headings = {
        re.sub(r"[^a-z0-9-]", "", line[3:].lower().replace(" ", "-"))
        for line in page.splitlines()
        if line[:3] == "## "
    }
    assert {target[1:] for target in targets if target[0] == "#"} <= headings
    assert "all options (docs/options.md)" in page


def test_the_page_on_messages_names_messages_that_there_are() -> None:
    """Words between backquotes at the start of a row; … and numbers stand for what a run fills in."""
    sources = "".join(
        path.read_text()
        for package in ("megaconv", "formats", "loaders", "savers")
        for path in (ROOT / package).rglob("*.py")
    )
    plain = re.sub(r'"\s*\n\s*f?"', "", sources)
    rows = re.findall(
        r"^\| `([^`]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 25
    pieces = {
        piece.strip()
        for row in rows
        for piece in re.split(r"…|\(|\)|;", row)
        if len(piece.strip()) > 6
    }
    assert sorted(piece for piece in pieces if piece not in plain) == []
