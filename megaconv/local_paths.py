"""Paths that have to be local: outputs, configurations, data. A URI is refused here, before it is used as a path.

    s3://bucket/out     Path() turns it into s3:/bucket/out, a directory below the working directory

Inputs that may be a URI go to `megaconv.hub.resolve`.
"""

import re
from pathlib import Path

from megaconv.errors import UsageError

_URI = re.compile(r"\s*([A-Za-z][A-Za-z0-9+._-]+):/")
"""Matches a URI with one slash too, because a Path reduces two slashes to one. A Windows drive has only one letter.
Spaces may precede the URI, as in a badly quoted variable."""
_REMEDIES = {"hf": "`hf download` makes a local copy, `megaconv push` puts a directory on the Hub"}
"""The way from and to a local path, of schemes that can't be mounted."""
_PAGE = b"<!doctype html"
"""The first bytes of a page."""


def local_path(place: str | Path) -> Path:
    """The place as a Path. Raises UsageError for a URI."""
    _refuse_uri(str(place))
    return Path(place)


def require_place(option: str, file: Path) -> None:
    """Check the place of an output file before everything is read for it. Raises UsageError.

    option: the option that names the file, such as `--html`.
    """
    if file.is_dir():
        raise UsageError(f"{option} {file}: is a directory; give the name of a file")
    if not file.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no such directory as {file.parent}")


def require_page(option: str, file: Path) -> None:
    """Check the place of a page as require_place does. An older page is replaced, and no other file."""
    require_place(option, file)
    if file.is_file() and file.stat().st_size and not _is_page(file):
        raise UsageError(
            f"{option} {file}: exists and is no HTML page, which alone is replaced; choose another name"
        )


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_PAGE)).lower() == _PAGE


UNEXPANDED = "~ is for a shell to expand, which it doesn't behind = or in quotes"


def is_unexpanded(path: str | Path) -> bool:
    """True if a path begins with `~`. megaconv treats `~` as an ordinary name; only a shell expands it."""
    return Path(path).parts[:1] == ("~",)


def local_word(word: str) -> str:
    """The word unchanged: a path, or another value that must not be a URI.

    Raises UsageError for a URI, and for a `~` that would name a directory of this name in the working directory.
    """
    _refuse_uri(word)
    if is_unexpanded(word) and not Path(word).exists():
        raise UsageError(f"{word}: {UNEXPANDED}; give the path in full")
    return word


def _refuse_uri(word: str) -> None:
    match = _URI.match(word)
    if match is not None:
        remedy = _REMEDIES.get(
            match[1], f"mount {match[1]}:// as a directory, or copy it from or to one"
        )
        raise UsageError(f"{word}: is a URI, and only a local path can be given here; {remedy}")
