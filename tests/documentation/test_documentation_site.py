"""The documentation as a site, as `make docs` builds it: complete, without a broken link, without a request to another machine."""

import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browsers import page

ROOT = Path(__file__).parents[2]
NEEDS = "mkdocs-material is not installed (pip install '.[docs]')"
WORD = "nvfp4"
"""A word that few pages contain."""

SEARCH = f"""(() => {{
    const box = document.querySelector('[data-md-component=search-query]')
    box.focus()
    box.value = '{WORD}'
    for (const kind of ['input', 'keyup']) box.dispatchEvent(new KeyboardEvent(kind, {{bubbles: true}}))
    return document.querySelectorAll('.md-search-result__link').length > 0
}})()"""
SCHEME = "document.body.getAttribute('data-md-color-scheme')"


class Document(HTMLParser):
    """The links, the loaded files and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])


def build(project: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "docs" / "build_site.py"), str(target)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the documentation, in a directory where a test may change them."""
    pytest.importorskip("material", reason=NEEDS)
    copy = tmp_path_factory.mktemp("project")
    names = (*(each.name for each in ROOT.glob("*.*") if each.is_file()), "Makefile", "LICENSE")
    for name in names:
        shutil.copy(ROOT / name, copy / name)
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, copy / name)
    for name in (
        "megaconv",
        "formats",
        "loaders",
        "savers",
        "megatron_lite",
        "tests",
        "benchmarks",
    ):
        (copy / name).symlink_to(ROOT / name)
    return copy


@pytest.fixture(scope="module")
def site(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(project, target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[Path, Document]:
    return {path: Document(path.read_text()) for path in site.rglob("*.html")}


def linked(start: Path, link: str) -> tuple[Path, str]:
    """(file, anchor) that a link of a page leads to."""
    path, _, anchor = urllib.parse.unquote(link).partition("#")
    return (Path(os.path.normpath(start.parent / path)) if path else start), anchor


def inner_links(documents: dict[Path, Document]) -> Iterator[tuple[Path, str]]:
    for start, document in documents.items():
        for link in document.links:
            if start.name != "404.html" and not re.match(r"\w+:", link):
                yield start, link


def test_the_navigation_names_every_page() -> None:
    """The test needs no mkdocs, whose strict mode checks the same."""
    named = set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {"CONTRIBUTING.md", "CHANGELOG.md"} == {
        name for name in named if not name.startswith("reference/")
    }


def test_every_link_of_the_site_leads_somewhere(documents: dict[Path, Document]) -> None:
    broken = []
    for start, link in inner_links(documents):
        path, anchor = linked(start, link)
        known = documents[path].anchors if path in documents else set()
        if not path.exists() or (anchor and anchor not in known):
            broken.append(f"{start.name}: {link}")
    assert broken == []
    assert len(documents) > 40


def test_the_site_loads_its_own_files_alone(documents: dict[Path, Document]) -> None:
    for start, document in documents.items():
        for address in document.loaded:
            assert not re.match(r"\w+:|//", address), f"{start.name}: {address}"
            assert start.name == "404.html" or linked(start, address)[0].exists(), (
                f"{start.name}: {address}"
            )


@pytest.mark.parametrize(
    "link",
    ["[a page](nowhere.md)", "[a heading](convert.md#nowhere)", "[a file](../megaconv/nowhere.py)"],
)
def test_a_broken_link_fails_the_build(link: str, project: Path, tmp_path: Path) -> None:
    changed = project / "docs" / "hub.md"
    original = changed.read_text()
    changed.write_text(f"{original}\nThis is {link}.\n")
    try:
        done = build(project, tmp_path / "site")
    finally:
        changed.write_text(original)
    assert done.returncode != 0
    assert "nowhere" in done.stdout + done.stderr


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site's address on this machine: browsers run a search only in pages of a server."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_browser_finds_a_word_and_switches_to_dark_without_a_request_to_another_machine(
    address: str, tmp_path: Path
) -> None:
    with page(tmp_path) as tab:
        tab.open(f"{address}index.html")
        assert tab.run(SCHEME) == "default"
        tab.run("document.querySelector('label[for=__palette_1]').click()")
        tab.wait(f"{SCHEME} === 'slate'")
        tab.run("document.querySelector('label[for=__search]').click()")
        tab.wait(SEARCH)
        found = tab.run("document.querySelector('.md-search-result__link').href")
        tab.open(found)
        assert WORD in tab.run("document.querySelector('article').textContent").lower()
        assert all(asked.startswith((address, "data:")) for asked in tab.asked)
