"""`megatron_lite data urls`: removes unwanted URLs from lists of pages.

The tests and their order are those of Megatron-LM's tools/openwebtext/blacklist_urls.py: domain, ending, short URL,
malformed URL, duplicate. A list of domains is the user's own. The list of endings has names of files without text.
"""

import argparse
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from formats.errors import CorruptCheckpoint
from megaconv.errors import TargetExists, UsageError
from megaconv.local_paths import local_path, local_word
from megatron_lite.data.finetuning.records import find_files
from megatron_lite.data.packages import package
from megatron_lite.data.recipes.outputs import opened_for_writing, partial_of

DESCRIPTION = "Remove unwanted URLs from lists of pages."
SHORTEST = 9
"""Characters of the shortest URL that is kept."""
ENDINGS = (
    ".3gp", ".7z", ".ai", ".aif", ".apk", ".app", ".avi", ".bin", ".bmp", ".bz2", ".css", ".csv",
    ".dat", ".deb", ".dmg", ".doc", ".docx", ".exe", ".gif", ".gifv", ".gz", ".iso", ".jar", ".jpeg",
    ".jpg", ".js", ".log", ".mid", ".midi", ".mkv", ".mov", ".mp3", ".mp4", ".mpeg", ".mpg", ".ogg",
    ".ogv", ".otf", ".pdf", ".pkg", ".png", ".pps", ".ppt", ".pptx", ".psd", ".py", ".qt", ".ram",
    ".rar", ".sql", ".svg", ".swf", ".tar", ".tgz", ".tif", ".tiff", ".ttf", ".txt", ".wav", ".webm",
    ".wma", ".wmv", ".xls", ".xlsx", ".xml", ".xz", ".zip",
)  # fmt: skip
_URL = re.compile(r"https?://[^\s/?#]+\.?[^\s]*\Z", re.IGNORECASE)


@dataclass
class UrlReport:
    """Numbers of URLs: read = kept + removed."""

    urls: int = 0
    kept: int = 0
    removed: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {"urls": self.urls, "kept": self.kept, "removed": self.removed}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report's table."""
        rows = {"urls": self.urls, "kept": self.kept}
        rows |= {f"removed: {reason}": count for reason, count in self.removed.items()}
        for name, count in rows.items():
            yield f"{name:24} {count:14,}"


@dataclass
class Rules:
    """The tests of a URL. It remembers 16 bytes of each URL that it has seen."""

    domains: frozenset[str]
    endings: frozenset[str]
    seen: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        tldextract = package("tldextract", "data urls") if self.domains else None
        # The bundled list of suffixes is used: nothing is downloaded.
        self._extract = tldextract.TLDExtract(suffix_list_urls=()) if tldextract else None
        for domain in self.domains:
            self._require_no_suffix(domain)

    def _require_no_suffix(self, domain: str) -> None:
        """Raise UsageError for a name such as `example.com`, which no URL's name without suffix can equal."""
        found = self._extract(domain) if self._extract else None
        if found and found.domain and found.suffix:
            raise UsageError(
                f"--domains: {domain}: give the name without its suffix, {found.domain}"
            )

    def reason(self, url: str) -> str | None:
        """Return the reason to remove a URL; None: keep it."""
        if self._extract is not None and self._extract(url).domain.lower() in self.domains:
            return "domain"
        path = _path(url).lower()
        if any(path.endswith(ending) for ending in self.endings):
            return "ending"
        if len(url) < SHORTEST:
            return "short"
        if not _is_url(url):
            return "malformed"
        key = hashlib.blake2b(url.encode(), digest_size=16).digest()
        if key in self.seen:
            return "duplicate"
        self.seen.add(key)
        return None


def _path(url: str) -> str:
    try:
        return urlsplit(url).path
    except ValueError:
        return ""


def _is_url(url: str) -> bool:
    try:
        return bool(_URL.match(url)) and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add(
        "--input", type=local_word, nargs="+", required=True, metavar="FILE",
        help="text files with a URL in each line; directories and patterns",
    )  # fmt: skip
    add("--output", type=local_path, required=True, metavar="FILE", help="the kept URLs")
    add(
        "--keep-removed", type=local_path, metavar="FILE",
        help="removed URLs, each after its reason and a tab (OUTPUT-removed)",
    )  # fmt: skip
    add(
        "--domains", type=local_path, metavar="FILE",
        help="unwanted domains without their suffix, such as `example`, one in each line",
    )  # fmt: skip
    add("--endings", type=local_path, metavar="FILE", help="unwanted endings instead of our own")
    add("--report", type=local_path, metavar="FILE", help="write the report as JSON too")
    add("--overwrite", action="store_true", help="replace existing outputs")


def run(given: argparse.Namespace) -> UrlReport:
    """Filter the URLs. Raises CorruptCheckpoint, UsageError, TargetExists."""
    output: Path = given.output
    removed: Path = given.keep_removed or output.with_name(f"{output.name}-removed")
    files = find_files(given.input, "--input")
    for target in (output, removed):
        if target.exists() and not given.overwrite:
            raise TargetExists(f"{target}: exists; choose another file, or pass --overwrite")
        if any(Path(file).resolve() == target.resolve() for file in files):
            raise UsageError(f"{target}: is an input too; choose another file")
    rules = Rules(
        frozenset(map(str.lower, _words(given.domains) if given.domains else ())),
        frozenset(map(str.lower, _words(given.endings) if given.endings else ENDINGS)),
    )
    return _filter(files, rules, output, removed)


def _filter(files: list[str], rules: Rules, output: Path, removed: Path) -> UrlReport:
    """Write both outputs. They appear when they are complete."""
    report = UrlReport()
    partial = [partial_of(path) for path in (output, removed)]
    for path in partial:
        path.unlink(missing_ok=True)
    try:
        with opened_for_writing(partial[0]) as kept_file, opened_for_writing(partial[1]) as others:
            for url in (url for file in files for url in _words(Path(file))):
                report.urls += 1
                reason = rules.reason(url)
                if reason is None:
                    report.kept += 1
                    kept_file.write(f"{url}\n".encode())
                else:
                    report.removed[reason] = report.removed.get(reason, 0) + 1
                    others.write(f"{reason}\t{url}\n".encode())
        if not report.urls:
            raise CorruptCheckpoint(f"{', '.join(files)}: there are no URLs")
        for path, target in zip(partial, (output, removed), strict=True):
            path.replace(target)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    return report


def _words(path: Path) -> Iterator[str]:
    """Yield the lines of a file that aren't blank, without white space around them and without a byte order mark.

    Raises UsageError, CorruptCheckpoint.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from filter(None, map(str.strip, file))
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path}: is not UTF-8: {error}") from error
