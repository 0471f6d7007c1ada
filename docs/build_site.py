"""Builds the documentation as a site, which needs no network: `make docs`.

    python docs/build_site.py [DIRECTORY]          (build/docs unless it is given)
    python -m http.server --directory build/docs   serves it; the search doesn't work in pages opened from the disk

The pages link to each other, to files of the source, and to CHANGELOG.md and CONTRIBUTING.md by paths that work on a forge.
The site lacks the files of the source: a link to such a file becomes its text. A link to a file that doesn't exist is an error.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = ROOT / "build" / "pages"
"""The Markdown of all pages of the site; `docs_dir` in mkdocs.yml."""

FROM_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the repository's root that are also pages of the site."""

FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!#|\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def collect(target: Path) -> None:
    """Write the pages of docs/, those of the repository's root and the generated reference into an empty directory."""
    for source in [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in FROM_ROOT)]:
        page = _place(source)
        _write(target / page, _on_site(source, page))
    shutil.copytree(DOCS / "images", target / "images")
    for name, text in build_reference.pages().items():
        _write(target / name, text)


def _place(source: Path) -> Path:
    """The path of a page in the site."""
    return source.relative_to(DOCS if source.is_relative_to(DOCS) else ROOT)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _on_site(source: Path, page: Path) -> str:
    """The text of a page, with links that work on the site."""
    parts = FENCE.split(source.read_text(encoding="utf-8"))
    for number in range(0, len(parts), 2):
        parts[number] = LINK.sub(lambda link: _link(link, source, page), parts[number])
    return "".join(parts)


def _link(link: re.Match[str], source: Path, page: Path) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    linked = Path(os.path.normpath(source.parent / path))
    if not linked.exists():
        sys.exit(f"{source.relative_to(ROOT)}: the link to {path} leads to no file")
    is_on_site = linked.is_relative_to(DOCS) or linked in [ROOT / name for name in FROM_ROOT]
    if is_on_site:
        return f"[{text}]({os.path.relpath(_place(linked), page.parent)}{anchor})"
    return text if text.startswith("`") else f"`{text}`"


def build(target: Path) -> None:
    """Build the site. Raises CalledProcessError for a broken link, or for a page that the navigation lacks."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    collect(SOURCES)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve())
