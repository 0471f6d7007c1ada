"""Names of corpora in data flags: prefixes and weights of a YAML file, and messages for what is wrong."""

from pathlib import Path

import pytest

from megaconv.errors import UsageError
from megatron_lite.data.corpora import parse_corpora
from megatron_lite.data.named_corpora import VARIABLE, read_names, with_prefixes

FILE = """
wikipedia: {path: /data/wiki_text_document, weight: 0.3}
books: {path: books_text_document, weight: 0.7}
web: {path: web_text_document}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "corpora.yaml"
    path.write_text(FILE)
    return path


def found(file: Path, *words: str) -> tuple[str, ...]:
    return with_prefixes(words, read_names(str(file)), "--data-path")


def test_names_become_prefixes_and_have_their_weights(file: Path) -> None:
    books = str(file.parent / "books_text_document")
    web = str(file.parent / "web_text_document")
    assert found(file, "wikipedia") == ("0.3", "/data/wiki_text_document")
    blended = parse_corpora(found(file, "wikipedia", "books"))
    assert blended == (("/data/wiki_text_document", books), (0.3, 0.7))
    assert found(file, "wikipedia", "web") == ("/data/wiki_text_document", web)
    assert found(file, "2", "web", "1e-1", "books") == ("2", web, "1e-1", books)
    assert found(file, "1e2", "web", "1E+1", "books") == ("1e2", web, "1E+1", books)
    assert found(file, "own/prefix", "web") == ("own/prefix", web)


def test_the_environment_names_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_names(None) == {}
    monkeypatch.setenv(VARIABLE, str(file))
    assert list(read_names(None)) == ["wikipedia", "books", "web"]


def test_an_unknown_name_lists_the_known_ones(file: Path) -> None:
    with pytest.raises(UsageError, match=r"openwebtext is not the prefix .* books, web, wikipedia"):
        found(file, "openwebtext")
    assert with_prefixes(["openwebtext"], {}, "--data-path") == ("openwebtext",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "expected names of corpora"),
        ("a: b\n", "a: expected `path`"),
        ("a: {path: b, weigth: 1}\n", "a: expected `path`"),
        ("a: {path: b, weight: -1}\n", "is not a positive number"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "corpora.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_names(str(path))
    with pytest.raises(UsageError, match="no such file"):
        read_names(str(tmp_path / "missing.yaml"))
