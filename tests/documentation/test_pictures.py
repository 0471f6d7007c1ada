"""The pictures of the documentation, which docs/build_screenshots.py makes."""

import re
import struct
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted((DOCS / "images").glob("*"))
PALETTE = 3
"""PNG's colour type of a picture with a palette."""


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_has_a_palette(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, _, colours = struct.unpack(">IIBB", content[16:26])
    assert colours == PALETTE
    assert 300 <= width <= 1000
    assert 300 <= height <= 1200
    assert len(content) < 150_000


def test_every_picture_is_shown_once_with_a_text() -> None:
    shown = []
    for page in DOCS.rglob("*.md"):
        for text, place in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(text) > 20, f"{page.name}: {place} needs a text for those who can't see it"
            shown.append((page.parent / place).resolve())
    assert sorted(shown) == [path.resolve() for path in PICTURES]
