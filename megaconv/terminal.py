"""What is printed for people: one line each, whatever is in the names that files and tensors have.

A name may hold anything: line breaks, sequences that rewrite a terminal, characters that turn the direction of writing,
bytes that are no text at all.
"""

import logging
import os
import shutil
import sys
import textwrap
from typing import TextIO

LONGEST = 4000
"""Characters of a line: more is cut off, with a note of how many."""


def one_line(text: object, encoding: str | None = None) -> str:
    """Text whose characters can all be seen: others are escaped as Python does (`\\n`, `\\x1b`, `\\u202e`, `\\udcff`).

    encoding: whose characters alone there may be; None: all.
    """
    line = str(text)
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ... ({len(line) - LONGEST:,} more characters)"
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if encoding is None else line.encode(encoding, "backslashreplace").decode(encoding)


def show(text: object, file: TextIO | None = None) -> None:
    """Print one line; file: sys.stdout unless given."""
    file = file or sys.stdout
    print(one_line(text, file.encoding), file=file)


def hide_download_bars(*, quiet: bool = False) -> None:
    """Those of the Hub's client, where stderr is no terminal, or where quiet is asked for. It reads its environment when it is
    imported; whoever has set it there keeps them."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():  # in a log they would be lines without end
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def columns() -> int | None:
    """The width of the terminal that stdout is; None where it is none, and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def has_blocks() -> bool:
    """Whether stdout can show block characters."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def folded(line: str, width: int | None, indent: int | None = None) -> list[str]:
    """A line in pieces that fit a terminal, broken between words. indent: of all but the first; None: 4 more than the line's own."""
    if width is None or len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip()) + 4 if indent is None else indent
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def log_to_stderr(name: str) -> None:
    """Warnings become lines on stderr that begin with this name; each is reported once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"{name}: %(level)s: %(message)s"))
    handler.addFilter(_Once())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.level = record.levelname.lower()
        return one_line(super().format(record))


class _Once(logging.Filter):
    """Lets each message pass once: files are opened to find out what they are, and then again, and all ranks' say the same."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = message in self._shown
        self._shown.add(message)
        return not shown
